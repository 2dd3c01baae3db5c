"""The raw half of the memory driver: byte pipes, connections and endpoints without any rule."""

from collections import deque
from typing import Protocol

import trio
from trio.lowlevel import ParkingLot

from lensemble import seeds
from lensemble.ids import NodeId
from lensemble.transport.driver import LinkFacts, PeerAddress
from lensemble.transport.raw import MAX_PIECE_BYTES, NOTHING, RawLost

WINDOW_BYTES = 1_250_000
"""Unread bytes of one stream before its writer waits."""

MAX_DATAGRAMS = 64
"""Datagrams under way to one reader; the oldest is dropped first."""

MAX_DATAGRAM_BYTES = 1414
"""As on QUIC over a network of ordinary frames."""

MAX_KNOCKS = 256
_SHARES = 1 << 63


class Weather:
    """What happens between two nodes from now on.

    A piece takes ``delay_s`` and up to ``jitter_s`` more, after those before it on its stream have
    left at ``bytes_per_s`` (0: at once); edge streams are torn once, after
    ``tear_after`` further bytes, counted over both directions.  Of the datagrams the share ``loss``
    is lost, and every one of a node in ``muted``, of which nothing else comes through either; those
    over ``datagram_bytes`` cannot be sent.
    """

    def __init__(self, seed: int) -> None:
        self.delay_s = 0.0
        self.jitter_s = 0.0
        self.bytes_per_s = 0.0
        self.silent = False
        self.loss = 0.0
        self.muted: set[NodeId] = set()
        self.datagram_bytes = MAX_DATAGRAM_BYTES
        self.healed = ParkingLot()
        """Where dials wait that nobody answers: they ask again, as dials over QUIC do."""
        self.tear_after: int | None = None
        self._seed = seed
        self._drawn = 0

    def travel_s(self) -> float:
        return self.delay_s + (self._draw("jitter") * self.jitter_s if self.jitter_s else 0.0)

    def leaving_s(self, nbytes: int) -> float:
        """How long ``nbytes`` take to leave."""
        return nbytes / self.bytes_per_s if self.bytes_per_s else 0.0

    def loses(self, sender: NodeId) -> bool:
        """Whether the next datagram of ``sender`` does not arrive."""
        return sender in self.muted or (self.loss > 0 and self._draw("loss") < self.loss)

    def _draw(self, what: str) -> float:
        self._drawn += 1
        return seeds.derive(self._seed, f"{what}:{self._drawn}") / _SHARES

    def torn_at(self, nbytes: int) -> int | None:
        """Where in the next ``nbytes`` the scripted tear lies, if it does."""
        if self.tear_after is None:
            return None
        if nbytes <= self.tear_after:
            self.tear_after -= nbytes
            return None
        cut, self.tear_after = self.tear_after, None
        return cut


class Wire:
    """What the two ends of a connection share."""

    def __init__(self, weather: Weather) -> None:
        self.weather = weather
        self.dead = False

    @property
    def silent(self) -> bool:
        return self.dead or self.weather.silent


