"""What the planner is told of links, and what a plan tells of them."""

from functools import partial
from pathlib import Path

from msgspec.structs import replace

from lensemble.ids import NodeId
from lensemble.transport.driver import LinkFacts
from lensemble_coord.drains import Drains
from lensemble_coord.inference import placement
from lensemble_coord.inference.chain import COORDINATOR, Link, Task
from lensemble_coord.inference.footprint import Wanted
from lensemble_coord.inference.places import Places
from lensemble_coord.peers import Peer, Peers
from tests.coord import planning

MS = 1_000_000
SOME_LAYERS = 148_000_000
"""Enough for half of the toy model, and not for all of it."""


def node(number: int) -> NodeId:
    return NodeId(f"{number:064x}")


def facts(rtt_ms: float | None) -> LinkFacts:
    return LinkFacts("direct", "", rtt_ms, 0, 0)


async def board(said: dict[int, dict[int, int]]) -> Peers:
    """Nodes by number, with the microseconds that each says it is away from others."""
    peers = Peers()
    for number, others in said.items():
        rtt_ms = None if number == 3 else 2.0
        peer = Peer(node(number), f"n{number}", 1, lambda order: None, partial(facts, rtt_ms))
        offered = planning.offer(number, 1 << 30).inventory
        assert offered is not None
        linked, rtts_us = tuple(map(node, others)), tuple(others.values())
        peer.inventory = replace(offered, linked=linked, rtts_us=rtts_us)
        peers.arrive(peer)
    return peers


async def test_links_are_those_that_either_end_has_measured_and_the_shorter_counts(
    tmp_path: Path,
) -> None:
    peers = await board({1: {2: 30_000, 3: 5_040, 9: 1}, 2: {1: 20_000}, 3: {}})
    assert Places(peers, Drains(tmp_path))._links() == {
        (COORDINATOR, node(1)): Link(2 * MS),
        (COORDINATOR, node(2)): Link(2 * MS),
        (node(1), node(2)): Link(20 * MS),
        (node(1), node(3)): Link(5 * MS),
    }


async def test_a_node_that_has_not_measured_its_links_says_nothing_of_them(tmp_path: Path) -> None:
    peers = await board({1: {}, 2: {}})
    assert set(Places(peers, Drains(tmp_path))._links()) == {
        (COORDINATOR, node(1)),
        (COORDINATOR, node(2)),
    }


def test_the_nearer_pair_is_taken_and_the_plan_tells_what_was_measured() -> None:
    model, tensors = planning.model()
    task = Task(model, tensors, Wanted(ctx=64, sessions=1, rows=8))
    offers = [planning.offer(number, SOME_LAYERS) for number in (1, 2, 3)]
    near = {(node(1), node(3)): Link(2 * MS), (node(1), node(2)): Link(80 * MS)}
    near |= {(node(2), node(3)): Link(80 * MS), (COORDINATOR, node(1)): Link(3 * MS)}
    plan = placement.plan(task, offers, near)
    assert {stage.node for stage in plan.stages} == {node(1), node(3)}
    assert len(plan.hops) == 3
    rtts = {(hop.before, hop.after): hop.rtt_ns for hop in plan.hops}
    first, last = plan.stages[0].name, plan.stages[-1].name
    assert rtts[first, last] == 2 * MS
    assert sorted((rtts["", first], rtts[last, ""]), key=str) == [3 * MS, None]
