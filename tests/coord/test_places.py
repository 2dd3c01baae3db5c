"""What the planner is told of links, and what a plan tells of them."""

import itertools
from functools import partial
from random import Random

import trio
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from trio.testing import MockClock

from lensemble.ids import NodeId
from lensemble.transport.driver import LinkFacts
from lensemble.wire.stages import LINKS_LOOK_S
from lensemble_coord.inference import placement
from lensemble_coord.inference.chain import COORDINATOR, Link, Task
from lensemble_coord.inference.footprint import Wanted
from lensemble_coord.inference.paths import KEPT_S, MAX_KEPT, Path, PathBook, Paths
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


async def test_links_are_those_that_either_end_has_measured_and_the_shorter_counts() -> None:
    peers = await board({1: {2: 30_000, 3: 5_040, 9: 1}, 2: {1: 20_000}, 3: {}})
    assert Paths(peers, PathBook()).links() == {
        (COORDINATOR, node(1)): Link(2 * MS),
        (COORDINATOR, node(2)): Link(2 * MS),
        (node(1), node(2)): Link(20 * MS),
        (node(1), node(3)): Link(5 * MS),
    }


async def test_a_node_that_has_not_measured_its_links_says_nothing_of_them() -> None:
    peers = await board({1: {}, 2: {}})
    assert set(Paths(peers, PathBook()).links()) == {
        (COORDINATOR, node(1)),
        (COORDINATOR, node(2)),
    }


async def test_a_rate_is_of_its_direction_and_of_the_other_where_nothing_else_is_known() -> None:
    peers, book = await board({1: {2: 20_000}, 2: {}, 3: {}}), PathBook()
    book.measured((node(2), node(1)), 1_234_567, None)
    book.measured((node(3), node(1)), 500_000, 7 * MS)
    book.measured((node(3), node(9)), 400_000, 7 * MS)
    book.seen((COORDINATOR, node(3)), 9_990_000)
    links = Paths(peers, book).links()
    assert links[node(1), node(2)] == Link(20 * MS, 1_200_000, "measured")
    assert links[node(1), node(3)] == Link(7 * MS, 500_000, "measured")
    assert links[COORDINATOR, node(3)] == Link(1 * MS, 10_000_000, "seen", timed=False)
    assert not any(node(9) in pair for pair in links), "it is not here"
    book.measured((node(1), node(2)), 40_000_000, 3 * MS)
    links = Paths(peers, book).links()
    assert links[node(1), node(2)] == Link(20 * MS, 40_000_000, "measured"), "its end knows better"
    assert links[node(2), node(1)] == Link(20 * MS, 1_200_000, "measured")


async def test_what_was_seen_is_a_lower_bound(autojump_clock: MockClock) -> None:
    book, pair = PathBook(), (node(1), node(2))
    book.seen(pair, 700)
    book.seen(pair, 600)
    assert book.rates()[pair].bytes_per_s == 600, "of two that were seen the later one"
    book.measured(pair, 1000, None)
    book.seen(pair, 900)
    assert (book.rates()[pair].bytes_per_s, book.rates()[pair].how) == (1000, "measured")
    book.seen(pair, 1100)
    assert (book.rates()[pair].bytes_per_s, book.rates()[pair].how) == (1100, "seen")
    await trio.sleep(KEPT_S + 1)
    assert not book.rates()


async def test_every_figure_is_told_with_its_age(autojump_clock: MockClock) -> None:
    peers, book = await board({1: {2: 20_000}, 2: {}, 3: {}}), PathBook()
    book.measured((node(1), node(3)), 500_000, 7 * MS)
    await trio.sleep(4)
    ring = Paths(peers, book).of((node(2), node(1), node(3)))
    assumed = Link(0).bytes_per_s
    assert ring == (
        Path(assumed, "assumed", None, 2 * MS, 0.0),
        Path(assumed, "assumed", None, 20 * MS, 4.0),
        Path(500_000, "measured", 4.0, 7 * MS, 4.0),
        Path(assumed, "assumed", None, None, None),
    )
    await trio.sleep(100)
    (_, second, third, _) = Paths(peers, book).of((node(2), node(1), node(3)))
    assert second.rtt_age_s == LINKS_LOOK_S, "its end would have said if that had changed"
    assert (third.age_s, third.rtt_age_s) == (104.0, 104.0)


async def test_no_more_pairs_are_kept_than_there_may_be() -> None:
    book = PathBook()
    for number in range(MAX_KEPT + 3):
        book.measured((node(number), node(number + 1)), 5, 1)
    assert len(book.rates()) == len(book.trips()) == MAX_KEPT
    assert (node(2), node(3)) not in book.rates()


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


def test_a_slow_link_is_avoided_and_the_plan_tells_how_its_rates_are_known() -> None:
    model, tensors = planning.model()
    task = Task(model, tensors, Wanted(ctx=64, sessions=1, rows=8))
    offers = [planning.offer(number, SOME_LAYERS) for number in (1, 2, 3)]
    links = {
        (node(1), node(2)): Link(1 * MS, 12_000, "measured"),
        (node(1), node(3)): Link(1 * MS, 12_000_000, "measured"),
        (node(2), node(3)): Link(1 * MS, 12_000, "measured"),
        (COORDINATOR, node(1)): Link(1 * MS, 5_000_000, "seen"),
    }
    plan = placement.plan(task, offers, links)
    assert {stage.node for stage in plan.stages} == {node(1), node(3)}
    first, last = (stage.name for stage in plan.stages)
    told = {(hop.before, hop.after): (hop.how, hop.bytes_per_s) for hop in plan.hops}
    assert told[first, last] == ("measured", 12_000_000)
    assert sorted((told["", first], told[last, ""])) == [
        ("assumed", 125_000_000),
        ("seen", 5_000_000),
    ]
    wide = 64 + 4 * 8 * model.hidden
    ends = sum((64 + more) * 10**9 // told[pair][1] for more, pair in (
        (28, ("", first)), (0, (last, "")),
    ))  # fmt: skip
    assert plan.chunk_ns == 3 * MS // 2 + wide * 10**9 // 12_000_000 + ends


def test_a_link_that_is_slow_one_way_only_is_taken_the_other_way() -> None:
    model, tensors = planning.model()
    task = Task(model, tensors, Wanted(ctx=64, sessions=1, rows=8))
    offers = [planning.offer(number, SOME_LAYERS) for number in (1, 2)]
    for up, down in ((1, 2), (2, 1)):
        links = {
            (node(up), node(down)): Link(1 * MS, 1_000_000, "measured"),
            (node(down), node(up)): Link(1 * MS, 9_000_000, "measured"),
        }
        plan = placement.plan(task, offers, links)
        assert [stage.node for stage in plan.stages] == [node(down), node(up)]


@given(st.permutations((1, 2, 3)), st.randoms())
def test_equal_inputs_give_equal_bytes_in_whatever_order(order: list[int], chance: Random) -> None:
    model, tensors = planning.model()
    task = Task(model, tensors, Wanted(ctx=64, sessions=1, rows=8))
    links = [
        ((node(a), node(b)), Link(a * MS, 1_000_000 * b, "measured"))
        for a, b in itertools.permutations((1, 2, 3), 2)
    ]
    wanted = placement.plan(
        task, [planning.offer(number, SOME_LAYERS) for number in (1, 2, 3)], dict(links)
    ).canonical()
    chance.shuffle(links)
    offers = [planning.offer(number, SOME_LAYERS) for number in order]
    assert placement.plan(task, offers, dict(links)).canonical() == wanted
