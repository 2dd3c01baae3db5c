"""What every driver must do; run over each by the module that provides the ``rig`` fixture."""

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Protocol

import pytest
import trio

from lensemble.edge.arena import Arena
from lensemble.edge.spec import EdgeSpec
from lensemble.errors import EdgeFault, FrameError, InvariantError, LinkLost
from lensemble.ids import EdgeId, NodeId
from lensemble.transport.driver import (
    MAX_CONTROL_BYTES,
    Driver,
    EdgeReceiver,
    EdgeSender,
    Link,
    PeerAddress,
)
from lensemble.transport.endpoint import EndpointDriver
from lensemble.transport.ends import ArenaLeases, RxEnd, TxEnd
from lensemble.transport.notes import MAX_NOTE_BYTES, MAX_WAITING_NOTES
from lensemble.transport.raw import RawConnection

EDGE = EdgeId(7)
PATIENCE_S = 20.0


class Rig(Protocol):
    """Starts drivers in the test's nursery; ``index`` picks the identity."""

    async def start(self, index: int) -> EndpointDriver: ...

    def node(self, index: int) -> NodeId: ...

    async def raw_dial(self, index: int, peer: PeerAddress) -> RawConnection:
        """Connect as identity ``index`` without any of the rules above the raw layer."""


def suite() -> dict[str, Callable[..., Awaitable[None]]]:
    """The tests below by name, for a module that runs them with its own ``rig``."""
    return {name: test for name, test in globals().items() if name.startswith("test_")}


def at(driver: Driver) -> PeerAddress:
    return PeerAddress(driver.node, driver.addresses())


class Pair:
    def __init__(self, near: EndpointDriver, far: EndpointDriver, there: Link, back: Link) -> None:
        self.near, self.far = near, far
        self.there, self.back = there, back

    @asynccontextmanager
    async def edge(self, edge: EdgeId = EDGE) -> AsyncIterator[tuple[EdgeSender, EdgeReceiver]]:
        inbound = self.far.expect_edge(self.near.node, edge)
        sender = await self.near.open_edge(self.far.node, edge)
        try:
            yield sender, await inbound.accept()
        finally:
            inbound.close()


async def linked(rig: Rig, near: int = 0, far: int = 1) -> Pair:
    dialler, listener = await rig.start(near), await rig.start(far)
    there = await dialler.dial(at(listener))
    return Pair(dialler, listener, there, await listener.accept())


async def eventually(holds: Callable[[], bool]) -> None:
    for _ in range(1000):
        if holds():
            return
        await trio.sleep(PATIENCE_S / 1000)
    pytest.fail(f"it did not come true within {PATIENCE_S} s")


# ---- links ----


async def test_both_sides_know_who_the_other_is(rig: Rig) -> None:
    pair = await linked(rig)
    assert pair.there.peer == pair.far.node == rig.node(1)
    assert pair.back.peer == pair.near.node == rig.node(0)
    assert pair.far.addresses()
    assert pair.there.facts().remote
    assert not pair.there.lost_reason()


async def test_a_peer_with_another_identity_than_dialled_is_refused(rig: Rig) -> None:
    dialler, listener = await rig.start(0), await rig.start(1)
    with pytest.raises(LinkLost) as caught:
        await dialler.dial(PeerAddress(rig.node(2), listener.addresses()))
    assert rig.node(2) in str(caught.value)
    assert listener.addresses()[0] in str(caught.value)


async def test_dialling_nowhere_names_the_peer(rig: Rig) -> None:
    dialler = await rig.start(0)
    with pytest.raises(LinkLost, match="no address"):
        await dialler.dial(PeerAddress(rig.node(1)))


async def test_a_second_dial_to_a_linked_peer_is_refused(rig: Rig) -> None:
    pair = await linked(rig)
    with pytest.raises(LinkLost, match="live link already"):
        await pair.near.dial(at(pair.far))
    await pair.there.send(b"still here")
    assert await pair.back.receive() == b"still here"


