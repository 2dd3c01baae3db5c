import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lensemble.errors import InvalidTransition
from lensemble.ids import EdgeId
from lensemble_node import provision as p
from tests.node.node_play import pair

PAIR, NEWER = pair(100), pair(200)
STATE, UPDATE = PAIR.edges
STATES: list[p.State] = [
    p.Bare(),
    p.Leasing(PAIR),
    p.Opening(PAIR, PAIR.edges),
    p.Opening(PAIR, (UPDATE,), opened=True),
    p.Live(PAIR),
    p.Draining(PAIR, PAIR.edges),
    p.Draining(PAIR, (UPDATE,), stopped=True, then=NEWER, told=PAIR.edges),
]
EVENTS: list[p.Event] = [
    p.Provide(PAIR),
    p.Provide(NEWER),
    p.Withdraw(PAIR.edges),
    p.Withdraw((EdgeId(7),)),
    p.Leased(PAIR),
    p.Opened(PAIR),
    p.Attached(STATE),
    p.Detached(STATE),
    p.EndFaulted(STATE, "torn"),
    p.EndFaulted(EdgeId(7), "torn"),
    p.Dropped("half sent"),
    p.LinkGone(),
    p.WorkerGone("killed"),
    p.Stopped(PAIR),
]
REFUSED = {
    (p.Bare, p.Leased),
    (p.Bare, p.Opened),
    (p.Bare, p.Stopped),
    (p.Leasing, p.Opened),
    (p.Leasing, p.Stopped),
    (p.Opening, p.Leased),
    (p.Opening, p.Stopped),
    (p.Live, p.Leased),
    (p.Live, p.Opened),
    (p.Live, p.Stopped),
}


@pytest.mark.parametrize(("state", "event"), list(itertools.product(STATES, EVENTS)))
def test_every_pair_is_answered_or_refused(state: p.State, event: p.Event) -> None:
    if (type(state), type(event)) in REFUSED:
        with pytest.raises(InvalidTransition):
            p.transition(state, event)
    else:
        p.transition(state, event)


def play(*events: p.Event) -> tuple[p.State, list[p.Action]]:
    state: p.State = p.Bare()
    done: list[p.Action] = []
    for event in events:
        state, actions = p.transition(state, event)
        done += actions
    return state, done


READY = (
    p.Provide(PAIR),
    p.Leased(PAIR),
    p.Attached(STATE),
    p.Opened(PAIR),
    p.Attached(UPDATE),
)


def test_nothing_is_acknowledged_before_every_end_is_ready() -> None:
    for length in range(len(READY)):
        assert p.Acknowledge(PAIR) not in play(*READY[:length])[1]
    state, done = play(*READY)
    assert done == [p.Lease(PAIR), p.Attach(PAIR), p.Open(PAIR), p.Acknowledge(PAIR)]
    assert state == p.Live(PAIR)


def test_a_ring_goes_back_once_pump_and_worker_have_let_go() -> None:
    state, done = play(*READY, p.EndFaulted(UPDATE, "torn"), p.Stopped(PAIR), p.Detached(STATE))
    assert p.ReportLost(PAIR, UPDATE, "torn") in done
    assert p.GiveBack(PAIR) not in done
    state, actions = p.transition(state, p.Detached(UPDATE))
    assert actions == (p.GiveBack(PAIR),)
    assert state == p.Bare()


def test_a_dead_worker_holds_nothing() -> None:
    _, done = play(*READY, p.WorkerGone("killed"), p.Stopped(PAIR))
    assert p.Detach(STATE) not in done
    assert done[-1] == p.GiveBack(PAIR)


def test_a_newer_pair_waits_for_the_older_to_drain() -> None:
    state, done = play(*READY, p.Provide(NEWER), p.Detached(STATE), p.Detached(UPDATE))
    assert p.Lease(NEWER) not in done
    state, actions = p.transition(state, p.Stopped(PAIR))
    assert actions == (p.GiveBack(PAIR), p.Lease(NEWER))
    assert state == p.Leasing(NEWER)


def test_a_pair_asked_for_twice_is_made_once() -> None:
    state, done = play(*READY, p.Provide(PAIR))
    assert state == p.Live(PAIR)
    assert done.count(p.Lease(PAIR)) == 1


def test_a_teardown_is_acknowledged_when_nothing_is_left() -> None:
    _, done = play(
        *READY, p.Withdraw(PAIR.edges), p.Stopped(PAIR), p.Detached(STATE), p.Detached(UPDATE)
    )
    assert done[-2:] == [p.GiveBack(PAIR), p.AcknowledgeTeardown(PAIR.edges)]
    assert play(p.Withdraw((EdgeId(5),)))[1] == [p.AcknowledgeTeardown((EdgeId(5),))]


