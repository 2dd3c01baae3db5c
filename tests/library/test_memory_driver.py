from collections.abc import Awaitable, Callable
from functools import wraps

import pytest
import trio
from trio.testing import MockClock

from lensemble.errors import EdgeFault, LinkLost
from lensemble.ids import EdgeId, NodeId
from lensemble.transport.driver import PeerAddress
from lensemble.transport.endpoint import EndpointDriver, EndpointSettings
from lensemble.transport.links import Pace
from lensemble.transport.memory_driver import MemoryNetwork
from lensemble.transport.memory_wire import MemoryConnection, MemoryEndpoint
from tests.library.driver_suite import Pair, at, linked, suite

SLOT = 4 << 20


def on_mock_clock(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """``test`` on a clock that jumps to the next deadline when nothing else is left to do."""

    def run(main: Callable[[], Awaitable[None]], **_: object) -> None:
        trio.run(main, clock=MockClock(autojump_threshold=0))

    @pytest.mark.trio(run=run)
    @wraps(test)
    async def timed(**fixtures: object) -> None:
        await test(**fixtures)

    return timed


globals().update({name: on_mock_clock(test) for name, test in suite().items()})


class MemoryRig:
    def __init__(self, nursery: trio.Nursery) -> None:
        self.network = MemoryNetwork(seed=1)
        self._nursery = nursery

    def node(self, index: int) -> NodeId:
        return NodeId(f"{index:02x}" * 32)

    async def start(self, index: int) -> EndpointDriver:
        driver = self.network.driver(self.node(index))
        await self._nursery.start(driver.run)
        return driver

    async def raw_dial(self, index: int, peer: PeerAddress) -> MemoryConnection:
        return await MemoryEndpoint(self.network, self.node(index)).connect(peer)


@pytest.fixture
def rig(nursery: trio.Nursery) -> MemoryRig:
    return MemoryRig(nursery)


@on_mock_clock
async def test_nobody_there_is_given_up_after_the_dial_timeout(rig: MemoryRig) -> None:
    dialler = await rig.start(0)
    began = trio.current_time()
    with pytest.raises(LinkLost, match="no answer within 5 s"):
        await dialler.dial(rig.network.address(rig.node(1)))
    assert trio.current_time() - began == pytest.approx(5)


@on_mock_clock
async def test_each_side_keeps_its_own_pace(rig: MemoryRig, nursery: trio.Nursery) -> None:
    hasty = rig.network.driver(rig.node(0), EndpointSettings(Pace(0.2, 1.0)))
    await nursery.start(hasty.run)
    calm = rig.network.driver(rig.node(1), EndpointSettings(Pace(20.0, 60.0)))
    await nursery.start(calm.run)
    there = await hasty.dial(rig.network.address(calm.node))
    back = await calm.accept()
    await trio.sleep(100)
    assert not there.lost.is_set()
    rig.network.partition(hasty.node, calm.node)
    began = trio.current_time()
    await there.lost.wait()
    assert trio.current_time() - began <= 1
    await back.lost.wait()
    assert trio.current_time() - began <= 60


@on_mock_clock
async def test_a_silent_peer_is_lost_within_the_heartbeat_timeout(rig: MemoryRig) -> None:
    pair = await linked(rig)
    await trio.sleep(100)
    assert not pair.there.lost.is_set()
    began = trio.current_time()
    rig.network.partition(pair.near.node, pair.far.node)
    await pair.there.lost.wait()
    await pair.back.lost.wait()
    assert 2 <= trio.current_time() - began <= 3
    assert pair.there.lost_reason() == "no heartbeat for 3 s"


@on_mock_clock
async def test_a_short_partition_delays_and_loses_nothing(rig: MemoryRig) -> None:
    pair = await linked(rig)
    rig.network.partition(pair.near.node, pair.far.node)
    await pair.there.send(b"late")
    with trio.move_on_after(1.5) as scope:
        await pair.back.receive()
    assert scope.cancelled_caught
    rig.network.heal(pair.near.node, pair.far.node)
    assert await pair.back.receive() == b"late"
    assert not pair.there.lost.is_set()


@on_mock_clock
async def test_a_restarted_peer_supersedes_its_former_self(rig: MemoryRig) -> None:
    pair = await linked(rig)
    rig.network.vanish(pair.near.node)
    reborn = await rig.start(0)
    began = trio.current_time()
    await reborn.dial(at(pair.far))
    assert trio.current_time() - began <= 1
    link = await pair.far.accept()
    assert link.peer == pair.back.peer
    assert pair.back.lost.is_set()
    assert "superseded" in pair.back.lost_reason()


@on_mock_clock
async def test_a_torn_frame_faults_both_ends_of_its_edge(rig: MemoryRig) -> None:
    pair = await linked(rig)
    async with pair.edge() as (sender, receiver):
        rig.network.between(pair.near.node, pair.far.node).tear_after = 1_000_000
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_torn_receive, receiver)
            with pytest.raises(EdgeFault, match="torn by the network"):
                await sender.send_frame(memoryview(bytes(SLOT)))
    assert not pair.there.lost.is_set()


