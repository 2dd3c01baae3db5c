"""The machine that drives outer rounds, seen from the coordinator.

::

    Closed -> Open -> Collecting -> Aggregating -> Aligning -> Committing -> Closed
                |         |             |             |           |
                +---------+-------------+-------------+-----------+-> Aborted -> Open, attempt + 1

A masked round passes through ``Sharing`` between ``Open`` and ``Collecting``, and through
``Unmasking`` between ``Collecting`` and ``Aggregating``; once its sum is revealed, a commit that
fails is tried again in place, since to collect again would reveal another sum.

Only ``Committing -> Closed`` moves the global digest.  The contributors are fixed when
``Collecting`` is left: later states have them and no way to add one.  Every peer's word carries the
(round, attempt) it was said for; a word for another one is refused and the state does not move.
"""

from bisect import bisect_left
from enum import StrEnum
from operator import attrgetter
from typing import Literal, TypeAlias

import msgspec
from msgspec.structs import replace

from lensemble.errors import InvalidTransition, OperatorError, Response
from lensemble.ids import Digest, NodeId
from lensemble.machine import ArmTimer, CancelTimer, Step, TimerExpired
from lensemble_coord.training import patience, quorum


class RoundState(StrEnum):
    """The public answer to "where is the round?"; computed from the state, never stored."""

    OPEN = "open"
    COLLECTING = "collecting"
    AGGREGATING = "aggregating"
    ALIGNING = "aligning"
    COMMITTING = "committing"
    CLOSED = "closed"
    ABORTED = "aborted"


class Timer(StrEnum):
    OPEN = "open"
    GRACE = "grace"
    SHARE = "share"
    COLLECT = "collect"
    COLLECT_END = "collect_end"
    UNMASK = "unmask"
    RETRY = "retry"


PHASE_TIMERS = (
    Timer.OPEN,
    Timer.GRACE,
    Timer.SHARE,
    Timer.COLLECT,
    Timer.COLLECT_END,
    Timer.UNMASK,
)
"""What may run while a round is in flight; all are cancelled when it aborts."""


UNUSABLE_SUMS = frozenset({"secure_aggregation", "aggregation"})
"""Why a masked sum cannot be used: its masks do not come off, or no honest updates make it."""

STOPPING_CODES = frozenset({"dp_budget_exceeded"})
"""What a node may say that ends the run: going on without it would spend what it cannot."""


MAX_REASONS = 8
"""Of how many nodes an abort repeats what they said."""


class Rules(msgspec.Struct, frozen=True):
    """What configuration fixes for every round; times in seconds."""

    quorum: int
    max_attempts: int
    open_timeout_s: float
    open_grace_s: float
    collect_timeout_s: float
    """A participant without progress for this long, or at most a quarter longer, is left out."""
    retry_backoff_s: float
    retry_backoff_max_s: float
    on_commitment_mismatch: Literal["abort", "exclude"]
    masked: bool = False
    threshold: int = 0
    """Fewest unmasking answers, for any number of participants; never below a majority of them."""
    share_timeout_s: float = 30.0
    unmask_timeout_s: float = 15.0
    collect_max_s: float = 0.0
    """The longest an attempt collects whatever progress is made; 0 is ``patience.MAX_PATIENCE``."""


class Ground(msgspec.Struct, frozen=True):
    """What every state stands on.

    ``round`` and ``attempt`` name the round in flight, or in ``Closed`` the next one.  ``tries``
    counts attempts of this round within the present run.  ``patience_s`` replaces the open timeout
    for the present run, and the run ends when it expires.  ``stopping`` is why an operator ends the
    run behind a commit that is already under way.  ``resting`` nodes are not asked any more; what
    one of them has bound itself to, it may finish.
    """

    rules: Rules
    round: int
    attempt: int
    digest: Digest
    here: tuple[NodeId, ...] = ()
    remaining: int = 0
    tries: int = 0
    patience_s: float | None = None
    stopping: str = ""
    resting: frozenset[NodeId] = frozenset()

    @property
    def asked(self) -> tuple[NodeId, ...]:
        """Who is expected in a round that opens."""
        return tuple(node for node in self.here if node not in self.resting)


class Binding(msgspec.Struct, frozen=True, gc=False):
    """A valid ``Commitment`` of this attempt."""

    node: NodeId
    dataset_root: Digest
    signature: bytes


class Contribution(msgspec.Struct, frozen=True, gc=False):
    """An update that is announced, arrived whole, and bound to its dataset."""

    node: NodeId
    dataset_root: Digest
    commitment_signature: bytes
    digest: Digest
    update_signature: bytes


class Dropped(msgspec.Struct, frozen=True, gc=False):
    node: NodeId
    code: str
    reason: str


# ---- states ----


class Closed(msgspec.Struct, frozen=True, tag=True):
    """No round in flight: at rest, or between two rounds."""

    ground: Ground


class Open(msgspec.Struct, frozen=True, tag=True):
    ground: Ground
    bound: tuple[Binding, ...] = ()
    declined: tuple[Dropped, ...] = ()
    graced: bool = False
    hurry: bool = False


class Sharing(msgspec.Struct, frozen=True, tag=True):
    """Masked only: ``bound`` exchange shares of their mask secrets; ``shared`` have sent theirs."""

    ground: Ground
    bound: tuple[Binding, ...]
    threshold: int
    shared: tuple[NodeId, ...] = ()
    dropped: tuple[Dropped, ...] = ()