def test_a_worker_that_dies_while_a_newer_pair_waits_is_reported_for_it() -> None:
    _, done = play(*READY, p.Provide(NEWER), p.WorkerGone("killed"), p.Stopped(PAIR))
    assert any(isinstance(a, p.ReportLost) and a.pair == NEWER for a in done)
    assert p.Lease(NEWER) not in done


def test_a_lost_link_forgets_the_pair_that_waits_with_it() -> None:
    state, _ = play(
        *READY,
        p.Provide(NEWER),
        p.LinkGone(),
        p.Stopped(PAIR),
        p.Detached(STATE),
        p.Detached(UPDATE),
    )
    assert state == p.Bare()


class Rings(RuleBasedStateMachine):
    """Whatever happens in whatever order, a ring has one user and goes back exactly once."""

    def __init__(self) -> None:
        super().__init__()
        self.state: p.State = p.Bare()
        self.count = 0
        self.leasing: set[p.Pair] = set()
        self.running: set[p.Pair] = set()
        self.stopping: set[p.Pair] = set()
        self.attached: set[int] = set()
        self.detaching: list[int] = []
        self.attaching: list[int] = []
        self.given_back: list[p.Pair] = []
        self.leased: list[p.Pair] = []
        self.acknowledged: set[p.Pair] = set()

    def feed(self, event: p.Event) -> None:
        self.state, actions = p.transition(self.state, event)
        for action in actions:
            self.perform(action)

    def perform(self, action: p.Action) -> None:
        match action:
            case p.Lease(made):
                self.leasing.add(made)
                self.running.add(made)
            case p.Attach(made):
                self.attaching += made.edges
            case p.Detach(edge):
                self.detaching.append(edge)
            case p.Stop(made):
                assert made in self.running
                self.stopping.add(made)
            case p.GiveBack(made):
                assert made not in self.running
                assert not set(made.edges) & (self.attached | set(self.attaching))
                assert made not in self.given_back
                self.given_back.append(made)
            case p.Acknowledge(made):
                assert set(made.edges) <= self.attached
                self.acknowledged.add(made)
            case p.ReportLost(pair=made) | p.Unusable(pair=made):
                self.acknowledged.discard(made)
            case _:
                pass

    @rule()
    def provide(self) -> None:
        self.count += 2
        self.feed(p.Provide(pair(1000 + self.count)))

    @precondition(lambda self: self.leasing - self.stopping)
    @rule()
    def lease(self) -> None:
        made = self.leasing.pop()
        if made not in self.stopping:
            self.leased.append(made)
            self.feed(p.Leased(made))

    @precondition(lambda self: self.leased)
    @rule()
    def open(self) -> None:
        made = self.leased.pop()
        if made in self.running and made not in self.stopping:
            self.feed(p.Opened(made))

    @precondition(lambda self: self.attaching)
    @rule()
    def attach(self) -> None:
        edge = self.attaching.pop(0)
        self.attached.add(edge)
        self.feed(p.Attached(EdgeId(edge)))

    @precondition(lambda self: self.detaching and not self.attaching)
    @rule()
    def detach(self) -> None:
        edge = self.detaching.pop(0)
        self.attached.discard(edge)
        self.feed(p.Detached(EdgeId(edge)))

    @precondition(lambda self: self.stopping)
    @rule()
    def stop(self) -> None:
        made = self.stopping.pop()
        self.leasing.discard(made)
        self.running.discard(made)
        self.feed(p.Stopped(made))

    @precondition(lambda self: self.running - self.stopping)
    @rule(data=st.data())
    def fault(self, data: st.DataObject) -> None:
        made = data.draw(st.sampled_from(sorted(self.running - self.stopping, key=str)))
        self.feed(p.EndFaulted(data.draw(st.sampled_from(made.edges)), "torn"))

    @rule(event=st.sampled_from([p.Dropped("x"), p.LinkGone()]))
    def lose(self, event: p.Event) -> None:
        self.feed(event)

    @rule()
    def kill_worker(self) -> None:
        self.attached.clear()
        self.attaching.clear()
        self.detaching.clear()
        self.feed(p.WorkerGone("killed"))

    @invariant()
    def one_pair_at_a_time(self) -> None:
        assert len(self.running) <= 1
        assert len(self.acknowledged) <= 1

    @invariant()
    def acknowledged_is_live(self) -> None:
        assert isinstance(self.state, p.Live) == bool(self.acknowledged)


TestRings = Rings.TestCase
TestRings.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
