"""Plans: as good as trying everything, whatever the order, and refusals with arithmetic."""

import itertools
from fractions import Fraction
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lensemble.errors import ConfigError, PlanInfeasible
from lensemble.ids import NodeId
from lensemble.model_facts import tensors_for
from lensemble_coord.inference import placement, split
from lensemble_coord.inference.chain import (
    COORDINATOR,
    NEUTRAL,
    Link,
    Links,
    Offer,
    Segment,
    Task,
    have_bytes,
)
from lensemble_coord.inference.footprint import RESERVE_BYTES, Footprint, Wanted
from tests.coord.planning import model, offer

WANTED = Wanted(ctx=1024, sessions=2)


def task(layers: int = 6, hidden: int = 256, *, tied: bool = False, text: str = "") -> Task:
    facts, tensors = model(layers, hidden, tied=tied, vocabulary=2000)
    segments = split.parse(text, layers, [offer(i, 1) for i in range(8)]) if text else ()
    return Task(facts, tensors, WANTED, segments)


def required(what: Task, first: int, last: int, weights: str = "float32") -> int:
    return Footprint(what.facts, what.tensors, what.wanted, weights).need(first, last).required


# ---- memory ----


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("weights", ["float32", "quantised"])
def test_weights_are_counted_as_they_lie_in_memory(tied: bool, weights: str) -> None:
    what = task(tied=tied)
    footprint = Footprint(what.facts, what.tensors, what.wanted, weights)
    for first, last in itertools.combinations(range(7), 2):
        parts = tensors_for(what.facts, what.tensors, first, last)
        assert footprint.need(first, last).weights == sum(each.nbytes for each in parts)
    ends = footprint.need(0, 3).weights + footprint.need(3, 6).weights
    twice = 4 * 256 * 2000 if tied else 0
    assert ends == footprint.need(0, 6).weights + twice, "a tied head lies on both ends"


def test_the_cache_grows_with_context_sessions_and_layers() -> None:
    facts, tensors = model(6, 256)
    base = Footprint(facts, tensors, Wanted(1024, 1), "float32").need(1, 3).cache
    assert base == 2 * (1024 + 32) * 2 * 2 * 64 * 4
    assert Footprint(facts, tensors, Wanted(1024, 3), "float32").need(1, 3).cache == 3 * base
    assert Footprint(facts, tensors, Wanted(1024, 1), "float32").need(1, 5).cache == 2 * base


# ---- against trying everything ----


def brute(what: Task, offers: list[Offer], links: Links) -> tuple[int, int] | None:
    """Least (stages, link time) over all orders of all nodes and all cuts."""
    layers = what.facts.layers
    best = None
    for count in range(1, len(offers) + 1):
        for chain in itertools.permutations(offers, count):
            for inner in itertools.combinations(range(1, layers), count - 1):
                cuts = (0, *inner, layers)
                if all(
                    required(what, cuts[at], cuts[at + 1], each.inventory.weights)
                    <= have_bytes(each.inventory)
                    for at, each in enumerate(chain)
                    if each.inventory
                ):
                    found = (count, _time(what, [each.node for each in chain], links))
                    best = found if best is None else min(best, found)
        if best is not None:
            return best
    return None


