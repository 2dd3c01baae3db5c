"""The machine that drives outer rounds, seen from the coordinator.

::

    Closed -> Open -> Collecting -> Aggregating -> Aligning -> Committing -> Closed
                |         |             |             |           |
                +---------+-------------+-------------+-----------+-> Aborted -> Open, attempt + 1

Only ``Committing -> Closed`` moves the global digest.  The contributors are fixed when
``Collecting`` is left: later states have them and no way to add one.  Every peer's word carries the
(round, attempt) it was said for; a word for another one is refused and the state does not move.
"""

from enum import StrEnum
from typing import Literal, TypeAlias

import msgspec
from msgspec.structs import replace

from lensemble.errors import InvalidTransition, OperatorError, Response
from lensemble.ids import Digest, NodeId
from lensemble.machine import ArmTimer, CancelTimer, Step, TimerExpired
from lensemble_coord.training import quorum


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
    COLLECT = "collect"
    RETRY = "retry"


PHASE_TIMERS = (Timer.OPEN, Timer.GRACE, Timer.COLLECT)
"""What may run while a round is in flight; all are cancelled when it aborts."""


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
    retry_backoff_s: float
    retry_backoff_max_s: float
    on_commitment_mismatch: Literal["abort", "exclude"]


class Ground(msgspec.Struct, frozen=True):
    """What every state stands on.

    ``round`` and ``attempt`` name the round in flight, or in ``Closed`` the next one.  ``tries``
    counts attempts of this round within the present run.  ``patience_s`` replaces the open timeout
    for the present run, and the run ends when it expires.  ``stopping`` is why an operator ends the
    run behind a commit that is already under way.
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


class Binding(msgspec.Struct, frozen=True):
    """A valid ``Commitment`` of this attempt."""

    node: NodeId
    dataset_root: Digest
    signature: bytes


class Contribution(msgspec.Struct, frozen=True):
    """An update that is announced, arrived whole, and bound to its dataset."""

    node: NodeId
    dataset_root: Digest
    commitment_signature: bytes
    digest: Digest
    update_signature: bytes


class Dropped(msgspec.Struct, frozen=True):
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


class Collecting(msgspec.Struct, frozen=True, tag=True):
    """``expected`` may contribute; ``announced`` and ``arrived`` are halves of a contribution."""

    ground: Ground
    expected: tuple[Binding, ...]
    announced: tuple["UpdateAnnounced", ...] = ()
    arrived: tuple["BlobArrived", ...] = ()
    verified: tuple[Contribution, ...] = ()
    dropped: tuple[Dropped, ...] = ()


class Aggregating(msgspec.Struct, frozen=True, tag=True):
    ground: Ground
    contributors: tuple[Contribution, ...]
    dropped: tuple[Dropped, ...]


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


class Aborted(msgspec.Struct, frozen=True, tag=True):
    """The attempt is discarded; ``retrying`` says whether another one follows by itself."""

    ground: Ground
    code: str
    reason: str
    retrying: bool


State: TypeAlias = Closed | Open | Collecting | Aggregating | Aligning | Committing | Aborted
InFlight: TypeAlias = Open | Collecting | Aggregating | Aligning | Committing

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


class MemberLost(msgspec.Struct, frozen=True, tag=True):
    node: NodeId
    code: str
    reason: str


class Committed(msgspec.Struct, frozen=True, tag=True):
    """A node bound itself to a dataset, signature checked; it holds so much of the state."""

    node: NodeId
    round: int
    attempt: int
    dataset_root: Digest
    signature: bytes
    holds_bytes: int


class Declined(msgspec.Struct, frozen=True, tag=True):
    """A node, or our own check of what it sent, says it will not contribute to this attempt."""

    node: NodeId
    round: int
    attempt: int
    code: str
    reason: str


class UpdateAnnounced(msgspec.Struct, frozen=True, tag=True):
    node: NodeId
    round: int
    attempt: int
    digest: Digest
    dataset_root: Digest
    signature: bytes


class BlobArrived(msgspec.Struct, frozen=True, tag=True):
    """A whole update lies in the spool; ``digest`` was computed here, the signature checked."""

    node: NodeId
    round: int
    attempt: int
    digest: Digest
    signature: bytes


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
    | MemberLost
    | Committed
    | Declined
    | UpdateAnnounced
    | BlobArrived
    | SumDerived
    | Diagnosed
    | Advanced
    | StepFailed
    | AbortAsked
    | TimerExpired
)
FromPeer: TypeAlias = Committed | Declined | UpdateAnnounced | BlobArrived
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
    """Send ``node`` the global state from ``from_byte`` on; nothing if it holds all of it."""

    node: NodeId
    from_byte: int


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
    | BeginCollect
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
        case MemberReady():
            return _welcome(state, event.node)
        case MemberLost():
            return _lose(state, event)
        case AbortAsked():
            return _stop(state, event.reason)
        case TimerExpired():
            return _expire(state, event.timer)
        case Committed() | Declined() | UpdateAnnounced() | BlobArrived():
            return _hear(state, event)
        case SumDerived() | Diagnosed() | Advanced() | StepFailed():
            return _work(state, event)


def public_state(state: State) -> RoundState:
    return RoundState(type(state).__name__.lower())


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
        OpenRound(ground.round, ground.attempt, ground.digest, ground.here),
        ArmTimer(Timer.OPEN, timeout),
    )


def _welcome(state: State, node: NodeId) -> Step[State, Action]:
    here = tuple(sorted({*state.ground.here, node}))
    joined = replace(state, ground=replace(state.ground, here=here))
    match joined:
        case Open():
            declined = tuple(d for d in joined.declined if d.node != node)
            bound = tuple(b for b in joined.bound if b.node != node)
            after, actions = _consider_collect(replace(joined, declined=declined, bound=bound))
            return after, (AskAlso(node), *actions)
        case _:
            return joined, ()


def _lose(state: State, event: MemberLost) -> Step[State, Action]:
    here = tuple(n for n in state.ground.here if n != event.node)
    left = replace(state, ground=replace(state.ground, here=here))
    match left:
        case Open():
            bound = tuple(b for b in left.bound if b.node != event.node)
            return _consider_collect(replace(left, bound=bound))
        case Collecting():
            return _drop(left, Dropped(event.node, event.code, event.reason))
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
        case Collecting():
            return _hear_while_collecting(state, event)
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


def _misplaced(state: State, event: FromPeer) -> Step[State, Action]:
    reason = f"{type(event).__name__} came while the round is {public_state(state)}"
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
    return after, (OfferState(event.node, event.holds_bytes), *actions)


def _consider_collect(state: Open) -> Step[State, Action]:
    match _open_verdict(state):
        case quorum.Enough(nodes=nodes):
            expected = tuple(sorted(state.bound, key=lambda b: b.node))
            timers = (CancelTimer(Timer.OPEN), CancelTimer(Timer.GRACE))
            arm = ArmTimer(Timer.COLLECT, state.ground.rules.collect_timeout_s)
            return Collecting(state.ground, expected), (*timers, BeginCollect(nodes), arm)
        case quorum.NotYet(sufficient=True) if not state.graced:
            arm_grace = ArmTimer(Timer.GRACE, state.ground.rules.open_grace_s)
            return replace(state, graced=True), (arm_grace,)
        case quorum.NotYet(sufficient=False) if state.graced:
            return replace(state, graced=False), (CancelTimer(Timer.GRACE),)
        case quorum.NotYet():
            return state, ()


def _open_verdict(state: Open) -> quorum.Enough | quorum.NotYet:
    declined = {d.node for d in state.declined}
    asked = frozenset(n for n in state.ground.here if n not in declined)
    bound = frozenset(b.node for b in state.bound)
    return quorum.to_collect(state.ground.rules.quorum, asked, bound, hurry=state.hurry)


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


def outstanding(state: Collecting) -> frozenset[NodeId]:
    """Who may still send an update."""
    settled = {c.node for c in state.verified} | {d.node for d in state.dropped}
    return frozenset(b.node for b in state.expected) - settled


def _consider_aggregate(state: Collecting, *, hurry: bool) -> Step[State, Action]:
    ground = state.ground
    late = outstanding(state)
    verified = frozenset(c.node for c in state.verified)
    match quorum.to_aggregate(ground.rules.quorum, verified, late, hurry=hurry):
        case quorum.Enough():
            contributors = tuple(sorted(state.verified, key=lambda c: c.node))
            reason = f"no update within {ground.rules.collect_timeout_s:g} s"
            dropped = (*state.dropped, *(Dropped(n, "timeout", reason) for n in sorted(late)))
            drops = tuple(DropUpdate(n) for n in sorted(late))
            return Aggregating(ground, contributors, dropped), (
                CancelTimer(Timer.COLLECT),
                *drops,
                DeriveSum(contributors),
            )
        case quorum.TooFew(reason=reason):
            gone = _several(tuple(f"{d.node[:12]}: {d.reason}" for d in state.dropped))
            text = f"{reason} ({gone})" if gone else reason
            return _abort(ground, "fault_tolerance_exceeded", text, Response.RETRY)
        case quorum.NotYet():
            return state, ()


def _work(state: State, event: FromWork) -> Step[State, Action]:
    ground = state.ground
    ours = (event.round, event.attempt) == (ground.round, ground.attempt)
    if isinstance(event, Advanced) and not (ours and isinstance(state, Committing)):
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
            return _abort(ground, event.code, event.reason, event.response)
        case _:
            raise InvalidTransition(state, event)


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
            after, actions = _consider_collect(replace(state, hurry=True))
            if isinstance(after, Collecting):
                return after, actions
            response = Response.RETRY if state.ground.patience_s is None else Response.STOP
            return _abort(state.ground, "fault_tolerance_exceeded", _open_reason(state), response)
        case Collecting(), Timer.COLLECT:
            return _consider_aggregate(state, hurry=True)
        case Aborted(retrying=True), Timer.RETRY:
            return _open(replace(state.ground, attempt=state.ground.attempt + 1))
        case _:
            return state, ()


def _open_reason(state: Open) -> str:
    verdict = _open_verdict(state)
    reason = verdict.reason if isinstance(verdict, quorum.NotYet) else ""
    said = _several(tuple(f"{d.node[:12]} declined: {d.reason}" for d in state.declined))
    return f"OPEN: {reason}" + (f"; {said}" if said else "")


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
        wait = min(
            ground.rules.retry_backoff_s * 2.0 ** (ground.tries - 1),
            ground.rules.retry_backoff_max_s,
        )
        return Aborted(ground, code, reason, retrying=True), (
            *cancels,
            announce,
            ArmTimer(Timer.RETRY, wait),
        )
    finish = FinishRun(completed=False, code=code, reason=reason)
    stopped = replace(ground, remaining=0, patience_s=None, stopping="")
    return Aborted(stopped, code, reason, retrying=False), (*cancels, announce, finish)


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
            verified = frozenset(c.node for c in state.verified)
            k = state.ground.rules.quorum
            return _undecided(quorum.to_aggregate(k, verified, outstanding(state), hurry=False))
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
