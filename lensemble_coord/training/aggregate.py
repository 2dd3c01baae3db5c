"""The sum of the updates: integer, exact and free of order, one piece of one accumulator at a time.

It is derived twice from the spools, side by side, and compared piece by piece, so that a fault of
memory or disk shows before anything is built on it.  These functions block, and release the GIL for
nearly all of their time; run them in a thread.
"""

import itertools
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from lensemble import files
from lensemble.blob import SumDigest
from lensemble.crash_points import reached
from lensemble.errors import (
    AggregationError,
    ContractViolation,
    NonDeterministicAggregation,
)
from lensemble.files import PART_PREFIX, PIECE_BYTES
from lensemble.ids import Digest, NodeId
from lensemble.secagg.field import FieldTerms, bound, limit, reach
from lensemble.secagg.plan import WORD_BYTES, FieldPlan, signed_of
from lensemble_coord.training.lanes import Lanes

SUM_SUFFIX = ".u32"
_MALFORMED = "An update was malformed or a mask was not removed; the round is tried again."


class Addend(Protocol):
    """Something that goes into the sum as the fold reads it; ``SpoolFile`` is one.

    ``updates`` is how many updates it stands for: 0 for what only takes masks off.
    """

    @property
    def participant(self) -> NodeId: ...

    @property
    def total_bytes(self) -> int: ...

    @property
    def complete(self) -> bool: ...

    @property
    def updates(self) -> int: ...

    def read_into(self, offset: int, into: memoryview) -> None: ...


class SumFacts(msgspec.Struct, frozen=True):
    """A field sum at rest in ``path``."""

    field_sum_digest: Digest
    path: Path
    count: int
    largest: int
    """Greatest magnitude of a word of 32 bits, in field units."""
    largest_narrow: int = 0
    """Of a word of 16 bits."""
    tail: tuple[int, ...] = ()


