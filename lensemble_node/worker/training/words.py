"""A difference as words of the round's plan, and what rounding leaves of it for the next round.

Wide coordinates are rounded to their step and are exact enough.  Narrow ones are rounded up or down
by chance, from secret randomness, so that the mean is right, and cut off at the limit.  What that
leaves, the **residual**, stays on this node and is added to the next difference (error feedback): a
coordinate is sent in full over a few rounds, whatever the steps are.

The residual is kept in steps of its word, as bfloat16 (the upper half of a float32, whose 8 bits
are enough for what is below a step), in a file of its own beside head and optimiser.  It belongs to
one released vector and becomes this node's with it: when a round counted that vector.  Of one that
did not count, vector and residual are forgotten together, as the training is, and the residual from
before stays due.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from lensemble.errors import CheckpointIntegrityError, ContractViolation
from lensemble.params import FlatParameters, ParamLayout
from lensemble.secagg.field import FieldTerms, bound, encode, over_bound
from lensemble.secagg.plan import FieldPlan, Segment

RESIDUAL = "residual.bf16"
_PIECE = 1 << 16
_CHANCE = np.float32(2.0**-16)
_MAGIC = b"LNSRESID"
_LENGTH_BYTES = 4

Words: TypeAlias = NDArray[np.unsignedinteger]


class Chance(Protocol):
    """Where secret uniform words come from; ``SecretNoise`` is one."""

    def words(self, count: int) -> NDArray[np.uint64]: ...


class _Head(msgspec.Struct, frozen=True, array_like=True):
    layout_digest: str
    k: int
    n_max: int
    code: bytes


class _Terms(msgspec.Struct, frozen=True):
    k: int
    n_max: int


class Residual:
    """What rounding left of this node's last vector that counted; mapped from ``path``.

    Raises:
        CheckpointIntegrityError: the file is damaged, or of another layout.
    """

    def __init__(self, path: Path, layout: ParamLayout) -> None:
        fixed = len(_MAGIC) + _LENGTH_BYTES
        if path.stat().st_size < fixed:
            raise _damaged(path, "it ends before it has begun")
        raw = np.memmap(path, dtype=np.uint8, mode="r")
        length = int.from_bytes(raw[len(_MAGIC) : fixed].tobytes(), "little")
        if raw[: len(_MAGIC)].tobytes() != _MAGIC:
            raise _damaged(path, "it does not begin as one")
        try:
            head = msgspec.msgpack.decode(raw[fixed : fixed + length].tobytes(), type=_Head)
            self._plan = FieldPlan(layout, _Terms(head.k, head.n_max), head.code)
        except (msgspec.DecodeError, ContractViolation) as error:
            raise _damaged(path, str(error)) from error
        if head.layout_digest != layout.digest:
            raise _damaged(path, "it is of another layout")
        data = raw[fixed + length :]
        counts = [each.last - each.first for each in self._plan.narrow]
        if len(data) != 2 * sum(counts):
            raise _damaged(path, f"{len(data)} bytes for {sum(counts)} coordinates")
        self._steps = data.view("<u2")
        starts = np.cumsum([0, *counts]).tolist()
        self._at = {each.first: at for each, at in zip(self._plan.narrow, starts, strict=False)}

    def add_to(self, first: int, values: FlatParameters) -> None:
        """Add what is left of the coordinates from ``first`` on to ``values`` (float32)."""
        for segment, lo, hi in self._plan.parts(first, first + len(values)):
            if segment.bits == 16:
                at = self._at[segment.first] - segment.first
                left = _widened(self._steps[at + lo : at + hi])
                left *= np.float32(2.0**-segment.k)
                values[lo - first : hi - first] += left


def _damaged(path: Path, what: str) -> CheckpointIntegrityError:
    return CheckpointIntegrityError(
        f"{path} is no residual of this node's training: {what}",
        "Remove that file: what rounding left of the last update is lost then, and nothing else.",
    )


class Encoder:
    """Turns one difference, piece by piece, into the words of a blob.

    Args:
        plan: of the round.
        terms: the workload's field, whose bound no coordinate may exceed.
        chance: for rounding.
        due: the residual of the vector before, if there is one.
        left: where this vector's residual is written; needed if the plan has narrow tensors.
    """

    def __init__(
        self,
        plan: FieldPlan,
        terms: FieldTerms,
        chance: Chance,
        due: Residual | None = None,
        left: BinaryIO | None = None,
    ) -> None:
        if plan.narrow and left is None:
            raise ContractViolation("rounding to 16 bits with nowhere to keep what it leaves")
        self._plan = plan
        self._terms = terms
        self._chance = chance
        self._due = due
        self._left = left
        self._clipped: list[int] = []
        self._scratch = np.empty((2, _PIECE), dtype=np.float32)
        self._words = np.empty(_PIECE, dtype="<u2")

    def words(self, difference: Iterable[FlatParameters]) -> Iterator[Words]:
        """The blob of ``difference`` (float32, in order, in any pieces, which are written to).

        Each piece of it is valid until the next is asked for.

        Raises:
            FieldBoundExceeded: names the first coordinate that the field does not hold.
        """
        if self._left is not None:
            self._left.write(_head(self._plan))
        self._clipped = [0] * len(self._plan.narrow)
        first = 0
        for values in difference:
            if self._due is not None:
                self._due.add_to(first, values)
            yield from self._encode(first, values)
            first += len(values)
        if self._plan.narrow:
            # Sums of counters have to fit in 32 bits, too.
            most = ((1 << 32) - 1) // self._plan.n_max
            yield np.array([1, *(min(each, most) for each in self._clipped)], dtype="<u4")

    def _encode(self, first: int, values: FlatParameters) -> Iterator[Words]:
        for segment, lo, hi in self._plan.parts(first, first + len(values)):
            part = values[lo - first : hi - first]
            if segment.bits == 32:
                yield encode(part, self._terms, at=lo)
                continue
            for start in range(0, len(part), _PIECE):
                yield self._round(segment, lo + start, part[start : start + _PIECE])
            if hi == segment.last and (segment.last - segment.first) % 2:
                yield np.zeros(1, dtype="<u2")

    def _round(self, segment: Segment, first: int, values: FlatParameters) -> Words:
        """Round one piece of a narrow tensor by chance; what is left of it is written down."""
        limit, unit = self._plan.limit, 2.0**segment.k
        steps, rounded = (row[: len(values)] for row in self._scratch)
        with np.errstate(over="ignore", invalid="ignore"):
            np.multiply(values, np.float32(unit), out=steps)
            peak = max(float(steps.max()), -float(steps.min()))
        if not peak <= bound(self._terms) * unit:
            raise over_bound(values, first, self._terms)
        chances = self._chance.words((len(steps) + 3) // 4).view("<u2")[: len(steps)]
        np.multiply(chances, _CHANCE, out=rounded)
        rounded += steps
        np.floor(rounded, out=rounded)
        if peak > limit - 1:
            np.clip(rounded, -limit, limit, out=rounded)
            index = (segment.clipped - self._plan.tail) // 4 - 1
            self._clipped[index] += int(np.count_nonzero(np.abs(steps) > limit))
        steps -= rounded
        words = self._words[: len(values)]
        if self._left is not None:
            self._left.write(_halved(steps, words).data)
        np.copyto(words.view("<i2"), rounded, casting="unsafe")
        return words


def _halved(values: NDArray[np.float32], into: NDArray[np.uint16]) -> NDArray[np.uint16]:
    """``values``, which are overwritten, as bfloat16, rounded to the nearest."""
    bits = values.view("<u4")
    bits += np.uint32(1 << 15)
    bits >>= np.uint32(16)
    np.copyto(into, bits, casting="unsafe")
    return into


def _widened(halves: NDArray[np.uint16]) -> NDArray[np.float32]:
    bits = halves.astype("<u4")
    bits <<= np.uint32(16)
    return bits.view("<f4")


def _head(plan: FieldPlan) -> bytes:
    head = msgspec.msgpack.encode(_Head(plan.layout.digest, plan.k, plan.n_max, plan.code))
    return _MAGIC + len(head).to_bytes(_LENGTH_BYTES, "little") + head
