"""Random lives of a round: whatever comes in whatever order, the audit's promises hold."""

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lensemble.errors import Response
from lensemble.ids import NodeId
from lensemble.machine import TimerExpired
from lensemble_coord.training import outer_round as r
from tests.coord import round_play as play

NODES = st.sampled_from([play.A, play.B, play.C, play.D, play.STRANGER])
MEMBERS = st.sampled_from([play.A, play.B, play.C, play.D])
OTHER_ATTEMPT = st.sampled_from([(0, 0), (0, 1), (1, 0), (9, 9)])


class RoundLife(RuleBasedStateMachine):
    """Nodes come, go and say things, fitting or not; our own work answers what was asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.audit = play.RoundAudit(play.closed())
        self.work: list[r.Event] = []

    @initialize(
        quorum=st.integers(1, 3),
        attempts=st.integers(1, 3),
        policy=st.sampled_from(["abort", "exclude"]),
        threshold=st.none() | st.integers(0, 3),
        here=st.sets(MEMBERS, min_size=1),
    )
    def start(
        self, quorum: int, attempts: int, policy: str, threshold: int | None, here: set[NodeId]
    ) -> None:
        """Without a threshold the rounds are not masked."""
        state = play.closed(
            *here,
            quorum=quorum,
            max_attempts=attempts,
            on_commitment_mismatch=policy,
            masked=threshold is not None,
            threshold=threshold or 0,
        )
        self.audit = play.RoundAudit(state)
        self.feed(r.RoundsAsked(2))

    @property
    def at(self) -> tuple[int, int]:
        return self.audit.state.ground.round, self.audit.state.ground.attempt

    def feed(self, event: r.Event) -> None:
        at = self.at
        for action in self.audit.step(event):
            match action:
                case r.DeriveSum():
                    self.work.append(play.summed(at))
                case r.Diagnose():
                    self.work.append(play.diagnosed(at))
                case r.Commit():
                    self.work.append(play.advanced(at))
                case _:
                    pass

    @rule(rounds=st.integers(1, 3), patience=st.none() | st.just(5.0))
    def ask(self, rounds: int, patience: float | None) -> None:
        self.feed(r.RoundsAsked(rounds, patience))

    @rule(node=MEMBERS)
    def join(self, node: NodeId) -> None:
        self.feed(r.MemberReady(node))

    @rule(node=NODES)
    def lose(self, node: NodeId) -> None:
        self.feed(play.lost(node))

    @rule(node=NODES)
    def commit(self, node: NodeId) -> None:
        self.feed(play.committed(node, self.at))

    def go_on(self, data: st.DataObject) -> None:
        """The next thing that brings the round on, if nothing goes wrong."""
        state, at = self.audit.state, self.at
        match state:
            case r.Open():
                unbound = set(state.ground.here) - {b.node for b in state.bound}
                if unbound:
                    self.feed(play.committed(data.draw(st.sampled_from(sorted(unbound))), at))
                else:
                    self.feed(r.MemberReady(data.draw(MEMBERS)))
            case r.Collecting():
                node = data.draw(st.sampled_from(sorted(r.outstanding(state))))
                for half in data.draw(st.permutations([play.announced, play.arrived])):
                    self.feed(half(node, at))
            case r.Sharing() | r.Unmasking():
                say = play.shares if isinstance(state, r.Sharing) else play.unmasks
                self.feed(say(data.draw(st.sampled_from(r.waiting(state).on)), at))
            case _ if r.Timer.RETRY in self.audit.armed:
                self.feed(TimerExpired(r.Timer.RETRY))
            case r.Closed() | r.Aborted():
                self.feed(r.RoundsAsked(1))
            case _:
                self.feed(self.work.pop(0))

    @rule(data=st.data(), steps=st.integers(1, 6))
    def goes_well(self, data: st.DataObject, steps: int) -> None:
        for _ in range(steps):
            self.go_on(data)

    @rule(
        data=st.data(),
        phase=st.sampled_from([r.Sharing, r.Collecting, r.Unmasking, r.Committing]),
    )
    def goes_well_up_to(self, data: st.DataObject, phase: type[r.State]) -> None:
        for _ in range(20):
            if isinstance(self.audit.state, phase):
                break
            self.go_on(data)

    @rule(data=st.data())
    def goes_well_for_one_step(self, data: st.DataObject) -> None:
        self.go_on(data)

    @rule(node=NODES, other_dataset=st.booleans())
    def announce(self, node: NodeId, other_dataset: bool) -> None:
        named = play.root(play.STRANGER) if other_dataset else play.root(node)
        self.feed(play.announced(node, self.at, dataset_root=named))

    @rule(node=NODES, torn=st.booleans())
    def arrive(self, node: NodeId, torn: bool) -> None:
        digest = play.PRIOR if torn else play.update_digest(node)
        self.feed(play.arrived(node, self.at, digest=digest))

    @rule(
        node=NODES,
        phase=st.sampled_from(["fetching", "training", "sending", "arriving", "none"]),
        done=st.integers(0, 4),
        total=st.integers(2, 3),
    )
    def progress(self, node: NodeId, phase: str, done: int, total: int) -> None:
        before = self.audit.state
        self.feed(play.progressed(node, phase, done, total, self.at))
        after = self.audit.state
        if isinstance(before, r.Collecting):
            assert msgspec.structs.replace(after, advances=before.advances) == before
        else:
            assert after == before

    @rule(node=NODES)
    def share(self, node: NodeId) -> None:
        self.feed(play.shares(node, self.at))

    @rule(node=NODES)
    def unmask(self, node: NodeId) -> None:
        self.feed(play.unmasks(node, self.at))

    @rule(node=NODES, spent=st.sampled_from([False, False, False, True]))
    def decline(self, node: NodeId, spent: bool) -> None:
        self.feed(play.declined(node, self.at, "dp_budget_exceeded" if spent else "dataset"))

    @rule(
        say=st.sampled_from(
            [
                play.committed,
                play.shares,
                play.announced,
                play.arrived,
                play.unmasks,
                play.declined,
            ]
        ),
        node=NODES,
        at=OTHER_ATTEMPT,
    )
    def say_for_some_attempt(self, say: type, node: NodeId, at: tuple[int, int]) -> None:
        self.feed(say(node, at))

    @precondition(lambda self: self.work)
    @rule(fails=st.sampled_from([None, None, None, *Response]))
    def work_ends(self, fails: Response | None) -> None:
        outcome = self.work.pop(0)
        at = (outcome.round, outcome.attempt)
        self.feed(outcome if fails is None else play.failed(at, fails))

    @precondition(lambda self: self.audit.armed)
    @rule(data=st.data())
    def expire(self, data: st.DataObject) -> None:
        self.feed(TimerExpired(data.draw(st.sampled_from(sorted(self.audit.armed)))))

    @rule(timer=st.sampled_from(list(r.Timer)))
    def a_cancelled_timer_expires_all_the_same(self, timer: r.Timer) -> None:
        """An expiry that was under way; where its timer runs it would be a real one."""
        if timer not in self.audit.armed:
            before = self.audit.state
            self.feed(TimerExpired(timer))
            assert self.audit.state == before

    @rule(sure=st.sampled_from([False, False, True]))
    def abort(self, sure: bool) -> None:
        if sure:
            self.feed(r.AbortAsked("enough"))

    @invariant()
    def nothing_grows_without_bound(self) -> None:
        state = self.audit.state
        if isinstance(state, r.Open):
            assert len({b.node for b in state.bound}) == len(state.bound)
            assert len({d.node for d in state.declined}) == len(state.declined)
            assert {b.node for b in state.bound} <= set(state.ground.here)
        if isinstance(state, r.Collecting):
            settled = [c.node for c in state.verified] + [d.node for d in state.dropped]
            assert len(set(settled)) == len(settled)
            assert {c.node for c in state.verified} <= {b.node for b in state.expected}
            left_out = {d.node for d in state.dropped} - {b.node for b in state.expected}
            assert not left_out or state.ground.rules.masked
        if isinstance(state, r.Sharing):
            settled = [*state.shared, *(d.node for d in state.dropped)]
            assert len(set(settled)) == len(settled)
            assert set(settled) <= {b.node for b in state.bound}
        if isinstance(state, r.Unmasking):
            settled = [*state.answered, *state.gone]
            assert len(set(settled)) == len(settled)
            assert set(settled) <= {c.node for c in state.contributors}

    @invariant()
    def contributors_are_what_was_announced(self) -> None:
        state = self.audit.state
        if isinstance(state, play.FROZEN):
            for each in state.contributors:
                assert each.digest == play.update_digest(each.node)
                assert each.dataset_root == play.root(each.node)

    def teardown(self) -> None:
        """Left alone with its timers and its own work, a run always comes to its end."""
        for _ in range(200):
            if play.at_rest(self.audit.state):
                break
            if self.work:
                self.feed(self.work.pop(0))
            elif self.audit.armed:
                self.feed(TimerExpired(min(self.audit.armed)))
            else:
                break
        assert play.at_rest(self.audit.state)
        assert not self.audit.asked


TestRoundLife = RoundLife.TestCase
TestRoundLife.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
