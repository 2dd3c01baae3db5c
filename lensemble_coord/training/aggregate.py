"""The sum of the updates: integer, exact and free of order, one piece of one accumulator at a time.

It is derived twice from the spools, side by side, and the digests are compared, so that a fault of
memory or disk shows before anything is built on it.  These functions block, and release the GIL for
nearly all of their time; run them in a thread.
"""

import os
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

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
from lensemble.params import PARAMETER_BYTES, ParamLayout
from lensemble.secagg.field import FieldTerms, bound, limit, reach

SUM_SUFFIX = ".u32"


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
    """A field sum at rest in ``path``; ``largest`` is its greatest magnitude, in field units."""

    field_sum_digest: Digest
    path: Path
    count: int
    largest: int


def count_of(addends: Sequence[Addend]) -> int:
    """How many updates the sum of ``addends`` is of."""
    return sum(each.updates for each in addends)


def summed_pieces(
    addends: Sequence[Addend], nbytes: int, piece_bytes: int = PIECE_BYTES
) -> Iterator[NDArray[np.uint32]]:
    """The sum modulo 2**32 in order (uint32); each piece is valid until the next is asked for.

    Raises:
        AggregationError: no addend, or one that is not whole.
    """
    if not addends:
        raise AggregationError("there is no update to sum")
    for each in addends:
        if each.total_bytes != nbytes or not each.complete:
            raise AggregationError(f"the update of {each.participant} is not whole")
    words = piece_bytes // PARAMETER_BYTES
    total = np.empty(words, dtype=np.uint32)
    term = np.empty(words, dtype=np.uint32)
    for offset in range(0, nbytes, words * PARAMETER_BYTES):
        size = min(words, (nbytes - offset) // PARAMETER_BYTES)
        piece, other = total[:size], term[:size]
        addends[0].read_into(offset, piece.data.cast("B"))
        for each in addends[1:]:
            each.read_into(offset, other.data.cast("B"))
            np.add(piece, other, out=piece)
        yield piece


def fold(addends: Sequence[Addend], layout: ParamLayout, out: Path) -> SumFacts:
    """Sum ``addends`` into the file ``out`` and flush it.

    Raises:
        AggregationError: no addend, or one that is not whole.
        StorageError: the file system refuses.
    """
    running, largest, offset = SumDigest(layout), 0, 0
    with files.storage(out, layout.nbytes):
        fd = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.posix_fallocate(fd, 0, layout.nbytes)
            reached("sum.begun")
            for piece in summed_pieces(addends, layout.nbytes):
                raw = piece.data.cast("B")
                running.update(raw)
                files.write_all(fd, raw, offset)
                offset += len(raw)
                signed = piece.view(np.int32)
                largest = max(largest, int(signed.max()), -int(signed.min()))
            reached("sum.written")
            os.fsync(fd)
            reached("sum.flushed")
        finally:
            os.close(fd)
    return SumFacts(running.hexdigest(), out, count_of(addends), largest)


def sum_digest(addends: Sequence[Addend], layout: ParamLayout) -> Digest:
    """The digest of the sum of ``addends``, derived anew and written nowhere."""
    running = SumDigest(layout)
    for piece in summed_pieces(addends, layout.nbytes):
        running.update(piece.data.cast("B"))
    return running.hexdigest()


def derive_sum(
    addends: Sequence[Addend],
    layout: ParamLayout,
    field: FieldTerms,
    directory: Path,
    differed: Callable[[Digest, Digest], None] = lambda *_: None,
) -> SumFacts:
    """Sum ``addends`` twice, into ``directory/<digest>.u32``; once more if the two differ.

    ``differed`` is told the two digests of a first disagreement, which is worth an alert.

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
        facts = _derive_equal(addends, layout, part, differed)
        require_plausible(facts.largest, facts.count, field)
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
    addends: Sequence[Addend],
    layout: ParamLayout,
    part: Path,
    differed: Callable[[Digest, Digest], None],
) -> SumFacts:
    for last in (False, True):
        with ThreadPoolExecutor(1, "second-sum") as beside:
            second = beside.submit(sum_digest, addends, layout)
            facts = fold(addends, layout, part)
            again = second.result()
        if again == facts.field_sum_digest:
            return facts
        if not last:
            differed(facts.field_sum_digest, again)
    raise NonDeterministicAggregation(
        f"the same {count_of(addends)} updates summed to {facts.field_sum_digest} and to {again}"
    )


def require_plausible(largest: int, count: int, field: FieldTerms) -> None:
    """Refuse a sum that ``count`` updates within the field's bound cannot have.

    A mask that was not removed leaves uniform words, which fail this at once.

    Raises:
        AggregationError: it is out of reach.
    """
    most = reach(field, count)
    if largest > most:
        raise AggregationError(
            f"the sum of {count} updates reaches {largest} field units; at most {most} can be",
            "An update was malformed or a mask was not removed; the round is tried again.",
        )


def check_update(update: Addend, layout: ParamLayout, field: FieldTerms) -> None:
    """Refuse a plain update that has a coordinate over the field's bound; a masked one has none.

    Raises:
        ContractViolation: names the participant, the coordinate and its value.
    """
    most, start = limit(field), 0
    for piece in summed_pieces([update], layout.nbytes):
        signed = piece.view(np.int32)
        if int(signed.max()) > most or int(signed.min()) < -most:
            at = int(np.flatnonzero((signed > most) | (signed < -most))[0])
            value = int(signed[at]) * 2.0**-field.k
            raise ContractViolation(
                f"coordinate {start + at} of the update of {update.participant} is {value:g}; "
                f"the field's bound is {bound(field):g}",
                "Clip the release of that node, or lower `field.k` of the workload.",
            )
        start += len(signed)


def sum_pieces(
    path: Path, layout: ParamLayout, piece_bytes: int = PIECE_BYTES
) -> Generator[memoryview, None, None]:
    """The bytes of a stored sum in order; a piece is valid until the next is asked for.

    Raises:
        AggregationError: the file is not as long as the layout.
        StorageError: missing or unreadable.
    """
    with files.storage(path), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size != layout.nbytes:
            raise AggregationError(f"{path}: {size} bytes instead of {layout.nbytes}")
        yield from files.read_pieces(file.fileno(), 0, size, piece_bytes)