async def test_peers_that_dial_each_other_at_once_end_with_one_link(rig: Rig) -> None:
    one, other = await rig.start(0), await rig.start(1)

    async def dial(driver: EndpointDriver, peer: EndpointDriver) -> None:
        with suppress(LinkLost):
            await driver.dial(at(peer))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(dial, one, other)
        nursery.start_soon(dial, other, one)
    await eventually(lambda: len(one.links()) == len(other.links()) == 1)
    await trio.sleep(1.5)
    there, back = one.links()[other.node], other.links()[one.node]
    await there.send(b"over the one link")
    assert await back.receive() == b"over the one link"


async def test_a_link_that_a_crossed_dial_gave_is_not_superseded(rig: Rig) -> None:
    one, other = await rig.start(0), await rig.start(1)
    dialled: list[Link] = []

    async def dial(driver: EndpointDriver, peer: EndpointDriver) -> None:
        with suppress(LinkLost):
            dialled.append(await driver.dial(at(peer)))

    for _ in range(5):
        dialled.clear()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(dial, one, other)
            nursery.start_soon(dial, other, one)
        await eventually(lambda: len(one.links()) == len(other.links()) == 1)
        await trio.sleep(0.2)
        assert [link.lost_reason() for link in dialled] == [""]
        await one.links()[other.node].close("once more")
        await eventually(lambda: not one.links() and not other.links())


async def test_two_live_holders_of_an_identity_are_both_named(rig: Rig) -> None:
    pair = await linked(rig)
    impostor = await rig.start(0)
    with pytest.raises(LinkLost) as caught:
        await impostor.dial(at(pair.far))
    assert pair.near.node[:16] in str(caught.value)
    assert "is refused" in str(caught.value)
    assert pair.far.refused() == {"second_holder": 1}
    await pair.there.send(b"the first holder goes on")
    assert await pair.back.receive() == b"the first holder goes on"


async def test_an_edge_expected_ahead_of_its_link_outlives_links_until_its_stream_comes(
    rig: Rig,
) -> None:
    dialler, listener = await rig.start(0), await rig.start(1)
    inbound = listener.expect_edge(dialler.node, EDGE, ahead=True)
    with pytest.raises(InvariantError, match="twice"):
        listener.expect_edge(dialler.node, EDGE, ahead=True)
    await (await dialler.dial(at(listener))).close("not this one")
    await eventually(lambda: not dialler.links() and not listener.links())
    await dialler.dial(at(listener))
    sender = await dialler.open_edge(listener.node, EDGE)
    await sender.send_frame(memoryview(b"at last"))
    with trio.fail_after(PATIENCE_S):
        receiver = await inbound.accept()
    into = bytearray(7)
    assert await receiver.receive_frame(memoryview(into)) == 7
    assert bytes(into) == b"at last"
    inbound.close()
    listener.expect_edge(dialler.node, EDGE, ahead=True).close()


async def test_a_closed_link_can_be_dialled_again(rig: Rig) -> None:
    pair = await linked(rig)
    await pair.there.close("done")
    again = await pair.near.dial(at(pair.far))
    accepted = await pair.far.accept()
    await again.send(b"again")
    assert await accepted.receive() == b"again"


# ---- control ----


async def test_control_payloads_arrive_in_order_and_whole(rig: Rig) -> None:
    pair = await linked(rig)
    payloads = [bytes([i % 256]) * size for i, size in enumerate((0, 1, 3, 70_000, 0, 9))]
    payloads.append(bytes(MAX_CONTROL_BYTES))
    async with trio.open_nursery() as nursery:
        for link, other in ((pair.there, pair.back), (pair.back, pair.there)):
            nursery.start_soon(_send_all, link, payloads)
            nursery.start_soon(_expect_all, other, payloads)


async def _send_all(link: Link, payloads: list[bytes]) -> None:
    for payload in payloads:
        await link.send(payload)


