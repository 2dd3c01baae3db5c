"""A run over its plans: what ends it, what it outlives, and who is left out of the next plan."""

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lensemble.errors import InvalidTransition
from lensemble.ids import NodeId
from lensemble_coord.inference import staging, survival
from lensemble_coord.inference.staging import Ending, Fault

A, B, C, D = (NodeId(letter * 64) for letter in "abcd")
NODES = (A, B, C)
DEAD = Fault("worker_fault", "killed by SIGKILL", 1, stderr=("last words",))
INFEASIBLE = Fault("plan_infeasible", "needs 2 GB, has 1 GB", None, "Add a node.")
FAILS, REPLACES = survival.Rules(), survival.Rules(replaces=True, most=2)


def begun(rules: survival.Rules = REPLACES, epoch: int = 0) -> survival.State:
    return survival.Planning(survival.Ground(rules, epoch))


def play(state: survival.State, *events: survival.Event) -> tuple[survival.State, list[Any]]:
    actions: list[Any] = []
    for event in events:
        state, more = survival.transition(state, event)
        actions = list(more)
    return state, actions


def lost(fault: Fault = DEAD) -> survival.Left:
    return survival.Left(Ending("faulted", fault.reason, fault))


UP = (survival.Planned(NODES), survival.Ready())
CLEARED = survival.Cleared("clean")


def test_a_lost_stage_is_replaced_without_its_node_under_a_new_epoch() -> None:
    state, actions = play(begun(), survival.Planned(NODES))
    assert actions == [survival.Carry(1)]
    assert not survival.takes_requests(state)
    state, _ = play(state, survival.Ready())
    state, actions = play(state, lost())
    assert actions == [survival.Interrupt(DEAD.reason, DEAD)]
    assert survival.takes_requests(state)
    state, actions = play(state, CLEARED)
    assert actions == [survival.Plan(frozenset({B}))]
    state, actions = play(state, survival.Planned((A, D, C)))
    assert actions == [survival.Carry(2)]
    assert survival.takes_requests(state)
    assert survival.ending(state) is None


def test_a_run_that_fails_ends_with_its_first_loss() -> None:
    state, actions = play(begun(FAILS), *UP, lost())
    assert actions == [survival.EndRequests(DEAD)]
    state, actions = play(state, survival.Cleared("timed out", ("no word",)))
    assert actions == [survival.Close()]
    assert isinstance(state, survival.Over)
    assert (state.ending.fault, state.teardown, state.complaints) == (
        DEAD, "timed out", ("no word",),
    )  # fmt: skip


def test_so_many_losses_end_it() -> None:
    state, _ = play(begun(), *UP)
    for _ in range(REPLACES.most):
        state, _ = play(state, lost(), CLEARED, *UP)
    state, actions = play(state, lost())
    assert isinstance(state, survival.Finishing)
    assert "stages were replaced 2 times before" in state.ending.reason
    assert actions == [survival.EndRequests(state.ending.fault)]


def test_nothing_fits_the_nodes_that_are_left() -> None:
    state, actions = play(begun(), *UP, lost(), CLEARED, survival.Unplanned(INFEASIBLE))
    assert isinstance(state, survival.Over)
    fault = state.ending.fault
    assert fault is not None
    assert fault.code == "plan_infeasible"
    assert DEAD.reason in fault.reason
    assert INFEASIBLE.reason in fault.reason
    assert (fault.stderr, fault.remediation) == (DEAD.stderr, INFEASIBLE.remediation)
    assert actions == [survival.EndRequests(fault), survival.Close()]


@pytest.mark.parametrize(
    ("fault", "dropped", "suspects"),
    [
        (DEAD, {B}, set()),
        (Fault("stage_stalled", "stands still", 0), {A}, set()),
        (Fault("stage_stalled", "a result got lost"), set(), set()),
        (Fault("upstream_lost", "reset", 2), set(), {B}),
        (Fault("downstream_lost", "reset", 0), set(), {B}),
        (Fault("unreachable", "nobody answers", 1), set(), {C}),
        (Fault("edge_fault", "torn here", 2), set(), {C}),
        (Fault("downstream_lost", "reset", 2), set(), {C}),
        (Fault("upstream_lost", "reset", 0), set(), {A}),
    ],
)
def test_whom_a_loss_is_laid_to(fault: Fault, dropped: set[NodeId], suspects: set[NodeId]) -> None:
    state, _ = play(begun(), *UP, lost(fault))
    assert isinstance(state, survival.Clearing)
    assert (state.ground.dropped, state.ground.suspects) == (dropped, suspects)
    state, _ = play(state, CLEARED, *UP, lost(fault))
    assert isinstance(state, survival.Clearing)
    assert state.ground.dropped == dropped | suspects


@pytest.mark.parametrize(
    ("fault", "at_first", "later"),
    [
        (DEAD, True, True),
        (Fault("stage_refused", "refused: memory", 1), False, True),
        (Fault("weights_disk_full", "no room", 1), False, True),
        (Fault("storage", "the file is gone"), False, False),
        (Fault("arena_exhausted", "no room for the coordinator's own rings"), False, False),
    ],
)
def test_what_was_never_ready_ends_with_what_another_plan_would_not_help(
    fault: Fault, at_first: bool, later: bool
) -> None:
    for events, replaced in ((UP[:1], at_first), (UP, later)):
        state, _ = play(begun(), *events, lost(fault))
        assert isinstance(state, survival.Clearing) == replaced


