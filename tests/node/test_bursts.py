"""Bursts that measure a link: what is timed, and everything that is refused."""

from collections import Counter
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from lensemble.edge.spec import EdgeSpec
from lensemble.ids import EdgeId, NodeId
from lensemble.transport.memory_driver import MemoryNetwork
from lensemble.wire import stages
from lensemble_node import bursts
from lensemble_node.bursts import Bursts
from lensemble_node.peer_links import LINGER_S, PeerLinks

A, B, C = (NodeId(f"{index:02x}" * 32) for index in (1, 2, 3))
FENCE: dict[str, Any] = {"federation": "f" * 32, "epoch": 4}
MBIT = 125_000


class Place:
    """One node, as far as measuring goes; ``said`` is what it would tell its coordinator."""

    def __init__(self, network: MemoryNetwork, node: NodeId, members: set[NodeId]) -> None:
        self.driver = network.driver(node)
        self.refused: Counter[str] = Counter()
        self.links = PeerLinks(self.driver, self.refused)
        self.members = members
        self.busy = ""
        self.in_use: set[EdgeId] = set()
        self.said: list[stages.BurstAnswer] = []
        self.news = trio.Event()
        ground = bursts.Ground(
            self.driver,
            self.links,
            lambda other: other in self.members,
            lambda: self.busy,
            lambda: self.in_use,
            self.refused,
        )
        self.bursts = Bursts(ground, self._tell)

    async def _tell(self, message: stages.BurstAnswer) -> None:
        self.said.append(message)
        self.news.set()
        self.news = trio.Event()

    async def next(self) -> Any:
        with trio.fail_after(60):
            while not self.said:
                await self.news.wait()
        return self.said.pop(0)

    async def refusal(self) -> str:
        answer = await self.next()
        assert isinstance(answer, stages.BurstRefused), answer
        return answer.reason


class World:
    def __init__(self, nursery: trio.Nursery) -> None:
        self.network = MemoryNetwork()
        self.nursery = nursery
        self.places: dict[NodeId, Place] = {}
        self._number = 0

    async def begin(self) -> None:
        for node in (A, B, C):
            place = self.places[node] = Place(self.network, node, {A, B, C} - {node})
            await self.nursery.start(place.driver.run)
            await self.nursery.start(place.links.run)
            await self.nursery.start(place.bursts.run)

    def orders(
        self, a: NodeId = A, b: NodeId = B, frame: int = stages.BURST_FRAME_BYTES
    ) -> tuple[stages.BurstExpect, stages.BurstSend]:
        self._number += 1
        spec = EdgeSpec(EdgeId(self._number), a, b, frame, 1)
        terms: dict[str, Any] = {**FENCE, "burst": self._number, "edge": spec}
        near, far = (
            stages.Address(node=each, addresses=self.network.address(each).addresses)
            for each in (a, b)
        )
        return stages.BurstExpect(**terms, far=near), stages.BurstSend(**terms, far=far)

    async def measure(self, a: NodeId = A, b: NodeId = B) -> Any:
        """The last word of ``b`` on a burst from ``a``."""
        expect, send = self.orders(a, b)
        self.places[b].bursts.take(expect)
        ready = await self.places[b].next()
        if not isinstance(ready, stages.BurstReady):
            return ready
        assert (ready.federation, ready.epoch, ready.burst) == ("f" * 32, 4, expect.burst)
        self.places[a].bursts.take(send)
        return await self.places[b].next()


@pytest.fixture
async def world(nursery: trio.Nursery) -> World:
    made = World(nursery)
    await made.begin()
    return made


def mbit_s(taken: stages.BurstTaken) -> float:
    return taken.landed_bytes / max(1, taken.microseconds) * 8


@pytest.mark.parametrize("rate", [10, 100, 1000])
async def test_a_burst_is_timed_at_the_rate_of_its_path(
    world: World, rate: int, autojump_clock: MockClock
) -> None:
    weather = world.network.between(A, B)
    weather.bytes_per_s, weather.delay_s = rate * MBIT, 0.02
    taken = await world.measure()
    assert taken.landed_bytes == stages.MAX_BURST_BYTES
    assert mbit_s(taken) == pytest.approx(rate, rel=0.02), "the way there is not in it"
    assert taken.rtt_us == 40_000
    assert not world.places[A].said, "who sent says nothing when all went well"


async def test_a_path_too_slow_for_a_burst_is_measured_by_what_came_in_time(
    world: World, autojump_clock: MockClock
) -> None:
    world.network.between(A, B).bytes_per_s = MBIT
    began = trio.current_time()
    taken = await world.measure()
    assert taken.landed_bytes < stages.MAX_BURST_BYTES / 4
    assert 0.9 <= mbit_s(taken) <= 1.0
    assert trio.current_time() - began < 2 * stages.BURST_S
    world.network.between(B, C).bytes_per_s = 1000
    taken = await world.measure(B, C)
    assert (taken.landed_bytes, taken.microseconds) == (0, 2_000_000), "not even one chunk"