async def _expect_all(link: Link, payloads: list[bytes]) -> None:
    for payload in payloads:
        assert await link.receive() == payload


async def test_an_oversize_control_payload_is_refused_before_it_leaves(rig: Rig) -> None:
    pair = await linked(rig)
    with pytest.raises(FrameError, match="1048577 bytes"):
        await pair.there.send(bytes(MAX_CONTROL_BYTES + 1))
    await pair.there.send(b"fine")
    assert await pair.back.receive() == b"fine"


async def test_what_was_sent_before_a_close_arrives_and_then_the_reason(rig: Rig) -> None:
    pair = await linked(rig)
    await pair.there.send(b"one")
    await pair.there.send(b"two")
    await pair.there.close("that was all")
    assert await pair.back.receive() == b"one"
    assert await pair.back.receive() == b"two"
    with pytest.raises(LinkLost, match="that was all"):
        await pair.back.receive()
    assert "that was all" in pair.back.lost_reason()
    with pytest.raises(LinkLost):
        await pair.there.send(b"three")


async def test_a_peer_that_does_not_read_holds_up_only_its_own_sender(rig: Rig) -> None:
    pair = await linked(rig)
    third = await rig.start(2)
    other_link = await pair.near.dial(at(third))
    other_back = await third.accept()
    with trio.move_on_after(1) as scope:
        while True:
            await pair.there.send(bytes(MAX_CONTROL_BYTES))
    assert scope.cancelled_caught
    await other_link.send(b"passing by")
    assert await other_back.receive() == b"passing by"
    assert not pair.there.lost.is_set()


async def test_cancelled_control_calls_lose_nothing(rig: Rig) -> None:
    pair = await linked(rig)
    count = 300

    async def send() -> None:
        for index in range(count):
            await pair.there.send(index.to_bytes(4, "little") * (1 + index % 50 * 100))

    async def receive() -> None:
        index = 0
        for attempt in itertools.count():
            if index == count:
                return
            with trio.move_on_after(0.0005 * (attempt % 3)):
                payload = await pair.back.receive()
                assert payload[:4] == index.to_bytes(4, "little")
                assert len(payload) == 4 * (1 + index % 50 * 100)
                index += 1
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        nursery.start_soon(receive)


# ---- edges ----


async def test_frames_of_every_size_cross_both_ways(rig: Rig) -> None:
    pair = await linked(rig)
    capacity = 600_000
    frames = [b"", b"x", bytes(range(256)) * 1000, b"\x07" * capacity, b"", b"end"]
    swapped = Pair(pair.far, pair.near, pair.back, pair.there)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_cross, pair, EdgeId(1), frames, capacity)
        nursery.start_soon(_cross, swapped, EdgeId(1), frames, capacity)


async def _cross(pair: Pair, edge: EdgeId, frames: list[bytes], capacity: int) -> None:
    slot = memoryview(bytearray(capacity))
    async with pair.edge(edge) as (sender, receiver), trio.open_nursery() as nursery:
        nursery.start_soon(_send_frames, sender, frames)
        for frame in frames:
            assert await receiver.receive_frame(slot) == len(frame)
            assert slot[: len(frame)] == frame
        assert await receiver.receive_frame(slot) is None
        assert await receiver.receive_frame(slot) is None


async def _send_frames(sender: EdgeSender, frames: list[bytes]) -> None:
    for frame in frames:
        await sender.send_frame(memoryview(frame))
    await sender.finish()


async def test_an_extent_over_capacity_faults_its_edge_only(rig: Rig) -> None:
    pair = await linked(rig)
    async with pair.edge(EdgeId(1)) as (sender, receiver), pair.edge(EdgeId(2)) as (other, calm):
        await sender.send_frame(memoryview(bytes(11)))
        with pytest.raises(EdgeFault, match="11 bytes exceeds the limit of 10"):
            await receiver.receive_frame(memoryview(bytearray(10)))
        with pytest.raises(EdgeFault):
            await receiver.receive_frame(memoryview(bytearray(20)))
        await receiver.stop()
        await other.send_frame(memoryview(b"calm"))
        assert await calm.receive_frame(memoryview(bytearray(10))) == 4
    assert not pair.back.lost.is_set()


