"""Links between nodes, for the edges between their stages and for gossip among members.

A node dials the node that its stage sends to, and members that it gossips with.  It takes a call
only from a node that it expects a stage's chunks from, or from a member while there is room; anyone
else is turned away and counted.  Nothing is said on such a link: all that travels are edges, and
notes in datagrams.  A link is kept for as long as a stage needs it, and a while longer; one for
gossip until another takes its place.
"""

import ipaddress
import math
import socket
from collections import Counter
from collections.abc import Mapping

import trio

from lensemble.errors import FrameError, LinkLost
from lensemble.ids import NodeId
from lensemble.logs import logger
from lensemble.transport.driver import Driver, Link, PeerAddress

OPEN_WITHIN_S = 6.0
"""How long a node is dialled; one dial that nobody answers takes 5 s of it."""

RETRY_S = 0.1
RETRY_MAX_S = 2.0
LINGER_S = 10.0
"""Between the end of the last stage that needs a link and the end of the link."""

MAX_NEW_LINKS = 1024
"""As many as an endpoint has links."""

MAX_DIALS = 4
"""Dials for gossip at the same time."""

REST_S = 60.0
"""A link for gossip that was used since does not make room for another."""

SHUNNED_S = 10.0
SHUNNED_MAX_S = 600.0
"""Between two dials of a member that cannot be reached; doubles."""

UNINVITED = "this is a node: it takes calls only from nodes that it is to compute with"


class _Peer:
    """A node that stages here need; ``link`` may be lost."""

    def __init__(self) -> None:
        self.needs = 0
        self.idle_since = 0.0
        self.used_at = -math.inf
        """When gossip last went this way."""
        self.link: Link | None = None
        self.arrived = trio.Event()
        self.turn = trio.Lock()

    @property
    def live(self) -> bool:
        return self.link is not None and not self.link.lost.is_set()


class _Shunned:
    """A member that could not be reached; it is not dialled before ``until``."""

    def __init__(self, now: float, pause_s: float) -> None:
        self.until = now + pause_s
        self.pause_s = pause_s