async def test_a_pair_rests_in_both_directions_and_other_pairs_do_not(
    world: World, autojump_clock: MockClock
) -> None:
    assert isinstance(await world.measure(A, B), stages.BurstTaken)
    await trio.sleep(9)
    for pair in ((A, B), (B, A)):
        refused = await world.measure(*pair)
        assert refused.reason.startswith("measured 9 s ago")
    # Who is to send refuses as well, whatever the other one does.
    world.places[A].bursts.take(world.orders(A, B)[1])
    assert "measured 9 s ago" in await world.places[A].refusal()
    assert isinstance(await world.measure(B, C), stages.BurstTaken)
    await trio.sleep(stages.BURST_REST_S)
    assert isinstance(await world.measure(B, A), stages.BurstTaken)


async def test_nothing_is_measured_beside_a_stage_or_a_round(
    world: World, autojump_clock: MockClock
) -> None:
    world.places[B].busy = "a stage is live on this node"
    assert (await world.measure()).reason == "a stage is live on this node"
    world.places[A].bursts.take(world.orders(B, A)[0])
    assert isinstance(await world.places[A].next(), stages.BurstReady), "A is free"
    world.places[B].bursts.take(world.orders(B, A)[1])
    assert await world.places[B].refusal() == "a stage is live on this node"


@pytest.mark.parametrize("which", [A, B])
async def test_a_burst_is_broken_off_when_somebody_is_to_be_served(
    world: World, which: NodeId, autojump_clock: MockClock
) -> None:
    world.network.between(A, B).bytes_per_s = MBIT
    expect, send = world.orders()
    world.places[B].bursts.take(expect)
    await world.places[B].next()
    world.places[A].bursts.take(send)
    await trio.sleep(0.5)
    began, world.places[which].busy = trio.current_time(), "it is in a round"
    if which == B:
        assert await world.places[B].refusal() == "broken off: it is in a round"
        assert trio.current_time() - began < 0.3, "with the next chunk"
    else:
        # All of it is with the transport already; what is under way ends with its time.
        taken = await world.places[B].next()
        assert taken.microseconds <= 1e6 * stages.BURST_S
    world.places[which].busy = ""
    await trio.sleep(LINGER_S)
    assert (await world.measure()).reason.startswith("measured")


async def test_nobody_measures_towards_one_who_is_no_member(
    world: World, autojump_clock: MockClock
) -> None:
    world.places[A].members.discard(B)
    world.places[B].members.discard(A)
    assert "is no member" in (await world.measure()).reason
    world.places[A].bursts.take(world.orders()[1])
    assert "is no member" in await world.places[A].refusal()
    await trio.sleep(1)
    assert not world.places[A].driver.links(), "nobody was dialled"


async def test_one_measurement_at_a_time(world: World, autojump_clock: MockClock) -> None:
    first, _ = world.orders(A, B)
    second, _ = world.orders(C, B)
    for order in (first, second):
        world.places[B].bursts.take(order)
    answers = [await world.places[B].next() for _ in range(2)]
    told = {type(each): each for each in answers}
    assert told[stages.BurstRefused].reason == "another measurement is under way here"
    assert told[stages.BurstReady].burst == first.burst
    assert (await world.places[B].refusal()).startswith("nothing came of it within")
    assert isinstance(await world.measure(C, B), stages.BurstTaken), "it is free again"


async def test_edges_that_are_none_for_a_burst_are_refused(
    world: World, autojump_clock: MockClock
) -> None:
    big, _ = world.orders(frame=1 << 20)
    swapped, foreign = world.orders(B, A)[1], world.orders(A, C)[0]
    world.places[B].in_use.add(EdgeId(4))
    used, _ = world.orders()
    for order, wanted in (
        (big, "is not one for a burst"),
        (stages.BurstExpect(**FENCE, burst=1, edge=swapped.edge, far=swapped.far), "is not one"),
        (foreign, "is not one for a burst"),
        (used, "edge 4 ends here already"),
    ):
        world.places[B].bursts.take(order)
        assert wanted in await world.places[B].refusal()


async def test_who_cannot_be_reached_is_named_and_the_link_is_given_back(
    world: World, autojump_clock: MockClock
) -> None:
    world.network.vanish(B)
    world.places[A].bursts.take(world.orders()[1])
    assert "has no link to" in await world.places[A].refusal()
    assert isinstance(await world.measure(A, C), stages.BurstTaken)
    assert world.places[A].links.links()
    await trio.sleep(2 * LINGER_S)
    assert not world.places[A].links.links(), "kept for nobody"


async def test_a_burst_ends_with_its_session_without_a_word(
    world: World, autojump_clock: MockClock
) -> None:
    world.places[B].bursts.take(world.orders()[0])
    assert isinstance(await world.places[B].next(), stages.BurstReady)
    world.places[B].bursts.end()
    await trio.sleep(60)
    assert not world.places[B].said
    assert isinstance(await world.measure(), stages.BurstTaken)
