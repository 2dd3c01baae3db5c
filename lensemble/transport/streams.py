"""The streams of edges on a link, and the edge in its demux that waits for one."""

from collections.abc import Awaitable, Callable

import trio

from lensemble.errors import EdgeFault
from lensemble.ids import EdgeId
from lensemble.transport.framing import PREFIX, FrameReader
from lensemble.transport.raw import RawLost, RawReceive, RawSend

PREAMBLE_BYTES = 8
PREAMBLE_TIMEOUT_S = 5.0
RESET_TIMEOUT_S = 1.0


class StreamSender:
    """An edge's stream, sending end."""

    def __init__(self, raw: RawSend, name: str) -> None:
        self._raw = raw
        self._name = name
        self._torn = ""

    async def send_frame(self, payload: memoryview) -> None:
        await self._whole(self._raw.write, PREFIX.pack(len(payload)), payload)

    async def send_preamble(self, edge: EdgeId) -> None:
        await self._whole(self._raw.write, edge.to_bytes(PREAMBLE_BYTES, "little"), b"")

    async def finish(self) -> None:
        await self._whole(self._raw.finish)

    async def reset(self) -> None:
        self._torn = self._torn or "reset by this side"
        with trio.move_on_after(RESET_TIMEOUT_S, shield=True):
            await self._raw.reset()

    async def lost(self) -> str:
        reason = await self._raw.stopped()
        return self._torn or reason

    async def _whole(self, call: Callable[..., Awaitable[None]], *args: object) -> None:
        """Make ``call``; unless it runs to its end, the stream is torn for the peer as well."""
        if self._torn:
            raise EdgeFault(f"{self._name}: {self._torn}")
        whole = False
        try:
            await call(*args)
            whole = True
        except RawLost as lost:
            self._torn = lost.reason
            raise EdgeFault(f"{self._name}: {lost.reason}") from lost
        finally:
            if not whole:
                await self.reset()


class StreamReceiver:
    """An edge's stream, receiving end."""

    def __init__(self, raw: RawReceive, name: str) -> None:
        self._raw = raw
        self._frames = FrameReader(raw)
        self._name = name

    async def receive_frame(self, into: memoryview) -> int | None:
        try:
            return await self._frames.receive_into(into)
        except RawLost as lost:
            raise EdgeFault(f"{self._name}: {lost.reason}") from lost

    async def stop(self) -> None:
        with trio.move_on_after(RESET_TIMEOUT_S, shield=True):
            await self._raw.stop()


class ExpectedEdge:
    """An edge in the demux of one link; its stream arrives once."""

    def __init__(self, name: str, discard: Callable[[StreamReceiver | None], None]) -> None:
        self.name = name
        self.taken = False
        self._discard = discard
        self._claimed = False
        self._arrived = trio.Event()
        self._receiver: StreamReceiver | None = None
        self._lost = ""

    async def accept(self) -> StreamReceiver:
        await self._arrived.wait()
        if self._receiver is None:
            raise EdgeFault(f"{self.name}: {self._lost}")
        self._claimed = True
        return self._receiver

    def arrive(self, receiver: StreamReceiver) -> None:
        self.taken = True
        self._receiver = receiver
        self._arrived.set()

    def lose(self, reason: str) -> None:
        self._lost = reason
        self._arrived.set()

    def close(self) -> None:
        self._discard(None if self._claimed else self._receiver)
        if self._receiver is None:
            self.lose("closed by this side")


async def read_preamble(raw: RawReceive) -> EdgeId | None:
    """The edge id at the head of a stream; None if it does not come whole and in time."""
    head, done = bytearray(PREAMBLE_BYTES), 0
    view = memoryview(head)
    with trio.move_on_after(PREAMBLE_TIMEOUT_S):
        try:
            while done < PREAMBLE_BYTES:
                count = await raw.read_into(view[done:])
                if count == 0:
                    return None
                done += count
        except RawLost:
            return None
        return EdgeId(int.from_bytes(head, "little"))
    return None