class PeerLinks:
    """The links of this node to others that are not its coordinator; ``refused`` counts callers."""

    def __init__(self, driver: Driver, refused: Counter[str]) -> None:
        self._driver = driver
        self._refused = refused
        self._peers: dict[NodeId, _Peer] = {}
        self._idle = trio.Event()
        # Tasks begin in this object's own: stages may outlive it when the daemon ends.
        self._made, self._to_attend = trio.open_memory_channel[Link](MAX_NEW_LINKS)
        self._spare, self._spared = trio.open_memory_channel[Link](MAX_NEW_LINKS)
        self._wish, self._wishes = trio.open_memory_channel[NodeId](MAX_DIALS)
        self._dialling: set[NodeId] = set()
        self._members: Mapping[NodeId, tuple[str, ...]] = {}
        self._most = 0
        self._shunned: dict[NodeId, _Shunned] = {}
        self._log = logger("peers")

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Take calls until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._attend_all, nursery)
            nursery.start_soon(self._let_go)
            nursery.start_soon(self._call_all, nursery)
            nursery.start_soon(self._part)
            task_status.started()
            await self._accept_all(nursery)

    def need(self, node: NodeId) -> None:
        """Take calls of ``node``, and keep a link to it, until as many times ``release``."""
        self._peers.setdefault(node, _Peer()).needs += 1

    def release(self, node: NodeId) -> None:
        """One ``need`` less."""
        peer = self._peers[node]
        peer.needs -= 1
        peer.idle_since = trio.current_time()
        self._idle.set()

    async def reach(self, address: PeerAddress, within_s: float = OPEN_WITHIN_S) -> None:
        """Have a live link to a node that is needed, whoever dials it.

        Raises:
            LinkLost: there is none within ``within_s`` seconds; names both ends' addresses.
        """
        peer = self._peers[address.node]
        cause, delay = "nobody answered", RETRY_S
        with trio.move_on_after(within_s):
            while not peer.live:
                cause = await self._dial(peer, address, cause)
                if not peer.live:
                    with trio.move_on_after(delay):
                        await peer.arrived.wait()
                    delay = min(2 * delay, RETRY_MAX_S)
            return
        own = ", ".join(self._driver.addresses())
        raise LinkLost(
            f"this node at {own} has no link to {cause}",
            "Both must listen where the other reaches them: set `listen.addresses` in each node's "
            "configuration to addresses of this network, not of loopback, and `listen.advertise` "
            "where others see another address.",
        )

    def open_to(self, members: Mapping[NodeId, tuple[str, ...]], most: int) -> None:
        """Gossip with ``members``, at these addresses, over at most ``most`` links."""
        shunned = self._shunned.items()
        same = {node for node, at in members.items() if self._members.get(node) == at}
        self._shunned = {node: each for node, each in shunned if node in same}
        self._members, self._most = members, most
        now = trio.current_time()
        for node, peer in self._peers.items():
            if not peer.needs and node not in members:
                peer.idle_since = now
        self._idle.set()

    def used(self, node: NodeId) -> None:
        """Gossip has gone over the link to ``node``."""
        if (peer := self._peers.get(node)) is not None:
            peer.used_at = trio.current_time()

    def wish(self, node: NodeId) -> None:
        """Dial a member that there is no link to, beside everything else, if there is room."""
        now = trio.current_time()
        peer, shunned = self._peers.get(node), self._shunned.get(node)
        if (peer is not None and peer.live) or not self._members.get(node):
            return
        if node in self._dialling or (shunned is not None and now < shunned.until):
            return
        if len(self._dialling) < MAX_DIALS and self._makes_room(now):
            self._dialling.add(node)
            self._wish.send_nowait(node)

    def links(self) -> tuple[Link, ...]:
        """Those that live."""
        return tuple(peer.link for peer in self._peers.values() if peer.link and peer.live)

    async def _accept_all(self, nursery: trio.Nursery) -> None:
        while True:
            link = await self._driver.accept()
            now = trio.current_time()
            if link.peer in self._peers:
                self._hold(link)
            elif link.peer in self._members and self._makes_room(now):
                self._peers[link.peer] = _Peer()
                self._peers[link.peer].used_at = now
                self._hold(link)
            else:
                self._refused["uninvited"] += 1
                nursery.start_soon(link.close, UNINVITED)

    async def _dial(self, peer: _Peer, address: PeerAddress, cause: str) -> str:
        async with peer.turn:
            if peer.live:
                return ""
            try:
                self._hold(await self._driver.dial(address))
            except LinkLost as lost:
                return lost.message
        return ""

    async def _part(self) -> None:
        async for link in self._spared:
            await link.close("another member takes the place of this link")

    async def _call_all(self, nursery: trio.Nursery) -> None:
        async for node in self._wishes:
            nursery.start_soon(self._call, node)

    async def _call(self, node: NodeId) -> None:
        """Dial a member for gossip; if it cannot be reached, leave it alone for a while."""
        peer = self._peers.setdefault(node, _Peer())
        peer.used_at = trio.current_time()
        try:
            cause = await self._dial(peer, PeerAddress(node, self._members.get(node, ())), "")
        finally:
            self._dialling.discard(node)
        if peer.live:
            self._shunned.pop(node, None)
            return
        self._forget(node, peer)
        before = self._shunned.get(node)
        pause = SHUNNED_S if before is None else min(2 * before.pause_s, SHUNNED_MAX_S)
        self._shunned[node] = _Shunned(trio.current_time(), pause)
        self._log.info("peer.not_reached", peer=node, reason=cause, next_s=pause)

    def _makes_room(self, now: float) -> bool:
        """Whether there may be one more link for gossip; the one that rests longest may go."""
        held = [peer for peer in self._peers.values() if not peer.needs and peer.live]
        if len(held) + len(self._dialling) < self._most:
            return True
        oldest = min(held, key=lambda peer: peer.used_at, default=None)
        if oldest is None or oldest.link is None or now - oldest.used_at < REST_S:
            return False
        del self._peers[oldest.link.peer]
        self._spare.send_nowait(oldest.link)
        return True

    def _forget(self, node: NodeId, peer: _Peer) -> None:
        """Expect nothing of a member that no stage needs and that there is no link to."""
        if not peer.needs and not peer.live and self._peers.get(node) is peer:
            del self._peers[node]

    def _hold(self, link: Link) -> None:
        peer = self._peers.get(link.peer)
        if peer is None:
            self._spare.send_nowait(link)
            return
        peer.link = link
        peer.arrived.set()
        peer.arrived = trio.Event()
        self._log.info("peer.linked", peer=link.peer)
        self._made.send_nowait(link)

    async def _attend_all(self, nursery: trio.Nursery) -> None:
        async for link in self._to_attend:
            nursery.start_soon(self._attend, link)

    async def _attend(self, link: Link) -> None:
        """Until the link is lost; whatever is said on it is too much."""
        try:
            await link.receive()
            self._refused["peer_spoke"] += 1
            await link.close("nodes say nothing to each other")
        except (LinkLost, FrameError):
            self._log.info("peer.unlinked", peer=link.peer, reason=link.lost_reason())
        peer = self._peers.get(link.peer)
        if peer is not None and link.peer in self._members:
            self._forget(link.peer, peer)

    async def _let_go(self) -> None:
        """End the links that nobody has needed for a while."""
        while True:
            await self._idle.wait()
            self._idle = trio.Event()
            await trio.sleep(LINGER_S)
            now = trio.current_time()
            for node, peer in list(self._peers.items()):
                kept = node in self._members and peer.live
                if peer.needs or kept or node in self._dialling:
                    continue
                if now - peer.idle_since < LINGER_S:
                    self._idle.set()
                    continue
                del self._peers[node]
                if peer.link is not None and peer.live:
                    await peer.link.close("no stage needs this link any more")


def reachable(bound: tuple[str, ...], toward: str) -> tuple[str, ...]:
    """``bound`` with each wildcard replaced by the address this host has towards ``toward``.

    Both are ``host:port``; nothing is sent.  A wildcard with no way to ``toward`` is left out.
    """
    return tuple(found for address in bound if (found := _seen(address, toward)))


def _seen(address: str, toward: str) -> str:
    host, _, port = address.rpartition(":")
    try:
        own = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return address
    if not own.is_unspecified:
        return address
    there, _, there_port = toward.rpartition(":")
    family = socket.AF_INET if own.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((there.strip("[]"), int(there_port)))
            name = str(probe.getsockname()[0])
    except (OSError, ValueError):
        return ""
    return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"