async def test_a_stopped_edge_is_lost_for_its_sender(rig: Rig) -> None:
    pair = await linked(rig)
    async with pair.edge() as (sender, receiver):
        await receiver.stop()
        with trio.fail_after(PATIENCE_S):
            assert await sender.lost()
        with pytest.raises(EdgeFault):
            await sender.send_frame(memoryview(bytes(10)))


async def test_an_unknown_edge_is_refused_and_counted(rig: Rig) -> None:
    pair = await linked(rig)
    sender = await pair.near.open_edge(pair.far.node, EdgeId(99))
    with trio.fail_after(PATIENCE_S):
        assert await sender.lost()
    await eventually(lambda: pair.far.refused() == {"unknown_edge": 1})
    assert not pair.back.lost.is_set()


async def test_a_second_stream_for_an_edge_is_refused_and_counted(rig: Rig) -> None:
    pair = await linked(rig)
    async with pair.edge() as (sender, receiver):
        second = await pair.near.open_edge(pair.far.node, EDGE)
        with trio.fail_after(PATIENCE_S):
            assert await second.lost()
        assert pair.far.refused() == {"duplicate": 1}
        await sender.send_frame(memoryview(b"first"))
        assert await receiver.receive_frame(memoryview(bytearray(10))) == 5


async def test_a_closed_registration_refuses_its_stream(rig: Rig) -> None:
    pair = await linked(rig)
    inbound = pair.far.expect_edge(pair.near.node, EDGE)
    with pytest.raises(InvariantError, match="twice"):
        pair.far.expect_edge(pair.near.node, EDGE)
    inbound.close()
    with pytest.raises(EdgeFault):
        await inbound.accept()
    sender = await pair.near.open_edge(pair.far.node, EDGE)
    with trio.fail_after(PATIENCE_S):
        assert await sender.lost()


async def test_a_reset_is_a_fault_and_stays_one(rig: Rig) -> None:
    pair = await linked(rig)
    slot = memoryview(bytearray(100))
    async with pair.edge() as (sender, receiver):
        await sender.send_frame(memoryview(b"whole"))
        assert await receiver.receive_frame(slot) == 5
        await sender.reset()
        for _ in range(3):
            with pytest.raises(EdgeFault):
                await receiver.receive_frame(slot)
        with pytest.raises(EdgeFault):
            await sender.send_frame(memoryview(b"more"))


async def test_a_cancelled_send_is_torn_for_the_peer(rig: Rig) -> None:
    pair = await linked(rig)
    async with pair.edge() as (sender, receiver):
        with trio.move_on_after(0.2) as scope:
            await sender.send_frame(memoryview(bytes(8 << 20)))
        assert scope.cancelled_caught
        with pytest.raises(EdgeFault):
            await receiver.receive_frame(memoryview(bytearray(8 << 20)))
        with pytest.raises(EdgeFault):
            await sender.send_frame(memoryview(b"more"))


async def test_cancelled_receives_lose_nothing(rig: Rig) -> None:
    pair = await linked(rig)
    count, capacity = 120, 50_000
    sizes = [(index * 7919) % capacity for index in range(count)]

    async def send(sender: EdgeSender) -> None:
        for index, size in enumerate(sizes):
            await sender.send_frame(memoryview(bytes([index % 251]) * size))
        await sender.finish()

    slot = memoryview(bytearray(capacity))
    async with pair.edge() as (sender, receiver), trio.open_nursery() as nursery:
        nursery.start_soon(send, sender)
        received: list[int | None] = []
        for attempt in itertools.count():
            if None in received:
                break
            with trio.move_on_after(0.0004 * (attempt % 4)) as scope:
                extent = await receiver.receive_frame(slot)
            if not scope.cancelled_caught:
                if extent is not None:
                    assert slot[:extent] == bytes([len(received) % 251]) * extent
                received.append(extent)
            await trio.lowlevel.checkpoint()
    assert received == [*sizes, None]


