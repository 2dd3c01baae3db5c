"""What a node is sent so that it has what a round starts from: all of it, or sums that lead there.

A node that holds what the last rounds started from is sent their sums and takes the outer steps
itself; any other one gets the parameters, and behind them the outer momentum, so that it can follow
from then on.  A sum is packed once, into a file without a name, and sent from there to everyone.
"""

import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec
import trio

from lensemble import blob, files
from lensemble.checkpoint import Checkpoint, open_checkpoint
from lensemble.crash_points import reached
from lensemble.errors import StorageError
from lensemble.ids import Digest, FederationId
from lensemble.logs import logger
from lensemble.packing import pack
from lensemble.params import ParamLayout
from lensemble.secagg.field import FieldTerms
from lensemble.secagg.plan import FieldPlan
from lensemble.transport.ends import TxEnd
from lensemble.wire.steps import MAX_STEPS, TakenStep
from lensemble_coord.training.directory import StateDirectory
from lensemble_coord.training.outer_round import Holding

By: TypeAlias = Literal["", "nothing", "sum", "state"]
"""How a node came to the state of the round in flight."""

ReadInto: TypeAlias = Callable[[int, int, memoryview], int]
"""Puts the data chunk of so many bytes from a byte on into a slot; returns its extent there."""


class Origin(msgspec.Struct, frozen=True):
    """What a round starts from, and the last ``steps`` that led there; ``nbytes`` is all of it.

    Without ``momentum`` it is nought, or the workload does not need it.
    """

    state: Digest
    momentum: Digest | None
    steps: tuple[TakenStep, ...]
    nbytes: int


class Part(msgspec.Struct, frozen=True):
    """One blob of an offer, from byte ``offset`` on; of ``checkpoint``, or of a stored sum."""

    kind: Literal["state", "momentum", "sum"]
    digest: Digest
    shape_digest: Digest
    nbytes: int
    offset: int = 0
    checkpoint: Checkpoint | None = None


class Offer(msgspec.Struct, frozen=True):
    """What a node is sent for one attempt."""

    by: By
    at: tuple[int, int]
    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        """Of what is still to come, unpacked."""
        return sum(part.nbytes - part.offset for part in self.parts)


class Packed:
    """A sum in packed chunks, in a nameless file of the directory ``room``."""

    def __init__(self, fd: int, bounds: Sequence[int], chunk_bytes: int, room: Path) -> None:
        self._room = room
        self._fd = fd
        self._bounds = bounds
        self._chunk_bytes = chunk_bytes

    @contextmanager
    def reading(self) -> Iterator[ReadInto]:
        """A reader of its own, whatever becomes of this object meanwhile.

        Raises:
            StorageError: it cannot be read, or one file more be opened.
        """
        with files.storage(self._room):
            fd = os.dup(self._fd)
            try:
                yield partial(self._read_into, fd)
            finally:
                os.close(fd)

    def _read_into(self, fd: int, start: int, _: int, slot: memoryview) -> int:
        index = start // self._chunk_bytes
        begin, end = self._bounds[index : index + 2]
        files.read_exactly(fd, slot[: end - begin], begin)
        return end - begin

    def close(self) -> None:
        """Its room is given back once no reader is left."""
        os.close(self._fd)


def pack_sum(path: Path, nbytes: int, chunk_bytes: int, room: Path) -> Packed:
    """Pack the ``nbytes`` of the stored sum ``path`` into a nameless file under ``room``.  Blocks.

    Raises:
        StorageError: the file system refuses.
    """
    with files.storage(room, nbytes), tempfile.TemporaryFile(dir=room) as into:
        bounds = [0]
        with files.storage(path), path.open("rb") as source:
            for piece in files.read_pieces(source.fileno(), 0, nbytes, chunk_bytes):
                chunk = pack(piece)
                files.write_all(into.fileno(), chunk, bounds[-1])
                bounds.append(bounds[-1] + len(chunk))
        reached("pack.written")
        return Packed(os.dup(into.fileno()), bounds, chunk_bytes, room)


