"""A node against a coordinator and a worker that say anything at any time."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lensemble.machine import ArmTimer, CancelTimer, TimerExpired
from lensemble.wire import messages
from lensemble_node import participation, signals
from lensemble_node.participation import Action, Event, Joined, State
from tests.node.node_play import (
    CONFIGURED,
    FEDERATION,
    ME,
    NEXT,
    NODE,
    OTHER,
    PRIOR,
    TARGET,
    bound,
    close,
    collect,
    pair,
    provision_message,
    round_open,
    trained,
    welcome,
)

rounds, attempts = st.integers(0, 3), st.integers(0, 2)
digests = st.sampled_from([PRIOR, NEXT])
rosters = st.sampled_from([(NODE,), (OTHER,), (NODE, OTHER)])


class Node(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.state: State = State(ME)
        self.timers: set[str] = set()
        self.calls: list[int] = []
        self.up: set[int] = set()
        self.epoch = 0
        self.pairs = 0
        self.committed: set[tuple[int, int, int]] = set()
        self.announced: set[tuple[int, int, int]] = set()
        self.opened: list[tuple[int, int, int]] = []
        self.collected: set[tuple[int, int, int]] = set()
        self.feed(participation.Assigned(TARGET))

    def feed(self, event: Event) -> None:
        before = self.state
        self.state, actions = participation.transition(before, event)
        for action in actions:
            self.perform(before, action)

    def perform(self, before: State, action: Action) -> None:  # noqa: C901 - one arm an action
        match action:
            case participation.Dial(call=call):
                assert all(call > earlier for earlier in self.calls)
                self.calls.append(call)
            case participation.Say(message=message):
                session = (before.membership, self.state.membership)
                known = {
                    (m.session.federation, m.session.epoch)
                    for m in session
                    if isinstance(m, Joined)
                }
                assert not isinstance(message, messages.Join)
                assert (message.federation, message.epoch) in known
            case participation.Commit(session=session, commit=commit):
                asked = (session.epoch, commit.open.round, commit.open.attempt)
                assert asked in self.opened
                self.committed.add(asked)
            case participation.Announce(session=session, announce=announce):
                asked = (session.epoch, announce.open.round, announce.open.attempt)
                assert asked in self.committed
                assert asked in self.collected
                assert isinstance(self.joined().edges, participation.Usable)
                assert announce.edge == self.joined().edges.pair.update.edge
            case participation.Provide():
                assert isinstance(self.state.worker, participation.Able)
            case participation.Order(command=command):
                self.order(command)
            case ArmTimer(timer=timer):
                self.timers.add(timer)
            case CancelTimer(timer=timer):
                self.timers.discard(timer)
            case participation.Redial():
                self.timers.add("redial")
            case _:
                pass

    def order(self, command: signals.Command) -> None:
        match command:
            case signals.Train(round=round_index, attempt=attempt):
                assert (self.joined().session.epoch, round_index, attempt) in self.collected
            case signals.Close(adopt=adopt) if isinstance(self.state.membership, Joined):
                assert adopt == (NODE in self.joined().session.last.contributors)
            case _:
                pass

    def joined(self) -> Joined:
        assert isinstance(self.state.membership, Joined)
        return self.state.membership

    @property
    def call(self) -> int:
        return self.calls[-1]

    def dialing(self) -> bool:
        return isinstance(self.state.membership, participation.Dialing)

    def linked(self) -> bool:
        return isinstance(self.state.membership, participation.Joining | Joined)

    def in_session(self) -> bool:
        return isinstance(self.state.membership, Joined)

    # ---- link and timers ----

    @precondition(dialing)
    @rule()
    def link_up(self) -> None:
        self.feed(participation.LinkUp(self.call))

    @rule(data=st.data())
    def link_down(self, data: st.DataObject) -> None:
        self.feed(participation.LinkDown(data.draw(st.sampled_from(self.calls)), "lost"))

    @precondition(lambda self: self.timers)
    @rule(data=st.data())
    def expire(self, data: st.DataObject) -> None:
        timer = data.draw(st.sampled_from(sorted(self.timers)))
        self.timers.discard(timer)
        self.feed(TimerExpired(timer))

    @rule()
    def assign(self) -> None:
        self.feed(participation.Assigned(TARGET))

    # ---- coordinator ----

    def hear(self, message: participation.FromCoordinator) -> None:
        self.feed(participation.Heard(self.call, message))

    @precondition(linked)
    @rule(last=st.integers(-1, 2), contributors=rosters)
    def welcome(self, last: int, contributors: tuple[str, ...]) -> None:
        self.epoch += 1
        record = messages.LastRecord(round=last, digest=PRIOR, contributors=contributors)
        self.hear(welcome(epoch=self.epoch, last=record))

    @precondition(linked)
    @rule(final=st.booleans())
    def refuse(self, final: bool) -> None:
        self.hear(messages.Refused(code="no", reason="because", final=final))

    @precondition(linked)
    @rule()
    def noise(self) -> None:
        self.feed(participation.Misheard(self.call, "frame", "noise"))

    @precondition(linked)
    @rule(stale=st.booleans())
    def provision(self, stale: bool) -> None:
        self.pairs += 2
        made = pair(100 + self.pairs)
        message = provision_message(made)
        epoch = self.epoch - stale
        if epoch >= 0:
            self.hear(
                messages.Provision(
                    federation=FEDERATION, epoch=epoch, state=made.state, update=message.update
                )
            )

    @precondition(linked)
    @rule(round_index=rounds, attempt=attempts, prior=digests)
    def open(self, round_index: int, attempt: int, prior: str) -> None:
        self.opened.append((self.epoch, round_index, attempt))
        self.hear(round_open(round_index, attempt, epoch=self.epoch, prior_digest=prior))

    @precondition(linked)
    @rule(round_index=rounds, attempt=attempts, roster=rosters)
    def collect(self, round_index: int, attempt: int, roster: tuple[str, ...]) -> None:
        self.collected.add((self.epoch, round_index, attempt))
        self.hear(collect(round_index, attempt, epoch=self.epoch, roster=roster))

    @precondition(linked)
    @rule(
        round_index=rounds,
        attempt=attempts,
        outcome=st.sampled_from(["closed", "aborted"]),
        retries=st.booleans(),
        contributors=rosters,
    )
    def close(self, round_index: int, attempt: int, **rest: object) -> None:
        self.hear(close(round_index, attempt, epoch=self.epoch, **rest))

    @precondition(linked)
    @rule()
    def leave(self) -> None:
        self.hear(messages.Leave(federation=FEDERATION, epoch=self.epoch, reason="restart"))

    # ---- worker and edges ----

    @rule()
    def worker_starts(self) -> None:
        self.feed(participation.WorkerStarted())

    @rule()
    def worker_dies(self) -> None:
        self.feed(participation.WorkerLost("worker_fault", "killed"))

    @rule(
        signal=st.one_of(
            st.just(CONFIGURED),
            st.builds(bound, rounds, attempts, st.integers(0, 4000)),
            st.builds(lambda digest: signals.StateHeld(digest=digest), digests),
            st.builds(trained, rounds, attempts),
            st.builds(lambda r, a: signals.Sent(round=r, attempt=a), rounds, attempts),
            st.builds(lambda r: signals.Closed(round=r, adopted=True), rounds),
            st.builds(
                lambda r, a: signals.Failed(code="x", message="y", round=r, attempt=a),
                rounds | st.none(),
                attempts,
            ),
        )
    )
    def worker_says(self, signal: signals.Event) -> None:
        self.feed(participation.WorkerSaid(signal))

    def provided(self) -> bool:
        return self.in_session() and isinstance(self.joined().edges, participation.Provided)

    @precondition(provided)
    @rule()
    def edges_live(self) -> None:
        edges = self.joined().edges
        assert isinstance(edges, participation.Provided)
        self.feed(participation.EdgesLive(edges.pair))

    @precondition(in_session)
    @rule(report=st.booleans())
    def edges_gone(self, report: bool) -> None:
        edges = self.joined().edges
        if not isinstance(edges, participation.NoEdges):
            lost = edges.pair.state.edge if report else None
            self.feed(participation.EdgesGone(edges.pair, "torn", lost))

    # ---- promises ----

    @invariant()
    def a_session_has_a_worker(self) -> None:
        if self.in_session():
            assert not isinstance(self.state.worker, participation.NoWorker)

    @invariant()
    def nobody_waits_for_ever(self) -> None:
        match self.state.membership:
            case participation.Resting():
                assert "redial" in self.timers
            case participation.Joining():
                assert "join" in self.timers
            case _:
                pass


TestNode = Node.TestCase
TestNode.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