def _time(what: Task, chain: list[NodeId], links: Links) -> int:
    total = 0
    for at, (a, b) in enumerate(itertools.pairwise([COORDINATOR, *chain, COORDINATOR])):
        link = links.get((a, b)) or links.get((b, a)) or NEUTRAL
        wide = 0 < at < len(chain)
        nbytes = 64 + (4 * what.facts.hidden if wide else 0)
        total += link.rtt_ns // 2 + nbytes * 10**9 // link.bytes_per_s
    return total


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[Offer], Links]:
    what = task(hidden=1024)
    layer = required(what, 1, 3) - required(what, 1, 2)
    least = required(what, 1, 2) - layer
    sizes = draw(st.lists(st.integers(0, 16), min_size=1, max_size=4))
    kinds = st.sampled_from(["float32", "quantised"])
    offers = [
        offer(index, least + layer * size // 2, weights=draw(kinds))
        for index, size in enumerate(sizes)
    ]
    places = [COORDINATOR, *(each.node for each in offers)]
    links = {
        pair: Link(draw(st.integers(0, 5)) * 1_000_000, draw(st.sampled_from([10**6, 10**8])))
        for pair in itertools.permutations(places, 2)
        if draw(st.booleans())
    }
    return offers, links


@given(worlds())
@settings(max_examples=60)
def test_a_plan_is_as_good_as_trying_everything(world: tuple[list[Offer], Links]) -> None:
    offers, links = world
    what = task(hidden=1024)
    wanted = brute(what, offers, links)
    try:
        found = placement.plan(what, offers, links)
    except PlanInfeasible as refused:
        assert wanted is None
        _check_refusal(refused, what, offers, links)
        return
    assert wanted == (len(found.stages), found.link_ns)
    assert found.exhaustive
    _check_plan(found, what, offers)
    assert found.link_ns == _time(what, [stage.node for stage in found.stages], links)


def _check_plan(found: placement.Plan, what: Task, offers: list[Offer]) -> None:
    reached = 0
    for stage in found.stages:
        assert (stage.first, stage.last > stage.first) == (reached, True)
        assert stage.required_bytes <= stage.have_bytes
        reached = stage.last
    assert reached == what.facts.layers
    named = [stage.node for stage in found.stages] + [each.node for each in found.unused]
    assert sorted(named) == sorted(each.node for each in offers)
    assert all(each.reason for each in found.unused)


def _check_refusal(refused: PlanInfeasible, what: Task, offers: list[Offer], links: Links) -> None:
    largest = refused.detail["largest_ctx"]
    assert isinstance(largest, int)
    assert len(refused.detail["nodes"]) == len(offers)  # type: ignore[arg-type]  # JSON
    if largest:
        assert f"ctx that fits is {largest}" in refused.message
        smaller = Task(what.facts, what.tensors, Wanted(largest, what.wanted.sessions))
        placement.plan(smaller, offers, links)
    more = Task(what.facts, what.tensors, Wanted(largest + 1, what.wanted.sessions))
    with pytest.raises(PlanInfeasible):
        placement.plan(more, offers, links)


@given(worlds(), st.randoms(use_true_random=False))
def test_shuffled_the_plan_is_byte_for_byte_the_same(
    world: tuple[list[Offer], Links], random: Random
) -> None:
    offers, links = world
    what = task(hidden=1024)

    def outcome() -> bytes:
        try:
            return placement.plan(what, offers, links).canonical()
        except PlanInfeasible as refused:
            return repr((refused.message, refused.remediation, refused.detail)).encode()

    first = outcome()
    random.shuffle(offers)
    pairs = list(links.items())
    random.shuffle(pairs)
    # A link of which one direction is known stands for both.
    links = {(pair if pair[::-1] in links else pair[::-1]): link for pair, link in pairs}
    what = Task(what.facts, tuple(reversed(what.tensors)), what.wanted)
    assert outcome() == first


# ---- by example ----


def test_a_model_that_fits_one_node_gets_one() -> None:
    what = task()
    found = placement.plan(what, [offer(index, 1 << 40) for index in range(5)], {})
    assert [(each.name, each.first, each.last) for each in found.stages] == [("node0", 0, 6)]
    assert "1 node is enough" in found.unused[0].reason


def test_cuts_level_how_full_equal_nodes_become() -> None:
    what = task(layers=30)
    half = required(what, 0, 20)
    found = placement.plan(what, [offer(index, half) for index in range(2)], {})
    fills = [Fraction(each.required_bytes, each.have_bytes) for each in found.stages]
    layer = Fraction(required(what, 1, 3) - required(what, 1, 2), half)
    assert abs(fills[0] - fills[1]) <= 2 * layer


def test_what_stages_take_already_is_not_there() -> None:
    what = task()
    need = required(what, 0, 6)
    placement.plan(what, [offer(0, need + 1000, taken=1000)], {})
    with pytest.raises(PlanInfeasible):
        placement.plan(what, [offer(0, need + 1000, taken=1001)], {})


def test_near_nodes_win() -> None:
    what = task()
    offers = [
        offer(index, required(what, 0, 6) * 6 // 10 + RESERVE_BYTES // 2) for index in range(4)
    ]
    near = {offers[3].node, offers[1].node}
    places = [COORDINATOR, *(each.node for each in offers)]
    links = {
        (a, b): Link(100_000 if {a, b} <= near | {COORDINATOR} else 40_000_000)
        for a, b in itertools.combinations(places, 2)
    }
    found = placement.plan(what, offers, links)
    assert {stage.node for stage in found.stages} <= near


def test_stages_have_one_engine() -> None:
    what = task(layers=8)
    part = required(what, 0, 5)
    offers = [offer(0, part), offer(1, part, engine="tinygrad 0.15"), offer(2, part)]
    found = placement.plan(what, offers, {})
    assert [each.name for each in found.stages] == ["node0", "node2"]
    assert found.unused[0].reason == "its engine is tinygrad 0.15, the plan's tinygrad 0.14.0"
    with pytest.raises(PlanInfeasible):
        placement.plan(what, offers[:2], {})


def test_nodes_that_offer_nothing_say_why() -> None:
    what = task()
    silent = Offer(NodeId("9" * 64), "silent")
    found = placement.plan(what, [offer(0, 1 << 40), silent, offer(1, 0)], {})
    assert [each.reason for each in found.unused] == [
        "it hosts no stages",
        "it has not said what it can hold",
    ]
    for nobody in ([], [silent], [offer(1, 0)]):
        with pytest.raises(PlanInfeasible, match=r"no node is here|silent:|node1:"):
            placement.plan(what, nobody, {})


def test_a_refusal_names_need_and_have_of_each_node() -> None:
    what = task()
    offers = [offer(index, 100_000_000) for index in range(12)]
    with pytest.raises(PlanInfeasible) as raised:
        placement.plan(what, offers, {})
    message = raised.value.message
    assert "node0 needs" in message
    assert "has 100.0 MB" in message
    assert "and 4 more" in message
    assert "no ctx fits" in message
    (row, *_) = raised.value.detail["nodes"]  # type: ignore[misc]  # JSON
    assert (row["need_bytes"], row["have_bytes"]) == (required(what, 0, 6), 100_000_000)


@pytest.mark.parametrize("wanted", [Wanted(1 << 18), Wanted(0), Wanted(9, 0), Wanted(9, 1, 0)])
def test_what_cannot_be_wanted_is_refused(wanted: Wanted) -> None:
    what = task()
    with pytest.raises(PlanInfeasible, match=r"ctx|sessions|rows"):
        placement.plan(Task(what.facts, what.tensors, wanted), [offer(0, 1 << 50)], {})


# ---- by hand ----


def test_a_split_by_hand_is_followed() -> None:
    offers = [offer(index, 1 << 34) for index in range(8)]
    found = placement.plan(task(text="0:1,1:4@node5,4:6"), offers, {})
    assert [(each.first, each.last) for each in found.stages] == [(0, 1), (1, 4), (4, 6)]
    assert found.stages[1].name == "node5"
    assert len({each.node for each in found.stages}) == 3
    assert found.unused[0].reason == "the split by hand leaves it out"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not FIRST:LAST"),
        ("0:6,", "is not FIRST:LAST"),
        ("0-6", "is not FIRST:LAST"),
        ("0:²", "is not FIRST:LAST"),
        ("0:3,4:6", "leaves out layers 3:4"),
        ("1:6", "leaves out layers 0:1"),
        ("0:3,2:6", "2:6 overlaps"),
        ("0:3,3:3,3:6", "no layers"),
        ("0:5", "ends at layer 5, the model at 6"),
        ("0:7", "ends at layer 7"),
        ("0:3@north,3:6", "no node 'north'"),
        ("0:3@node1,3:6@node1", "node1 twice"),
        ("0:6@0", "is 8 nodes"),
        ("0:6@" + "0" * 63 + "9", "no node"),
        (",".join(["0:1"] * 65), "65 segments"),
    ],
)
def test_a_wrong_split_is_refused_by_name(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        split.parse(text, 6, [offer(index, 1) for index in range(8)])


def test_the_start_of_an_id_names_a_node() -> None:
    offers = [Offer(NodeId(f"{index}{'0' * 63}"), "") for index in range(3)]
    assert split.parse("0:6@2", 6, offers) == (Segment(0, 6, offers[2].node),)


def test_a_split_that_does_not_fit_names_the_segment() -> None:
    offers = [offer(0, 1 << 34), offer(1, 1 << 20), offer(2, 1 << 20)]
    for text, said in (("0:3,3:6@node1", "layers 3:6 fit"), ("0:3@node0,3:6", "share a node")):
        with pytest.raises(PlanInfeasible, match=said):
            placement.plan(task(text=text), offers, {})


def test_large_plans_are_made_in_a_moment() -> None:
    """16 nodes of all sizes, 80 layers; the bound on steps is what keeps the time."""
    facts, tensors = model(80, 1024, vocabulary=32_000)
    what = Task(facts, tensors, Wanted(4096, 2))
    whole = required(what, 0, 80)
    offers = [offer(index, whole * (20 + index * 7 % 16) // 100) for index in range(16)]
    places = [COORDINATOR, *(each.node for each in offers)]
    links = {
        pair: Link(1_000_000 * (1 + at * 37 % 50), 10**7 * (1 + at * 11 % 13))
        for at, pair in enumerate(itertools.combinations(places, 2))
    }
    _check_plan(placement.plan(what, offers, links), what, offers)


def test_a_tight_fit_of_many_nodes_is_found() -> None:
    """15 of 16 nodes are needed; without bounds on the rest of a chain no search gets there."""
    facts, tensors = model(80, 1024, vocabulary=32_000)
    what = Task(facts, tensors, Wanted(4096, 2))
    whole = required(what, 0, 80)
    random = Random(3)
    offers = [offer(index, int(whole * 0.12 * random.uniform(0.8, 1.1))) for index in range(16)]
    found = placement.plan(what, offers, {})
    assert len(found.stages) == 15
    _check_plan(found, what, offers)