def test_a_drained_node_is_left_without_a_fault_and_without_counting() -> None:
    state, _ = play(begun(survival.Rules(replaces=True, most=0)), *UP)
    _, actions = play(state, survival.MoveAsked(D, "drained"))
    assert actions == []
    _, actions = play(state, survival.MoveAsked(B, "drained"))
    assert actions == [survival.Tell(staging.MoveAsked("drained"))]
    state, actions = play(state, survival.Left(Ending("moved", "drained")))
    assert actions == [survival.Interrupt("drained", None)]
    assert state.ground.replaced == 0
    _, actions = play(state, CLEARED)
    assert actions == [survival.Plan(frozenset())]


def test_stop_and_teardown_between_two_plans() -> None:
    between, _ = play(begun(), *UP, lost())
    stopped, actions = play(between, survival.StopAsked("enough"))
    assert actions == [survival.EndRequests(None)]
    over, actions = play(stopped, CLEARED)
    assert actions == [survival.Close()]
    assert survival.ending(over) == Ending("stopped", "enough")
    planning, _ = play(between, CLEARED)
    _, actions = play(planning, survival.DrainAsked("enough", 0))
    assert actions == [survival.EndRequests(None), survival.Close()]
    draining, actions = play(planning, survival.DrainAsked("enough", 2))
    assert actions == []
    assert not survival.takes_requests(draining)
    draining, actions = play(draining, *UP)
    assert actions == [survival.Tell(staging.DrainAsked("enough"))]
    _, actions = play(draining, survival.Left(Ending("completed", "enough")))
    assert actions == [survival.EndRequests(None)]


def test_teardown_waits_for_requests_that_wait_for_the_next_plan() -> None:
    state, _ = play(begun(), *UP, lost(), CLEARED, survival.Planned((A, D, C)))
    _, actions = play(state, survival.DrainAsked("enough", 0))
    assert actions == [survival.Tell(staging.DrainAsked("enough"))]
    state, actions = play(state, survival.DrainAsked("enough", 1))
    assert actions == []
    _, actions = play(state, survival.Ready())
    assert actions == [survival.Tell(staging.DrainAsked("enough"))]


def test_a_run_goes_on_behind_the_epochs_of_an_earlier_process() -> None:
    _, actions = play(begun(epoch=7), survival.Planned(NODES))
    assert actions == [survival.Carry(8)]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InvalidTransition):
        survival.transition(begun(), survival.Ready())
    with pytest.raises(InvalidTransition):
        survival.transition(play(begun(), *UP)[0], survival.Planned(NODES))


FAULTS = st.builds(
    Fault,
    st.sampled_from(("worker_fault", "upstream_lost", "unreachable", "stage_refused", "storage")),
    st.just("why"),
    st.none() | st.integers(0, 2),
)


class SurvivalMachine(RuleBasedStateMachine):
    """However plans end and whoever asks: one outcome, growing epochs, requests told once."""

    def __init__(self) -> None:
        super().__init__()
        self.state: survival.State = begun()
        self.epochs: list[int] = []
        self.ended = self.closed = 0
        self.plan_lives = False

    def feed(self, event: survival.Event) -> None:
        self.state, actions = survival.transition(self.state, event)
        for action in actions:
            match action:
                case survival.Carry(epoch):
                    assert not self.plan_lives, "two plans at a time"
                    self.epochs.append(epoch)
                    self.plan_lives = True
                case survival.EndRequests():
                    self.ended += 1
                case survival.Close():
                    assert not self.plan_lives, "closed while a plan is carried out"
                    self.closed += 1
                case survival.Interrupt():
                    assert self.ended == 0
                case _:
                    pass

    @precondition(lambda self: isinstance(self.state, survival.Planning))
    @rule(nodes=st.permutations((A, B, C, D)), fits=st.booleans())
    def plan(self, nodes: list[NodeId], fits: bool) -> None:
        left = tuple(node for node in nodes if node not in self.state.ground.dropped)[:3]
        self.feed(survival.Planned(left) if fits and left else survival.Unplanned(INFEASIBLE))

    @precondition(lambda self: isinstance(self.state, survival.Carrying))
    @rule()
    def ready(self) -> None:
        self.feed(survival.Ready())

    @precondition(lambda self: isinstance(self.state, survival.Carrying))
    @rule(outcome=st.sampled_from(("completed", "stopped", "moved")), fault=st.none() | FAULTS)
    def leave(self, outcome: staging.Outcome, fault: Fault | None) -> None:
        gone = Ending(outcome, "why") if fault is None else Ending("faulted", "why", fault)
        before = self.state.ground
        self.feed(survival.Left(gone))
        after = self.state.ground
        assert before.dropped <= after.dropped <= before.dropped | set(before.nodes)

    @precondition(lambda self: isinstance(self.state, survival.Clearing | survival.Finishing))
    @rule(teardown=st.sampled_from(("clean", "faulted", "timed out")))
    def clear(self, teardown: staging.Teardown) -> None:
        self.plan_lives = False
        self.feed(survival.Cleared(teardown))

    @rule(
        event=st.sampled_from(
            (
                survival.StopAsked("x"),
                survival.DrainAsked("x", 0),
                survival.DrainAsked("x", 1),
                survival.MoveAsked(A, "x"),
            )
        )
    )
    def ask(self, event: survival.Event) -> None:
        self.feed(event)

    @invariant()
    def holds(self) -> None:
        assert self.epochs == list(range(1, len(self.epochs) + 1))
        assert self.state.ground.replaced <= REPLACES.most
        over = isinstance(self.state, survival.Over)
        assert self.closed == over
        assert self.ended == (over or isinstance(self.state, survival.Finishing))
        assert not (over and survival.takes_requests(self.state))


TestSurvival = SurvivalMachine.TestCase
