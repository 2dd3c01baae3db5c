"""The driver over QUIC: an iroh endpoint that is bound where it is told and nowhere else."""

import ipaddress
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import iroh
import trio

from lensemble.errors import ConfigError
from lensemble.identity import Identity
from lensemble.ids import NodeId
from lensemble.transport import iroh_loop
from lensemble.transport.driver import LinkFacts, PeerAddress
from lensemble.transport.endpoint import EndpointDriver, EndpointSettings
from lensemble.transport.links import Pace
from lensemble.transport.raw import NOTHING, RawLost

ALPN = b"lensemble/1"
MAX_EDGES = 4096
"""Streams that a peer may have open at the same time."""

CLOSE_TIMEOUT_S = 2.0
_TORN = 1
_PHRASES = {"Reset(": "reset by the peer", "Stopped(": "refused by the peer"}
_LOOPBACK = {4: "127.0.0.1:0", 6: "[::1]:0"}


class IrohDriver(EndpointDriver):
    """An endpoint with the identity's key, bound to ``bind``: ``host:port`` with numeric hosts.

    There can be one IPv4 and one IPv6 address.  Times are in seconds.

    Raises:
        ConfigError: the installed binding is not supported, or ``bind`` is not such addresses.
    """

    def __init__(
        self,
        identity: Identity,
        bind: tuple[str, ...],
        *,
        heartbeat_s: float = 1.0,
        heartbeat_timeout_s: float = 3.0,
        dial_timeout_s: float = 5.0,
    ) -> None:
        iroh_loop.install()
        settings = EndpointSettings(Pace(heartbeat_s, heartbeat_timeout_s), dial_timeout_s)
        super().__init__(IrohEndpoint(identity, bind), settings)


class IrohSend:
    """The sending half of a QUIC stream."""

    def __init__(self, stream: iroh.SendStream, connection: iroh.Connection) -> None:
        self._stream = stream
        self._connection = connection

    async def write(self, prefix: bytes, payload: bytes | memoryview) -> None:
        view = memoryview(payload).cast("B")
        first = iroh_loop.MAX_CALL_BYTES - len(prefix)
        with _lost(self._connection):
            await iroh_loop.write(self._stream, prefix, view[:first])
            for start in range(first, len(view), iroh_loop.MAX_CALL_BYTES):
                piece = view[start : start + iroh_loop.MAX_CALL_BYTES]
                await iroh_loop.write(self._stream, b"", piece)

    async def finish(self) -> None:
        with _lost(self._connection):
            await self._stream.finish()
            refused = await self._stream.stopped()
        if refused is not None:
            raise RawLost("refused by the peer")

    async def reset(self) -> None:
        await trio.lowlevel.checkpoint()
        try:
            await self._stream.reset(_TORN)
        except iroh.IrohError:
            return  # gone already, which is as good

    async def stopped(self) -> str:
        try:
            code = await self._stream.stopped()
        except iroh.IrohError as error:
            return _reason(error, self._connection)
        if code is None:  # the peer has everything, and nothing can be lost any more
            await trio.sleep_forever()
        return "refused by the peer"


class IrohReceive:
    """The receiving half of a QUIC stream."""

    def __init__(self, stream: iroh.RecvStream, connection: iroh.Connection) -> None:
        self._stream = stream
        self._connection = connection

    async def read_into(self, into: memoryview, beyond: memoryview = NOTHING) -> int:
        with _lost(self._connection):
            return await iroh_loop.read_into(self._stream, into, beyond)

    async def stop(self) -> None:
        await trio.lowlevel.checkpoint()
        try:
            await self._stream.stop(_TORN)
        except iroh.IrohError:
            return  # gone already, which is as good


class IrohConnection:
    """An authenticated QUIC connection."""

    def __init__(self, connection: iroh.Connection) -> None:
        self.peer = NodeId(connection.remote_id().to_bytes().hex())
        self._connection = connection
        self._path: iroh.PathSnapshot | None = None
        connection.set_max_concurrent_uni_streams(MAX_EDGES)
        connection.set_max_concurrent_bi_streams(1)

    async def open_control(self) -> tuple[IrohSend, IrohReceive]:
        with _lost(self._connection):
            return self._halves(await self._connection.open_bi())

    async def accept_control(self) -> tuple[IrohSend, IrohReceive]:
        with _lost(self._connection):
            return self._halves(await self._connection.accept_bi())

    def _halves(self, stream: iroh.BiStream) -> tuple[IrohSend, IrohReceive]:
        return (
            IrohSend(stream.send(), self._connection),
            IrohReceive(stream.recv(), self._connection),
        )

    async def open_uni(self) -> IrohSend:
        with _lost(self._connection):
            return IrohSend(await self._connection.open_uni(), self._connection)

    async def accept_uni(self) -> IrohReceive:
        await trio.lowlevel.checkpoint()
        with _lost(self._connection):
            return IrohReceive(await self._connection.accept_uni(), self._connection)

    def send_datagram(self, payload: bytes) -> bool:
        with _lost(self._connection):
            room = self._connection.max_datagram_size()
            if room is None or len(payload) > room:
                return False
            try:
                self._connection.send_datagram(payload)
            except iroh.IrohError:
                if self._connection.close_reason() is not None:
                    raise
                return False  # the path has shrunk since
        return True

    async def read_datagram(self) -> bytes:
        await trio.lowlevel.checkpoint()
        with _lost(self._connection):
            return await self._connection.read_datagram()

    async def closed(self) -> str:
        return await self._connection.closed()

    def close(self, reason: str) -> None:
        self._connection.close(0, reason.encode())

    def facts(self) -> LinkFacts:
        stats = self._connection.stats()
        paths = self._connection.paths()
        path = next((path for path in paths if path.is_selected), None)
        # Between two paths none is selected; the peer is then where it was.
        path = self._path = path or self._path or next(iter(paths), None)
        return LinkFacts(
            path="unknown" if path is None else "relay" if path.is_relay else "direct",
            remote="" if path is None else path.remote_addr,
            rtt_ms=None if path is None else float(path.rtt_ms),
            sent_bytes=stats.udp_tx_bytes,
            received_bytes=stats.udp_rx_bytes,
        )