class Collecting(msgspec.Struct, frozen=True, tag=True):
    """``expected`` may contribute; ``announced`` and ``arrived`` are halves of a contribution.

    ``expected`` are sorted, ``advances`` of all of them in that order; ``checks`` counts how often
    they were looked at.
    """

    ground: Ground
    expected: tuple[Binding, ...]
    announced: tuple["UpdateAnnounced", ...] = ()
    arrived: tuple["BlobArrived", ...] = ()
    verified: tuple[Contribution, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    threshold: int = 0
    advances: tuple[patience.Advance, ...] = ()
    checks: int = 0


class Unmasking(msgspec.Struct, frozen=True, tag=True):
    """Masked only: the contributors are fixed and reveal what takes the masks off their sum."""

    ground: Ground
    contributors: tuple[Contribution, ...]
    dropped: tuple[Dropped, ...]
    threshold: int
    answered: tuple[NodeId, ...] = ()
    gone: tuple[NodeId, ...] = ()


class Aggregating(msgspec.Struct, frozen=True, tag=True):
    ground: Ground
    contributors: tuple[Contribution, ...]
    dropped: tuple[Dropped, ...]
    failures: int = 0
    reason: str = ""
    """Masked only: why the last try failed, while the pause before the next one lasts."""


class Aligning(msgspec.Struct, frozen=True, tag=True):
    ground: Ground
    contributors: tuple[Contribution, ...]
    dropped: tuple[Dropped, ...]
    field_sum: Digest


class Committing(msgspec.Struct, frozen=True, tag=True):
    ground: Ground
    contributors: tuple[Contribution, ...]
    dropped: tuple[Dropped, ...]
    field_sum: Digest
    failures: int = 0
    reason: str = ""
    """Why the last try failed, while the pause before the next one lasts."""


class Aborted(msgspec.Struct, frozen=True, tag=True):
    """The attempt is discarded; ``retrying`` says whether another one follows by itself."""

    ground: Ground
    code: str
    reason: str
    retrying: bool


State: TypeAlias = (
    Closed | Open | Sharing | Collecting | Unmasking | Aggregating | Aligning | Committing | Aborted
)
InFlight: TypeAlias = Open | Sharing | Collecting | Unmasking | Aggregating | Aligning | Committing

# ---- events ----


class RoundsAsked(msgspec.Struct, frozen=True, tag=True):
    """``rounds`` more rounds are wanted, 1 at least; asked during a run they are part of it."""

    rounds: int
    patience_s: float | None = None

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise OperatorError(f"{self.rounds} rounds were asked for", "Ask for 1 or more.")


class MemberReady(msgspec.Struct, frozen=True, tag=True):
    """A node is admitted and its edges are provisioned."""

    node: NodeId


class MemberRests(msgspec.Struct, frozen=True, tag=True):
    """``node``, here or not, is left out of rounds that open later, or (False) is not any more."""

    node: NodeId
    resting: bool = True


class MemberLost(msgspec.Struct, frozen=True, tag=True):
    node: NodeId
    code: str
    reason: str


class Holding(msgspec.Struct, frozen=True):
    """What a node has of the state that a round starts from, as its ``Commitment`` says it.

    ``nbytes`` of the parameters and the momentum behind them; or what ``follows`` of the last
    steps start from, and ``of_sum`` bytes of the first sum of those.
    """

    nbytes: int
    follows: int = 0
    of_sum: int = 0


class Committed(msgspec.Struct, frozen=True, tag=True):
    """A node bound itself to a dataset, signature checked; it holds so much of the state."""

    node: NodeId
    round: int
    attempt: int
    dataset_root: Digest
    signature: bytes
    held: Holding


class Declined(msgspec.Struct, frozen=True, tag=True):
    """A node, or our own check of what it sent, says it will not contribute to this attempt."""

    node: NodeId
    round: int
    attempt: int
    code: str
    reason: str


class SharesSent(msgspec.Struct, frozen=True, tag=True):
    """A node sent its encrypted shares for every other bound node."""

    node: NodeId
    round: int
    attempt: int


class UnmaskAnswered(msgspec.Struct, frozen=True, tag=True):
    """A contributor revealed shares for the survivor set it signed; the signature is checked."""

    node: NodeId
    round: int
    attempt: int


class UpdateAnnounced(msgspec.Struct, frozen=True, tag=True, gc=False):
    node: NodeId
    round: int
    attempt: int
    digest: Digest
    dataset_root: Digest
    signature: bytes


class BlobArrived(msgspec.Struct, frozen=True, tag=True, gc=False):
    """A whole update lies in the spool; ``digest`` was computed here, the signature checked."""

    node: NodeId
    round: int
    attempt: int
    digest: Digest
    signature: bytes


class Progressed(msgspec.Struct, frozen=True, tag=True):
    """A node says how far it is, or (``arriving``) so many bytes of its update are here."""

    node: NodeId
    round: int
    attempt: int
    phase: str
    done: int
    total: int


class SumDerived(msgspec.Struct, frozen=True, tag=True):
    round: int
    attempt: int
    field_sum: Digest


class Diagnosed(msgspec.Struct, frozen=True, tag=True):
    round: int
    attempt: int


class Advanced(msgspec.Struct, frozen=True, tag=True):
    """The ledger record is durable: the global state is ``digest`` now."""

    round: int
    attempt: int
    digest: Digest


class StepFailed(msgspec.Struct, frozen=True, tag=True):
    """Our own work for this attempt failed; nothing is committed."""

    round: int
    attempt: int
    code: str
    reason: str
    response: Response


class AbortAsked(msgspec.Struct, frozen=True, tag=True):
    """An operator ends the run; the round in flight is discarded."""

    reason: str


Event: TypeAlias = (
    RoundsAsked
    | MemberReady
    | MemberRests
    | MemberLost
    | Committed
    | Declined
    | SharesSent
    | UpdateAnnounced
    | BlobArrived
    | UnmaskAnswered
    | Progressed
    | SumDerived
    | Diagnosed
    | Advanced
    | StepFailed
    | AbortAsked
    | TimerExpired
)
FromPeer: TypeAlias = (
    Committed | Declined | SharesSent | UpdateAnnounced | BlobArrived | UnmaskAnswered
)
FromWork: TypeAlias = SumDerived | Diagnosed | Advanced | StepFailed

# ---- actions ----


class OpenRound(msgspec.Struct, frozen=True, tag=True):
    """Record the attempt, durably, then tell ``nodes``."""

    round: int
    attempt: int
    digest: Digest
    nodes: tuple[NodeId, ...]


class AskAlso(msgspec.Struct, frozen=True, tag=True):
    """Tell ``node`` too that the round is open."""

    node: NodeId


class OfferState(msgspec.Struct, frozen=True, tag=True):
    """Send ``node`` what it does not hold of the global state; nothing if it holds all of it."""

    node: NodeId
    held: Holding


class SendRoster(msgspec.Struct, frozen=True, tag=True):
    """Tell the bound nodes each other's keys and the threshold."""

    bound: tuple[Binding, ...]
    threshold: int


class BeginCollect(msgspec.Struct, frozen=True, tag=True):
    nodes: tuple[NodeId, ...]


class Refuse(msgspec.Struct, frozen=True, tag=True):
    """Count what ``node`` sent as refused and tell it why."""

    node: NodeId
    code: str
    reason: str


class DropUpdate(msgspec.Struct, frozen=True, tag=True):
    """Forget whatever ``node`` sent for this attempt."""

    node: NodeId


class RequestUnmask(msgspec.Struct, frozen=True, tag=True):
    """Ask the survivors for what takes the masks off the sum of exactly their updates."""

    survivors: tuple[NodeId, ...]
    dropouts: tuple[NodeId, ...]


class DeriveSum(msgspec.Struct, frozen=True, tag=True):
    contributors: tuple[Contribution, ...]


class Diagnose(msgspec.Struct, frozen=True, tag=True):
    field_sum: Digest
    contributors: tuple[Contribution, ...]


class Commit(msgspec.Struct, frozen=True, tag=True):
    """Outer step, checkpoint, one ledger record."""

    field_sum: Digest
    contributors: tuple[Contribution, ...]


class AnnounceClose(msgspec.Struct, frozen=True, tag=True):
    round: int
    attempt: int
    digest: Digest
    contributors: tuple[NodeId, ...]


class AnnounceAbort(msgspec.Struct, frozen=True, tag=True):
    """Record and tell that the attempt is discarded; drop its spool."""

    round: int
    attempt: int
    digest: Digest
    code: str
    reason: str
    retries: bool


class FinishRun(msgspec.Struct, frozen=True, tag=True):
    """The rounds asked for are done, or given up for ``reason``."""

    completed: bool
    code: str = ""
    reason: str = ""


Action: TypeAlias = (
    OpenRound
    | AskAlso
    | OfferState
    | SendRoster
    | BeginCollect
    | RequestUnmask
    | Refuse
    | DropUpdate
    | DeriveSum
    | Diagnose
    | Commit
    | AnnounceClose
    | AnnounceAbort
    | FinishRun
    | ArmTimer
    | CancelTimer
)

# ---- transition ----


def transition(state: State, event: Event) -> Step[State, Action]:
    match event:
        case RoundsAsked():
            return _ask(state, event)
        case MemberReady() | MemberRests() | MemberLost() | Progressed():
            return _member(state, event)
        case AbortAsked():
            return _stop(state, event.reason)
        case TimerExpired():
            return _expire(state, event.timer)
        case (
            Committed()
            | Declined()
            | SharesSent()
            | UpdateAnnounced()
            | BlobArrived()
            | UnmaskAnswered()
        ):
            return _hear(state, event)
        case SumDerived() | Diagnosed() | Advanced() | StepFailed():
            return _work(state, event)


_PUBLIC = {"sharing": RoundState.OPEN, "unmasking": RoundState.AGGREGATING}


def public_state(state: State) -> RoundState:
    name = type(state).__name__.lower()
    return _PUBLIC.get(name) or RoundState(name)


def _ask(state: State, event: RoundsAsked) -> Step[State, Action]:
    ground = replace(
        state.ground,
        remaining=state.ground.remaining + event.rounds,
        patience_s=state.ground.patience_s if event.patience_s is None else event.patience_s,
    )
    match state:
        case Closed() if state.ground.remaining == 0:
            return _open(replace(ground, tries=0))
        case Aborted(retrying=False):
            return _open(replace(ground, attempt=ground.attempt + 1, tries=0))
        case _:
            return replace(state, ground=ground), ()


def _open(ground: Ground) -> Step[State, Action]:
    timeout = ground.rules.open_timeout_s if ground.patience_s is None else ground.patience_s
    state = Open(replace(ground, tries=ground.tries + 1))
    return state, (
        OpenRound(ground.round, ground.attempt, ground.digest, ground.asked),
        ArmTimer(Timer.OPEN, timeout),
    )


def _member(
    state: State, event: MemberReady | MemberRests | MemberLost | Progressed
) -> Step[State, Action]:
    match event:
        case MemberReady(node):
            return _welcome(state, node)
        case MemberRests():
            return _rest(state, event)
        case MemberLost():
            return _lose(state, event)
        case Progressed():
            return _progress(state, event)


def _welcome(state: State, node: NodeId) -> Step[State, Action]:
    here = tuple(sorted({*state.ground.here, node}))
    joined = replace(state, ground=replace(state.ground, here=here))
    match joined:
        case Open() if node not in joined.ground.resting:
            declined = tuple(d for d in joined.declined if d.node != node)
            bound = tuple(b for b in joined.bound if b.node != node)
            after, actions = _consider_collect(replace(joined, declined=declined, bound=bound))
            return after, (AskAlso(node), *actions)
        case _:
            return joined, ()


def _rest(state: State, event: MemberRests) -> Step[State, Action]:
    ground = state.ground
    others = ground.resting - {event.node}
    resting = others | {event.node} if event.resting else others
    after = replace(state, ground=replace(ground, resting=resting))
    match after:
        case Open() if event.resting:
            return _consider_collect(after)
        case Open(bound=bound) if event.node in ground.here and not _asked(
            ground, bound, event.node
        ):
            return _welcome(after, event.node)
        case _:
            return after, ()


def _asked(ground: Ground, bound: tuple[Binding, ...], node: NodeId) -> bool:
    return node in ground.asked or any(b.node == node for b in bound)


def _lose(state: State, event: MemberLost) -> Step[State, Action]:
    here = tuple(n for n in state.ground.here if n != event.node)
    left = replace(state, ground=replace(state.ground, here=here))
    match left:
        case Open():
            bound = tuple(b for b in left.bound if b.node != event.node)
            return _consider_collect(replace(left, bound=bound))
        case Sharing():
            return _leave_sharing(left, Dropped(event.node, event.code, event.reason))
        case Collecting():
            return _drop(left, Dropped(event.node, event.code, event.reason))
        case Unmasking():
            return _cannot_answer(left, event.node)
        case _:
            return left, ()


def _hear(state: State, event: FromPeer) -> Step[State, Action]:
    ground = state.ground
    if (event.round, event.attempt) != (ground.round, ground.attempt):
        reason = (
            f"{type(event).__name__} is for round {event.round} attempt {event.attempt}; "
            f"the coordinator is at round {ground.round} attempt {ground.attempt}"
        )
        return state, (Refuse(event.node, "stale", reason),)
    if isinstance(event, Declined) and event.node not in ground.here:
        return state, (Refuse(event.node, "unknown", "this node is not here"),)
    match state:
        case Open():
            return _hear_while_open(state, event)
        case Sharing():
            return _hear_while_sharing(state, event)
        case Collecting():
            return _hear_while_collecting(state, event)
        case Unmasking():
            return _hear_while_unmasking(state, event)
        case _ if isinstance(event, Declined):
            return state, ()
        case _:
            return _misplaced(state, event)


def _hear_while_open(state: Open, event: FromPeer) -> Step[State, Action]:
    match event:
        case Committed():
            return _bind(state, event)
        case Declined() if event.code in STOPPING_CODES:
            return _fail_closed(state.ground, event)
        case Declined():
            bound = tuple(b for b in state.bound if b.node != event.node)
            others = tuple(d for d in state.declined if d.node != event.node)
            declined = (*others, Dropped(event.node, event.code, event.reason))
            return _consider_collect(replace(state, bound=bound, declined=declined))
        case _:
            return _misplaced(state, event)


def _hear_while_collecting(state: Collecting, event: FromPeer) -> Step[State, Action]:
    match event:
        case UpdateAnnounced():
            return _announce(state, event)
        case BlobArrived():
            return _arrive(state, event)
        case Declined() if event.code in STOPPING_CODES:
            return _fail_closed(state.ground, event)
        case Declined():
            return _drop(state, Dropped(event.node, event.code, event.reason))
        case _:
            return _misplaced(state, event)


def _hear_while_sharing(state: Sharing, event: FromPeer) -> Step[State, Action]:
    match event:
        case SharesSent():
            return _share(state, event.node)
        case Declined() if event.code in STOPPING_CODES:
            return _fail_closed(state.ground, event)
        case Declined():
            return _leave_sharing(state, Dropped(event.node, event.code, event.reason))
        case _:
            return _misplaced(state, event)


def _hear_while_unmasking(state: Unmasking, event: FromPeer) -> Step[State, Action]:
    match event:
        case UnmaskAnswered():
            return _answer(state, event.node)
        case Declined():
            return _cannot_answer(state, event.node)
        case _:
            return _misplaced(state, event)


def _misplaced(state: State, event: FromPeer) -> Step[State, Action]:
    reason = f"{type(event).__name__} came while the round is {type(state).__name__.lower()}"
    return state, (Refuse(event.node, "misplaced", reason),)


def _fail_closed(ground: Ground, event: Declined) -> Step[State, Action]:
    return _abort(ground, event.code, f"node {event.node[:12]}: {event.reason}", Response.STOP)


def _bind(state: Open, event: Committed) -> Step[State, Action]:
    if event.node not in state.ground.here:
        return state, (Refuse(event.node, "unknown", "this node was not asked"),)
    if any(b.node == event.node for b in state.bound):
        return state, (Refuse(event.node, "duplicate", "already bound for this attempt"),)
    binding = Binding(event.node, event.dataset_root, event.signature)
    declined = tuple(d for d in state.declined if d.node != event.node)
    bound = replace(state, bound=(*state.bound, binding), declined=declined)
    after, actions = _consider_collect(bound)
    return after, (OfferState(event.node, event.held), *actions)


def _consider_collect(state: Open) -> Step[State, Action]:
    ground = state.ground
    asked = len(ground.here) - len(ground.resting) - len(state.declined)
    enough = len(state.bound) >= _needed_to_collect(ground.rules)
    if asked > len(state.bound) and enough == state.graced and not state.hurry:
        return state, ()  # some are outstanding: nobody need be counted by name, see ``quorum``
    match _open_verdict(state):
        case quorum.Enough():
            bound = tuple(sorted(state.bound, key=lambda b: b.node))
            timers = (CancelTimer(Timer.OPEN), CancelTimer(Timer.GRACE))
            begin = _share_secrets if state.ground.rules.masked else _collect
            after, actions = begin(state.ground, bound)
            return after, (*timers, *actions)
        case quorum.NotYet(sufficient=True) if not state.graced:
            arm_grace = ArmTimer(Timer.GRACE, state.ground.rules.open_grace_s)
            return replace(state, graced=True), (arm_grace,)
        case quorum.NotYet(sufficient=False) if state.graced:
            return replace(state, graced=False), (CancelTimer(Timer.GRACE),)
        case quorum.NotYet():
            return state, ()


def _collect(
    ground: Ground,
    expected: tuple[Binding, ...],
    dropped: tuple[Dropped, ...] = (),
    threshold: int = 0,
) -> Step[State, Action]:
    begin = BeginCollect(tuple(b.node for b in expected))
    rules = ground.rules
    cap = (ArmTimer(Timer.COLLECT_END, rules.collect_max_s),) if rules.collect_max_s else ()
    advances = tuple(patience.Advance(b.node) for b in expected)
    collecting = Collecting(
        ground, expected, dropped=dropped, threshold=threshold, advances=advances
    )
    return collecting, (
        begin,
        ArmTimer(Timer.COLLECT, patience.check_every_s(rules.collect_timeout_s)),
        *cap,
    )


# ---- masks: shares before the updates, answers after them ----


def _share_secrets(ground: Ground, bound: tuple[Binding, ...]) -> Step[State, Action]:
    # More than half of those who hold shares, so that no two survivor sets can both be answered.
    threshold = max(ground.rules.threshold, len(bound) // 2 + 1)
    return Sharing(ground, bound, threshold), (
        SendRoster(bound, threshold),
        ArmTimer(Timer.SHARE, ground.rules.share_timeout_s),
    )


def _share(state: Sharing, node: NodeId) -> Step[State, Action]:
    if all(b.node != node for b in state.bound) or any(d.node == node for d in state.dropped):
        return state, (Refuse(node, "unbound", "no commitment of this node for this attempt"),)
    if node in state.shared:
        return state, (Refuse(node, "duplicate", "a second SharesSent of one attempt"),)
    return _consider_masked_collect(replace(state, shared=(*state.shared, node)), hurry=False)


def _leave_sharing(state: Sharing, dropped: Dropped) -> Step[State, Action]:
    node = dropped.node
    known = any(b.node == node for b in state.bound)
    if not known or any(d.node == node for d in state.dropped):
        return state, ()
    shared = tuple(n for n in state.shared if n != node)
    after = replace(state, shared=shared, dropped=(*state.dropped, dropped))
    return _consider_masked_collect(after, hurry=False)


def _due_to_share(state: Sharing) -> frozenset[NodeId]:
    gone = {d.node for d in state.dropped}
    return frozenset(b.node for b in state.bound) - gone - set(state.shared)


def _sharing_verdict(state: Sharing, *, hurry: bool) -> quorum.Verdict:
    need = _needed_to_share(state)
    return quorum.to_share(need, frozenset(state.shared), _due_to_share(state), hurry=hurry)


def _needed_to_share(state: Sharing) -> int:
    return max(state.ground.rules.quorum, state.threshold)


def _consider_masked_collect(state: Sharing, *, hurry: bool) -> Step[State, Action]:
    ground = state.ground
    possible = len(state.bound) - len(state.dropped)
    if not hurry and quorum.surely_waits(_needed_to_share(state), len(state.shared), possible):
        return state, ()
    silence = f"no mask shares within {ground.rules.share_timeout_s:g} s"
    late = sorted(_due_to_share(state)) if hurry else ()
    dropped = (*state.dropped, *(Dropped(n, "timeout", silence) for n in late))
    match _sharing_verdict(state, hurry=hurry):
        case quorum.Enough(nodes=nodes):
            expected = tuple(b for b in state.bound if b.node in nodes)
            after, actions = _collect(ground, expected, dropped, state.threshold)
            return after, (CancelTimer(Timer.SHARE), *actions)
        case quorum.TooFew(reason=reason):
            text = _with_reasons(reason, dropped)
            return _abort(ground, "secure_aggregation", text, Response.RETRY)
        case quorum.NotYet():
            return state, ()


def _answer(state: Unmasking, node: NodeId) -> Step[State, Action]:
    if all(c.node != node for c in state.contributors):
        return state, (Refuse(node, "unbound", "this node is no survivor of this attempt"),)
    if node in state.answered:
        return state, (Refuse(node, "duplicate", "a second UnmaskAnswered of one attempt"),)
    gone = tuple(n for n in state.gone if n != node)
    return _consider_sum(replace(state, answered=(*state.answered, node), gone=gone), hurry=False)


def _cannot_answer(state: Unmasking, node: NodeId) -> Step[State, Action]:
    settled = (*state.answered, *state.gone)
    if node in settled or all(c.node != node for c in state.contributors):
        return state, ()
    return _consider_sum(replace(state, gone=(*state.gone, node)), hurry=False)


def _unmask_verdict(state: Unmasking, *, hurry: bool) -> quorum.Verdict:
    survivors = frozenset(c.node for c in state.contributors)
    due = survivors - set(state.answered) - set(state.gone)
    return quorum.to_unmask(state.threshold, frozenset(state.answered), due, hurry=hurry)


def _consider_sum(state: Unmasking, *, hurry: bool) -> Step[State, Action]:
    possible = len(state.contributors) - len(state.gone)
    if not hurry and quorum.surely_waits(state.threshold, len(state.answered), possible):
        return state, ()
    match _unmask_verdict(state, hurry=hurry):
        case quorum.Enough():
            aggregating = Aggregating(state.ground, state.contributors, state.dropped)
            return aggregating, (CancelTimer(Timer.UNMASK), DeriveSum(state.contributors))
        case quorum.TooFew(reason=reason):
            silent = (c.node for c in state.contributors if c.node not in state.answered)
            text = f"{reason}; no answer of {_several(tuple(n[:12] for n in silent))}"
            return _abort(state.ground, "secure_aggregation", text, Response.RETRY)
        case quorum.NotYet():
            return state, ()


def _open_verdict(state: Open) -> quorum.Enough | quorum.NotYet:
    declined = {d.node for d in state.declined}
    bound = frozenset(b.node for b in state.bound)
    asked = frozenset(n for n in state.ground.asked if n not in declined) | bound
    k = _needed_to_collect(state.ground.rules)
    return quorum.to_collect(k, asked, bound, hurry=state.hurry)


def _needed_to_collect(rules: Rules) -> int:
    return max(rules.quorum, rules.threshold) if rules.masked else rules.quorum


def _announce(state: Collecting, event: UpdateAnnounced) -> Step[State, Action]:
    refusal = _cannot_send(state, event.node) or _twice(state.announced, event)
    if refusal is not None:
        return state, (refusal,)
    binding = next(b for b in state.expected if b.node == event.node)
    if event.dataset_root != binding.dataset_root:
        return _mismatch(state, event, binding)
    return _pair_up(replace(state, announced=(*state.announced, event)), event.node)


def _mismatch(state: Collecting, event: UpdateAnnounced, binding: Binding) -> Step[State, Action]:
    reason = (
        f"the update names dataset root {event.dataset_root[:16]}, "
        f"the commitment {binding.dataset_root[:16]}"
    )
    refuse = Refuse(event.node, "commitment_mismatch", reason)
    if state.ground.rules.on_commitment_mismatch == "exclude":
        after, actions = _drop(state, Dropped(event.node, "commitment_mismatch", reason))
        return after, (refuse, *actions)
    after, actions = _abort(
        state.ground, "commitment_mismatch", f"node {event.node[:12]}: {reason}", Response.STOP
    )
    return after, (refuse, *actions)


def _arrive(state: Collecting, event: BlobArrived) -> Step[State, Action]:
    refusal = _cannot_send(state, event.node) or _twice(state.arrived, event)
    if refusal is not None:
        return state, (refusal,)
    return _pair_up(replace(state, arrived=(*state.arrived, event)), event.node)


def _cannot_send(state: Collecting, node: NodeId) -> Refuse | None:
    if all(b.node != node for b in state.expected):
        return Refuse(node, "unbound", "no commitment of this node for this attempt")
    if any(d.node == node for d in state.dropped):
        return Refuse(node, "dropped", "this node was dropped from this attempt")
    return None


def _twice(
    heard: tuple[UpdateAnnounced, ...] | tuple[BlobArrived, ...],
    event: UpdateAnnounced | BlobArrived,
) -> Refuse | None:
    if any(e.node == event.node for e in heard):
        return Refuse(event.node, "duplicate", f"a second {type(event).__name__} of one attempt")
    return None


def _pair_up(state: Collecting, node: NodeId) -> Step[State, Action]:
    """A contribution is verified once its announcement and its blob are both here and agree."""
    announced = next((a for a in state.announced if a.node == node), None)
    arrived = next((b for b in state.arrived if b.node == node), None)
    if announced is None or arrived is None:
        return state, ()
    if (announced.digest, announced.signature) != (arrived.digest, arrived.signature):
        reason = f"the blob is {arrived.digest[:16]}, announced was {announced.digest[:16]}"
        after, actions = _drop(state, Dropped(node, "contract_violation", reason))
        return after, (Refuse(node, "contract_violation", reason), *actions)
    binding = next(b for b in state.expected if b.node == node)
    contribution = Contribution(
        node, binding.dataset_root, binding.signature, arrived.digest, arrived.signature
    )
    return _consider_aggregate(
        replace(state, verified=(*state.verified, contribution)), hurry=False
    )


def _drop(state: Collecting, dropped: Dropped) -> Step[State, Action]:
    """Take a node out of this attempt, unless its update is already in or it was never expected."""
    node = dropped.node
    settled = {c.node for c in state.verified} | {d.node for d in state.dropped}
    if node in settled or all(b.node != node for b in state.expected):
        return state, ()
    after, actions = _consider_aggregate(
        replace(state, dropped=(*state.dropped, dropped)), hurry=False
    )
    return after, (DropUpdate(node), *actions)


def _progress(state: State, event: Progressed) -> Step[State, Action]:
    """Whoever comes further is waited for; anything else said of progress changes nothing."""
    at = (event.round, event.attempt)
    if not isinstance(state, Collecting) or at != (state.ground.round, state.ground.attempt):
        return state, ()
    place = bisect_left(state.advances, event.node, key=attrgetter("node"))
    if place == len(state.advances) or state.advances[place].node != event.node:
        return state, ()
    advance = patience.further(state.advances[place], event.phase, event.done, event.total)
    advances = (*state.advances[:place], advance, *state.advances[place + 1 :])
    return replace(state, advances=advances), ()


def _check_progress(state: Collecting) -> Step[State, Action]:
    """Leave out who has been still for too long; wait on for who moves."""
    timeout_s, due = state.ground.rules.collect_timeout_s, outstanding(state)
    checks = state.checks + 1
    if patience.is_over(checks):
        return _consider_aggregate(state, hurry=True)
    advances = tuple(replace(each, still=each.still + 1) for each in state.advances)
    stalled = tuple(
        Dropped(each.node, "timeout", f"no progress for {timeout_s:g} s: {patience.describe(each)}")
        for each in advances
        if each.node in due and patience.is_stalled(each)
    )
    watched = replace(state, advances=advances, checks=checks, dropped=(*state.dropped, *stalled))
    drops = tuple(DropUpdate(each.node) for each in stalled)
    after, actions = _consider_aggregate(watched, hurry=False)
    again = (ArmTimer(Timer.COLLECT, patience.check_every_s(timeout_s)),)
    more = again if isinstance(after, Collecting) else ()
    return after, (*drops, *actions, *more)


def may_send(state: Collecting, node: NodeId) -> bool:
    """Whether ``node`` may still send an update: it is one of the ``outstanding``."""
    place = bisect_left(state.expected, node, key=attrgetter("node"))
    if place == len(state.expected) or state.expected[place].node != node:
        return False
    return all(each.node != node for settled in (state.verified, state.dropped) for each in settled)


def outstanding(state: Collecting) -> frozenset[NodeId]:
    """Who may still send an update."""
    settled = {c.node for c in state.verified} | {d.node for d in state.dropped}
    return frozenset(b.node for b in state.expected) - settled


def awaited(state: Collecting) -> tuple[patience.Advance, ...]:
    """How far those have come that may still send an update."""
    due = outstanding(state)
    return tuple(each for each in state.advances if each.node in due)


def _collecting_verdict(state: Collecting, *, hurry: bool) -> quorum.Verdict:
    k = _needed_to_aggregate(state)
    verified = frozenset(c.node for c in state.verified)
    return quorum.to_aggregate(k, verified, outstanding(state), hurry=hurry)


def _needed_to_aggregate(state: Collecting) -> int:
    # Only those who contributed can unmask, so fewer than the threshold of them are in vain.
    return max(state.ground.rules.quorum, state.threshold)


def _consider_aggregate(state: Collecting, *, hurry: bool) -> Step[State, Action]:
    ground = state.ground
    possible = len(state.expected) - len(state.dropped)
    if not hurry and quorum.surely_waits(
        _needed_to_aggregate(state), len(state.verified), possible
    ):
        return state, ()
    late = outstanding(state)
    match _collecting_verdict(state, hurry=hurry):
        case quorum.Enough():
            contributors = tuple(sorted(state.verified, key=lambda c: c.node))
            reason = "its update was not in when no more could be waited for"
            dropped = (*state.dropped, *(Dropped(n, "timeout", reason) for n in sorted(late)))
            drops = tuple(DropUpdate(n) for n in sorted(late))
            frozen = replace(state, dropped=dropped)
            after, actions = _freeze(frozen, contributors)
            cancels = (CancelTimer(Timer.COLLECT), CancelTimer(Timer.COLLECT_END))
            return after, (*cancels, *drops, *actions)
        case quorum.TooFew(reason=reason):
            text = _with_reasons(reason, state.dropped)
            return _abort(ground, "fault_tolerance_exceeded", text, Response.RETRY)
        case quorum.NotYet():
            return state, ()


def _freeze(state: Collecting, contributors: tuple[Contribution, ...]) -> Step[State, Action]:
    ground = state.ground
    if not ground.rules.masked:
        return Aggregating(ground, contributors, state.dropped), (DeriveSum(contributors),)
    survivors = tuple(c.node for c in contributors)
    dropouts = tuple(b.node for b in state.expected if b.node not in survivors)
    gone = tuple(n for n in survivors if n not in ground.here)
    unmasking = Unmasking(ground, contributors, state.dropped, state.threshold, gone=gone)
    after, actions = _consider_sum(unmasking, hurry=False)
    if not isinstance(after, Unmasking):
        return after, actions
    arm = ArmTimer(Timer.UNMASK, ground.rules.unmask_timeout_s)
    return after, (RequestUnmask(survivors, dropouts), arm)


def _work(state: State, event: FromWork) -> Step[State, Action]:
    ground = state.ground
    ours = (event.round, event.attempt) == (ground.round, ground.attempt)
    under_way = isinstance(state, Committing) and not state.reason
    if isinstance(event, Advanced) and not (ours and under_way):
        # The ledger holds a record that this machine did not ask for: to go on would fork it.
        raise InvalidTransition(state, event)
    if not ours:
        return state, ()
    match state, event:
        case Aggregating(), SumDerived():
            aligning = Aligning(ground, state.contributors, state.dropped, event.field_sum)
            return aligning, (Diagnose(event.field_sum, state.contributors),)
        case Aligning(), Diagnosed():
            committing = Committing(ground, state.contributors, state.dropped, state.field_sum)
            return committing, (Commit(state.field_sum, state.contributors),)
        case Committing(), Advanced():
            return _close(state, event.digest)
        case ((Aborted() | Closed()), _):
            return state, ()
        case _, StepFailed():
            return _fail(state, event)
        case _:
            raise InvalidTransition(state, event)


def _fail(state: State, event: StepFailed) -> Step[State, Action]:
    ground = state.ground
    match state:
        case Aggregating(reason=reason) | Committing(reason=reason) if reason:
            # Nothing is under way in the pause: this is the failure it already lasts for.
            return state, ()
        case Aggregating() | Committing() if _may_try_again(state, event):
            again = replace(state, failures=state.failures + 1, reason=event.reason)
            return again, (ArmTimer(Timer.RETRY, _backoff(ground.rules, again.failures)),)
        case Aggregating() | Aligning() | Committing() if _is_revealed(state, event):
            return _abort(ground, event.code, event.reason, Response.STOP)
        case _:
            return _abort(ground, event.code, event.reason, event.response)


def _is_revealed(state: Aggregating | Aligning | Committing, event: StepFailed) -> bool:
    """Whether a masked sum is known and sound, so that nothing but our own work is wanting."""
    return state.ground.rules.masked and event.code not in UNUSABLE_SUMS


def _may_try_again(state: Aggregating | Committing, event: StepFailed) -> bool:
    """A revealed sum is committed from what is here or not at all: collecting reveals more."""
    rules = state.ground.rules
    return (
        _is_revealed(state, event)
        and event.response is Response.RETRY
        and state.failures + 1 < rules.max_attempts
        and not state.ground.stopping
    )


def _backoff(rules: Rules, tries: int) -> float:
    return float(min(rules.retry_backoff_s * 2.0 ** (tries - 1), rules.retry_backoff_max_s))


def _close(state: Committing, digest: Digest) -> Step[State, Action]:
    ground = state.ground
    nodes = tuple(c.node for c in state.contributors)
    announce = AnnounceClose(ground.round, ground.attempt, digest, nodes)
    after = replace(
        ground,
        round=ground.round + 1,
        attempt=0,
        digest=digest,
        remaining=ground.remaining - 1,
        tries=0,
        stopping="",
    )
    finish = FinishRun(
        completed=not ground.stopping,
        code="stopped" if ground.stopping else "",
        reason=ground.stopping,
    )
    if after.remaining == 0:
        return Closed(replace(after, patience_s=None)), (announce, finish)
    opened, actions = _open(after)
    if ground.stopping:
        # What remains was asked for after the stop, so it is another run.
        return opened, (announce, finish, *actions)
    return opened, (announce, *actions)


def _expire(state: State, timer: str) -> Step[State, Action]:
    match state, timer:
        case Open(graced=True), Timer.GRACE:
            return _consider_collect(replace(state, hurry=True))
        case Open(), Timer.OPEN:
            return _give_up_waiting(state)
        case Sharing(), Timer.SHARE:
            return _consider_masked_collect(state, hurry=True)
        case Collecting(), Timer.COLLECT:
            return _check_progress(state)
        case Collecting(), Timer.COLLECT_END if state.ground.rules.collect_max_s:
            return _consider_aggregate(state, hurry=True)
        case Unmasking(), Timer.UNMASK:
            return _consider_sum(state, hurry=True)
        case ((Aggregating() | Committing() | Aborted()), Timer.RETRY):
            return _again(state)
        case _:
            return state, ()


def _give_up_waiting(state: Open) -> Step[State, Action]:
    after, actions = _consider_collect(replace(state, hurry=True))
    if not isinstance(after, Open):
        return after, actions
    response = Response.RETRY if state.ground.patience_s is None else Response.STOP
    return _abort(state.ground, "fault_tolerance_exceeded", _open_reason(state), response)


def _again(state: Aggregating | Committing | Aborted) -> Step[State, Action]:
    match state:
        case Aggregating(reason=reason) if reason:
            return replace(state, reason=""), (DeriveSum(state.contributors),)
        case Committing(reason=reason) if reason:
            return replace(state, reason=""), (Commit(state.field_sum, state.contributors),)
        case Aborted(retrying=True):
            return _open(replace(state.ground, attempt=state.ground.attempt + 1))
        case _:
            return state, ()


def _open_reason(state: Open) -> str:
    verdict = _open_verdict(state)
    reason = verdict.reason if isinstance(verdict, quorum.NotYet) else ""
    said = _several(tuple(f"{d.node[:12]} declined: {d.reason}" for d in state.declined))
    return f"OPEN: {reason}" + (f"; {said}" if said else "")


def _with_reasons(reason: str, dropped: tuple[Dropped, ...]) -> str:
    gone = _several(tuple(f"{d.node[:12]}: {d.reason}" for d in dropped))
    return f"{reason} ({gone})" if gone else reason


def _several(sentences: tuple[str, ...]) -> str:
    more = len(sentences) - MAX_REASONS
    tail = (f"and {more} more",) if more > 0 else ()
    return "; ".join((*sentences[:MAX_REASONS], *tail))


def _stop(state: State, reason: str) -> Step[State, Action]:
    match state:
        case Committing():
            # The commit cannot be taken back once it is under way: the run ends behind it.
            ground = replace(state.ground, remaining=1, stopping=reason, patience_s=None)
            return replace(state, ground=ground), ()
        case Closed():
            return state, ()
        case Aborted(retrying=False):
            return state, ()
        case Aborted():
            ground = replace(state.ground, remaining=0, patience_s=None)
            finish = FinishRun(completed=False, code="stopped", reason=reason)
            return replace(state, ground=ground, retrying=False), (
                CancelTimer(Timer.RETRY),
                finish,
            )
        case Aggregating(reason=failure) if failure:
            after, actions = _abort(state.ground, "stopped", reason, Response.STOP)
            return after, (CancelTimer(Timer.RETRY), *actions)
        case _:
            return _abort(state.ground, "stopped", reason, Response.STOP)


def _abort(ground: Ground, code: str, reason: str, response: Response) -> Step[State, Action]:
    retrying = (
        response is Response.RETRY
        and ground.tries < ground.rules.max_attempts
        and not ground.stopping
    )
    announce = AnnounceAbort(ground.round, ground.attempt, ground.digest, code, reason, retrying)
    cancels = tuple(CancelTimer(timer) for timer in PHASE_TIMERS)
    if retrying:
        wait = _backoff(ground.rules, ground.tries)
        return Aborted(ground, code, reason, retrying=True), (
            *cancels,
            announce,
            ArmTimer(Timer.RETRY, wait),
        )
    finish = FinishRun(completed=False, code=code, reason=reason)
    stopped = replace(ground, remaining=0, patience_s=None, stopping="")
    return Aborted(stopped, code, reason, retrying=False), (*cancels, announce, finish)


# ---- who takes part ----


def participants(state: State) -> frozenset[NodeId]:
    """The nodes that the round in flight has use for."""
    match state:
        case Open(bound=some) | Sharing(bound=some):
            return frozenset(each.node for each in some)
        case Collecting(expected=expected, dropped=dropped):
            gone = {each.node for each in dropped}
            return frozenset(each.node for each in expected) - gone
        case Unmasking(contributors=contributors, gone=gone):
            return frozenset(each.node for each in contributors) - frozenset(gone)
        case _:
            return frozenset()


# ---- what is waited for ----


class Waiting(msgspec.Struct, frozen=True):
    """The reason a state lasts, and the nodes it lasts for."""

    reason: str
    on: tuple[NodeId, ...] = ()


def waiting(state: State) -> Waiting:
    """Why the round is where it is; the very decision that will move it on."""
    match state:
        case Open():
            return _undecided(_open_verdict(state))
        case Collecting():
            return _undecided(_collecting_verdict(state, hurry=False))
        case Sharing():
            return _undecided(_sharing_verdict(state, hurry=False))
        case Unmasking():
            return _undecided(_unmask_verdict(state, hurry=False))
        case Aggregating(reason=reason) | Committing(reason=reason) if reason:
            return Waiting(f"trying again after a pause: {reason}")
        case Aborted():
            lead = "retrying after a pause" if state.retrying else "stopped"
            return Waiting(f"{lead}: {state.reason}")
        case Aggregating():
            return Waiting(f"summing {len(state.contributors)} updates twice and comparing")
        case _:
            return Waiting(_BUSY[public_state(state)])


_BUSY = {
    RoundState.CLOSED: "at rest: no round is asked for",
    RoundState.ALIGNING: "diagnosing the revealed sum",
    RoundState.COMMITTING: "taking the outer step and writing the checkpoint",
}


def _undecided(verdict: quorum.Verdict) -> Waiting:
    if isinstance(verdict, quorum.NotYet):
        return Waiting(verdict.reason, verdict.on)
    return Waiting("moving on")
