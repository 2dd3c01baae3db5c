"""What tests of the round machine share: short names for its events, and an audit of every step."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from lensemble.errors import Response
from lensemble.ids import Digest, NodeId
from lensemble.machine import ArmTimer, CancelTimer, TimerExpired
from lensemble_coord.training import outer_round as r
from lensemble_coord.training import patience

Kind = TypeVar("Kind")
Transition = Callable[[r.State, r.Event], tuple[r.State, tuple[r.Action, ...]]]

A, B, C, D = (NodeId(letter * 64) for letter in "abcd")
STRANGER = NodeId("f" * 64)
PRIOR = Digest("0" * 64)
SUM = Digest("5" * 64)

RULES = r.Rules(
    quorum=2,
    max_attempts=3,
    open_timeout_s=60.0,
    open_grace_s=2.0,
    collect_timeout_s=600.0,
    retry_backoff_s=1.0,
    retry_backoff_max_s=3.0,
    on_commitment_mismatch="abort",
)

FROZEN = (r.Unmasking, r.Aggregating, r.Aligning, r.Committing)


def root(node: NodeId) -> Digest:
    return Digest("d" + node[1:])


def update_digest(node: NodeId) -> Digest:
    return Digest("e" + node[1:])


def next_digest(round_index: int) -> Digest:
    return Digest(f"{round_index + 1:064x}")


def signature(node: NodeId) -> bytes:
    return node[:64].encode()


def closed(*here: NodeId, **rules: object) -> r.Closed:
    return r.Closed(
        r.Ground(
            replace(RULES, **rules), round=0, attempt=0, digest=PRIOR, here=tuple(sorted(here))
        )
    )


def committed(node: NodeId, at: tuple[int, int] = (0, 0), holds: int = 0) -> r.Committed:
    return r.Committed(node, *at, root(node), signature(node), r.Holding(holds))


def declined(
    node: NodeId, at: tuple[int, int] = (0, 0), code: str = "dataset", reason: str = "no data"
) -> r.Declined:
    return r.Declined(node, *at, code, reason)


def announced(node: NodeId, at: tuple[int, int] = (0, 0), **other: object) -> r.UpdateAnnounced:
    said = r.UpdateAnnounced(node, *at, update_digest(node), root(node), signature(node))
    return replace(said, **other)


def arrived(node: NodeId, at: tuple[int, int] = (0, 0), **other: object) -> r.BlobArrived:
    return replace(r.BlobArrived(node, *at, update_digest(node), signature(node)), **other)


def shares(node: NodeId, at: tuple[int, int] = (0, 0)) -> r.SharesSent:
    return r.SharesSent(node, *at)


def unmasks(node: NodeId, at: tuple[int, int] = (0, 0)) -> r.UnmaskAnswered:
    return r.UnmaskAnswered(node, *at)


def lost(node: NodeId) -> r.MemberLost:
    return r.MemberLost(node, "link_lost", "its link is gone")


def progressed(
    node: NodeId, phase: str, done: int, total: int, at: tuple[int, int] = (0, 0)
) -> r.Progressed:
    return r.Progressed(node, *at, phase, done, total)


def summed(at: tuple[int, int] = (0, 0)) -> r.SumDerived:
    return r.SumDerived(*at, SUM)


def diagnosed(at: tuple[int, int] = (0, 0)) -> r.Diagnosed:
    return r.Diagnosed(*at)


def advanced(at: tuple[int, int] = (0, 0)) -> r.Advanced:
    return r.Advanced(*at, next_digest(at[0]))


def failed(
    at: tuple[int, int] = (0, 0), response: Response = Response.RETRY, code: str = "storage"
) -> r.StepFailed:
    return r.StepFailed(*at, code, "the disk is full", response)


def expired(timer: r.Timer) -> TimerExpired:
    return TimerExpired(timer)


def armed_in(state: r.State) -> set[str]:
    """The timers that may, and must, run in ``state``."""
    match state:
        case r.Open(graced=True):
            return {r.Timer.OPEN, r.Timer.GRACE}
        case r.Open():
            return {r.Timer.OPEN}
        case r.Sharing():
            return {r.Timer.SHARE}
        case r.Collecting():
            capped = {r.Timer.COLLECT_END} if state.ground.rules.collect_max_s else set()
            return {r.Timer.COLLECT} | capped
        case r.Unmasking():
            return {r.Timer.UNMASK}
        case r.Aggregating(reason=reason) | r.Committing(reason=reason) if reason:
            return {r.Timer.RETRY}
        case r.Aborted(retrying=True):
            return {r.Timer.RETRY}
        case _:
            return set()


def at_rest(state: r.State) -> bool:
    return isinstance(state, r.Closed) or (isinstance(state, r.Aborted) and not state.retrying)


class MaskAudit:
    """What one attempt may reveal: the sum of one fixed set, with enough answers, or nothing."""

    def __init__(self) -> None:
        self.roster: r.SendRoster | None = None
        self.shared: set[NodeId] = set()
        self.told: tuple[NodeId, ...] = ()
        self.request: r.RequestUnmask | None = None
        self.answered: set[NodeId] = set()
        self.revealed = False
        self.commits = 0

    def hear(self, event: r.Event, actions: tuple[r.Action, ...]) -> None:
        """A word that was not refused."""
        if not any(isinstance(action, r.Refuse) for action in actions):
            match event:
                case r.SharesSent(node=node):
                    assert node not in self.shared
                    self.shared.add(node)
                case r.UnmaskAnswered(node=node):
                    assert node not in self.answered
                    self.answered.add(node)
                case _:
                    pass

    def see(self, action: r.Action, ground: r.Ground) -> None:
        if not ground.rules.masked:
            assert not isinstance(action, r.SendRoster | r.RequestUnmask)
            return
        match action:
            case r.SendRoster():
                assert self.roster is None
                self.roster = action
                bound = [b.node for b in action.bound]
                assert bound == sorted(set(bound))
                assert len(bound) // 2 < action.threshold <= len(bound)
                assert action.threshold >= ground.rules.threshold
            case r.BeginCollect(nodes=nodes):
                assert self.roster is not None
                assert not self.told
                self.told = nodes
                assert set(nodes) <= self.shared & {b.node for b in self.roster.bound}
                assert len(nodes) >= self.roster.threshold
            case r.RequestUnmask(survivors=survivors, dropouts=dropouts):
                assert self.roster is not None
                assert self.request is None, "two sets were asked for in one attempt"
                self.request = action
                assert sorted((*survivors, *dropouts)) == list(self.told)
                assert len(survivors) >= self.roster.threshold
            case _:
                self._see_the_sum(action, ground)

    def _see_the_sum(self, action: r.Action, ground: r.Ground) -> None:
        match action:
            case r.DeriveSum(contributors=contributors):
                assert self.roster is not None
                assert self.request is not None
                assert tuple(c.node for c in contributors) == self.request.survivors
                assert self.answered <= set(self.request.survivors)
                assert len(self.answered) >= self.roster.threshold
            case r.Diagnose():
                self.revealed = True
            case r.AnnounceAbort(retries=retries):
                assert not (retries and self.revealed), "a revealed sum is collected for again"
            case r.Commit():
                self.commits += 1
                assert self.commits <= ground.rules.max_attempts
            case _:
                pass


class RoundAudit:
    """Watches every step of one round machine and fails on the first broken promise."""

    def __init__(self, state: r.State, transition: Transition = r.transition) -> None:
        self.state = state
        self._transition = transition
        self.masks = MaskAudit()
        self.armed: set[str] = set()
        self.opened: tuple[int, int] | None = None
        self.last_opened = (-1, -1)
        self.asked = False
        self.finished: list[r.FinishRun] = []
        self.closes: list[r.AnnounceClose] = []

    def step(self, event: r.Event) -> tuple[r.Action, ...]:
        before = self.state
        after, actions = self._transition(before, event)
        self.state = after
        if isinstance(event, TimerExpired):
            self.armed.discard(event.timer)
        if isinstance(event, r.RoundsAsked):
            self.asked = True
        self.masks.hear(event, actions)
        for action in actions:
            if isinstance(action, r.OpenRound):
                self.masks = MaskAudit()
            self._see(action, before, event)
            self.masks.see(action, after.ground)
        self._check_digest(before, event)
        self._check_contributors(before)
        self._check_rest()
        self._check_waiting()
        return actions

    def _see(self, action: r.Action, before: r.State, event: r.Event) -> None:
        ground = self.state.ground
        match action:
            case ArmTimer(timer=timer, seconds=seconds):
                assert seconds >= 0
                self.armed.add(timer)
            case CancelTimer(timer=timer):
                self.armed.discard(timer)
            case r.OpenRound():
                self._see_open(action)
            case r.AnnounceClose() | r.AnnounceAbort():
                self._see_end(action, before)
            case r.DeriveSum() | r.Diagnose() | r.Commit():
                assert isinstance(self.state, FROZEN)
                assert action.contributors == self.state.contributors
                assert len(action.contributors) >= ground.rules.quorum
                nodes = [c.node for c in action.contributors]
                assert nodes == sorted(set(nodes))
            case r.BeginCollect():
                assert len(action.nodes) >= ground.rules.quorum
                assert set(action.nodes) <= set(ground.here)
            case r.FinishRun():
                assert self.asked, "a run was finished that nobody asked for"
                stopped_behind_commit = bool(before.ground.stopping) and isinstance(
                    event, r.Advanced
                )
                assert at_rest(self.state) or stopped_behind_commit
                self.asked = ground.remaining > 0
                self.finished.append(action)
            case _:
                pass

    def _see_open(self, action: r.OpenRound) -> None:
        ground = self.state.ground
        at = (action.round, action.attempt)
        assert self.opened is None, f"{at} opened while {self.opened} is open"
        assert at > self.last_opened, "an attempt number came twice"
        assert (action.nodes, action.digest) == (ground.asked, ground.digest)
        self.opened = self.last_opened = at

    def _see_end(self, action: r.AnnounceClose | r.AnnounceAbort, before: r.State) -> None:
        assert (action.round, action.attempt) == self.opened
        assert action.digest == self.state.ground.digest
        self.opened = None
        if isinstance(action, r.AnnounceClose):
            assert isinstance(before, r.Committing)
            assert action.contributors == tuple(c.node for c in before.contributors)
            self.closes.append(action)

    def _check_digest(self, before: r.State, event: r.Event) -> None:
        old, new = before.ground, self.state.ground
        if isinstance(before, r.Committing) and isinstance(event, r.Advanced):
            assert (new.round, new.attempt, new.digest) == (old.round + 1, 0, event.digest)
        else:
            assert (new.round, new.digest) == (old.round, old.digest)
            assert new.attempt in (old.attempt, old.attempt + 1)

    def _check_contributors(self, before: r.State) -> None:
        if isinstance(before, FROZEN) and isinstance(self.state, FROZEN):
            assert self.state.contributors == before.contributors

    def _check_rest(self) -> None:
        assert self.armed == armed_in(self.state), "timers do not fit the state"
        assert (self.opened is None) == isinstance(self.state, r.Closed | r.Aborted)
        assert (self.state.ground.remaining == 0) == at_rest(self.state)
        assert self.asked != at_rest(self.state)

    def _check_waiting(self) -> None:
        waiting = r.waiting(self.state)
        assert waiting.reason
        assert set(waiting.on) <= set(self.state.ground.here)
        assert isinstance(r.public_state(self.state), r.RoundState)


class Play(RoundAudit):
    """A playbook: events in, and what was asked for in return."""

    def __init__(self, *here: NodeId, **rules: object) -> None:
        super().__init__(closed(*here, **rules))

    def feed(self, *events: r.Event) -> tuple[r.Action, ...]:
        """Actions of the last event."""
        actions: tuple[r.Action, ...] = ()
        for event in events:
            actions = self.step(event)
            line = msgspec.json.encode(self.state)
            assert msgspec.json.decode(line, type=r.State) == self.state
        return actions

    def opens(self, rounds: int = 1, patience_s: float | None = None) -> "Play":
        self.feed(r.RoundsAsked(rounds, patience_s))
        return self

    def collects(self, *nodes: NodeId, at: tuple[int, int] = (0, 0)) -> "Play":
        self.feed(*(committed(node, at) for node in nodes))
        if isinstance(self.state, r.Open):
            self.feed(expired(r.Timer.GRACE))
        if isinstance(self.state, r.Sharing):
            self.feed(*(shares(node, at) for node in nodes))
        assert isinstance(self.state, r.Collecting)
        return self

    def sends(self, *nodes: NodeId, at: tuple[int, int] = (0, 0)) -> tuple[r.Action, ...]:
        actions: tuple[r.Action, ...] = ()
        for node in nodes:
            actions = self.feed(announced(node, at), arrived(node, at))
        return actions

    def unmasks(self, *nodes: NodeId, at: tuple[int, int] = (0, 0)) -> tuple[r.Action, ...]:
        return self.feed(*(unmasks(node, at) for node in nodes))

    def stalls(self) -> tuple[r.Action, ...]:
        """A whole collect timeout passes in which nobody comes further."""
        actions: tuple[r.Action, ...] = ()
        for _ in range(patience.CHECKS):
            actions = self.feed(expired(r.Timer.COLLECT))
        return actions

    def commits(self, at: tuple[int, int] = (0, 0)) -> tuple[r.Action, ...]:
        return self.feed(summed(at), diagnosed(at), advanced(at))


def only(actions: Sequence[r.Action], kind: type[Kind]) -> Kind:
    """The one action of ``kind``."""
    (found,) = (action for action in actions if isinstance(action, kind))
    return found


def kinds(actions: Sequence[r.Action]) -> list[str]:
    return [type(action).__name__ for action in actions]
