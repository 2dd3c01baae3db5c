"""What an edge costs beside a bare loop over the same binding, with the same frame size.

``python benchmarks/edges.py [--megabytes 256] [--frame-kib 1024] [--repeats 3]`` runs a sending
and a receiving process on loopback, in a private network namespace, each way in turn.  It prints
a table, and one JSON line at the end.  Ratios are results; absolute figures belong to the machine.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import iroh
import trio

from lensemble import identity
from lensemble.edge.arena import Arena
from lensemble.edge.spec import EdgeSpec
from lensemble.ids import EdgeId, NodeId
from lensemble.transport import iroh_loop
from lensemble.transport.driver import PeerAddress
from lensemble.transport.ends import ArenaLeases, RxEnd, TxEnd
from lensemble.transport.iroh_driver import IrohDriver
from lensemble.transport.raw import NOTHING
from lensemble_local import netns

ALPN = b"lensemble/bench"
EDGE = EdgeId(1)
MEGABYTE = 1_000_000
Meter = Callable[[], dict[str, float]]


def meter() -> Meter:
    """Starts the clocks; call the result to read wall and CPU seconds since."""
    wall, cpu = time.perf_counter(), time.process_time()
    return lambda: {
        "seconds": time.perf_counter() - wall,
        "cpu": time.process_time() - cpu,
        "rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


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


async def bare_receive(frame: int, frames: int) -> None:
    endpoint = await bound()
    offer(endpoint.id().to_bytes().hex(), endpoint.bound_sockets()[:1])
    incoming = await endpoint.accept_next()
    if incoming is None:
        raise SystemExit("the endpoint is closed")
    connection = await (await incoming.accept()).connect()
    stream = await connection.accept_uni()
    buffer = memoryview(bytearray(frame))
    read = meter()
    for _ in range(frames):
        at = 0
        while at < frame:
            at += await iroh_loop.read_into(stream, buffer[at:], NOTHING)
    answer(read())
    await connection.closed()
    await endpoint.close()


async def bare_send(peer: PeerAddress, frame: int, frames: int) -> None:
    endpoint = await bound()
    target = iroh.EndpointId.from_bytes(bytes.fromhex(peer.node))
    address = iroh.EndpointAddr(target, None, list(peer.addresses))
    connection = await endpoint.connect(address, ALPN)
    stream = await connection.open_uni()
    buffer = memoryview(bytearray(frame))
    read = meter()
    for _ in range(frames):
        for at in range(0, frame, iroh_loop.MAX_CALL_BYTES):
            await iroh_loop.write(stream, b"", buffer[at : at + iroh_loop.MAX_CALL_BYTES])
    await stream.finish()
    await stream.stopped()
    answer(read())
    connection.close(0, b"")
    await endpoint.close()


# ---- the edge: driver, ends and arena, as a daemon uses them ----


def edge_spec(producer: NodeId, consumer: NodeId, frame: int) -> EdgeSpec:
    return EdgeSpec(EDGE, producer, consumer, frame)


async def edge_receive(frame: int, frames: int) -> None:
    driver = IrohDriver(identity.generate(), ("127.0.0.1:0",))
    async with trio.open_nursery() as nursery:
        await nursery.start(driver.run)
        offer(driver.node, driver.addresses())
        link = await driver.accept()
        spec = edge_spec(link.peer, driver.node, frame)
        rx = RxEnd(spec, await ArenaLeases(Arena.create()).lease(spec), driver)
        await nursery.start(rx.serve)
        await link.send(b"provisioned")
        read = meter()
        for _ in range(frames):
            chunk = await rx.receive()
            if chunk is not None:
                rx.consumed(chunk[0])
        answer(read())
        await link.lost.wait()
        nursery.cancel_scope.cancel()


async def edge_send(peer: PeerAddress, frame: int, frames: int) -> None:
    driver = IrohDriver(identity.generate(), ("127.0.0.1:0",))
    async with trio.open_nursery() as nursery:
        await nursery.start(driver.run)
        link = await driver.dial(peer)
        await link.receive()
        spec = edge_spec(driver.node, peer.node, frame)
        tx = TxEnd(spec, await ArenaLeases(Arena.create()).lease(spec), driver)
        await nursery.start(tx.serve)
        read = meter()
        for _ in range(frames):
            tx.filled(await tx.acquire(), frame)
        await tx.finished()
        answer(read())
        await link.close("done")
        nursery.cancel_scope.cancel()


# ---- two processes ----


def offer(node: str, addresses: tuple[str, ...] | list[str]) -> None:
    print(json.dumps([node, *addresses]), flush=True)


def answer(figures: dict[str, float]) -> None:
    print(json.dumps(figures), flush=True)


def child(role: list[str]) -> None:
    how, side, frame, frames, *where = role
    receive, send = {"bare": (bare_receive, bare_send), "edge": (edge_receive, edge_send)}[how]

    async def main() -> None:
        work: Awaitable[None]
        if side == "receive":
            work = receive(int(frame), int(frames))
        else:
            peer = PeerAddress(NodeId(where[0]), tuple(where[1:]))
            work = send(peer, int(frame), int(frames))
        await work

    trio.run(main)


def spawn(*role: str) -> "subprocess.Popen[str]":
    command = [sys.executable, __file__, "--role", *role]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def line(process: "subprocess.Popen[str]") -> str:
    if process.stdout is None:
        raise SystemExit("the child has no output")
    return process.stdout.readline()


def once(how: str, frame: int, frames: int) -> dict[str, float]:
    """Figures of one transfer, per GB where that makes sense."""
    receiver = spawn(how, "receive", str(frame), str(frames))
    sender = spawn(how, "send", str(frame), str(frames), *json.loads(line(receiver)))
    sent, received = json.loads(line(sender)), json.loads(line(receiver))
    for process in (sender, receiver):
        process.wait(timeout=30)
    gigabytes = frame * frames / 1e9
    return {
        "mb_per_s": gigabytes * 1000 / received["seconds"],
        "send_cpu_s_per_gb": sent["cpu"] / gigabytes,
        "receive_cpu_s_per_gb": received["cpu"] / gigabytes,
        "send_rss_mib": sent["rss_mib"],
        "receive_rss_mib": received["rss_mib"],
    }


def compare(megabytes: int, frame: int, repeats: int) -> dict[str, Any]:
    frames = max(1, megabytes * MEGABYTE // frame)
    runs: dict[str, list[dict[str, float]]] = {"bare": [], "edge": []}
    for _ in range(repeats):
        for how, figures in runs.items():
            figures.append(once(how, frame, frames))
    result: dict[str, Any] = {"frame_bytes": frame, "megabytes": frame * frames / MEGABYTE}
    for how, figures in runs.items():
        result[how] = {key: statistics.median(run[key] for run in figures) for key in figures[0]}
    pairs = list(zip(runs["edge"], runs["bare"], strict=True))
    for key in ("mb_per_s", "send_cpu_s_per_gb", "receive_cpu_s_per_gb"):
        result[f"{key}_ratio"] = statistics.median(edge[key] / bare[key] for edge, bare in pairs)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--frame-kib", type=int, nargs="*", default=[64, 1024, 8192])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--role", nargs="*", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.role:
        child(given.role)
        return
    if refused := netns.enter():
        raise SystemExit(f"this needs a private network: {refused}")
    results = [compare(given.megabytes, kib << 10, given.repeats) for kib in given.frame_kib]
    print(f"{'frame':>10} {'':>6} {'MB/s':>8} {'send s/GB':>10} {'recv s/GB':>10}")
    for result in results:
        for how in ("bare", "edge"):
            figures = result[how]
            print(
                f"{result['frame_bytes']:>10} {how:>6} {figures['mb_per_s']:>8.0f} "
                f"{figures['send_cpu_s_per_gb']:>10.2f} {figures['receive_cpu_s_per_gb']:>10.2f}"
            )
        print(
            f"{'':>10} {'ratio':>6} {result['mb_per_s_ratio']:>8.2f} "
            f"{result['send_cpu_s_per_gb_ratio']:>10.2f} "
            f"{result['receive_cpu_s_per_gb_ratio']:>10.2f}"
        )
    print(json.dumps({"edges": results}))


if __name__ == "__main__":
    main()
