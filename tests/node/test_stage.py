import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lensemble.errors import InvalidTransition
from lensemble.wire import stages
from lensemble_node import signals, stage_signals
from lensemble_node import stage as s
from tests.node.stage_play import fence, opening, provision, teardown, weights

ORDER, NEWER = provision(1), provision(2)
INBOUND, OUTBOUND = s.edges(ORDER)
HOSTED = stage_signals.Hosted(weights_bytes=1, resident_bytes=2, fetched_bytes=3, seconds=0.5)
ADVANCED = stage_signals.Advanced(phase="fetching", done=1, total=2)
STATES: list[s.State] = [
    s.Vacant(),
    s.Vacant(1),
    s.Leasing(ORDER),
    s.Hosting(ORDER, s.edges(ORDER)),
    s.Hosting(ORDER, (OUTBOUND,), registered=True, hosted=HOSTED),
    s.ReadyToOpen(ORDER),
    s.Opening(ORDER),
    s.Live(ORDER),
    s.Draining(ORDER, pumping=True, working=True),
    s.Draining(ORDER, pumping=False, working=True, told=(teardown(ORDER),), then=NEWER),
]
EVENTS: list[s.Event] = [
    s.Provide(ORDER),
    s.Provide(NEWER),
    s.Open(opening(ORDER)),
    s.Open(opening(NEWER)),
    s.Withdraw(teardown(ORDER)),
    s.Withdraw(teardown(NEWER)),
    s.Withdraw(teardown(provision(0))),
    s.Look(stages.StageLook(**fence(ORDER))),
    s.LinkGone(),
    s.Leased(1),
    s.Leased(7),
    s.Registered(1),
    s.Said(1, signals.Attached(edge=INBOUND)),
    s.Said(1, stage_signals.Wants(ranges=((0, 5),))),
    s.Said(1, ADVANCED),
    s.Said(1, HOSTED),
    s.Opened(1),
    s.Faulted(1, "upstream_lost", "torn"),
    s.WorkerEnded(1, "worker_fault", "killed", stderr=("last words",)),
    s.Stopped(1),
]
GETTING_READY = (s.Leasing, s.Hosting)
WORKING = (s.Hosting, s.ReadyToOpen, s.Opening, s.Live)


def is_refused(state: s.State, event: s.Event) -> bool:
    """What only a broken rim could feed."""
    if isinstance(state, s.Vacant | s.Draining) or getattr(event, "run_epoch", 1) != 1:
        return False
    match event:
        case s.Leased():
            return not isinstance(state, s.Leasing)
        case s.Registered():
            return not isinstance(state, s.Hosting)
        case s.Said():
            return not isinstance(state, WORKING)
        case s.Opened():
            return not isinstance(state, s.Opening)
        case s.Stopped():
            return True
        case _:
            return False


@pytest.mark.parametrize(("state", "event"), list(itertools.product(STATES, EVENTS)))
def test_every_pair_is_answered_or_refused(state: s.State, event: s.Event) -> None:
    if is_refused(state, event):
        with pytest.raises(InvalidTransition):
            s.transition(state, event)
    else:
        s.transition(state, event)


def play(*events: s.Event, start: s.State | None = None) -> tuple[s.State, list[s.Action]]:
    state = s.Vacant() if start is None else start
    done: list[s.Action] = []
    for event in events:
        state, actions = s.transition(state, event)
        done += actions
    return state, done


def said(actions: list[s.Action]) -> list[stages.StageAnswer]:
    return [action.message for action in actions if isinstance(action, s.Say)]


READY = (
    s.Provide(ORDER),
    s.Leased(1),
    s.Registered(1),
    s.Said(1, signals.Attached(edge=INBOUND)),
    s.Said(1, signals.Attached(edge=OUTBOUND)),
    s.Said(1, HOSTED),
)
LIVE = (*READY, s.Open(opening(ORDER)), s.Opened(1))


def test_a_stage_is_ready_when_all_of_it_is_in_whatever_order() -> None:
    for parts in itertools.permutations(READY[2:]):
        state, done = play(*READY[:2], *parts[:-1])
        assert isinstance(state, s.Hosting)
        assert said(done) == []
        state, done = play(*READY[:2], *parts)
        assert isinstance(state, s.ReadyToOpen)
        [ready] = said(done)
        assert isinstance(ready, stages.StageReady)
        assert (ready.run, ready.run_epoch, ready.fetched_bytes) == (ORDER.run, 1, 3)


def test_it_opens_when_told_and_says_so_once_the_stream_is_there() -> None:
    state, done = play(*LIVE)
    assert state == s.Live(ORDER)
    kinds = [type(m).__name__ for m in said(done)]
    assert kinds == ["StageReady", "StageProgress", "StageOpened"]
    assert done.index(s.OpenEdge(ORDER)) < len(done) - 1
    assert play(s.Open(opening(ORDER)), start=state) == (state, [])