class Peaks:
    """Greatest magnitudes of the words of a sum, and its tail, taken piece by piece."""

    def __init__(self, plan: FieldPlan) -> None:
        self._plan = plan
        self.of = {16: 0, 32: 0}
        self.tail: tuple[int, ...] = ()

    def include(self, start: int, piece: NDArray[np.uint32]) -> None:
        """Take ``piece`` (uint32), which is that from byte ``start`` on; pieces come in order."""
        first = max(0, min(len(piece), (self._plan.tail - start) // WORD_BYTES))
        self.tail += tuple(piece[first:].tolist())
        for span in self._plan.spans(start, start + first * WORD_BYTES):
            signed = signed_of(piece, span)
            largest = max(int(signed.max()), -int(signed.min()))
            self.of[span.bits] = max(self.of[span.bits], largest)

    def facts(self, digest: Digest, path: Path, count: int) -> SumFacts:
        """All that is known of the sum of ``count`` updates once it was taken whole."""
        return SumFacts(digest, path, count, self.of[32], self.of[16], self.tail)


def count_of(addends: Sequence[Addend]) -> int:
    """How many updates the sum of ``addends`` is of."""
    return sum(each.updates for each in addends)


def summed_pieces(
    addends: Sequence[Addend], plan: FieldPlan, piece_bytes: int = PIECE_BYTES, kept: int = 1
) -> Iterator[NDArray[np.uint32]]:
    """The sum in order, each word modulo its own width; each is valid until the ``kept``-th after.

    Pieces are uint32 arrays of the sum's bytes, whatever the widths of the words in them.

    Raises:
        AggregationError: no addend, or one that is not whole.
    """
    if not addends:
        raise AggregationError("there is no update to sum")
    nbytes = plan.nbytes
    for each in addends:
        if each.total_bytes != nbytes or not each.complete:
            raise AggregationError(f"the update of {each.participant} is not whole")
    words = piece_bytes // WORD_BYTES
    totals = itertools.cycle([np.empty(words, dtype=np.uint32) for _ in range(kept)])
    term = np.empty(words, dtype=np.uint32)
    for offset in range(0, nbytes, words * WORD_BYTES):
        size = min(words, (nbytes - offset) // WORD_BYTES)
        piece, other = next(totals)[:size], term[:size]
        addends[0].read_into(offset, piece.data.cast("B"))
        for each in addends[1:]:
            each.read_into(offset, other.data.cast("B"))
            plan.add(offset, piece, other)
        yield piece


class _Comparison:
    """A second derivation of a sum, which takes the pieces of the first and compares."""

    def __init__(self, addends: Sequence[Addend], plan: FieldPlan) -> None:
        self._again = summed_pieces(addends, plan)
        self.differs_at: int | None = None
        """Byte of the first piece that came out differently."""

    def include(self, start: int, piece: NDArray[np.uint32]) -> None:
        """Take ``piece``, which is that from byte ``start`` on; pieces come in order."""
        if not np.array_equal(next(self._again), piece) and self.differs_at is None:
            self.differs_at = start


class _Resting:
    """A sum on its way into a file: written, hashed and looked at, piece by piece."""

    def __init__(self, fd: int, plan: FieldPlan) -> None:
        self._fd = fd
        self.running, self.peaks = SumDigest(plan), Peaks(plan)

    def include(self, start: int, piece: NDArray[np.uint32]) -> None:
        """Take ``piece``, which is that from byte ``start`` on; pieces come in order."""
        raw = piece.data.cast("B")
        self.running.update(raw)
        files.write_all(self._fd, raw, start)
        self.peaks.include(start, piece)


def fold(addends: Sequence[Addend], plan: FieldPlan, out: Path) -> tuple[SumFacts, int | None]:
    """Sum ``addends`` into the file ``out`` and flush it; and sum them again, for comparison.

    Beside the facts comes where the two differ, in bytes, rounded down to a piece; None if they
    are equal.

    Raises:
        AggregationError: no addend, or one that is not whole.
        StorageError: the file system refuses.
    """
    with files.storage(out, plan.nbytes):
        fd = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.posix_fallocate(fd, 0, plan.nbytes)
            reached("sum.begun")
            resting, again, start = _Resting(fd, plan), _Comparison(addends, plan), 0
            with Lanes(2, "sum") as lanes:
                for piece in summed_pieces(addends, plan, kept=lanes.kept):
                    lanes.give(
                        partial(resting.include, start, piece), partial(again.include, start, piece)
                    )
                    start += piece.nbytes
                lanes.finish()
            reached("sum.written")
            os.fsync(fd)
            reached("sum.flushed")
        finally:
            os.close(fd)
    digest = resting.running.hexdigest()
    return resting.peaks.facts(digest, out, count_of(addends)), again.differs_at


def sum_digest(addends: Sequence[Addend], plan: FieldPlan) -> Digest:
    """The digest of the sum of ``addends``, derived anew and written nowhere."""
    running = SumDigest(plan)
    for piece in summed_pieces(addends, plan):
        running.update(piece.data.cast("B"))
    return running.hexdigest()


def derive_sum(
    addends: Sequence[Addend],
    plan: FieldPlan,
    field: FieldTerms,
    directory: Path,
    differed: Callable[[int], None] = lambda _: None,
) -> SumFacts:
    """Sum ``addends`` twice, into ``directory/<digest>.u32``; once more if the two differ.

    ``differed`` is told where they first did, in bytes, which is worth an alert.

    Raises:
        NonDeterministicAggregation: the two differ again.
        AggregationError: too many addends for the field, one not whole, or an implausible sum.
        StorageError: the file system refuses.
    """
    if (count := count_of(addends)) > field.n_max:
        raise AggregationError(f"{count} updates; the field has room for {field.n_max}")
    part = directory / f"{PART_PREFIX}sum"
    with files.storage(directory):
        files.make_directory(directory)
    try:
        facts = _derive_equal(addends, plan, part, differed)
        require_plausible(facts, plan, field)
        target = directory / (facts.field_sum_digest + SUM_SUFFIX)
        with files.storage(target):
            part.replace(target)
            reached("sum.named")
            files.flush_directory(directory)
            reached("sum.listed")
    finally:
        part.unlink(missing_ok=True)
    return msgspec.structs.replace(facts, path=target)


def _derive_equal(
    addends: Sequence[Addend], plan: FieldPlan, part: Path, differed: Callable[[int], None]
) -> SumFacts:
    facts, at = fold(addends, plan, part)
    if at is None:
        return facts
    differed(at)
    facts, at = fold(addends, plan, part)
    if at is None:
        return facts
    raise NonDeterministicAggregation(
        f"the same {count_of(addends)} updates summed to two results that differ from byte {at} on"
    )


def require_plausible(facts: SumFacts, plan: FieldPlan, field: FieldTerms) -> None:
    """Refuse a sum that so many updates within the field's bounds cannot have.

    A mask that was not removed leaves uniform words, which fail this at once.

    Raises:
        AggregationError: it is out of reach.
    """
    count = facts.count
    for bits, largest, most in (
        (32, facts.largest, reach(field, count)),
        (16, facts.largest_narrow, count * plan.limit),
    ):
        if largest > most:
            raise AggregationError(
                f"the sum of {count} updates reaches {largest} field units in words of {bits} "
                f"bits; at most {most} can be",
                _MALFORMED,
            )
    if plan.all_wide:
        return
    said, *clipped = facts.tail
    sizes = [each.last - each.first for each in plan.narrow]
    if said != count or any(n > count * size for n, size in zip(clipped, sizes, strict=True)):
        raise AggregationError(
            f"the tail of the sum of {count} updates says {said}, and {max(clipped)} coordinates "
            "cut off in one tensor",
            _MALFORMED,
        )


def check_update(update: Addend, plan: FieldPlan, field: FieldTerms) -> None:
    """Refuse a plain update that has a coordinate over the field's bound; a masked one has none.

    Raises:
        ContractViolation: names the participant, the coordinate and its value.
    """
    start = 0
    for piece in summed_pieces([update], plan):
        coordinates = max(0, min(piece.nbytes, plan.tail - start))
        for span in plan.spans(start, start + coordinates):
            signed = signed_of(piece, span)
            most = limit(field) if span.bits == 32 else plan.limit
            if int(signed.max()) > most or int(signed.min()) < -most:
                at = int(np.flatnonzero((signed > most) | (signed < -most))[0])
                where = plan.coordinate_at(start + span.start + at * span.bits // 8)
                raise _over_bound(update, plan, field, where, int(signed[at]))
        start += piece.nbytes


def _over_bound(
    update: Addend, plan: FieldPlan, field: FieldTerms, coordinate: int, word: int
) -> ContractViolation:
    segment = plan.segment_of(coordinate)
    most = bound(field) if segment.bits == 32 else plan.limit * 2.0**-segment.k
    return ContractViolation(
        f"coordinate {coordinate} of the update of {update.participant} is "
        f"{word * 2.0**-segment.k:g}; the field's bound is {most:g}",
        "Clip the release of that node, or lower `field.k` of the workload.",
    )


def sum_pieces(
    path: Path, plan: FieldPlan, piece_bytes: int = PIECE_BYTES
) -> Generator[memoryview, None, None]:
    """The bytes of a stored sum in order; a piece is valid until the next is asked for.

    Raises:
        AggregationError: the file is not as long as the plan says.
        StorageError: missing or unreadable.
    """
    with files.storage(path), path.open("rb") as file:
        size = _require_size(path, file.fileno(), plan)
        yield from files.read_pieces(file.fileno(), 0, size, piece_bytes)


class Part(NamedTuple):
    """So many coordinates of a sum from ``first`` on; ``raw`` begins at ``byte_of(first)``."""

    first: int
    coordinates: int
    raw: memoryview


def sum_parts(
    path: Path, plan: FieldPlan, coordinates: int, kept: int = 1
) -> Generator[Part, None, None]:
    """The bytes of a stored sum, in parts of so many coordinates; the last one has the tail, too.

    A part is valid until the ``kept``-th after it.

    Raises:
        AggregationError: the file is not as long as the plan says.
        StorageError: missing or unreadable.
    """
    size = plan.layout.size
    with files.storage(path), path.open("rb") as file:
        nbytes = _require_size(path, file.fileno(), plan)
        most = min(nbytes, _most_bytes(plan, coordinates))
        rooms = itertools.cycle([memoryview(bytearray(most)) for _ in range(kept)])
        for first in range(0, size, coordinates):
            last = min(size, first + coordinates)
            start, stop = plan.byte_of(first), plan.byte_of(last) if last < size else nbytes
            raw = next(rooms)[: stop - start]
            files.read_exactly(file.fileno(), raw, start)
            yield Part(first, last - first, raw)


def _most_bytes(plan: FieldPlan, coordinates: int) -> int:
    """The most that so many coordinates can take up, filling words and tail among it."""
    return WORD_BYTES * coordinates + plan.nbytes - plan.tail


def _require_size(path: Path, fd: int, plan: FieldPlan) -> int:
    size = os.fstat(fd).st_size
    if size != plan.nbytes:
        raise AggregationError(f"{path}: {size} bytes instead of {plan.nbytes}")
    return size