class IrohIncoming:
    """A peer whose handshake has not begun."""

    def __init__(self, incoming: iroh.Incoming) -> None:
        self._incoming = incoming

    async def complete(self) -> IrohConnection:
        with _lost(None):
            accepting = await self._incoming.accept()
            return IrohConnection(await accepting.connect())

    async def refuse(self) -> None:
        try:
            await self._incoming.refuse()
        except iroh.IrohError:
            return  # it went away by itself


class _Bindings(iroh.Preset):
    """No discovery, no relay, and exactly these sockets.

    The endpoint opens a wildcard socket for each address family that it is given no address of, so
    a family without one gets a socket on loopback instead.
    """

    def __init__(self, addresses: tuple[str, ...]) -> None:
        self._addresses = addresses

    def apply(self, builder: iroh.EndpointBuilder) -> None:
        builder.apply_minimal()
        for address in self._addresses:
            builder.bind_addr(address)


class IrohEndpoint:
    def __init__(self, identity: Identity, bind: tuple[str, ...]) -> None:
        self.node = identity.node
        self._seed = identity.seed
        self._bind = bind
        self._hosts = {_host(address) for address in bind}
        self._families = {host.version for host in self._hosts}
        self._endpoint: iroh.Endpoint | None = None
        if not 0 < len(bind) == len(self._families):
            raise ConfigError(
                f"an endpoint is bound to one IPv4 address, one IPv6 address or both, not to {bind}"
            )

    async def start(self) -> None:
        # An earlier endpoint of this process may have been bound to the same address.
        iroh_loop.release()
        idle = [version for version in (4, 6) if version not in self._families]
        filler = tuple(_LOOPBACK[version] for version in idle if _has_loopback(version))
        options = iroh.EndpointOptions(
            preset=_Bindings((*self._bind, *filler)),
            relay_mode=iroh.RelayMode.disabled(),
            secret_key=self._seed,
            alpns=[ALPN],
        )
        try:
            self._endpoint = await iroh.Endpoint.bind(options)
        except iroh.IrohError as error:
            raise ConfigError(
                f"cannot bind {', '.join(self._bind)}: {error.message()}",
                "Choose an address of this host and a port that nobody uses.",
            ) from error

    def addresses(self) -> tuple[str, ...]:
        bound = [] if self._endpoint is None else self._endpoint.bound_sockets()
        return tuple(address for address in bound if _host(address) in self._hosts)

    async def connect(self, peer: PeerAddress) -> IrohConnection:
        if not peer.addresses:
            raise RawLost("no address to dial")
        endpoint = self._running()
        with _lost(None):
            target = iroh.EndpointAddr(
                iroh.EndpointId.from_bytes(bytes.fromhex(peer.node)),
                None,
                [found for address in peer.addresses for found in await _resolve(address)],
            )
            return IrohConnection(await endpoint.connect(target, ALPN))

    async def accept(self) -> IrohIncoming:
        incoming = await self._running().accept_next()
        if incoming is None:
            return await trio.sleep_forever()
        return IrohIncoming(incoming)

    async def close(self) -> None:
        if self._endpoint is not None:
            with trio.move_on_after(CLOSE_TIMEOUT_S):
                await self._endpoint.close()
            self._endpoint = None

    def _running(self) -> iroh.Endpoint:
        if self._endpoint is None:
            raise RawLost("the endpoint is closed")
        return self._endpoint


@contextmanager
def _lost(connection: iroh.Connection | None) -> Iterator[None]:
    """Turn the binding's errors into ours."""
    try:
        yield
    except iroh.IrohError as error:
        raise RawLost(_reason(error, connection)) from error


def _reason(error: iroh.IrohError, connection: iroh.Connection | None) -> str:
    if connection is not None and (closed := connection.close_reason()) is not None:
        return closed
    message = error.message()
    return next((phrase for mark, phrase in _PHRASES.items() if mark in message), message)


def _host(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    host, _, port = address.rpartition(":")
    try:
        if not 0 <= int(port) <= 65535:
            raise ConfigError(f"{address!r} has no port between 0 and 65535")
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        raise ConfigError(
            f"{address!r} is not an address to bind",
            "Write a numeric host and a port: `192.0.2.1:4433` or `[2001:db8::1]:4433`.",
        ) from None


async def _resolve(address: str) -> list[str]:
    """``address`` with its host as numbers, which may be several."""
    host, _, port = address.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    try:
        found = await trio.socket.getaddrinfo(bare, port, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError) as error:
        raise RawLost(f"cannot resolve {address}: {error}") from error
    numeric = [str(where[0]) for _, _, _, _, where in found]
    return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in numeric]


def _has_loopback(version: int) -> bool:
    """Whether this host has a loopback address of IP ``version``."""
    family, host = (socket.AF_INET, "127.0.0.1") if version == 4 else (socket.AF_INET6, "::1")
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True
