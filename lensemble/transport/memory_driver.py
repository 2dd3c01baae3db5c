"""A network inside one process, with scripted weather.

``MemoryNetwork`` makes drivers that reach each other by node id.  Streams are bounded as on QUIC,
so a slow reader slows its writer.  All times are trio's: under a mock clock an hour takes no time.
"""

from lensemble import seeds
from lensemble.ids import NodeId
from lensemble.transport.driver import PeerAddress
from lensemble.transport.endpoint import EndpointDriver, EndpointSettings
from lensemble.transport.memory_wire import MemoryConnection, MemoryEndpoint, Weather


class MemoryNetwork:
    """Nodes in one process and the weather between them; the same seed gives the same weather."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._endpoints: dict[str, MemoryEndpoint] = {}
        self._weather: dict[frozenset[NodeId], Weather] = {}
        self._connections: list[MemoryConnection] = []

    def driver(self, node: NodeId, settings: EndpointSettings | None = None) -> EndpointDriver:
        """A driver for ``node``, which may be one that vanished before."""
        return EndpointDriver(MemoryEndpoint(self, node), settings or EndpointSettings())

    @staticmethod
    def address(node: NodeId) -> PeerAddress:
        """Where ``node`` is reached, now or once it runs."""
        return PeerAddress(node, (f"{node[:16]}.memory:1",))

    # ---- scripting ----

    def between(self, one: NodeId, other: NodeId) -> Weather:
        """The weather between two nodes, to be set."""
        pair = frozenset((one, other))
        if pair not in self._weather:
            label = "weather:" + ":".join(sorted(pair))
            self._weather[pair] = Weather(seeds.derive(self._seed, label))
        return self._weather[pair]

    def partition(self, one: NodeId, other: NodeId) -> None:
        """Let nothing through between the two, and tell neither."""
        self.between(one, other).silent = True

    def mute(self, speaker: NodeId, listener: NodeId) -> None:
        """Let nothing of ``speaker`` through to ``listener``, while the other way works."""
        self.between(speaker, listener).muted.add(speaker)

    def heal(self, one: NodeId, other: NodeId) -> None:
        """End a partition; what was sent meanwhile on links that still live goes through."""
        weather = self.between(one, other)
        weather.silent = False
        weather.muted.clear()
        weather.healed.unpark_all()
        self._wake({one, other})

    def cut(self, one: NodeId, other: NodeId, reason: str = "the network cut the link") -> None:
        """Lose the links between the two at once, on both sides."""
        for connection in self._connections:
            if {connection.node, connection.peer} == {one, other}:
                connection.lose(reason)

    def vanish(self, node: NodeId) -> None:
        """Let ``node`` fall silent as if killed: its links carry nothing any more, ever."""
        for connection in self._connections:
            if node in (connection.node, connection.peer):
                connection.wire.dead = True
        for address, endpoint in list(self._endpoints.items()):
            if endpoint.node == node:
                del self._endpoints[address]

    # ---- for the endpoints ----

    def attach(self, endpoint: MemoryEndpoint) -> None:
        self._endpoints[endpoint.addresses()[0]] = endpoint

    def detach(self, endpoint: MemoryEndpoint) -> None:
        if self._endpoints.get(endpoint.addresses()[0]) is endpoint:
            del self._endpoints[endpoint.addresses()[0]]

    def endpoint_at(self, address: str) -> MemoryEndpoint | None:
        return self._endpoints.get(address)

    def connected(self, *ends: MemoryConnection) -> None:
        self._connections = [c for c in self._connections if not c.lost]
        self._connections.extend(ends)

    def _wake(self, nodes: set[NodeId]) -> None:
        for connection in self._connections:
            if {connection.node, connection.peer} == nodes:
                connection.wake()
