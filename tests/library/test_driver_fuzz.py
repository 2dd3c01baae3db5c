"""Any bytes from an authenticated peer: refused or understood, and nothing else is harmed."""

import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from lensemble.errors import EdgeFault, FrameError, LinkLost
from lensemble.ids import EdgeId, NodeId
from lensemble.transport.driver import PeerAddress
from lensemble.transport.endpoint import GREETING, EndpointDriver
from lensemble.transport.links import CoreLink
from lensemble.transport.memory_driver import MemoryNetwork
from lensemble.transport.memory_wire import MemoryEndpoint
from lensemble.transport.raw import RawLost

HONEST, LISTENER, STRANGER = (NodeId(pair * 32) for pair in ("aa", "bb", "cc"))
EDGE = EdgeId(3)

GARBAGE = st.binary(max_size=60) | st.just(GREETING) | st.just(b"\x02\x00\x00\x00ok")
PREAMBLES = st.binary(max_size=20) | st.just(EDGE.to_bytes(8, "little"))


async def stranger(
    network: MemoryNetwork, where: PeerAddress, control: bytes, streams: list[tuple[bytes, bool]]
) -> None:
    raw = await MemoryEndpoint(network, STRANGER).connect(where)
    try:
        out, _ = await raw.open_control()
        await out.write(control, b"")
        for payload, whole in streams:
            stream = await raw.open_uni()
            await stream.write(payload, b"")
            raw.send_datagram(payload[:3])
            await (stream.finish() if whole else stream.reset())
    except RawLost:
        return


async def serve_anybody(driver: EndpointDriver, *, task_status: trio.TaskStatus[None]) -> None:
    task_status.started()
    async with trio.open_nursery() as nursery:
        while True:
            link = await driver.accept()
            nursery.start_soon(drain, driver, link)


async def drain(driver: EndpointDriver, link: CoreLink) -> None:
    inbound = driver.expect_edge(link.peer, EDGE)
    with trio.move_on_after(60):
        try:
            await link.send(b"ready")
        except LinkLost:
            return
        try:
            receiver = await inbound.accept()
            while await receiver.receive_frame(memoryview(bytearray(16))) is not None:
                pass
        except EdgeFault:
            pass
        try:
            while True:
                await link.send(await link.receive())
        except (FrameError, LinkLost):
            pass


@settings(max_examples=60)
@given(
    control=st.lists(GARBAGE, max_size=4),
    streams=st.lists(st.tuples(PREAMBLES, st.booleans()), max_size=6),
    greets=st.booleans(),
)
def test_any_bytes_leave_driver_and_other_links_alone(
    control: list[bytes], streams: list[tuple[bytes, bool]], greets: bool
) -> None:
    async def main() -> None:
        network = MemoryNetwork()
        listener, honest = network.driver(LISTENER), network.driver(HONEST)
        async with trio.open_nursery() as nursery:
            await nursery.start(listener.run)
            await nursery.start(honest.run)
            await nursery.start(serve_anybody, listener)
            where = PeerAddress(LISTENER, listener.addresses())
            first = GREETING if greets else b""
            await stranger(network, where, first + b"".join(control), streams)
            await trio.sleep(100)
            link = await honest.dial(where)
            with trio.fail_after(100):
                # A stream that comes before its edge is expected would be refused.
                assert await link.receive() == b"ready"
            sender = await honest.open_edge(LISTENER, EDGE)
            await sender.finish()
            await link.send(b"echo")
            with trio.fail_after(100):
                assert await link.receive() == b"echo"
            nursery.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0))
