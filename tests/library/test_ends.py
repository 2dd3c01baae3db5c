from collections.abc import Callable

import pytest
import trio
import trio.testing

from lensemble.edge.arena import PAGE_BYTES, Arena
from lensemble.edge.spec import EdgeSpec
from lensemble.errors import ArenaExhausted, EdgeFault, InvalidTransition
from lensemble.ids import EdgeId, NodeId, SlotIndex
from lensemble.transport.driver import PeerAddress
from lensemble.transport.endpoint import EndpointDriver
from lensemble.transport.ends import ArenaLeases, RxEnd, TxEnd
from lensemble.transport.memory_driver import MemoryNetwork

PRODUCER, CONSUMER = NodeId("aa" * 32), NodeId("bb" * 32)
CAPACITY = 4096


class Edge:
    """Two linked drivers and an arena, with one edge between them."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.nursery = nursery
        self.network = MemoryNetwork()
        self.leases = ArenaLeases(Arena.create(1 << 30))
        self.spec = EdgeSpec(EdgeId(5), PRODUCER, CONSUMER, CAPACITY, slots=3)

    async def connect(self) -> None:
        self.near = await self._start(PRODUCER)
        self.far = await self._start(CONSUMER)
        await self.near.dial(PeerAddress(CONSUMER, self.far.addresses()))
        await self.far.accept()

    async def _start(self, node: NodeId) -> EndpointDriver:
        driver = self.network.driver(node)
        await self.nursery.start(driver.run)
        return driver

    async def rx(self, on_ready: Callable[[SlotIndex, int], None] | None = None) -> RxEnd:
        end = RxEnd(self.spec, await self.leases.lease(self.spec), self.far, on_ready)
        await self.nursery.start(end.serve)
        return end

    async def tx(self, on_released: Callable[[SlotIndex], None] | None = None) -> TxEnd:
        end = TxEnd(self.spec, await self.leases.lease(self.spec), self.near, on_released)
        await self.nursery.start(end.serve)
        return end


@pytest.fixture
async def edge(nursery: trio.Nursery) -> Edge:
    edge = Edge(nursery)
    await edge.connect()
    return edge


async def put(tx: TxEnd, payload: bytes) -> None:
    slot = await tx.acquire()
    tx.region.slot(slot)[: len(payload)] = payload
    tx.filled(slot, len(payload))


async def get(rx: RxEnd) -> bytes | None:
    chunk = await rx.receive()
    if chunk is None:
        return None
    slot, extent = chunk
    payload = bytes(rx.region.slot(slot)[:extent])
    rx.consumed(slot)
    return payload


async def test_chunks_arrive_in_order_then_the_end(edge: Edge, autojump_clock: object) -> None:
    rx, tx = await edge.rx(), await edge.tx()
    payloads = [b"", b"x", bytes(CAPACITY), *(bytes([i]) * i for i in range(100))]

    async def produce() -> None:
        for payload in payloads:
            await put(tx, payload)
        await tx.finished()

    edge.nursery.start_soon(produce)
    for payload in payloads:
        assert await get(rx) == payload
    assert await get(rx) is None
    assert await get(rx) is None
    await rx.over.wait()
    await tx.over.wait()
    assert rx.fault is tx.fault is None
    with pytest.raises(EdgeFault, match="finished"):
        await tx.acquire()


async def test_a_slot_can_be_had_at_once_or_not_at_all(edge: Edge, autojump_clock: object) -> None:
    rx, tx = await edge.rx(), await edge.tx()
    slots = [tx.acquire_now() for _ in range(4)]
    assert slots == [0, 1, 2, None]
    had: list[SlotIndex] = []

    async def wait() -> None:
        had.append(await tx.acquire())

    edge.nursery.start_soon(wait)
    await trio.testing.wait_all_tasks_blocked()
    tx.filled(SlotIndex(1), 5)
    await trio.sleep(1)
    assert had == [1], "who waits comes first"
    assert tx.acquire_now() is None
    tx.filled(SlotIndex(0), 5)
    await trio.sleep(1)
    rx.close()
    await tx.over.wait()
    assert tx.acquire_now() is None, "there is nothing to send it on any more"


async def test_the_ring_bounds_what_is_under_way(edge: Edge, autojump_clock: object) -> None:
    rx, tx = await edge.rx(), await edge.tx()
    sent = 0
    with trio.move_on_after(5):
        while True:
            await put(tx, bytes(CAPACITY))
            sent += 1
    assert len(rx.lent) == 3
    assert sent < 3 + 3 + 400
    held = [await rx.receive() for _ in range(3)]
    assert [chunk[0] for chunk in held if chunk] == list(rx.lent)
    with trio.move_on_after(5) as scope:
        await rx.receive()
    assert scope.cancelled_caught
    rx.consumed(rx.lent[1])
    assert await rx.receive() is not None


async def test_a_process_can_be_driven_by_signals(edge: Edge, autojump_clock: object) -> None:
    ready: list[tuple[SlotIndex, int]] = []
    released: list[SlotIndex] = []
    rx = await edge.rx(lambda slot, extent: ready.append((slot, extent)))
    tx = await edge.tx(released.append)
    assert released == [0, 1, 2]
    tx.filled(SlotIndex(2), 7)
    tx.filled(SlotIndex(0), 8)
    await trio.sleep(1)
    assert ready == [(0, 7), (1, 8)]
    assert released == [0, 1, 2, 2, 0]
    rx.consumed(SlotIndex(1))
    tx.filled(SlotIndex(0), CAPACITY)
    await trio.sleep(1)
    assert ready[2:] == [(2, CAPACITY)]


async def test_a_slot_that_is_not_lent_cannot_be_handed_back(
    edge: Edge, autojump_clock: object
) -> None:
    rx, tx = await edge.rx(), await edge.tx()
    with pytest.raises(InvalidTransition):
        rx.consumed(SlotIndex(0))
    slot = await tx.acquire()
    tx.filled(slot, 1)
    with pytest.raises(InvalidTransition):
        tx.filled(slot, 1)


async def test_a_lost_link_faults_both_ends_and_nothing_else(
    edge: Edge, autojump_clock: object
) -> None:
    rx, tx = await edge.rx(), await edge.tx()
    edge.network.cut(PRODUCER, CONSUMER, "a digger")
    for end in (rx, tx):
        await end.over.wait()
        assert "a digger" in (end.fault or "")
    with pytest.raises(EdgeFault, match="a digger"):
        await tx.acquire()
    with pytest.raises(EdgeFault, match="a digger"):
        await tx.finished()
    with pytest.raises(EdgeFault, match="a digger"):
        await rx.receive()
    tx.filled(SlotIndex(0), 1)
    rx.consumed(SlotIndex(0))


async def test_a_loss_wakes_who_waits(edge: Edge, autojump_clock: object) -> None:
    rx, tx = await edge.rx(), await edge.tx()
    woken = 0

    async def expect_fault(call: Callable[[], object]) -> None:
        nonlocal woken
        with pytest.raises(EdgeFault):
            await call()  # type: ignore[misc]  # each is a coroutine function of its own type
        woken += 1

    for _ in range(3):
        await tx.acquire()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(expect_fault, tx.acquire)
        nursery.start_soon(expect_fault, rx.receive)
        await trio.sleep(1)
        edge.network.cut(PRODUCER, CONSUMER)
    assert woken == 2


async def test_a_closed_receiver_faults_its_sender(edge: Edge, autojump_clock: object) -> None:
    rx, tx = await edge.rx(), await edge.tx()
    await put(tx, b"one")
    assert await get(rx) == b"one"
    rx.close()
    await tx.over.wait()
    assert "refused" in (tx.fault or "")
    assert rx.fault == "closed by this side"


async def test_a_closed_sender_tears_the_edge(edge: Edge, autojump_clock: object) -> None:
    rx, tx = await edge.rx(), await edge.tx()
    await put(tx, b"whole")
    assert await get(rx) == b"whole"
    tx.close()
    await rx.over.wait()
    assert "reset" in (rx.fault or "")
    assert tx.fault == "closed by this side"


async def test_a_torn_frame_is_never_handed_over(edge: Edge, autojump_clock: object) -> None:
    rx, tx = await edge.rx(), await edge.tx()
    edge.network.between(PRODUCER, CONSUMER).tear_after = 100
    await put(tx, bytes(50))
    await put(tx, bytes(50))
    await rx.over.wait()
    await tx.over.wait()
    assert "torn" in (tx.fault or "")
    with pytest.raises(EdgeFault):
        await rx.receive()


async def test_an_unprovisioned_receiver_is_a_fault_of_the_edge(
    edge: Edge, autojump_clock: object
) -> None:
    tx = await edge.tx()
    await tx.over.wait()
    assert "refused" in (tx.fault or "")
    assert edge.far.refused() == {"unknown_edge": 1}


async def test_an_end_without_a_link_starts_and_is_faulted(
    edge: Edge, autojump_clock: object
) -> None:
    edge.network.cut(PRODUCER, CONSUMER)
    await trio.sleep(1)
    tx, rx = await edge.tx(), await edge.rx()
    await rx.over.wait()
    assert "no live link" in (tx.fault or "")
    assert "no live link" in (rx.fault or "")


async def test_a_bug_in_a_callback_is_not_swallowed(autojump_clock: object) -> None:
    def broken(slot: SlotIndex, extent: int) -> None:
        raise ZeroDivisionError

    with pytest.RaisesGroup(ZeroDivisionError, flatten_subgroups=True):
        async with trio.open_nursery() as nursery:
            edge = Edge(nursery)
            await edge.connect()
            await edge.rx(broken)
            tx = await edge.tx()
            await put(tx, b"x")


async def test_cancelling_the_nursery_around_an_end_tears_it(
    edge: Edge, autojump_clock: object
) -> None:
    rx = await edge.rx()
    async with trio.open_nursery() as nursery:
        tx = TxEnd(edge.spec, await edge.leases.lease(edge.spec), edge.near)
        await nursery.start(tx.serve)
        await put(tx, b"x")
        assert await get(rx) == b"x"
        nursery.cancel_scope.cancel()
    assert tx.fault == "closed by this side"
    await rx.over.wait()
    assert "reset" in (rx.fault or "")


async def test_leases_wait_for_room_in_turn(autojump_clock: object) -> None:
    leases = ArenaLeases(Arena.create(4 * PAGE_BYTES))
    order: list[str] = []

    def spec(slots: int) -> EdgeSpec:
        return EdgeSpec(EdgeId(1), PRODUCER, CONSUMER, PAGE_BYTES, slots)

    async def lease(name: str, slots: int) -> None:
        await leases.lease(spec(slots))
        order.append(name)

    first = await leases.lease(spec(3))
    with pytest.raises(ArenaExhausted):
        await leases.lease(spec(5))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lease, "large", 2)
        await trio.sleep(1)
        nursery.start_soon(lease, "small", 1)
        await trio.sleep(1)
        assert order == []
        leases.give_back(first)
    assert order == ["large", "small"]


async def test_a_cancelled_lease_holds_up_nobody(autojump_clock: object) -> None:
    leases = ArenaLeases(Arena.create(4 * PAGE_BYTES))
    small = EdgeSpec(EdgeId(1), PRODUCER, CONSUMER, PAGE_BYTES, 1)
    large = EdgeSpec(EdgeId(1), PRODUCER, CONSUMER, PAGE_BYTES, 4)
    await leases.lease(small)
    with trio.move_on_after(1):
        await leases.lease(large)
    await leases.lease(small)


async def test_two_that_want_two_rings_each_do_not_wait_for_each_other(
    autojump_clock: object,
) -> None:
    leases = ArenaLeases(Arena.create(2 * PAGE_BYTES))
    both = [EdgeSpec(EdgeId(each), PRODUCER, CONSUMER, PAGE_BYTES, 1) for each in (1, 2)]
    served: list[str] = []

    async def use(name: str) -> None:
        regions = await leases.lease_all(both)
        await trio.sleep(1)
        served.append(name)
        for region in regions:
            leases.give_back(region)

    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            for name in ("one", "two", "three"):
                nursery.start_soon(use, name)
    assert sorted(served) == ["one", "three", "two"]
    assert leases.arena.leased_bytes() == 0


async def test_who_gives_up_waiting_for_two_rings_holds_none(autojump_clock: object) -> None:
    leases = ArenaLeases(Arena.create(2 * PAGE_BYTES))
    spec = EdgeSpec(EdgeId(1), PRODUCER, CONSUMER, PAGE_BYTES, 1)
    other = await leases.lease(spec)
    with trio.move_on_after(1):
        await leases.lease_all((spec, spec))
    leases.give_back(other)
    assert leases.arena.leased_bytes() == 0