async def test_a_cancelled_accept_loses_no_stream(rig: Rig) -> None:
    pair = await linked(rig)
    edges = [EdgeId(index) for index in range(200)]
    inbounds = [pair.far.expect_edge(pair.near.node, edge) for edge in edges]
    slot = memoryview(bytearray(8))

    async def send() -> None:
        for edge in edges:
            sender = await pair.near.open_edge(pair.far.node, edge)
            await sender.send_frame(memoryview(edge.to_bytes(8, "little")))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        for edge, inbound in zip(edges, inbounds, strict=True):
            receiver = None
            while receiver is None:
                with trio.move_on_after(0.0005):
                    receiver = await inbound.accept()
            assert await receiver.receive_frame(slot) == 8
            assert slot == edge.to_bytes(8, "little")


async def test_many_edges_at_once_and_a_stalled_one_stops_no_other(rig: Rig) -> None:
    pair = await linked(rig)
    async with pair.edge(EdgeId(1000)) as (stalled, _), trio.open_nursery() as nursery:
        nursery.start_soon(_send_frames, stalled, [bytes(3 << 20)])
        async with trio.open_nursery() as crossings:
            for index in range(150):
                frames = [bytes([index % 256]) * 2000, b""]
                crossings.start_soon(_cross, pair, EdgeId(index), frames, 2000)
        nursery.cancel_scope.cancel()


async def test_a_finished_stream_is_not_lost(rig: Rig) -> None:
    pair = await linked(rig)
    async with pair.edge() as (sender, receiver):
        await sender.send_frame(memoryview(b"all"))
        with trio.move_on_after(0.5) as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(sender.lost)
                await sender.finish()
        assert scope.cancelled_caught
        assert await receiver.receive_frame(memoryview(bytearray(10))) == 3
        assert await receiver.receive_frame(memoryview(bytearray(10))) is None


async def test_ends_on_a_real_stream_carry_chunks_and_finish(rig: Rig) -> None:
    pair = await linked(rig)
    spec = EdgeSpec(EDGE, pair.near.node, pair.far.node, 5000, slots=2)
    leases = ArenaLeases(Arena.create(1 << 20))
    rx = RxEnd(spec, await leases.lease(spec), pair.far)
    tx = TxEnd(spec, await leases.lease(spec), pair.near)

    async def produce() -> None:
        for index in range(200):
            slot = await tx.acquire()
            tx.region.slot(slot)[:] = bytes([index]) * 5000
            tx.filled(slot, 5000 - index)
        await tx.finished()

    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            await nursery.start(rx.serve)
            await nursery.start(tx.serve)
            nursery.start_soon(produce)
            for index in range(200):
                chunk = await rx.receive()
                assert chunk is not None
                assert chunk[1] == 5000 - index
                assert rx.region.slot(chunk[0])[: chunk[1]] == bytes([index]) * chunk[1]
                rx.consumed(chunk[0])
            assert await rx.receive() is None
    assert rx.fault is tx.fault is None


async def test_ends_that_stand_still_notice_a_lost_link(rig: Rig) -> None:
    pair = await linked(rig)
    spec = EdgeSpec(EDGE, pair.near.node, pair.far.node, 5000, slots=2)
    leases = ArenaLeases(Arena.create(1 << 20))
    rx = RxEnd(spec, await leases.lease(spec), pair.far)
    tx = TxEnd(spec, await leases.lease(spec), pair.near)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            await nursery.start(rx.serve)
            await nursery.start(tx.serve)
            await trio.sleep(0.1)
            await pair.back.close("enough")
    assert rx.fault
    assert tx.fault


# ---- loss ----


