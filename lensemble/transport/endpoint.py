"""The shared half of every driver: dialling, greeting, and one link for each peer.

A new connection from a peer that already has a link asks the old link first.  No answer within a
second: the old one belongs to a process that is gone, and the new one takes its place.  An answer:
two processes hold the same identity, and the new one is refused with both named.  When two peers
dial each other at once, both keep the connection that the smaller node id dialled: that side lets
the other's wait until its own dial has come out, so that no link is superseded once it is used.
"""

from collections import Counter
from functools import partial

import msgspec
import trio

from lensemble.errors import EdgeFault, InvariantError, LinkLost
from lensemble.ids import EdgeId, NodeId
from lensemble.transport.driver import PeerAddress
from lensemble.transport.links import CoreLink, Pace
from lensemble.transport.notes import Notes
from lensemble.transport.raw import RawConnection, RawEndpoint, RawIncoming, RawLost, RawReceive
from lensemble.transport.streams import (
    RESET_TIMEOUT_S,
    ExpectedEdge,
    StreamReceiver,
    StreamSender,
)

GREETING = b"lensemble/1\n"
"""The first bytes of a control stream, from the dialler and then from the listener."""

MAX_GREETINGS = 64
"""Connections that are being greeted at the same time."""

MAX_LINKS = 1024
MAX_WAITING_LINKS = 256
"""Links that nobody has accepted yet."""

GREETING_TIMEOUT_S = 5.0
CROSSING_TIMEOUT_S = 2.0
"""A peer that dials us while we dial it waits at most so long for our dial."""

MAX_AHEAD = 4096
"""Edges that are expected without regard to a link."""


class EndpointSettings(msgspec.Struct, frozen=True):
    """How a driver behaves; times in seconds."""

    pace: Pace = Pace()
    dial_timeout_s: float = 5.0


