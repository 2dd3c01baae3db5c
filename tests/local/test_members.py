"""Who lives, found out by real daemons in this process: five nodes and their coordinator."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from lensemble_coord.inference.run_rows import Wish
from tests.local.circle import HUB, Circle
from tests.tiny_gguf import write_tiny

DETECTION_S = 45.0
"""Of the profile wan: an interval and its probes to be found out, and twice the suspicion."""


@pytest.fixture
async def circle(
    tmp_path: Path, nursery: trio.Nursery, mock_clock: MockClock
) -> AsyncIterator[Circle]:
    # The tests name the clock too: they run on one that is among their own arguments only.
    made = Circle(tmp_path, nursery, mock_clock)
    yield made
    made.end()


async def test_a_node_that_is_killed_is_dead_to_all_and_no_other_is(
    circle: Circle, mock_clock: MockClock
) -> None:
    await circle.start(5)
    await circle.wait(30)
    assert circle.all_alive(), circle.told()
    assert {row.path for name in circle.nodes for row in circle.rows(name)} == {"direct"}
    circle.kill("n2")
    took = await circle.until(lambda: circle.all_see("n2", "dead"), DETECTION_S)
    assert took > 5
    for name in circle.nodes:
        others = [row for row in circle.rows(name) if row.name != "n2"]
        assert all(row.state == "alive" and row.flaps == 0 for row in others)
    await circle.wait(1)
    assert await circle.events("member.suspect") == ["n2"]
    assert await circle.events("member.dead") == ["n2"]


async def test_a_cut_in_one_direction_between_two_nodes_is_no_death(
    circle: Circle, mock_clock: MockClock
) -> None:
    await circle.start(5)
    await circle.wait(10)
    circle.network.mute(circle.node("n0"), circle.node("n1"))
    for _ in range(120):
        await circle.wait(1)
        assert circle.all_alive(), circle.told()
    assert circle.view("n1", "n0").path == "relayed"
    assert all(row.flaps == 0 for name in circle.nodes for row in circle.rows(name))


async def test_a_node_that_starts_again_supersedes_its_old_self(
    circle: Circle, mock_clock: MockClock
) -> None:
    await circle.start(3)
    await circle.wait(10)
    circle.kill("n1")
    await circle.wait(2.5)
    await circle.begin("n1")
    await circle.until(lambda: len(circle.rows("n1")) == 3 and circle.all_alive(), DETECTION_S)
    await circle.wait(DETECTION_S)
    assert circle.all_alive(), circle.told()
    assert await circle.events("member.dead") == []
    assert circle.view(HUB, "n1").incarnation > 1


async def test_a_dead_node_that_comes_back_lives_again_within_seconds(
    circle: Circle, mock_clock: MockClock
) -> None:
    await circle.start(3)
    circle.kill("n1")
    await circle.until(lambda: circle.all_see("n1", "dead"), DETECTION_S)
    await circle.begin("n1")
    took = await circle.until(lambda: circle.all_see("n1", "alive"), DETECTION_S)
    assert took < 5
    assert await circle.events("member.dead") == ["n1"]


async def test_a_pause_of_three_seconds_is_no_death(circle: Circle, mock_clock: MockClock) -> None:
    await circle.start(5)
    await circle.wait(10)
    circle.isolate("n0")
    await circle.wait(3)
    circle.rejoin("n0")
    await circle.wait(DETECTION_S)
    assert circle.all_alive(), circle.told()
    assert await circle.events("member.dead") == []


async def test_a_cut_of_ten_seconds_is_a_suspicion_that_leaves_nothing(
    circle: Circle, mock_clock: MockClock
) -> None:
    await circle.start(5)
    await circle.wait(10)
    circle.isolate("n0")
    await circle.wait(10)
    assert circle.view(HUB, "n0").state == "suspect"
    circle.rejoin("n0")
    await circle.until(circle.all_alive, 20)
    assert await circle.events("member.dead") == []
    flaps = {row.node: row.flaps for row in circle.rows(HUB)}
    await circle.wait(90)
    assert circle.all_alive(), circle.told()
    assert {row.node: row.flaps for row in circle.rows(HUB)} == flaps
    assert max(flaps.values()) <= 2


async def test_who_goes_away_in_order_has_left_and_is_not_suspected(
    circle: Circle, mock_clock: MockClock
) -> None:
    await circle.start(4)
    await circle.wait(10)
    circle.stop("n3")
    await circle.until(lambda: circle.all_see("n3", "left"), 10)
    await circle.wait(DETECTION_S)
    assert circle.all_see("n3", "left")
    assert await circle.events("member.suspect") == []
    assert await circle.events("member.dead") == []
    await circle.begin("n3")
    await circle.until(lambda: circle.all_see("n3", "alive"), DETECTION_S)


async def test_a_node_that_takes_no_calls_is_reached_by_way_of_the_coordinator(
    circle: Circle, mock_clock: MockClock
) -> None:
    await circle.start(2)
    await circle.begin("n2", direct=False)
    await circle.until(lambda: len(circle.rows("n2")) == len(circle.rows("n0")) == 3)
    await circle.wait(60)
    assert circle.all_alive(), circle.told()
    assert circle.view("n0", "n1").path == "direct"
    assert circle.view("n0", "n2").path == circle.view("n2", "n0").path == "relayed"
    assert circle.view("n2", HUB).path == "direct"
    assert circle.view("n0", "n2").rtt_ms is not None
    assert [link.peer for link in circle.nodes["n2"].member.links.links()] == []
    circle.kill("n2")
    await circle.until(lambda: circle.all_see("n2", "dead"), DETECTION_S)


async def test_nothing_is_placed_on_a_member_in_trouble_and_the_plan_says_why(
    circle: Circle, mock_clock: MockClock, tmp_path: Path
) -> None:
    model = write_tiny(tmp_path / "tiny.gguf", layers=4)
    wish = Wish(model=str(model), ctx=64, rows=8)
    await circle.start(3)
    offered = circle.hub.reception.peers.here
    await circle.until(lambda: all(peer.inventory for peer in offered.values()))

    async def planned() -> tuple[set[str], dict[str, str]]:
        """The nodes that are used, and why each other is not."""
        circle.end()
        _, plan = await circle.hub.orchestrator.plan(wish)
        return {each.name for each in plan.stages}, {each.name: each.reason for each in plan.unused}

    used, unused = await planned()
    (name,) = used
    assert all("1 node is enough" in reason for reason in unused.values())
    circle.network.partition(circle.node(name), circle.node(HUB))
    other = next(iter(unused))
    circle.kill(other)
    await circle.until(lambda: circle.view(HUB, other).state == "suspect")
    used, unused = await planned()
    assert len(used) == 1
    assert unused[name] == "it has no link to the coordinator"
    assert unused[other].startswith("suspect for ")
    assert "no answer to probes" in unused[other]
    await circle.until(lambda: circle.view(HUB, other).state == "dead")
    used, unused = await planned()
    assert unused[other].startswith("dead for ")
    assert circle.view(HUB, name).state == "alive"
    assert circle.view(HUB, name).path == "none"
    assert used.isdisjoint({name, other})


async def test_no_round_counts_on_a_member_that_is_dead_or_has_left(
    circle: Circle, mock_clock: MockClock
) -> None:
    await circle.start(4)
    await circle.wait(10)
    sessions = circle.hub.rounds.sessions

    def agrees(name: str, *states: str) -> bool:
        """Whether a session and the members' view say the same."""
        return (circle.node(name) in sessions) == (circle.view(HUB, name).state not in states)

    circle.kill("n0")
    lost = await circle.until(lambda: circle.node("n0") not in sessions, 10)
    assert circle.view(HUB, "n0").state in {"alive", "suspect"}
    dead = lost + await circle.until(lambda: circle.view(HUB, "n0").state == "dead", DETECTION_S)
    assert lost < 4 < dead
    circle.stop("n1")
    await circle.until(lambda: circle.view(HUB, "n1").state == "left", 10)
    await circle.wait(0.5)
    assert agrees("n0", "dead")
    assert agrees("n1", "left")
    assert set(sessions) == {circle.node("n2"), circle.node("n3")}
    await circle.begin("n0")
    await circle.until(lambda: circle.node("n0") in sessions, 10)
    await circle.wait(1)
    assert agrees("n0", "dead", "suspect")