async def test_losing_a_link_wakes_everyone(rig: Rig) -> None:
    pair = await linked(rig)
    woken: list[str] = []
    slot = memoryview(bytearray(10))
    never = pair.far.expect_edge(pair.near.node, EdgeId(500))
    late = pair.near.expect_edge(pair.far.node, EdgeId(501))

    async def expect(
        name: str, call: Callable[[], object], error: type[Exception] = EdgeFault
    ) -> None:
        with pytest.raises(error):
            await call()  # type: ignore[misc]  # each is a coroutine function of its own type
        woken.append(name)

    async with pair.edge(EdgeId(1)) as (sender, receiver), pair.edge(EdgeId(2)) as (idle, _):
        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                big = memoryview(bytes(8 << 20))
                nursery.start_soon(expect, "send", lambda: sender.send_frame(big))
                nursery.start_soon(expect, "accept", never.accept)
                nursery.start_soon(expect, "late", late.accept)
                nursery.start_soon(expect, "control near", pair.there.receive, LinkLost)
                nursery.start_soon(expect, "control far", pair.back.receive, LinkLost)
                await trio.sleep(0.2)
                await pair.back.close("enough")
                assert await idle.lost()
                await pair.there.lost.wait()
        assert sorted(woken) == ["accept", "control far", "control near", "late", "send"]
        with pytest.raises(EdgeFault):
            await receiver.receive_frame(slot)
        with pytest.raises(EdgeFault, match="no live link"):
            await pair.near.open_edge(pair.far.node, EdgeId(3))
        orphan = pair.near.expect_edge(pair.far.node, EdgeId(4))
        with pytest.raises(EdgeFault, match="no live link"):
            await orphan.accept()


async def test_a_driver_that_ends_tells_its_peers(rig: Rig) -> None:
    pair = await linked(rig)
    with trio.CancelScope() as scope:
        async with trio.open_nursery():
            third = await rig.start(2)
            link = await third.dial(at(pair.far))
            accepted = await pair.far.accept()
            assert accepted.peer == third.node
            await link.close("leaving")
            scope.cancel()
    with trio.fail_after(PATIENCE_S):
        await accepted.lost.wait()
    assert "leaving" in accepted.lost_reason()


# ---- garbage ----


async def test_a_peer_that_speaks_something_else_is_refused(rig: Rig) -> None:
    listener = await rig.start(1)
    raw = await rig.raw_dial(0, at(listener))
    control = await raw.open_control()
    await control[0].write(b"GET / HTTP/1.1\r\n", b"")
    with trio.fail_after(PATIENCE_S):
        assert "greeting" in await raw.closed()
    assert listener.refused() == {"handshake": 1}
    dialler = await rig.start(2)
    await dialler.dial(at(listener))


async def test_an_oversize_control_frame_closes_the_link_and_is_counted(rig: Rig) -> None:
    listener = await rig.start(1)
    raw = await rig.raw_dial(0, at(listener))
    control = await raw.open_control()
    await control[0].write(b"lensemble/1\n", b"\xff\xff\xff\xff garbage")
    link = await listener.accept()
    with pytest.raises(FrameError, match="4294967295 bytes"):
        await link.receive()
    with pytest.raises(LinkLost):
        await link.receive()
    assert link.lost.is_set()
    with trio.fail_after(PATIENCE_S):
        assert "4294967295" in await raw.closed()
    assert listener.refused() == {"frame": 1}


async def test_garbage_on_streams_harms_nothing_else(rig: Rig) -> None:
    pair = await linked(rig)
    raw = await rig.raw_dial(2, at(pair.far))
    control = await raw.open_control()
    await control[0].write(b"lensemble/1\n", b"")
    link = await pair.far.accept()
    inbound = pair.far.expect_edge(link.peer, EDGE)
    for index in range(20):
        stream = await raw.open_uni()
        await stream.write(bytes([index]) * (index % 8 + 1), b"")
        await (stream.reset() if index % 2 else stream.finish())
    good = await raw.open_uni()
    await good.write(EDGE.to_bytes(8, "little"), b"\x00\x00\x00\xf0 too long")
    receiver = await inbound.accept()
    with pytest.raises(EdgeFault, match="exceeds"):
        await receiver.receive_frame(memoryview(bytearray(100)))
    await eventually(lambda: sum(pair.far.refused().values()) >= 18)
    await pair.there.send(b"unharmed")
    assert await pair.back.receive() == b"unharmed"


