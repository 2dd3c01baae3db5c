"""Weights from the coordinator's own file to stages, over edges: only what each asks for."""

import struct
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import trio

from lensemble import files
from lensemble.edge.spec import EdgeSpec
from lensemble.errors import EdgeFault, StorageError, WeightsError
from lensemble.ids import SlotIndex
from lensemble.transport.driver import Driver
from lensemble.transport.ends import ArenaLeases, TxEnd
from lensemble_coord.inference.busy import Busy

OFFSET = struct.Struct("<Q")
CAPACITY_BYTES = OFFSET.size + (1 << 18)
SLOTS = 4

Ranges = tuple[tuple[int, int], ...]


class Sent(msgspec.Struct):
    """How much of what was asked for is with the edge; bytes."""

    done: int = 0
    total: int = 0
    busy: Busy = msgspec.field(default_factory=lambda: Busy(SLOTS))
    """How much of it left while there was always something to send."""


class WeightsOut:
    """Sends parts of the file at ``path``, to several stages at a time."""

    def __init__(self, path: Path, driver: Driver, leases: ArenaLeases) -> None:
        self._path = path
        self._driver = driver
        self._leases = leases

    async def send(self, spec: EdgeSpec, ranges: Ranges, sent: Sent) -> None:
        """Send ``ranges`` on the edge ``spec`` and end its stream; ``sent`` tells how far it is.

        A chunk is the offset of its bytes in the file, u64 little-endian, then the bytes.

        Raises:
            WeightsError: a range lies outside the file.
            StorageError: the file cannot be read.
            EdgeFault: the edge is torn.
        """
        with files.storage(self._path):
            size = (await trio.Path(self._path).stat()).st_size
        for offset, length in ranges:
            if offset + length > size:
                raise WeightsError(
                    f"bytes {offset} to {offset + length} were asked for; {self._path} has {size}"
                )
        sent.total = sum(length for _, length in ranges)
        region = await self._leases.lease(spec)
        failure: EdgeFault | StorageError | None = None
        try:
            async with trio.open_nursery() as nursery:
                end = TxEnd(spec, region, self._driver)
                await nursery.start(end.serve)
                try:
                    await self._pour(end, ranges, sent)
                except (EdgeFault, StorageError) as error:
                    failure = error
                nursery.cancel_scope.cancel()
        finally:
            self._leases.give_back(region)
        if failure is not None:
            raise failure

    async def _pour(self, end: TxEnd, ranges: Ranges, sent: Sent) -> None:
        with files.storage(self._path):
            file = await trio.to_thread.run_sync(partial(self._path.open, "rb", buffering=0))
        try:
            for offset, length in _pieces(ranges, end.spec.capacity_bytes - OFFSET.size):
                slot = await _acquire(end, sent.busy)
                view = end.region.slot(slot)
                OFFSET.pack_into(view, 0, offset)
                piece = view[OFFSET.size : OFFSET.size + length]
                with files.storage(self._path):
                    # Not abandoned on cancel: the slot is written until the read is over.
                    read = partial(files.read_exactly, file.fileno(), piece, offset)
                    await trio.to_thread.run_sync(read)
                sent.busy.filled(length, idle=len(end.lent) == end.spec.slots)
                end.filled(slot, OFFSET.size + length)
                sent.done += length
            await end.finished()
        finally:
            file.close()


async def _acquire(end: TxEnd, busy: Busy) -> SlotIndex:
    slot = end.acquire_now()
    if slot is None:
        slot = await end.acquire()
        busy.waited(trio.current_time())
    return slot


def _pieces(ranges: Iterable[tuple[int, int]], most: int) -> Iterator[tuple[int, int]]:
    for offset, length in ranges:
        for begin in range(offset, offset + length, most):
            yield begin, min(most, offset + length - begin)