def test_it_is_not_opened_before_it_is_ready_nor_for_another_plan() -> None:
    for start, order, field in (
        (s.Vacant(), ORDER, "run"),
        (s.Hosting(ORDER, ()), ORDER, "phase"),
        (s.ReadyToOpen(ORDER), NEWER, "run"),
        (s.ReadyToOpen(NEWER), ORDER, "run"),
    ):
        state, done = play(s.Open(opening(order)), start=start)
        assert state == start
        [refused] = said(done)
        assert isinstance(refused, stages.StageRefused)
        assert refused.field == field


def test_weights_over_an_edge_are_wanted_once_it_is_registered() -> None:
    order = provision(1, source=weights())
    assert len(s.edges(order)) == 3
    wants = s.Said(1, stage_signals.Wants(ranges=((0, 9),)))
    _, done = play(s.Provide(order), s.Leased(1), s.Registered(1), wants)
    [message] = said(done)
    assert isinstance(message, stages.StageWants)
    assert message.ranges == ((0, 9),)
    for early in (play(s.Provide(order), s.Leased(1), wants), play(*READY[:3], wants)):
        [fault] = said(early[1])
        assert isinstance(fault, stages.StageFault)
        assert fault.code == "worker_fault"


def test_a_dead_worker_is_said_at_once_with_its_last_words() -> None:
    state, done = play(*LIVE, s.WorkerEnded(1, "worker_fault", "SIGKILL", stderr=("a", "b")))
    fault = said(done)[-1]
    assert isinstance(fault, stages.StageFault)
    assert (fault.code, fault.stderr) == ("worker_fault", ("a", "b"))
    assert s.GiveBack(ORDER) not in done
    state, done = play(s.Stopped(1), start=state)
    assert (state, done) == (s.Vacant(1), [s.GiveBack(ORDER)])


def test_rings_go_back_once_pumps_and_worker_are_gone_and_then_the_teardown_is_answered() -> None:
    for first, second in itertools.permutations((s.Stopped(1), s.WorkerEnded(1, "", ""))):
        state, done = play(*LIVE, s.Withdraw(teardown(ORDER)), first)
        assert s.GiveBack(ORDER) not in done
        state, done = play(second, start=state)
        assert state == s.Vacant(1)
        assert done[0] == s.GiveBack(ORDER)
        [torn_down] = said(done)
        assert isinstance(torn_down, stages.StageTornDown)
        assert torn_down.outcome == "clean"


def test_a_worker_that_had_to_be_killed_makes_its_teardown_faulted() -> None:
    ended = s.WorkerEnded(1, "worker_fault", "killed", complaint="it did not stop when asked")
    _, done = play(*LIVE, s.Withdraw(teardown(ORDER)), s.Stopped(1), ended)
    torn_down = said(done)[-1]
    assert isinstance(torn_down, stages.StageTornDown)
    assert (torn_down.outcome, torn_down.reason) == ("faulted", "it did not stop when asked")


def test_a_newer_plan_takes_the_place_of_the_older_once_that_is_gone() -> None:
    state, done = play(*LIVE, s.Provide(NEWER), s.Stopped(1))
    assert s.Lease(NEWER) not in done
    state, done = play(s.WorkerEnded(1, "", ""), start=state)
    assert state == s.Leasing(NEWER)
    assert done == [s.GiveBack(ORDER), s.Lease(NEWER)]


@pytest.mark.parametrize("start", [s.Live(NEWER), s.Vacant(2), s.Draining(NEWER, True, True)])
def test_an_older_plan_is_refused_by_name(start: s.State) -> None:
    for order, field in ((ORDER, "run_epoch"), (NEWER, "run")):
        state, done = play(s.Provide(order), start=start)
        assert state == start
        [refused] = said(done)
        assert isinstance(refused, stages.StageRefused)
        assert (refused.field, refused.want) == (field, f"plan {order.run_epoch}")
        assert "plan 2" in refused.have


def test_a_teardown_of_what_is_not_here_is_answered_and_harms_nothing() -> None:
    for start, told in (
        (s.Vacant(), teardown(ORDER)),
        (s.Live(NEWER), teardown(ORDER)),
        (s.Live(ORDER), teardown(provision(1, stage=1, stages=2))),
    ):
        state, done = play(s.Withdraw(told), start=start)
        assert state == start
        [torn_down] = said(done)
        assert isinstance(torn_down, stages.StageTornDown)


def test_a_lost_coordinator_frees_everything_and_hears_nothing() -> None:
    state, done = play(*LIVE, s.Withdraw(teardown(ORDER)), s.Provide(NEWER), s.LinkGone())
    assert s.Stop(ORDER, kill=True) in done
    state, done = play(s.Stopped(1), s.WorkerEnded(1, "", ""), start=state)
    assert (state, done) == (s.Vacant(1), [s.GiveBack(ORDER)])
    assert s.Stop(ORDER, kill=True) in play(*LIVE, s.LinkGone())[1]