class Pipe:
    """One direction of a byte stream, from ``writer``'s end to ``reader``'s."""

    def __init__(
        self, writer: "MemoryConnection", reader: "MemoryConnection", *, edge: bool
    ) -> None:
        self.changed = ParkingLot()
        self._writer = writer
        self._reader = reader
        self._edge = edge
        self._announced = False
        self._pieces: deque[tuple[float, memoryview]] = deque()
        self._unread = 0
        self._due = self._left = 0.0
        self._finished = False
        self._torn = ""
        self._refused = ""
        for end in (writer, reader):
            end.pipes.append(self)

    # ---- the writer's half ----

    async def write(self, prefix: bytes, payload: bytes | memoryview) -> None:
        await trio.lowlevel.checkpoint()
        self._check_writable()
        for part in (memoryview(prefix), memoryview(payload).cast("B")):
            for start in range(0, len(part), MAX_PIECE_BYTES):
                await self._put(part[start : start + MAX_PIECE_BYTES])

    async def _put(self, piece: memoryview) -> None:
        while self._unread > 0 and self._unread + len(piece) > WINDOW_BYTES:
            await self.changed.park()
            self._check_writable()
        cut = self._writer.wire.weather.torn_at(len(piece)) if self._edge else None
        kept = bytes(piece[:cut])
        weather = self._writer.wire.weather
        self._left = max(self._left, trio.current_time()) + weather.leaving_s(len(piece))
        self._due = max(self._due, self._left + weather.travel_s())
        self._pieces.append((self._due, memoryview(kept)))
        self._unread += len(kept)
        self._writer.sent_bytes += len(kept)
        self._announce()
        if cut is not None:
            self._torn = "torn by the network"
        self.changed.unpark_all()
        if self._torn:
            raise RawLost(self._torn)

    def _announce(self) -> None:
        if self._edge and not self._announced:
            self._reader.streams.append(self)
            self._reader.changed.unpark_all()
        self._announced = True

    def _check_writable(self) -> None:
        if reason := self._writer.lost or self._refused or self._torn:
            raise RawLost(reason)

    async def finish(self) -> None:
        self._check_writable()
        self._finished = True
        self.changed.unpark_all()
        await trio.sleep_until(max(self._due, trio.current_time()))
        while self._unheard and not self._writer.lost:
            await self.changed.park()
        self._check_writable()

    async def reset(self) -> None:
        await trio.lowlevel.checkpoint()
        if self._writer.lost:
            return
        self._torn = self._torn or "reset by the peer"
        self._pieces.clear()
        self.changed.unpark_all()

    async def stopped(self) -> str:
        while not (reason := self._writer.lost or self._refused):
            await self.changed.park()
        return reason

    # ---- the reader's half ----

    @property
    def _unheard(self) -> bool:
        wire = self._reader.wire
        return wire.silent or self._writer.node in wire.weather.muted

    async def read_into(self, into: memoryview, beyond: memoryview = NOTHING) -> int:
        await trio.lowlevel.checkpoint()
        while True:
            if not self._unheard:
                if self._torn:
                    raise RawLost(self._torn)
                if self._pieces:
                    due, piece = self._pieces[0]
                    if due <= trio.current_time():
                        return self._take(piece, into, beyond)
                    await trio.sleep_until(due)
                    continue
                if self._finished:
                    return 0
            if self._reader.lost:
                raise RawLost(self._reader.lost)
            await self.changed.park()

    def _take(self, piece: memoryview, into: memoryview, beyond: memoryview) -> int:
        first = min(len(piece), len(into))
        count = min(len(piece), first + len(beyond))
        into[:first] = piece[:first]
        beyond[: count - first] = piece[first:count]
        due, _ = self._pieces.popleft()
        if count < len(piece):
            self._pieces.appendleft((due, piece[count:]))
        self._unread -= count
        self._reader.received_bytes += count
        self.changed.unpark_all()
        return count

    async def stop(self) -> None:
        await trio.lowlevel.checkpoint()
        self._refused = self._refused or "refused by the peer"
        self.changed.unpark_all()


class MemoryConnection:
    """One end of a connection."""

    def __init__(self, node: NodeId, peer: NodeId, wire: Wire) -> None:
        self.node = node
        self.peer = peer
        self.wire = wire
        self.changed = ParkingLot()
        self.lost = ""
        self.other: MemoryConnection = self
        self.pipes: list[Pipe] = []
        self.streams: deque[Pipe] = deque()
        self.control: tuple[Pipe, Pipe] | None = None
        self.sent_bytes = 0
        self.received_bytes = 0
        self._datagrams: deque[tuple[float, bytes]] = deque(maxlen=MAX_DATAGRAMS)

    @classmethod
    def pair(cls, dialler: NodeId, listener: NodeId, weather: Weather) -> "MemoryConnection":
        """The dialler's end of a new connection; its ``other`` is the listener's."""
        wire = Wire(weather)
        near, far = cls(dialler, listener, wire), cls(listener, dialler, wire)
        near.other, far.other = far, near
        return near

    async def open_control(self) -> tuple[Pipe, Pipe]:
        await trio.lowlevel.checkpoint()
        out, back = Pipe(self, self.other, edge=False), Pipe(self.other, self, edge=False)
        self.other.control = (back, out)
        self.other.changed.unpark_all()
        return out, back

    async def accept_control(self) -> tuple[Pipe, Pipe]:
        while self.control is None:
            self._check()
            await self.changed.park()
        return self.control

    async def open_uni(self) -> Pipe:
        await trio.lowlevel.checkpoint()
        self._check()
        return Pipe(self, self.other, edge=True)

    async def accept_uni(self) -> Pipe:
        while not self.streams or self.wire.silent or self.peer in self.wire.weather.muted:
            self._check()
            await self.changed.park()
        return self.streams.popleft()

    def send_datagram(self, payload: bytes) -> bool:
        self._check()
        weather = self.wire.weather
        if len(payload) > weather.datagram_bytes:
            return False
        if not self.wire.silent and not weather.loses(self.node):
            self.other.deliver(trio.current_time() + weather.travel_s(), payload)
        return True

    def deliver(self, due: float, payload: bytes) -> None:
        self._datagrams.append((due, payload))
        self.changed.unpark_all()

    async def read_datagram(self) -> bytes:
        while not self._datagrams:
            self._check()
            await self.changed.park()
        await trio.sleep_until(self._datagrams[0][0])
        return self._datagrams.popleft()[1]

    async def closed(self) -> str:
        while not self.lost:
            await self.changed.park()
        return self.lost

    def close(self, reason: str) -> None:
        if not self.lost:
            self.lose(f"closed by this side: {reason}")
            if not self.wire.silent and self.node not in self.wire.weather.muted:
                self.other.lose(f"closed by the peer: {reason}")

    def lose(self, reason: str) -> None:
        self.lost = self.lost or reason
        self.wake()

    def wake(self) -> None:
        self.changed.unpark_all()
        for pipe in self.pipes:
            pipe.changed.unpark_all()

    def facts(self) -> LinkFacts:
        rtt_ms = 2000 * self.wire.weather.delay_s
        remote = MemoryEndpoint.address_of(self.peer)
        return LinkFacts("memory", remote, rtt_ms, self.sent_bytes, self.received_bytes)

    def _check(self) -> None:
        if self.lost:
            raise RawLost(self.lost)