class EndpointDriver:
    """A driver over any raw endpoint."""

    def __init__(self, raw: RawEndpoint, settings: EndpointSettings) -> None:
        self.node = raw.node
        self._raw = raw
        self._settings = settings
        self._refused: Counter[str] = Counter()
        self._links: dict[NodeId, CoreLink] = {}
        self._dialling: dict[NodeId, trio.Event] = {}
        self._ahead: dict[tuple[NodeId, EdgeId], ExpectedEdge] = {}
        self._notes = Notes(self._refused)
        self._nursery: trio.Nursery | None = None
        self._greetings = 0
        self._opened, self._waiting = trio.open_memory_channel[CoreLink](MAX_WAITING_LINKS)

    def addresses(self) -> tuple[str, ...]:
        return self._raw.addresses()

    def refused(self) -> dict[str, int]:
        return dict(self._refused)

    def links(self) -> dict[NodeId, CoreLink]:
        """The live links by peer."""
        return {peer: link for peer, link in self._links.items() if not link.lost.is_set()}

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        await self._raw.start()
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                task_status.started()
                await self._greet_all(nursery)
        finally:
            self._nursery = None
            for link in self._links.values():
                link.lose("shut down")
            self._links.clear()
            for expected in self._ahead.values():
                expected.lose("shut down")
            with trio.CancelScope(shield=True):
                await self._raw.close()

    async def accept(self) -> CoreLink:
        while True:
            link = await self._waiting.receive()
            if not link.lost.is_set():
                return link

    async def dial(self, peer: PeerAddress) -> CoreLink:
        came_out = trio.Event()
        self._dialling.setdefault(peer.node, came_out)
        try:
            return await self._dial(peer)
        finally:
            came_out.set()
            if self._dialling[peer.node] is came_out:
                del self._dialling[peer.node]

    async def _dial(self, peer: PeerAddress) -> CoreLink:
        nursery = self._running()
        where = f"{peer.node} at {', '.join(peer.addresses) or 'no address'}"
        if peer.node in self.links():
            raise LinkLost(f"{where}: there is a live link already")
        link: CoreLink | None = None
        timeout = self._settings.dial_timeout_s
        with trio.move_on_after(timeout):
            try:
                link = await self._introduce(peer)
            except RawLost as lost:
                raise LinkLost(f"{where}: {lost.reason}") from lost
        if link is None:
            raise LinkLost(f"{where}: no answer within {timeout:g} s")
        if refusal := await self._admit(link):
            link.lose(refusal)
            raise LinkLost(f"{where}: {refusal}")
        await nursery.start(self._serve, link)
        return link

    def expect_edge(self, peer: NodeId, edge: EdgeId, *, ahead: bool = False) -> ExpectedEdge:
        if ahead:
            return self._expect_ahead(peer, edge)
        link = self.links().get(peer)
        if link is not None:
            return link.expect_edge(edge)
        orphan = ExpectedEdge(f"edge {edge} from {peer}", lambda _: None)
        orphan.lose("there is no live link")
        return orphan

    async def open_edge(self, peer: NodeId, edge: EdgeId) -> StreamSender:
        link = self.links().get(peer)
        if link is None:
            raise EdgeFault(f"edge {edge} to {peer}: there is no live link")
        return await link.open_edge(edge)

    def link_to(self, peer: NodeId) -> CoreLink | None:
        link = self._links.get(peer)
        return None if link is None or link.lost.is_set() else link

    def send_note(self, peer: NodeId, note: bytes) -> bool:
        link = self.link_to(peer)
        return link is not None and link.send_note(note)

    async def receive_note(self) -> tuple[NodeId, bytes]:
        return await self._notes.take()

    def _expect_ahead(self, peer: NodeId, edge: EdgeId) -> ExpectedEdge:
        if (peer, edge) in self._ahead or len(self._ahead) >= MAX_AHEAD:
            raise InvariantError(
                f"edge {edge} from {peer} is registered twice, or with {MAX_AHEAD} others"
            )
        expected = ExpectedEdge(f"edge {edge} from {peer}", partial(self._forget, (peer, edge)))
        self._ahead[peer, edge] = expected
        return expected

    def _forget(self, key: tuple[NodeId, EdgeId], unclaimed: StreamReceiver | None) -> None:
        self._ahead.pop(key, None)
        if unclaimed is not None and self._nursery is not None:
            self._nursery.start_soon(unclaimed.stop)

    # ---- dialling and greeting ----

    async def _introduce(self, peer: PeerAddress) -> CoreLink:
        raw = await self._raw.connect(peer)
        greeted = False
        try:
            control = await raw.open_control()
            await control[0].write(GREETING, b"")
            await _read_greeting(control[1])
            greeted = True
            return CoreLink(raw, control, self._settings.pace, self._refused, dialled=True)
        finally:
            if not greeted:
                raw.close("the greeting was not answered")

    async def _greet_all(self, nursery: trio.Nursery) -> None:
        while True:
            incoming = await self._raw.accept()
            if self._greetings >= MAX_GREETINGS:
                self._refused["busy"] += 1
                nursery.start_soon(self._turn_away, incoming)
            else:
                self._greetings += 1
                nursery.start_soon(self._greet, incoming)

    async def _greet(self, incoming: RawIncoming) -> None:
        try:
            link = await self._welcome(incoming)
        finally:
            self._greetings -= 1
        if link is None:
            return
        try:
            self._opened.send_nowait(link)
        except trio.WouldBlock:
            self._refused["busy"] += 1
            link.lose("nobody accepts links here")
            return
        await self._serve(link)

    async def _welcome(self, incoming: RawIncoming) -> CoreLink | None:
        """Take a connection through its greeting; None if it must be refused."""
        raw: RawConnection | None = None
        refusal, reason = "handshake", "the greeting did not come in time"
        with trio.move_on_after(GREETING_TIMEOUT_S):
            try:
                raw = await incoming.complete()
                control = await raw.accept_control()
                await _read_greeting(control[1])
                link = CoreLink(raw, control, self._settings.pace, self._refused, dialled=False)
                await self._let_cross(link.peer)
                reason = await self._admit(link)
                if not reason:
                    await control[0].write(GREETING, b"")
                    return link
                refusal = "second_holder"
            except RawLost as lost:
                reason = lost.reason
        self._refused[refusal] += 1
        if raw is not None:
            raw.close(reason)
            self._drop(raw)
        return None

    async def _let_cross(self, peer: NodeId) -> None:
        """Where our own dial of ``peer`` is the one to keep, wait for what comes of it."""
        if self.node < peer and peer in self._dialling:
            with trio.move_on_after(CROSSING_TIMEOUT_S):
                await self._dialling[peer].wait()

    async def _turn_away(self, incoming: RawIncoming) -> None:
        with trio.move_on_after(RESET_TIMEOUT_S):
            await incoming.refuse()

    # ---- one link for each peer ----

    async def _admit(self, link: CoreLink) -> str:
        """Make ``link`` the link to its peer; the reason if there is a better one already."""
        peer = link.peer
        while (old := self.links().get(peer)) is not None:
            if not self._is_favoured(link, old) and await old.probe():
                return (
                    f"{peer[:16]} is connected from {old.facts().remote} and answers there; "
                    f"the one at {link.facts().remote} is refused"
                )
            old.lose(f"superseded by a newer connection from {link.facts().remote}")
        if len(self._links) >= MAX_LINKS:
            return f"there are {MAX_LINKS} links already"
        link.ahead, link.notes = self._ahead, self._notes
        self._links[peer] = link
        return ""

    def _is_favoured(self, link: CoreLink, old: CoreLink) -> bool:
        """Whether the two crossed on their way and ``link`` is the one that both sides keep."""
        dialled_by_smaller = link.dialled == (self.node < link.peer)
        return link.dialled != old.dialled and dialled_by_smaller

    async def _serve(
        self, link: CoreLink, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        try:
            await link.run(task_status=task_status)
        finally:
            if self._links.get(link.peer) is link:
                del self._links[link.peer]

    def _drop(self, raw: RawConnection) -> None:
        """Forget the link on ``raw``, if it is one."""
        link = self._links.get(raw.peer)
        if link is not None and link.stands_on(raw):
            link.lose("the greeting could not be answered")
            del self._links[raw.peer]

    def _running(self) -> trio.Nursery:
        if self._nursery is None:
            raise InvariantError("the driver is not running")
        return self._nursery


async def _read_greeting(control: RawReceive) -> None:
    """Take the greeting off ``control``.

    Raises:
        RawLost: something else comes.
    """
    head, done = memoryview(bytearray(len(GREETING))), 0
    while done < len(GREETING):
        count = await control.read_into(head[done:])
        if count == 0 or head[: done + count] != GREETING[: done + count]:
            raise RawLost("what the peer says is not the greeting of lensemble/1")
        done += count