class Stages(RuleBasedStateMachine):
    """Whatever happens in whatever order: leases end once, each teardown has its answer."""

    def __init__(self) -> None:
        super().__init__()
        self.state: s.State = s.Vacant()
        self.plan = 0
        self.leases: list[int] = []
        self.waiting: set[int] = set()
        self.pumping: set[int] = set()
        self.working: set[int] = set()
        self.opening: set[int] = set()
        self.stopping: set[int] = set()
        self.given_back: set[int] = set()
        self.asked: list[stages.StageTeardown] = []
        self.faults: list[int] = []

    def feed(self, event: s.Event) -> None:
        self.state, actions = s.transition(self.state, event)
        for action in actions:
            match action:
                case s.Lease(order):
                    assert not self.pumping
                    assert not self.working
                    assert order.run_epoch not in self.leases
                    self.leases.append(order.run_epoch)
                    self.waiting.add(order.run_epoch)
                    self.pumping.add(order.run_epoch)
                case s.Host(order):
                    self.working.add(order.run_epoch)
                case s.OpenEdge(order):
                    self.opening.add(order.run_epoch)
                case s.Stop(order):
                    assert order.run_epoch in self.pumping | self.working
                    self.stopping.add(order.run_epoch)
                case s.GiveBack(order):
                    assert order.run_epoch not in self.pumping | self.working | self.given_back
                    self.given_back.add(order.run_epoch)
                case s.Say(message):
                    self.hear(message)

    def hear(self, message: stages.StageAnswer) -> None:
        match message:
            case stages.StageTornDown():
                told = next(t for t in self.asked if t.run_epoch == message.run_epoch)
                self.asked.remove(told)
            case stages.StageFault():
                assert message.run_epoch not in self.faults
                self.faults.append(message.run_epoch)
            case _:
                pass

    @property
    def here(self) -> int:
        return 0 if isinstance(self.state, s.Vacant) else self.state.order.run_epoch

    @rule(step=st.integers(-1, 2))
    def provide(self, step: int) -> None:
        self.plan = max(1, self.plan + step)
        self.feed(s.Provide(provision(self.plan)))

    @rule(step=st.integers(-2, 1))
    def withdraw(self, step: int) -> None:
        told = teardown(provision(max(0, self.plan + step)))
        self.asked.append(told)
        self.feed(s.Withdraw(told))

    @rule()
    def open(self) -> None:
        self.feed(s.Open(opening(provision(max(1, self.plan)))))

    @rule()
    def lose_link(self) -> None:
        self.asked.clear()
        self.feed(s.LinkGone())

    @precondition(lambda self: self.waiting)
    @rule()
    def lease(self) -> None:
        plan = self.waiting.pop()
        if plan not in self.stopping:
            self.feed(s.Leased(plan))

    @precondition(lambda self: self.working)
    @rule(data=st.data())
    def work(self, data: st.DataObject) -> None:
        [plan] = self.working
        parts = [
            s.Said(plan, HOSTED),
            s.Said(plan, ADVANCED),
            *(s.Said(plan, signals.Attached(edge=e)) for e in s.edges(provision(plan))),
        ]
        if isinstance(self.state, s.Hosting):
            parts.append(s.Registered(plan))
        self.feed(data.draw(st.sampled_from(parts)))

    @precondition(lambda self: isinstance(self.state, s.Hosting))
    @rule()
    def finish_hosting(self) -> None:
        plan = self.here
        self.feed(s.Registered(plan))
        for event in (
            *(s.Said(plan, signals.Attached(edge=e)) for e in s.edges(provision(plan))),
            s.Said(plan, HOSTED),
        ):
            if isinstance(self.state, s.Hosting):
                self.feed(event)

    @precondition(lambda self: self.opening - self.stopping)
    @rule()
    def opened(self) -> None:
        self.feed(s.Opened(self.opening.pop()))

    @precondition(lambda self: self.here)
    @rule()
    def fault(self) -> None:
        self.feed(s.Faulted(self.here, "upstream_lost", "torn"))

    @precondition(lambda self: self.working)
    @rule()
    def kill(self) -> None:
        plan = self.working.pop()
        self.feed(s.WorkerEnded(plan, "worker_fault", "killed"))

    @precondition(lambda self: self.stopping & self.pumping)
    @rule()
    def stop(self) -> None:
        plan = (self.stopping & self.pumping).pop()
        self.pumping.discard(plan)
        self.waiting.discard(plan)
        self.opening.discard(plan)
        self.feed(s.Stopped(plan))

    @invariant()
    def nothing_is_lost(self) -> None:
        held = set(self.leases) - self.given_back
        assert held == ({self.here} if self.here else set())
        assert len(self.pumping | self.working) <= 1

    @invariant()
    def every_teardown_is_answered_or_waited_for(self) -> None:
        told = self.state.told if isinstance(self.state, s.Draining) else ()
        assert len(self.asked) == len(told)

    @invariant()
    def a_plan_is_told_at_most_one_fault(self) -> None:
        assert len(set(self.faults)) == len(self.faults)


TestStages = Stages.TestCase
TestStages.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