class Knock:
    """A connection that its listener has not taken yet."""

    def __init__(self, connection: MemoryConnection) -> None:
        self.answered = trio.Event()
        self.refused = False
        self._connection = connection

    async def complete(self) -> MemoryConnection:
        await trio.lowlevel.checkpoint()
        self.answered.set()
        return self._connection

    async def refuse(self) -> None:
        await trio.lowlevel.checkpoint()
        self.refused = True
        self.answered.set()


class Neighbourhood(Protocol):
    """What an endpoint needs to know of its network."""

    def between(self, one: NodeId, other: NodeId) -> Weather: ...

    def attach(self, endpoint: "MemoryEndpoint") -> None: ...

    def detach(self, endpoint: "MemoryEndpoint") -> None: ...

    def endpoint_at(self, address: str) -> "MemoryEndpoint | None": ...

    def connected(self, *ends: MemoryConnection) -> None: ...


class MemoryEndpoint:
    """A node's place in a network."""

    def __init__(self, network: Neighbourhood, node: NodeId) -> None:
        self.node = node
        self._network = network
        self._ends: list[MemoryConnection] = []
        self._knock, self._knocks = trio.open_memory_channel[Knock](MAX_KNOCKS)

    @staticmethod
    def address_of(node: NodeId) -> str:
        return f"{node[:16]}.memory:1"

    async def start(self) -> None:
        await trio.lowlevel.checkpoint()
        self._network.attach(self)

    def addresses(self) -> tuple[str, ...]:
        return (self.address_of(self.node),)

    async def connect(self, peer: PeerAddress) -> MemoryConnection:
        if not peer.addresses:
            raise RawLost("no address to dial")
        weather = self._network.between(self.node, peer.node)
        await trio.sleep(weather.travel_s())
        found = [self._network.endpoint_at(address) for address in peer.addresses]
        listener = next((endpoint for endpoint in found if endpoint is not None), None)
        if listener is None:
            return await trio.sleep_forever()
        while weather.silent or weather.muted:
            await weather.healed.park()
        if listener.node != peer.node:
            raise RawLost(f"the node there is {listener.node}")
        near = MemoryConnection.pair(self.node, peer.node, weather)
        knock = Knock(near.other)
        await listener.knock(knock)
        await knock.answered.wait()
        if knock.refused:
            raise RawLost("refused")
        self.adopt(near)
        listener.adopt(near.other)
        self._network.connected(near, near.other)
        return near

    async def knock(self, knock: Knock) -> None:
        await self._knock.send(knock)

    def adopt(self, end: MemoryConnection) -> None:
        self._ends = [other for other in self._ends if not other.lost]
        self._ends.append(end)

    async def accept(self) -> Knock:
        return await self._knocks.receive()

    async def close(self) -> None:
        self._network.detach(self)
        for end in self._ends:
            end.close("shut down")
        await trio.lowlevel.checkpoint()
