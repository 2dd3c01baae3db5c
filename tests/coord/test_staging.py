"""A run has exactly one outcome, and whatever was taken for it is given back."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lensemble.errors import InvalidTransition
from lensemble.ids import NodeId
from lensemble.machine import ArmTimer, CancelTimer, TimerExpired
from lensemble_coord.inference import staging

STAGES = 3
NODES = tuple(NodeId(f"{index}" * 64) for index in range(STAGES))
RULES = staging.Rules(stall_s=5, probe_s=6, drain_s=7, teardown_s=8, last_word_s=1)
PLANNED = staging.Planned(RULES, tuple(staging.Place(node) for node in NODES))
LOADED = staging.Loaded(1, 2, 3, 4.0)
CAUSE = staging.Fault("worker_fault", "killed by SIGKILL", 1, stderr=("last words",))
SYMPTOM = staging.Fault("edge_fault", "torn", 2)
OWN = staging.Fault("edge_fault", "torn here")


def play(state: staging.State, *events: staging.Event) -> tuple[staging.State, list[Any]]:
    actions: list[Any] = []
    for event in events:
        state, more = staging.transition(state, event)
        actions = list(more)
    return state, actions


TOLD = (staging.Begin(), staging.EdgesTaken())
READY = tuple(staging.Ready(stage, LOADED) for stage in range(STAGES))
OPENED = (*(staging.Opened(stage) for stage in range(STAGES)), staging.OwnOpened())
UP = (*TOLD, *READY, *OPENED, staging.Probed())
GONE = tuple(staging.StageGone(stage) for stage in range(STAGES))


def kinds(actions: list[Any]) -> list[type]:
    return [type(a) for a in actions if not isinstance(a, ArmTimer | CancelTimer)]


def test_a_run_goes_the_straight_way() -> None:
    state, actions = play(PLANNED, staging.Begin())
    assert kinds(actions) == [staging.TakeEdges]
    state, actions = play(state, staging.EdgesTaken())
    assert kinds(actions) == [staging.ProvisionStages]
    state, actions = play(state, staging.Wanted(1, ((0, 4),)))
    assert staging.SendWeights(1, ((0, 4),)) in actions
    state, actions = play(state, *READY)
    assert isinstance(state, staging.Opening)
    assert kinds(actions) == [staging.OpenEdges]
    state, actions = play(state, *OPENED)
    assert kinds(actions) == [staging.SendProbe]
    state, _ = play(state, staging.Probed())
    assert staging.public_state(state) == "provisioned"
    state, _ = play(state, staging.SequenceBegan(), staging.SequenceBegan())
    assert isinstance(state, staging.Running)
    state, _ = play(state, staging.DrainAsked("enough"), staging.SequenceEnded())
    assert isinstance(state, staging.Draining)
    assert not staging.takes_requests(state)
    state, actions = play(state, staging.SequenceEnded())
    assert kinds(actions) == [staging.EndSequences, staging.TearDown, staging.GiveEdges]
    state, actions = play(state, *GONE, staging.EdgesGiven())
    assert isinstance(state, staging.TornDown)
    assert (state.ending.outcome, state.teardown) == ("completed", "clean")
    assert kinds(actions) == [staging.Close]


@pytest.mark.parametrize(
    ("before", "code"),
    [((staging.Begin(),), "arena_exhausted"), ((*TOLD, *READY, *OPENED[:-1]), "stage_stalled")],
)
def test_what_the_coordinator_itself_waits_for_has_an_end(
    before: tuple[staging.Event, ...], code: str
) -> None:
    state, _ = play(PLANNED, *before, TimerExpired(staging.OWN_EDGES))
    assert isinstance(state, staging.Leaving)
    assert state.ending.fault is not None
    assert (state.ending.fault.code, state.ending.fault.stage) == (code, None)
    assert "within 5 s" in state.ending.reason


@pytest.mark.parametrize("before", [TOLD, (*TOLD, *READY), UP])
def test_the_cause_wins_over_a_symptom_that_came_first(before: tuple[staging.Event, ...]) -> None:
    state, _ = play(PLANNED, *before, staging.Failed(OWN))
    assert not isinstance(state, staging.Leaving)
    state, _ = play(state, staging.Failed(SYMPTOM), staging.Failed(CAUSE))
    assert isinstance(state, staging.Leaving)
    assert state.ending.fault == CAUSE
    state, _ = play(state, staging.Failed(SYMPTOM), *GONE, staging.EdgesGiven())
    assert isinstance(state, staging.TornDown)
    assert state.ending == staging.Ending("faulted", CAUSE.reason, CAUSE)
    assert state.teardown == "clean"


def test_a_symptom_without_a_cause_ends_the_run_when_its_time_is_up() -> None:
    state, _ = play(PLANNED, *UP, staging.Failed(OWN), staging.Failed(SYMPTOM))
    state, _ = play(state, TimerExpired(staging.LAST_WORD))
    assert isinstance(state, staging.Leaving)
    assert state.ending.fault == SYMPTOM


def test_a_stalled_stage_is_named_with_its_phase() -> None:
    told = (*TOLD, staging.Progressed(1, "fetching", 10, 100))
    state, actions = play(PLANNED, *told, staging.Progressed(1, "fetching", 10, 100))
    assert actions == []
    state, actions = play(state, staging.Progressed(1, "fetching", 11, 100))
    assert actions == [ArmTimer("stall 1", 5)]
    state, _ = play(state, TimerExpired("stall 1"))
    assert isinstance(state, staging.Leaving)
    fault = state.ending.fault
    assert fault is not None
    assert (fault.code, fault.stage) == ("stage_stalled", 1)
    assert "fetching (11 of 100)" in fault.reason


def test_a_lost_node_is_not_waited_for_and_the_others_are() -> None:
    state, _ = play(PLANNED, *UP, staging.NodeLost(NODES[1], "silent for 3 s"))
    assert isinstance(state, staging.Leaving)
    assert state.waiting == {0, 2}
    assert state.ending.fault is not None
    assert state.ending.fault.stage == 1
    state, _ = play(state, staging.EdgesGiven(), staging.StageGone(0, "worker killed"))
    state, _ = play(state, TimerExpired(staging.TEARDOWN))
    assert isinstance(state, staging.TornDown)
    assert state.teardown == "timed out"
    assert len(state.complaints) == 2


def test_a_fault_that_names_a_lost_neighbour_does_not_count_its_own_node_as_lost() -> None:
    fault = staging.Fault("link_lost", "the link to upstream is gone", 2)
    state, _ = play(PLANNED, *UP, staging.Failed(fault), TimerExpired(staging.LAST_WORD))
    assert isinstance(state, staging.Leaving)
    assert state.waiting == {0, 1, 2}


@pytest.mark.parametrize("state", [PLANNED, play(PLANNED, *UP)[0]])
def test_what_cannot_be_is_refused(state: staging.State) -> None:
    event = staging.Probed() if isinstance(state, staging.Planned) else staging.Begin()
    with pytest.raises(InvalidTransition):
        staging.transition(state, event)


STAGE = st.integers(0, STAGES - 1)
FAULTS = st.builds(
    staging.Fault, st.sampled_from(("worker_fault", "edge_fault", "link_lost")), st.just("why"),
    st.none() | STAGE,
)  # fmt: skip


class Run(RuleBasedStateMachine):
    """Everything that nodes, operators and the coordinator's own rim may do, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.state: staging.State = PLANNED
        self.timers: set[str] = set()
        self.did: Counter[type] = Counter()
        self.taken = self.given = self.torn = self.ended = self.closed = 0
        self.giving = False
        self.endings: set[staging.Ending] = set()

    def feed(self, event: staging.Event) -> None:
        assert not self.closed or not isinstance(event, TimerExpired)
        self.state, actions = staging.transition(self.state, event)
        for action in actions:
            self.perform(action)
        if isinstance(self.state, staging.Leaving | staging.TornDown):
            self.endings.add(self.state.ending)

    def perform(self, action: staging.Action) -> None:
        match action:
            case ArmTimer(timer):
                self.timers.add(timer)
            case CancelTimer(timer):
                self.timers.discard(timer)
            case staging.GiveEdges():
                assert not self.giving
                self.giving = True
            case _:
                self.did[type(action)] += 1
        self.taken, self.torn = self.did[staging.TakeEdges], self.did[staging.TearDown]
        self.ended, self.closed = self.did[staging.EndSequences], self.did[staging.Close]

    def live(self) -> bool:
        return not isinstance(self.state, staging.Planned | staging.TornDown)

    @precondition(lambda self: isinstance(self.state, staging.Planned))
    @rule()
    def begin(self) -> None:
        self.feed(staging.Begin())

    @precondition(lambda self: self.taken and not self.given)
    @rule()
    def take_edges(self) -> None:
        self.feed(staging.EdgesTaken())

    @precondition(lambda self: self.giving and not self.given)
    @rule()
    def give_edges(self) -> None:
        self.given += 1
        self.feed(staging.EdgesGiven())

    @precondition(live)
    @rule(stage=STAGE, done=st.integers(0, 2), phase=st.sampled_from(("fetching", "loading")))
    def progress(self, stage: int, done: int, phase: str) -> None:
        self.feed(staging.Progressed(stage, phase, done, 2))

    @precondition(live)
    @rule()
    def all_ready(self) -> None:
        for event in READY:
            self.feed(event)

    @precondition(live)
    @rule(stage=STAGE)
    def ready(self, stage: int) -> None:
        self.feed(staging.Ready(stage, LOADED))

    @precondition(live)
    @rule()
    def all_opened(self) -> None:
        for event in OPENED:
            self.feed(event)

    @precondition(live)
    @rule()
    def probed(self) -> None:
        self.feed(staging.Probed())

    @precondition(live)
    @rule(fault=FAULTS)
    def fail(self, fault: staging.Fault) -> None:
        leaving = isinstance(self.state, staging.Leaving)
        self.feed(staging.Failed(fault))
        if not leaving and fault.code not in staging.SYMPTOMS:
            assert isinstance(self.state, staging.Leaving)
            assert self.state.ending.fault == fault

    @precondition(live)
    @rule(stage=STAGE)
    def lose(self, stage: int) -> None:
        self.feed(staging.NodeLost(NODES[stage], "silent"))

    @rule(now=st.booleans())
    def stop(self, *, now: bool) -> None:
        self.feed(staging.StopAsked("stop") if now else staging.DrainAsked("drain"))

    @precondition(lambda self: staging.takes_requests(self.state))
    @rule()
    def request(self) -> None:
        self.feed(staging.SequenceBegan())

    @precondition(lambda self: isinstance(self.state, staging.Running | staging.Draining))
    @rule()
    def request_ends(self) -> None:
        self.feed(staging.SequenceEnded())

    @precondition(lambda self: self.torn)
    @rule(stage=STAGE, complaint=st.sampled_from(("", "worker killed")))
    def gone(self, stage: int, complaint: str) -> None:
        self.feed(staging.StageGone(stage, complaint))

    @precondition(lambda self: self.timers)
    @rule(data=st.data())
    def expire(self, data: st.DataObject) -> None:
        timer = data.draw(st.sampled_from(sorted(self.timers)))
        self.timers.discard(timer)
        self.feed(TimerExpired(timer))

    @invariant()
    def one_outcome(self) -> None:
        assert len(self.endings) <= 1
        assert self.closed == isinstance(self.state, staging.TornDown)
        assert self.torn == self.ended == (self.taken and len(self.endings))
        if self.closed:
            assert self.given == self.taken
            assert not self.timers

    @invariant()
    def every_wait_has_an_end(self) -> None:
        if isinstance(self.state, staging.Provisioning | staging.Opening | staging.Probing):
            assert self.timers

    def teardown(self) -> None:
        """From wherever it is, a run that is stopped ends once the teardown timer has run out."""
        self.feed(staging.StopAsked("the end"))
        if staging.TEARDOWN in self.timers:
            self.timers.discard(staging.TEARDOWN)
            self.feed(TimerExpired(staging.TEARDOWN))
        if self.giving and not self.given:
            self.given += 1
            self.feed(staging.EdgesGiven())
        assert isinstance(self.state, staging.TornDown)
        self.one_outcome()


TestRun = Run.TestCase
TestRun.settings = settings(deadline=None, stateful_step_count=40)
