"""One of the two processes of ``edges.py``: ``one_end.py HOW SIDE SETTING [NODE ADDRESS...]``.

``HOW`` is the way the bytes go: ``edge``, a ``bare`` loop over the same binding with its calls of
256 KiB, or ``tcp``.  ``SIDE`` is one of receive and send, which move frames one way, or answer and
ask, which pass one chunk to and fro.  ``SETTING`` is JSON.  A process prints where it listens, and
its figures when it is done.
"""

import json
import resource
import socket
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import iroh
import msgspec
import trio

from lensemble import identity
from lensemble.edge.arena import Arena
from lensemble.edge.spec import EdgeSpec
from lensemble.ids import EdgeId, NodeId
from lensemble.transport import iroh_loop
from lensemble.transport.driver import Link, PeerAddress
from lensemble.transport.ends import ArenaLeases, RxEnd, TxEnd
from lensemble.transport.iroh_driver import IrohDriver
from lensemble.transport.raw import NOTHING

ALPN = b"lensemble/bench"
WARM_TRIPS = 20
SETTLE_S = 1.0
"""Until the streams of idle edges are routed: opening them is no cost of an edge that is idle."""

TCP_CALL_BYTES = 256 << 10
Meter = Callable[[], dict[str, float]]


class Setting(msgspec.Struct, frozen=True):
    """``frames`` of ``frame`` bytes, on each of ``edges``; ``idle`` more edges carry nothing."""

    frame: int
    frames: int
    edges: int = 1
    idle: int = 0


