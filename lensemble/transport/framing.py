"""Frames on a byte stream: a u32 little-endian length, then that many bytes.

Control streams and edges are framed alike.  The reader keeps its progress across cancelled calls
and latches the first failure, so that a torn stream can never pass for one that ended in order.
"""

import struct

import trio

from lensemble.transport.raw import RawLost, RawReceive

PREFIX = struct.Struct("<I")
AHEAD_BYTES = 4096
"""Read at most beyond what is being filled; copied once more."""


class TooLong(RawLost):
    """A frame announced more bytes than its receiver allows."""


class FrameReader:
    """Reads frames from ``raw``; one task at a time."""

    def __init__(self, raw: RawReceive) -> None:
        self._raw = raw
        self._prefix = bytearray(PREFIX.size)
        self._done = 0
        self._extent: int | None = None
        self._own = bytearray()
        self._spare = memoryview(bytearray(AHEAD_BYTES))
        self._ahead = self._spare[:0]
        """The part of ``_spare`` that was read and belongs to what comes next."""
        self._lost = ""

    async def receive_into(self, into: memoryview) -> int | None:
        """Fill ``into`` with one frame; its length, or None at the end of the stream.

        A cancelled call loses nothing when the next one gets the same ``into``.

        Raises:
            TooLong: the frame is longer than ``into``.
            RawLost: the stream is torn.
        """
        extent = await self._next_extent(len(into))
        if extent is None:
            return None
        await self._fill(into[:extent])
        self._extent, self._done = None, 0
        return extent

    async def receive(self, limit: int) -> bytes | None:
        """One frame of at most ``limit`` bytes, or None at the end of the stream.

        A cancelled call loses nothing.  Raises as ``receive_into`` does.
        """
        extent = await self._next_extent(limit)
        if extent is None:
            return None
        if len(self._own) != extent:
            self._own = bytearray(extent)
        await self._fill(memoryview(self._own))
        payload = bytes(self._own)
        self._own = bytearray()
        self._extent, self._done = None, 0
        return payload

    async def _next_extent(self, limit: int) -> int | None:
        if self._lost:
            raise RawLost(self._lost)
        if self._extent is None:
            if not await self._fill(memoryview(self._prefix), at_boundary=True):
                return None
            (extent,) = PREFIX.unpack(self._prefix)
            if extent > limit:
                self._lost = f"a frame of {extent} bytes exceeds the limit of {limit}"
                raise TooLong(self._lost)
            self._extent, self._done = extent, 0
        return self._extent

    async def _fill(self, view: memoryview, *, at_boundary: bool = False) -> bool:
        """Read until ``view`` is full; False where the stream ends before its first byte.

        What comes in one go with the last of ``view`` is kept for what comes next: so a small frame
        takes one call, and a large one none for its prefix.
        """
        self._take_ahead(view)
        if at_boundary and self._done == len(view):
            # No call is needed, and whoever reads many small frames still makes way for others.
            await trio.lowlevel.checkpoint()
        while (missing := len(view) - self._done) > 0:
            try:
                count = await self._raw.read_into(view[self._done :], self._spare)
            except RawLost as lost:
                self._lost = lost.reason
                raise
            if count == 0 and at_boundary and self._done == 0:
                return False
            if count == 0:
                self._lost = f"the stream ended inside a frame, {missing} bytes early"
                raise RawLost(self._lost)
            self._done += min(count, missing)
            self._ahead = self._spare[: max(count - missing, 0)]
        return True

    def _take_ahead(self, view: memoryview) -> None:
        """Move what was read already to ``view``, as much as it has room for."""
        count = min(len(view) - self._done, len(self._ahead))
        view[self._done : self._done + count] = self._ahead[:count]
        self._ahead = self._ahead[count:]
        self._done += count
