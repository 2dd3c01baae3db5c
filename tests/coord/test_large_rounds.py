"""What one word of one node costs the round machine does not grow with the nodes of the round."""

import gc
import sys
from collections import Counter
from types import FrameType

import pytest

from lensemble.ids import NodeId
from lensemble_coord.training import outer_round as r
from tests.coord import round_play as play

FEW, MANY = 20, 400


def nodes(count: int) -> list[NodeId]:
    return [NodeId(f"{number:064x}") for number in range(count)]


def calls(state: r.State, event: r.Event) -> tuple[r.State, Counter[str]]:
    """The next state, and how often which of our functions was called for it."""
    called: Counter[str] = Counter()

    def count(frame: FrameType, kind: str, _: object) -> None:
        if kind == "call" and "lensemble_coord" in frame.f_code.co_filename:
            called[frame.f_code.co_name] += 1

    sys.setprofile(count)
    try:
        after, _ = r.transition(state, event)
    finally:
        sys.setprofile(None)
    return after, called


def words_of_all(count: int, masked: bool) -> dict[str, Counter[str]]:
    """What the word of a node in the middle costs, by its kind, in one whole round."""
    names = nodes(count)
    rules = {"masked": True, "threshold": count // 2 + 1} if masked else {}
    state: r.State = play.closed(*names, quorum=count, **rules)
    state, _ = r.transition(state, r.RoundsAsked(1))
    found: dict[str, Counter[str]] = {}
    kinds = [play.committed, play.announced, play.arrived]
    if masked:
        kinds = [play.committed, play.shares, play.announced, play.arrived, play.unmasks]
    for kind in kinds:
        for number, name in enumerate(names):
            state, called = calls(state, kind(name))
            if number == count // 2:
                found[kind.__name__] = called
        if kind is play.committed and masked:
            assert isinstance(state, r.Sharing)
    assert isinstance(state, r.Aggregating)
    return found


@pytest.mark.parametrize("masked", [False, True])
def test_a_word_among_many_makes_as_many_steps_as_one_among_few(masked: bool) -> None:
    few, many = words_of_all(FEW, masked), words_of_all(MANY, masked)
    for kind, called in many.items():
        # A scan for one name is a step for each name, and the only thing that may be.
        assert {**called, "<genexpr>": 0} == {**few[kind], "<genexpr>": 0}, kind
        assert not {"outstanding", "_open_verdict", "_due_to_share"} & called.keys(), kind


def test_progress_of_one_among_many_is_found_without_a_look_at_the_others() -> None:
    costs = []
    for count in (FEW, MANY):
        names = nodes(count)
        state: r.State = play.closed(*names, quorum=count)
        for event in (r.RoundsAsked(1), *map(play.committed, names)):
            state, _ = r.transition(state, event)
        state, called = calls(state, r.Progressed(names[7], 0, 0, "training", 1, 2))
        assert isinstance(state, r.Collecting)
        assert [each.phase for each in state.advances[6:9]] == ["", "training", ""]
        costs.append(called)
    assert costs[0] == costs[1]


def test_who_may_send_is_who_is_outstanding() -> None:
    names = nodes(5)
    state: r.State = play.closed(*names, quorum=3)
    events = [r.RoundsAsked(1), *map(play.committed, names), play.lost(names[1])]
    for event in (*events, play.announced(names[3]), play.arrived(names[3])):
        state, _ = r.transition(state, event)
    assert isinstance(state, r.Collecting)
    for name in (*names, NodeId("f" * 64)):
        assert r.may_send(state, name) == (name in r.outstanding(state))
    assert r.outstanding(state) == {names[0], names[2], names[4]}


def test_what_a_round_keeps_of_each_node_is_no_work_for_the_garbage_collector() -> None:
    names = nodes(3)
    state: r.State = play.closed(*names, quorum=3)
    for event in (r.RoundsAsked(1), *map(play.committed, names), play.announced(names[0])):
        state, _ = r.transition(state, event)
    assert isinstance(state, r.Collecting)
    kept = (*state.expected, *state.announced, *state.advances, play.arrived(names[0]))
    assert not [each for each in kept if gc.is_tracked(each)]