async def test_a_stream_that_ends_inside_a_frame_is_torn(rig: Rig) -> None:
    listener = await rig.start(1)
    raw = await rig.raw_dial(0, at(listener))
    control = await raw.open_control()
    await control[0].write(b"lensemble/1\n", b"")
    link = await listener.accept()
    inbound = listener.expect_edge(link.peer, EDGE)
    stream = await raw.open_uni()
    await stream.write(EDGE.to_bytes(8, "little"), b"\x05\x00\x00\x00abc")
    await stream.finish()
    receiver = await inbound.accept()
    for _ in range(2):
        with pytest.raises(EdgeFault, match="inside a frame"):
            await receiver.receive_frame(memoryview(bytearray(100)))


# ---- notes ----


async def test_notes_pass_streams_that_stand_still_and_name_their_sender(rig: Rig) -> None:
    pair = await linked(rig)
    with trio.move_on_after(1) as scope:
        while True:
            await pair.there.send(bytes(MAX_CONTROL_BYTES))
    assert scope.cancelled_caught
    assert pair.near.send_note(pair.far.node, b"there")
    assert pair.far.send_note(pair.near.node, bytes(1000))
    with trio.fail_after(PATIENCE_S):
        assert await pair.far.receive_note() == (pair.near.node, b"there")
        assert await pair.near.receive_note() == (pair.far.node, bytes(1000))
    assert pair.near.refused() == pair.far.refused() == {}


async def test_a_note_that_cannot_go_is_not_sent_and_harms_nothing(rig: Rig) -> None:
    pair = await linked(rig)
    assert pair.near.link_to(pair.far.node) is pair.there
    assert not pair.near.send_note(rig.node(2), b"to nobody")
    assert not pair.near.send_note(pair.far.node, bytes(MAX_NOTE_BYTES + 1))
    await pair.there.send(b"alive")
    assert await pair.back.receive() == b"alive"
    await pair.there.close("done")
    assert not pair.near.send_note(pair.far.node, b"too late")
    assert pair.near.link_to(pair.far.node) is None


async def test_who_says_too_much_loses_notes_of_its_own_only(rig: Rig) -> None:
    pair = await linked(rig)
    third = await rig.start(2)
    await third.dial(at(pair.far))
    for _ in range(MAX_WAITING_NOTES + 8):
        assert pair.near.send_note(pair.far.node, b"!")
        await trio.sleep(0.001)
    await eventually(lambda: pair.far.refused() == {"note_overflow": 8})
    assert third.send_note(pair.far.node, b"a word")
    with trio.fail_after(PATIENCE_S):
        for _ in range(MAX_WAITING_NOTES):
            assert await pair.far.receive_note() == (pair.near.node, b"!")
        assert await pair.far.receive_note() == (third.node, b"a word")


async def test_datagrams_of_an_unknown_kind_are_counted_and_ignored(rig: Rig) -> None:
    listener = await rig.start(1)
    raw = await rig.raw_dial(0, at(listener))
    control = await raw.open_control()
    await control[0].write(b"lensemble/1\n", b"")
    link = await listener.accept()
    strange = (b"\x00", b"\x01\x01", b"\xff" * 1000, b"\x03" + bytes(MAX_NOTE_BYTES + 1))
    for datagram in strange:
        assert raw.send_datagram(datagram)
    assert raw.send_datagram(b"\x03fine")
    with trio.fail_after(PATIENCE_S):
        assert await listener.receive_note() == (rig.node(0), b"fine")
    assert listener.refused() == {"datagram": len(strange)}
    assert not link.lost.is_set()
