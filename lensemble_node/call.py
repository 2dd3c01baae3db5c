"""One dial of the coordinator and the link that came of it, as events of ``participation``."""

from collections.abc import Awaitable, Callable

import trio

from lensemble.crash_points import reached
from lensemble.errors import ContractViolation, FrameError, LinkLost
from lensemble.transport.driver import Driver, Link, PeerAddress
from lensemble.wire import codec
from lensemble_node.participation import Event, Heard, LinkDown, LinkUp, Misheard, Target

OUTBOX_MESSAGES = 256
FAREWELL_S = 1.0
"""How long the last messages of a link may take."""

Hear = Callable[[Event], Awaitable[None]]


class Call:
    """A call to ``target``, numbered so that its late news are told apart from a newer one's."""

    def __init__(self, number: int, target: Target, driver: Driver, hear: Hear) -> None:
        self.number = number
        self.link: Link | None = None
        self.over = trio.Event()
        self._target = target
        self._driver = driver
        self._hear = hear
        self._scope = trio.CancelScope()
        self._farewell = ""
        self._outbox, self._letters = trio.open_memory_channel[tuple[str, bytes]](OUTBOX_MESSAGES)

    async def attend(self) -> None:
        """Dial, serve the link to its end, and say why it ended."""
        cause = ""
        with self._scope:
            try:
                target = PeerAddress(self._target.node, self._target.addresses)
                self.link = await self._driver.dial(target)
                await self._serve(self.link)
            except (LinkLost, FrameError) as error:
                cause = error.message
        cause = self._farewell or cause
        if self.link is not None:
            with trio.move_on_after(FAREWELL_S, shield=True):
                await self.link.close(cause)
        self.over.set()
        await self._hear(LinkDown(self.number, cause))

    def say(self, kind: str, payload: bytes) -> None:
        """Queue a control payload, a ``kind``; a link that takes no more of them is given up."""
        try:
            self._outbox.send_nowait((kind, payload))
        except trio.WouldBlock:
            self._farewell = f"{OUTBOX_MESSAGES} messages wait to be sent"
            self._scope.cancel()
        except (trio.ClosedResourceError, trio.BrokenResourceError):
            # The link went down with this on its way; the machine is about to hear of it.
            return

    def hang_up(self, reason: str) -> None:
        """End the call once what was said is sent; a dial still in progress ends at once."""
        self._farewell = self._farewell or reason
        self._outbox.close()
        if self.link is None:
            self._scope.cancel()
        else:
            self._scope.deadline = trio.current_time() + FAREWELL_S

    async def _serve(self, link: Link) -> None:
        await self._hear(LinkUp(self.number))
        lost = ""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._post, link)
            try:
                await self._listen(link)
            except (LinkLost, FrameError) as error:
                lost = error.message
            nursery.cancel_scope.cancel()
        raise LinkLost(lost)

    async def _listen(self, link: Link) -> None:
        while True:
            payload = await link.receive()
            try:
                message = codec.decode_from_coordinator(payload)
            except (FrameError, ContractViolation) as error:
                await self._hear(Misheard(self.number, error.code, error.message))
            else:
                await self._hear(Heard(self.number, message))

    async def _post(self, link: Link) -> None:
        try:
            async for kind, letter in self._letters:
                reached("message.made", kind)
                await link.send(letter)
                reached("message.sent", kind)
        except LinkLost:
            # The listener is told the same, and says so.
            return
        # The outbox was closed and is empty: all is said.
        self._scope.cancel()