async def _torn_receive(receiver: object) -> None:
    with pytest.raises(EdgeFault):
        await receiver.receive_frame(memoryview(bytearray(SLOT)))  # type: ignore[attr-defined]


@on_mock_clock
async def test_a_cut_loses_the_link_at_once(rig: MemoryRig) -> None:
    pair = await linked(rig)
    began = trio.current_time()
    rig.network.cut(pair.near.node, pair.far.node, "a digger")
    with pytest.raises(LinkLost, match="a digger"):
        await pair.back.receive()
    await pair.there.lost.wait()
    assert trio.current_time() == began


@on_mock_clock
async def test_delay_is_felt_and_keeps_order(rig: MemoryRig) -> None:
    pair = await linked(rig)
    weather = rig.network.between(pair.near.node, pair.far.node)
    weather.delay_s, weather.jitter_s = 0.2, 0.3
    began = trio.current_time()
    for index in range(10):
        await pair.there.send(bytes([index]))
    assert [await pair.back.receive() for _ in range(10)] == [bytes([i]) for i in range(10)]
    assert 0.2 <= trio.current_time() - began <= 0.5


def test_the_same_seed_gives_the_same_weather() -> None:
    def draws(seed: int) -> list[float]:
        weather = MemoryNetwork(seed).between(NodeId("a"), NodeId("b"))
        weather.jitter_s = 1.0
        return [weather.travel_s() for _ in range(5)]

    assert draws(1) == draws(1) != draws(2)


@on_mock_clock
async def test_an_idle_day_passes_quickly(rig: MemoryRig) -> None:
    pair: Pair = await linked(rig)
    async with pair.edge(EdgeId(1)) as (sender, receiver):
        await trio.sleep(3600)
        await sender.send_frame(memoryview(b"still there"))
        assert await receiver.receive_frame(memoryview(bytearray(20))) == 11


@on_mock_clock
async def test_a_mute_node_hears_and_is_not_heard_until_it_is_healed(rig: MemoryRig) -> None:
    pair = await linked(rig)
    near, far = pair.near.node, pair.far.node
    rig.network.mute(near, far)
    pair.near.send_note(far, b"unheard")
    pair.far.send_note(near, b"heard")
    await pair.there.send(b"later")
    await pair.back.send(b"now")
    assert await pair.near.receive_note() == (far, b"heard")
    assert await pair.there.receive() == b"now"
    with trio.move_on_after(1) as scope:
        await pair.back.receive()
    assert scope.cancelled_caught
    rig.network.heal(near, far)
    assert await pair.back.receive() == b"later"
    pair.near.send_note(far, b"again")
    assert await pair.far.receive_note() == (near, b"again")


@on_mock_clock
async def test_a_mute_node_is_lost_to_the_one_and_cannot_be_dialled(rig: MemoryRig) -> None:
    pair = await linked(rig)
    rig.network.mute(pair.near.node, pair.far.node)
    await trio.sleep(4)
    assert "no heartbeat" in pair.back.lost_reason()
    with pytest.raises(LinkLost, match="no answer"):
        await pair.far.dial(rig.network.address(pair.near.node))


@on_mock_clock
async def test_a_share_of_datagrams_is_lost_and_long_ones_cannot_go(rig: MemoryRig) -> None:
    pair = await linked(rig)
    weather = rig.network.between(pair.near.node, pair.far.node)
    weather.loss = 0.5
    heard = []
    for number in range(100):
        assert pair.near.send_note(pair.far.node, bytes([number]))
        with trio.move_on_after(0.01):
            heard.append((await pair.far.receive_note())[1][0])
    assert 30 < len(heard) < 70
    weather.datagram_bytes = 1000
    assert not pair.near.send_note(pair.far.node, bytes(1000))


def test_the_same_seed_loses_the_same_datagrams() -> None:
    one, other = NodeId("aa" * 32), NodeId("bb" * 32)
    lost = []
    for seed in (1, 1, 2):
        weather = MemoryNetwork(seed).between(one, other)
        weather.loss = 0.3
        lost.append([weather.loses(one) for _ in range(50)])
    assert lost[0] == lost[1] != lost[2]
    assert 5 < sum(lost[0]) < 25
