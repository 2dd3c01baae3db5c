"""A node against a coordinator and a worker that say anything at any time."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lensemble.machine import ArmTimer, CancelTimer, TimerExpired
from lensemble.wire import messages
from lensemble_node import attempt as attempts_of
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
    roster,
    round_open,
    trained,
    unmask,
    welcome,
)

MASKED_DIGEST = "8" * 64

rounds, attempts = st.integers(0, 3), st.integers(0, 2)
digests = st.sampled_from([PRIOR, NEXT])
rosters = st.sampled_from([(NODE,), (OTHER,), (NODE, OTHER)])


class Node(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.state: State = State(ME)
        self.timers: set[str] = set()
        self.start_expired = False
        self.calls: list[int] = []
        self.up: set[int] = set()
        self.epoch = 0
        self.pairs = 0
        self.committed: set[tuple[int, int, int]] = set()
        self.announced: set[tuple[int, int, int]] = set()
        self.opened: list[tuple[int, int, int]] = []
        self.collected: set[tuple[int, int, int]] = set()
        self.masked: set[int] = set()
        """Epochs of masked sessions."""
        self.keys = 0
        self.dealt_with: set[int] = set()
        self.masks_given: set[tuple[int, int, int]] = set()
        self.spent: set[tuple[int, int]] = set()
        self.answered: set[tuple[int, int]] = set()
        self.decided: list[tuple[int, tuple[str, ...]]] = []
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
                assert commit.masked == (session.epoch in self.masked)
                assert asked[1:] not in self.answered
                self.keys += 1
            case participation.Announce(session=session, announce=announce):
                asked = (session.epoch, announce.open.round, announce.open.attempt)
                assert asked in self.committed
                assert asked in self.collected
                assert isinstance(self.joined().edges, participation.Usable)
                assert announce.edge == self.joined().edges.pair.update.edge
                if session.epoch in self.masked:
                    assert asked in self.masks_given
                    assert announce.digest == MASKED_DIGEST
            case participation.OnSecrets(session=session, action=wanted):
                self.beside(session.epoch, wanted)
            case participation.Provide():
                assert isinstance(self.state.worker, participation.Able)
            case participation.Order(command=command):
                self.order(command)
            case ArmTimer(timer=timer):
                self.timers.add(timer)
                self.start_expired = self.start_expired and timer != "start"
            case CancelTimer(timer=timer):
                self.timers.discard(timer)
            case participation.Redial():
                self.timers.add("redial")
            case _:
                pass

    def beside(self, epoch: int, wanted: attempts_of.OnSecrets) -> None:
        """Secrets are those of the newest keys; ``_moved`` of the rim has them then."""
        assert epoch in self.masked
        at = (wanted.open.round, wanted.open.attempt)
        # They are there while the action is performed.
        assert attempts_of.holds_secrets(self.joined().attempt)
        match wanted:
            case attempts_of.Deal():
                assert self.keys not in self.dealt_with
                self.dealt_with.add(self.keys)
            case attempts_of.MaskUpdate():
                self.masks_given.add((epoch, *at))
            case attempts_of.Decide(survivors=survivors):
                assert isinstance(self.joined().attempt, attempts_of.Asked)
                assert all(keys != self.keys for keys, _ in self.decided)
                self.decided.append((self.keys, survivors))
            case attempts_of.Answer():
                assert at in self.spent
                assert at not in self.answered
                self.answered.add(at)
            case attempts_of.OpenShares():
                assert self.keys in self.dealt_with

    def order(self, command: signals.Command) -> None:
        match command:
            case signals.Send() | signals.Mask():
                raise AssertionError("only the rim gives these, with what it has signed or drawn")
            case signals.Train(round=round_index, attempt=attempt):
                assert (self.joined().session.epoch, round_index, attempt) in self.collected
            case signals.Close(round=closed, adopt=adopt) if self.in_session():
                # One that is owed since a session with a newer record is none of this one's.
                if closed == self.joined().session.last.round:
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
        # The supervisor answers the end of a worker with news of it.
        self.start_expired = self.start_expired or timer == "start"
        self.feed(TimerExpired(timer))

    @rule()
    def assign(self) -> None:
        self.feed(participation.Assigned(TARGET))

    # ---- coordinator ----

    def hear(self, message: messages.FromCoordinator) -> None:
        self.feed(participation.Heard(self.call, message))

    @precondition(linked)
    @rule(last=st.integers(-1, 2), contributors=rosters, masked=st.booleans())
    def welcome(self, last: int, contributors: tuple[str, ...], masked: bool) -> None:
        self.welcomed(last, contributors, masked=masked)

    def welcomed(self, last: int, contributors: tuple[str, ...], *, masked: bool) -> None:
        self.epoch += 1
        if masked:
            self.masked.add(self.epoch)
        record = messages.LastRecord(round=last, digest=PRIOR, contributors=contributors)
        aggregation = "masked" if masked else "plain"
        self.hear(welcome(epoch=self.epoch, last=record, aggregation=aggregation))

    @precondition(linked)
    @rule(round_index=rounds, attempt=attempts)
    def roster(self, round_index: int, attempt: int) -> None:
        self.hear(roster(round_index, attempt, epoch=self.epoch))

    @precondition(linked)
    @rule(round_index=rounds, attempt=attempts, survivors=rosters)
    def unmask(self, round_index: int, attempt: int, survivors: tuple[str, ...]) -> None:
        self.hear(unmask(round_index, attempt, epoch=self.epoch, survivors=survivors))

    # ---- the next honest step, so that masked attempts get far ----

    @precondition(lambda self: self.dialing() or self.linked())
    @rule(round_index=rounds, attempt=attempts, steps=st.integers(0, 14))
    def begin_masked(self, round_index: int, attempt: int, steps: int) -> None:
        if self.dialing():
            self.feed(participation.LinkUp(self.call))
        if not self.in_session():
            self.welcomed(-1, (OTHER,), masked=True)
        self.feed(participation.WorkerSaid(CONFIGURED))
        self.provided_with(stale=False)
        if isinstance(edges := self.joined().edges, participation.Provided):
            self.feed(participation.EdgesLive(edges.pair))
        self.opened_with(round_index, attempt, PRIOR)
        self.feed(participation.WorkerSaid(bound(round_index, attempt)))
        self.go_on(steps)

    @precondition(in_session)
    @rule(steps=st.integers(1, 12))
    def advance(self, steps: int) -> None:
        self.go_on(steps)

    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            now = self.joined().attempt if self.in_session() else attempts_of.Idle()
            if not isinstance(now, attempts_of.Idle | attempts_of.Withdrawn):
                self.step(now)

    def step(self, now: attempts_of.Active) -> None:
        at = (now.open.round, now.open.attempt)
        match now:
            case attempts_of.Fetching(go=go) | attempts_of.Waiting(go=go):
                self.exchange(at, go)
            case attempts_of.Training():
                self.feed(participation.WorkerSaid(trained(*at)))
            case attempts_of.Masking():
                masked = signals.Masked(round=at[0], attempt=at[1], digest=MASKED_DIGEST)
                self.feed(participation.WorkerSaid(masked))
            case attempts_of.Sending():
                self.feed(participation.WorkerSaid(signals.Sent(round=at[0], attempt=at[1])))
            case attempts_of.Sent():
                self.hear(unmask(*at, epoch=self.epoch))
            case attempts_of.Asked():
                self.feed(participation.SecretsSaid(attempts_of.Consented(*at)))
            case attempts_of.Spending():
                self.spend(at)
            case _:
                pass

    def exchange(self, at: tuple[int, int], go: attempts_of.Go) -> None:
        match go:
            case attempts_of.Go.ROSTER:
                self.hear(roster(*at, epoch=self.epoch))
            case attempts_of.Go.DEALING:
                self.feed(participation.SecretsSaid(attempts_of.SharesDealt(*at, b"", ())))
            case attempts_of.Go.COLLECT:
                self.collected.add((self.epoch, *at))
                self.hear(collect(*at, epoch=self.epoch))
            case attempts_of.Go.OPENING:
                self.feed(participation.SecretsSaid(attempts_of.SharesOpened(*at)))
            case attempts_of.Go.GIVEN:
                self.feed(participation.WorkerSaid(signals.StateHeld(digest=PRIOR)))

    @precondition(in_session)
    @rule(
        signal=st.one_of(
            st.builds(lambda r, a: attempts_of.SharesDealt(r, a, b"", ()), rounds, attempts),
            st.builds(attempts_of.SharesOpened, rounds, attempts),
            st.builds(attempts_of.Consented, rounds, attempts),
            st.builds(attempts_of.MasksRefused, rounds, attempts, st.just("no")),
        )
    )
    def secrets_say(self, signal: attempts_of.FromSecrets) -> None:
        # The rim reports nothing of secrets that were forgotten.
        if self.in_session() and attempts_of.holds_secrets(self.joined().attempt):
            self.feed(participation.SecretsSaid(signal))

    def spend(self, at: tuple[int, int]) -> None:
        # A worker says so only when it was told to, and after it is on disk.
        joined = self.state.membership
        if isinstance(joined, Joined) and isinstance(joined.attempt, attempts_of.Spending):
            self.spent.add(at)
            self.feed(participation.WorkerSaid(signals.Spent(round=at[0], attempt=at[1])))

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
        self.provided_with(stale=stale)

    def provided_with(self, *, stale: bool) -> None:
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
        self.opened_with(round_index, attempt, prior)

    def opened_with(self, round_index: int, attempt: int, prior: str) -> None:
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
    def no_set_of_survivors_is_answered_for_twice(self) -> None:
        assert len({keys for keys, _ in self.decided}) == len(self.decided)

    @invariant()
    def secrets_are_held_in_masked_sessions_only(self) -> None:
        if self.in_session() and attempts_of.holds_secrets(self.joined().attempt):
            assert self.joined().session.terms.masked

    @invariant()
    def nobody_waits_for_ever(self) -> None:
        if isinstance(self.state.worker, participation.Starting):
            assert "start" in self.timers or self.start_expired
        match self.state.membership:
            case participation.Resting():
                assert "redial" in self.timers
            case participation.Joining():
                assert "join" in self.timers
            case _:
                pass


TestNode = Node.TestCase
TestNode.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
