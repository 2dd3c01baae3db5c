"""Links between nodes, for the edges between their stages.

A node dials the node that its stage sends to.  It takes a call only from a node that it expects a
stage's chunks from; anyone else is turned away and counted.  Nothing is said on such a link: all
that travels are edges.  A link is kept for as long as a stage needs it, and a while longer.
"""

import ipaddress
import socket
from collections import Counter

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

UNINVITED = "this is a node: it takes calls only from nodes that it is to compute with"


class _Peer:
    """A node that stages here need; ``link`` may be lost."""

    def __init__(self) -> None:
        self.needs = 0
        self.idle_since = 0.0
        self.link: Link | None = None
        self.arrived = trio.Event()
        self.turn = trio.Lock()

    @property
    def live(self) -> bool:
        return self.link is not None and not self.link.lost.is_set()


class PeerLinks:
    """The links of this node to others that are not its coordinator; ``refused`` counts callers."""

    def __init__(self, driver: Driver, refused: Counter[str]) -> None:
        self._driver = driver
        self._refused = refused
        self._peers: dict[NodeId, _Peer] = {}
        self._idle = trio.Event()
        # Tasks begin in this object's own: stages may outlive it when the daemon ends.
        self._made, self._to_attend = trio.open_memory_channel[Link](MAX_NEW_LINKS)
        self._log = logger("peers")

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Take calls until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._attend_all, nursery)
            nursery.start_soon(self._let_go)
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

    def links(self) -> tuple[Link, ...]:
        """Those that live."""
        return tuple(peer.link for peer in self._peers.values() if peer.link and peer.live)

    async def _accept_all(self, nursery: trio.Nursery) -> None:
        while True:
            link = await self._driver.accept()
            if link.peer in self._peers:
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

    def _hold(self, link: Link) -> None:
        peer = self._peers.get(link.peer)
        if peer is None:
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

    async def _let_go(self) -> None:
        """End the links that nobody has needed for a while."""
        while True:
            await self._idle.wait()
            self._idle = trio.Event()
            await trio.sleep(LINGER_S)
            now = trio.current_time()
            for node, peer in list(self._peers.items()):
                if peer.needs:
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