def meter() -> Meter:
    """Starts the clocks; call the result to read wall and CPU seconds since."""
    wall, cpu = time.perf_counter(), time.process_time()
    return lambda: {
        "seconds": time.perf_counter() - wall,
        "cpu": time.process_time() - cpu,
        "rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def offer(node: str, addresses: tuple[str, ...] | list[str]) -> None:
    print(json.dumps([node, *addresses]), flush=True)


def tell(figures: dict[str, float]) -> None:
    print(json.dumps(figures), flush=True)


def trips(took: list[float]) -> dict[str, float]:
    """Milliseconds of whole trips, to and fro, without the first ones."""
    counted = took[WARM_TRIPS:]
    cuts = statistics.quantiles(counted, n=100)
    return {"p50_ms": 1e3 * cuts[49], "p99_ms": 1e3 * cuts[98]}


# ---- the bare loop: the binding, its calls of 256 KiB, and nothing else ----


async def bound() -> iroh.Endpoint:
    iroh_loop.install()
    options = iroh.EndpointOptions(
        preset=iroh.preset_minimal(),
        relay_mode=iroh.RelayMode.disabled(),
        bind_addr="127.0.0.1:0",
        alpns=[ALPN],
    )
    return await iroh.Endpoint.bind(options)


async def bare_accepted() -> tuple[iroh.Endpoint, iroh.Connection]:
    endpoint = await bound()
    offer(endpoint.id().to_bytes().hex(), endpoint.bound_sockets()[:1])
    incoming = await endpoint.accept_next()
    if incoming is None:
        raise SystemExit("the endpoint is closed")
    return endpoint, await (await incoming.accept()).connect()


async def bare_dialled(peer: PeerAddress) -> tuple[iroh.Endpoint, iroh.Connection]:
    endpoint = await bound()
    target = iroh.EndpointId.from_bytes(bytes.fromhex(peer.node))
    address = iroh.EndpointAddr(target, None, list(peer.addresses))
    return endpoint, await endpoint.connect(address, ALPN)


async def bare_fill(stream: iroh.RecvStream, buffer: memoryview) -> None:
    at = 0
    while at < len(buffer):
        at += await iroh_loop.read_into(stream, buffer[at:], NOTHING)


async def bare_write(stream: iroh.SendStream, buffer: memoryview) -> None:
    for at in range(0, len(buffer), iroh_loop.MAX_CALL_BYTES):
        await iroh_loop.write(stream, b"", buffer[at : at + iroh_loop.MAX_CALL_BYTES])


async def bare_receive(setting: Setting, _peer: PeerAddress) -> None:
    endpoint, connection = await bare_accepted()
    stream = await connection.accept_uni()
    buffer = memoryview(bytearray(setting.frame))
    read = meter()
    for _ in range(setting.frames):
        await bare_fill(stream, buffer)
    tell(read())
    await connection.closed()
    await endpoint.close()


async def bare_send(setting: Setting, peer: PeerAddress) -> None:
    endpoint, connection = await bare_dialled(peer)
    stream = await connection.open_uni()
    buffer = memoryview(bytearray(setting.frame))
    read = meter()
    for _ in range(setting.frames):
        await bare_write(stream, buffer)
    await stream.finish()
    await stream.stopped()
    tell(read())
    connection.close(0, b"")
    await endpoint.close()


async def bare_answer(setting: Setting, _peer: PeerAddress) -> None:
    endpoint, connection = await bare_accepted()
    stream = await connection.accept_bi()
    buffer = memoryview(bytearray(setting.frame))
    for _ in range(setting.frames):
        await bare_fill(stream.recv(), buffer)
        await bare_write(stream.send(), buffer)
    tell({})
    await connection.closed()
    await endpoint.close()


async def bare_ask(setting: Setting, peer: PeerAddress) -> None:
    endpoint, connection = await bare_dialled(peer)
    stream = await connection.open_bi()
    buffer, took = memoryview(bytearray(setting.frame)), []
    for _ in range(setting.frames):
        before = time.perf_counter()
        await bare_write(stream.send(), buffer)
        await bare_fill(stream.recv(), buffer)
        took.append(time.perf_counter() - before)
    tell(trips(took))
    connection.close(0, b"")
    await endpoint.close()


# ---- TCP ----


async def tcp_accepted() -> trio.SocketStream:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    offer("", [f"127.0.0.1:{listener.socket.getsockname()[1]}"])
    stream = await listener.accept()
    await listener.aclose()
    return stream


async def tcp_dialled(peer: PeerAddress) -> trio.SocketStream:
    host, _, port = peer.addresses[0].rpartition(":")
    stream = await trio.open_tcp_stream(host, int(port))
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return stream


async def tcp_fill(stream: trio.SocketStream, buffer: memoryview) -> None:
    at = 0
    while at < len(buffer):
        at += await stream.socket.recv_into(buffer[at : at + TCP_CALL_BYTES])


async def tcp_receive(setting: Setting, _peer: PeerAddress) -> None:
    stream = await tcp_accepted()
    buffer = memoryview(bytearray(setting.frame))
    read = meter()
    for _ in range(setting.frames):
        await tcp_fill(stream, buffer)
    tell(read())
    await stream.aclose()


async def tcp_send(setting: Setting, peer: PeerAddress) -> None:
    stream = await tcp_dialled(peer)
    buffer = memoryview(bytearray(setting.frame))
    read = meter()
    for _ in range(setting.frames):
        await stream.send_all(buffer)
    tell(read())
    await stream.receive_some(1)


async def tcp_answer(setting: Setting, _peer: PeerAddress) -> None:
    stream = await tcp_accepted()
    buffer = memoryview(bytearray(setting.frame))
    for _ in range(setting.frames):
        await tcp_fill(stream, buffer)
        await stream.send_all(buffer)
    tell({})


async def tcp_ask(setting: Setting, peer: PeerAddress) -> None:
    stream = await tcp_dialled(peer)
    buffer, took = memoryview(bytearray(setting.frame)), []
    for _ in range(setting.frames):
        before = time.perf_counter()
        await stream.send_all(buffer)
        await tcp_fill(stream, buffer)
        took.append(time.perf_counter() - before)
    tell(trips(took))


# ---- the edge: driver, ends and arena, as a daemon uses them ----


def spec(number: int, producer: NodeId, consumer: NodeId, frame: int) -> EdgeSpec:
    return EdgeSpec(EdgeId(number), producer, consumer, frame)


class Side:
    """A driver with its arena and its link to the other process."""

    def __init__(self, driver: IrohDriver, link: Link, nursery: trio.Nursery) -> None:
        self.driver = driver
        self.link = link
        self._nursery = nursery
        self._leases = ArenaLeases(Arena.create())

    async def rx(self, number: int, frame: int) -> RxEnd:
        wanted = spec(number, self.link.peer, self.driver.node, frame)
        end = RxEnd(wanted, await self._leases.lease(wanted), self.driver)
        await self._nursery.start(end.serve)
        return end

    async def tx(self, number: int, frame: int) -> TxEnd:
        wanted = spec(number, self.driver.node, self.link.peer, frame)
        end = TxEnd(wanted, await self._leases.lease(wanted), self.driver)
        await self._nursery.start(end.serve)
        return end


async def over_edges(
    work: Callable[[Setting, Side], Awaitable[None]], setting: Setting, peer: PeerAddress | None
) -> None:
    """Do ``work`` on a link that is dialled to ``peer``, or else waited for."""
    driver = IrohDriver(identity.generate(), ("127.0.0.1:0",))
    async with trio.open_nursery() as nursery:
        await nursery.start(driver.run)
        if peer is None:
            offer(driver.node, driver.addresses())
            link = await driver.accept()
        else:
            link = await driver.dial(peer)
        await work(setting, Side(driver, link, nursery))
        if peer is None:
            await link.lost.wait()
        else:
            await link.close("done")
        nursery.cancel_scope.cancel()


async def take_all(end: RxEnd, frames: int) -> None:
    for _ in range(frames):
        chunk = await end.receive()
        if chunk is not None:
            end.consumed(chunk[0])


async def give_all(end: TxEnd, frame: int, frames: int) -> None:
    for _ in range(frames):
        end.filled(await end.acquire(), frame)
    await end.finished()


async def edge_receive(setting: Setting, side: Side) -> None:
    ends = [await side.rx(number, setting.frame) for number in range(setting.edges)]
    for number in range(setting.idle):
        await side.rx(setting.edges + number, setting.frame)
    await side.link.send(b"provisioned")
    await side.link.receive()
    if setting.idle:
        await trio.sleep(SETTLE_S)
    await side.link.send(b"go")
    read = meter()
    async with trio.open_nursery() as nursery:
        for end in ends:
            nursery.start_soon(take_all, end, setting.frames)
    tell(read())


async def edge_send(setting: Setting, side: Side) -> None:
    await side.link.receive()
    ends = [await side.tx(number, setting.frame) for number in range(setting.edges)]
    for number in range(setting.idle):
        await side.tx(setting.edges + number, setting.frame)
    await side.link.send(b"begin")
    await side.link.receive()
    read = meter()
    async with trio.open_nursery() as nursery:
        for end in ends:
            nursery.start_soon(give_all, end, setting.frame, setting.frames)
    tell(read())


async def edge_answer(setting: Setting, side: Side) -> None:
    rx = await side.rx(0, setting.frame)
    await side.link.receive()
    tx = await side.tx(1, setting.frame)
    await side.link.send(b"provisioned")
    for _ in range(setting.frames):
        chunk = await rx.receive()
        if chunk is None:
            break
        tx.filled(await tx.acquire(), chunk[1])
        rx.consumed(chunk[0])
    tell({})


async def edge_ask(setting: Setting, side: Side) -> None:
    rx = await side.rx(1, setting.frame)
    await side.link.send(b"provisioned")
    await side.link.receive()
    tx = await side.tx(0, setting.frame)
    took = []
    for _ in range(setting.frames):
        slot = await tx.acquire()
        before = time.perf_counter()
        tx.filled(slot, setting.frame)
        chunk = await rx.receive()
        took.append(time.perf_counter() - before)
        if chunk is not None:
            rx.consumed(chunk[0])
    tell(trips(took))


PLAIN: dict[tuple[str, str], Callable[[Setting, PeerAddress], Awaitable[None]]] = {
    ("bare", "receive"): bare_receive,
    ("bare", "send"): bare_send,
    ("bare", "answer"): bare_answer,
    ("bare", "ask"): bare_ask,
    ("tcp", "receive"): tcp_receive,
    ("tcp", "send"): tcp_send,
    ("tcp", "answer"): tcp_answer,
    ("tcp", "ask"): tcp_ask,
}
EDGE = {
    "receive": edge_receive,
    "send": edge_send,
    "answer": edge_answer,
    "ask": edge_ask,
}


async def main(arguments: list[str]) -> None:
    how, side, given, *where = arguments
    setting: Any = msgspec.json.decode(given, type=Setting)
    peer = PeerAddress(NodeId(where[0]), tuple(where[1:])) if where else None
    if how == "edge":
        await over_edges(EDGE[side], setting, peer)
    else:
        await PLAIN[how, side](setting, peer or PeerAddress(NodeId(""), ()))


if __name__ == "__main__":
    trio.run(main, sys.argv[1:])