class Downlink:
    """Decides what each node is sent, and sends it.

    Args:
        federation: whose blobs.
        layout: of the parameters.
        field: of the sums.
        directory: where checkpoints and sums lie.
        capacity_bytes: of the edges.
    """

    def __init__(
        self,
        federation: FederationId,
        layout: ParamLayout,
        field: FieldTerms,
        directory: StateDirectory,
        capacity_bytes: int,
    ) -> None:
        self._federation = federation
        self._layout = layout
        self._field = field
        self._directory = directory
        self._capacity = capacity_bytes
        self._packs: OrderedDict[Digest, Packed] = OrderedDict()
        self._packing = trio.Lock()
        self._unusable: set[Digest] = set()
        """Sums that could not be packed: nobody is offered them again."""

    async def close(self) -> None:
        """Give back what the packed sums take up."""
        while self._packs:
            await _beside(self._packs.popitem()[1].close)

    # ---- what to send ----

    def offer(self, origin: Origin, held: Holding, at: tuple[int, int]) -> Offer:
        """What a node that holds ``held`` is sent for ``at``, so that it has ``origin``.

        Raises:
            StorageError, CheckpointIntegrityError: the state cannot be opened.
        """
        if held.nbytes >= origin.nbytes:
            return Offer("nothing", at, ())
        if 0 < held.follows <= len(origin.steps):
            steps = origin.steps[-held.follows :]
            if self._unusable.isdisjoint(step.total for step in steps):
                return Offer("sum", at, tuple(self._sums(steps, held.of_sum)))
        return Offer("state", at, tuple(self._whole(origin, held.nbytes)))

    def _sums(self, steps: Sequence[TakenStep], held: int) -> Iterator[Part]:
        chunk = blob.packed_chunk_bytes(self._capacity)
        for step in steps:
            plan = FieldPlan(self._layout, self._field, step.plan)
            # Chunks are packed each by itself: one of which a part is held comes again.
            offset = min(held - held % chunk, plan.nbytes)
            yield Part("sum", step.total, plan.digest, plan.nbytes, offset)
            held = 0

    def _whole(self, origin: Origin, held: int) -> Iterator[Part]:
        nbytes, shape = self._layout.nbytes, self._layout.digest
        if held < nbytes:
            state = open_checkpoint(self._directory.checkpoint(origin.state))
            yield Part("state", origin.state, shape, nbytes, held, state)
        if origin.momentum is not None:
            momentum = open_checkpoint(self._directory.momentum_of(origin.momentum))
            offset = max(0, held - nbytes)
            yield Part("momentum", origin.momentum, shape, nbytes, offset, momentum)

    # ---- sums ----

    async def prepare(self, total: Digest, plan: FieldPlan) -> None:
        """Pack the sum ``total`` beforehand; a disk that refuses shows when it is sent."""
        try:
            await self._pack(total, plan.nbytes)
        except StorageError as error:
            logger("downlink").warning("sum.not_packed", reason=error.message)

    async def _pack(self, total: Digest, nbytes: int) -> Packed:
        async with self._packing:
            if total in self._packs:
                self._packs.move_to_end(total)
                return self._packs[total]
            path, room = self._directory.sum(total), self._directory.spool
            chunk = blob.packed_chunk_bytes(self._capacity)
            try:
                packed = await trio.to_thread.run_sync(pack_sum, path, nbytes, chunk, room)
            except StorageError:
                self._unusable = {*list(self._unusable)[-MAX_STEPS:], total}
                raise
            self._packs[total] = packed
            while len(self._packs) > MAX_STEPS:
                await _beside(self._packs.popitem(last=False)[1].close)
            return packed

    # ---- sending ----

    async def send(self, offer: Offer, tx: TxEnd, sent: Callable[[int], None]) -> None:
        """Put all parts of ``offer`` on ``tx``; ``sent`` is told the bytes of every data chunk.

        Raises:
            EdgeFault: the edge is torn.
            StorageError: the file system refuses.
        """
        for part in offer.parts:
            if part.checkpoint is not None:
                with _checkpoint_reading(part.checkpoint) as read:
                    await self._send(part, offer.at, tx, read, sent)
            else:
                packed = await self._pack(part.digest, part.nbytes)
                with packed.reading() as read:
                    await self._send(part, offer.at, tx, read, sent)

    async def _send(
        self,
        part: Part,
        at: tuple[int, int],
        tx: TxEnd,
        read: ReadInto,
        sent: Callable[[int], None],
    ) -> None:
        header = self._header(part, at)
        slot = await tx.acquire()
        tx.filled(slot, blob.header_chunk(header, tx.region.slot(slot)))
        reached("state.sent", f"{part.kind} header")
        for start, length in blob.data_ranges(header):
            slot = await tx.acquire()
            extent = await trio.to_thread.run_sync(read, start, length, tx.region.slot(slot))
            tx.filled(slot, extent)
            sent(extent)
            reached("state.sent", f"{part.kind} data")
        slot = await tx.acquire()
        tx.filled(slot, blob.trailer_chunk(part.digest, b"", tx.region.slot(slot)))
        reached("state.sent", f"{part.kind} trailer")

    def _header(self, part: Part, at: tuple[int, int]) -> blob.BlobHeader:
        packed = blob.packed_chunk_bytes(self._capacity)
        return blob.BlobHeader(
            kind=part.kind,
            federation=self._federation,
            round=at[0],
            attempt=at[1],
            total_bytes=part.nbytes,
            offset=part.offset,
            chunk_bytes=packed if part.kind == "sum" else self._capacity,
            layout_digest=part.shape_digest,
            digest_hint=part.digest,
        )


async def _beside(close: Callable[[], None]) -> None:
    """Free a large file in a thread, whatever is cancelled: the loop would stand still for it."""
    with trio.CancelScope(shield=True):
        await trio.to_thread.run_sync(close)


@contextmanager
def _checkpoint_reading(checkpoint: Checkpoint) -> Iterator[ReadInto]:
    with files.storage(checkpoint.weights), checkpoint.weights.open("rb", buffering=0) as file:
        yield partial(_read_flat, file.fileno(), checkpoint.data_offset)


def _read_flat(fd: int, data_offset: int, start: int, length: int, slot: memoryview) -> int:
    files.read_exactly(fd, slot[:length], data_offset + start)
    return length
