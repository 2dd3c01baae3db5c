"""A node's membership of one federation: dial, join, serve the session, come back after a loss.

The state is a product: what the worker can do goes on across sessions, what the coordinator was
promised does not.  Messages are fenced before they act: one of another federation, session, round
or attempt is counted and changes nothing.
"""

from typing import TypeAlias

import msgspec
from msgspec.structs import replace

from lensemble.errors import (
    ContractViolation,
    InvalidTransition,
    LensembleError,
    SecureAggregationError,
)
from lensemble.ids import Digest, EdgeId, FederationId, NodeId
from lensemble.machine import ArmTimer, CancelTimer, Step, TimerExpired
from lensemble.wire import circle, messages, stages
from lensemble.wire.messages import FromCoordinator, FromNode
from lensemble_node import attempt, signals
from lensemble_node.provision import Pair
from lensemble_node.terms import Terms, agree, objection

JOIN_TIMEOUT_S = 10.0
SETTLED_S = 5.0
"""A session this old was a success: the next loss starts the backoff anew."""

REFUSED_DELAY_S = 60.0
"""Between two tries after an answer that trying again will not change by itself."""

BIND_TIMEOUT_S = 120.0
"""A worker that has not even looked up what it holds by then is wedged."""

REDIAL, JOIN, SETTLED, BIND, START = "redial", "join", "settled", "bind", "start"
MAX_SENTENCE = 500
PAST = frozenset({"stale", "stale_epoch"})
"""Codes of refusals of what was said too late."""


class Me(msgspec.Struct, frozen=True):
    """What this process is, fixed at its start."""

    node: NodeId
    name: str
    build: str
    boot: str
    pinned: str = ""
    """Take part only in the workload with this config hash."""
    share_norms: bool = False
    share_plain: bool = False
    task_entry: str = ""
    """Take part where the coordinator sees each update by itself."""
    backoff_s: float = 0.5
    backoff_max_s: float = 15.0
    start_timeout_s: float = 3600.0
    """A worker that has not opened its dataset by then is wedged."""


class Target(msgspec.Struct, frozen=True):
    """Whom to join; ``federation`` once it is known."""

    node: NodeId
    addresses: tuple[str, ...]
    federation: FederationId | None = None


# ---- states: the worker ----


class NoWorker(msgspec.Struct, frozen=True, tag=True):
    """No workload is known yet."""


class Starting(msgspec.Struct, frozen=True, tag=True):
    """The process is up or coming up and opens its dataset; ``owed`` is a round it must close."""

    terms: Terms
    owed: signals.Close | None = None


class Able(msgspec.Struct, frozen=True, tag=True):
    terms: Terms
    facts: signals.Configured
    owed: signals.Close | None = None


class Unable(msgspec.Struct, frozen=True, tag=True):
    """Dead or refusing its configuration; the supervisor starts it again."""

    terms: Terms
    code: str
    reason: str
    remediation: str = ""
    owed: signals.Close | None = None


Worker: TypeAlias = NoWorker | Starting | Able | Unable

# ---- states: the edges of a session ----


class NoEdges(msgspec.Struct, frozen=True, tag=True):
    """None provisioned, or lost and reported."""


class Wanted(msgspec.Struct, frozen=True, tag=True):
    """Asked for; the worker cannot attach yet."""

    pair: Pair


class Provided(msgspec.Struct, frozen=True, tag=True):
    pair: Pair


class Usable(msgspec.Struct, frozen=True, tag=True):
    pair: Pair


Edges: TypeAlias = NoEdges | Wanted | Provided | Usable

# ---- states: the membership ----


class Unassigned(msgspec.Struct, frozen=True, tag=True):
    """No coordinator is known."""

    call: int = 0


class Dialing(msgspec.Struct, frozen=True, tag=True):
    """``call`` numbers the links of this process, so that news of an old one are told apart."""

    target: Target
    call: int
    failures: int = 0


class Resting(msgspec.Struct, frozen=True, tag=True):
    """Not connected, and why; ``delay_s`` is before jitter.  ``refused``: told not to come back."""

    target: Target
    call: int
    failures: int
    cause: str
    delay_s: float
    refused: bool = False


class Joining(msgspec.Struct, frozen=True, tag=True):
    """Connected; ``Join`` is sent."""

    target: Target
    call: int
    failures: int = 0


class Session(msgspec.Struct, frozen=True):
    """What ``Welcome`` said; ``last`` is the newest committed round."""

    federation: FederationId
    epoch: int
    coordinator: str
    build: str
    terms: Terms
    last: messages.LastRecord


Attempt: TypeAlias = attempt.State


class Joined(msgspec.Struct, frozen=True, tag=True):
    target: Target
    call: int
    session: Session
    edges: Edges = NoEdges()
    attempt: Attempt = attempt.Idle()
    fresh: bool = False
    """The edges are newer than the last ``RoundOpen``: it may be said again for them."""
    failures: int = 0


class Left(msgspec.Struct, frozen=True, tag=True):
    """This process is going away."""


Membership: TypeAlias = Unassigned | Dialing | Resting | Joining | Joined | Left


class Unmasked(msgspec.Struct, frozen=True):
    """The newest attempt whose sum this node has helped to unmask."""

    federation: FederationId
    round: int
    attempt: int


class State(msgspec.Struct, frozen=True, tag=True):
    me: Me
    worker: Worker = NoWorker()
    membership: Membership = Unassigned()
    unmasked: Unmasked | None = None
    """Neither it nor an older one is taken again: two sums of it would give an update away."""


# ---- events ----


class Assigned(msgspec.Struct, frozen=True, tag=True):
    """Join this coordinator, and leave the one there is."""

    target: Target


class LinkUp(msgspec.Struct, frozen=True, tag=True):
    call: int


class LinkDown(msgspec.Struct, frozen=True, tag=True):
    """The call failed, or its link was lost."""

    call: int
    cause: str


class Heard(msgspec.Struct, frozen=True, tag=True):
    call: int
    message: FromCoordinator


class Misheard(msgspec.Struct, frozen=True, tag=True):
    """A control frame that is no message of a version we speak."""

    call: int
    code: str
    reason: str


class WorkerSaid(msgspec.Struct, frozen=True, tag=True):
    signal: signals.Event


class WorkerStarted(msgspec.Struct, frozen=True, tag=True):
    """A process of a newer generation is up and was told its configuration."""


class WorkerLost(msgspec.Struct, frozen=True, tag=True):
    code: str
    reason: str
    remediation: str = ""


class SecretsSaid(msgspec.Struct, frozen=True, tag=True):
    """From beside the secrets of the attempt in hand."""

    signal: attempt.FromSecrets


class EdgesLive(msgspec.Struct, frozen=True, tag=True):
    pair: Pair


class EdgesGone(msgspec.Struct, frozen=True, tag=True):
    """``lost`` is the edge to report; None where the coordinator knows already."""

    pair: Pair
    reason: str
    lost: EdgeId | None = None


class EdgesTornDown(msgspec.Struct, frozen=True, tag=True):
    """As the coordinator asked."""

    edges: tuple[int, ...]


class Dismissed(msgspec.Struct, frozen=True, tag=True):
    """Leave the federation and belong to none."""

    reason: str


class Quit(msgspec.Struct, frozen=True, tag=True):
    reason: str


class StageSaid(msgspec.Struct, frozen=True, tag=True):
    """What a stage on this node, or this node as their host, has to say in its session."""

    message: stages.StageAnswer | stages.BurstAnswer


Event: TypeAlias = (
    Assigned
    | LinkUp
    | LinkDown
    | Heard
    | Misheard
    | WorkerSaid
    | WorkerStarted
    | WorkerLost
    | SecretsSaid
    | EdgesLive
    | EdgesGone
    | EdgesTornDown
    | TimerExpired
    | Dismissed
    | Quit
    | StageSaid
)

# ---- actions ----


class Dial(msgspec.Struct, frozen=True, tag=True):
    """Answered by ``LinkUp`` or ``LinkDown`` with this ``call``; ends a dial still in progress."""

    target: Target
    call: int


class SayJoin(msgspec.Struct, frozen=True, tag=True):
    """Say ``Join`` with the invite of ``target``, if there is one."""

    target: Target
    call: int


class HangUp(msgspec.Struct, frozen=True, tag=True):
    call: int
    reason: str


class Redial(msgspec.Struct, frozen=True, tag=True):
    """Let the timer ``redial`` expire in ``delay_s`` less some jitter, and log why."""

    target: Target
    cause: str
    delay_s: float
    refused: bool


class Say(msgspec.Struct, frozen=True, tag=True):
    message: FromNode


class Commit(msgspec.Struct, frozen=True, tag=True):
    """Sign and say ``Commitment``."""

    session: Session
    commit: attempt.Commit


class Announce(msgspec.Struct, frozen=True, tag=True):
    """Sign and say ``Update``; give the worker ``Send`` with the same signature."""

    session: Session
    announce: attempt.Announce


class OnSecrets(msgspec.Struct, frozen=True, tag=True):
    """Do with the secrets of the attempt what ``action`` says."""

    session: Session
    action: attempt.OnSecrets


class RunWorker(msgspec.Struct, frozen=True, tag=True):
    """Have a worker that is configured for ``terms``; answered by ``WorkerStarted``."""

    terms: Terms


class Order(msgspec.Struct, frozen=True, tag=True):
    command: signals.Command


class EndWorker(msgspec.Struct, frozen=True, tag=True):
    """Kill the process; the supervisor starts another."""

    reason: str


class Provide(msgspec.Struct, frozen=True, tag=True):
    pair: Pair


class Withdraw(msgspec.Struct, frozen=True, tag=True):
    edges: tuple[int, ...]


class DropEdges(msgspec.Struct, frozen=True, tag=True):
    """Give the pair up and report it lost."""

    reason: str


class ForgetEdges(msgspec.Struct, frozen=True, tag=True):
    """The link of the pair and of every stage is gone."""


class Remember(msgspec.Struct, frozen=True, tag=True):
    """Admitted: keep federation and address, forget the invite."""

    target: Target


class Count(msgspec.Struct, frozen=True, tag=True):
    """A message was refused for ``reason``, a word for counters; ``detail`` is for the log."""

    reason: str
    detail: str = ""


class Introduce(msgspec.Struct, frozen=True, tag=True):
    """What ``coordinator`` says of the other members of its federation."""

    coordinator: NodeId
    order: circle.CircleOrder


class OfferStages(msgspec.Struct, frozen=True, tag=True):
    """Stages may be hosted in this session: say what this node can hold."""

    session: Session
    coordinator: NodeId


class Stage(msgspec.Struct, frozen=True, tag=True):
    """The coordinator asks something of a stage on this node; the session is the one there is.

    Or to measure a link that stages may use.
    """

    order: stages.StageOrder | stages.BurstOrder


class Finish(msgspec.Struct, frozen=True, tag=True):
    """Nothing more will be asked for."""


OnEdges: TypeAlias = Provide | Withdraw | DropEdges | ForgetEdges
Local: TypeAlias = (
    RunWorker
    | Order
    | EndWorker
    | Count
    | OfferStages
    | Stage
    | Introduce
    | ArmTimer
    | CancelTimer
    | Finish
    | OnEdges
)
"""What is done within this process."""

Action: TypeAlias = (
    Dial | SayJoin | HangUp | Redial | Say | Commit | Announce | OnSecrets | Remember | Local
)

# ---- transition ----


def transition(state: State, event: Event) -> Step[State, Action]:
    if isinstance(state.membership, Left):
        return state, ()
    match event:
        case WorkerSaid() | WorkerStarted() | WorkerLost():
            return _worker(state, event)
        case Assigned() | Dismissed() | Quit():
            return _belong(state, event)
        case LinkUp() | LinkDown() | Heard() | Misheard():
            call = getattr(state.membership, "call", None)
            return _link(state, event) if event.call == call else (state, ())
        case EdgesLive() | EdgesGone() | EdgesTornDown():
            return _edges(state, event)
        case SecretsSaid() | StageSaid():
            return _said(state, event)
        case TimerExpired(timer):
            return _timer(state, timer)


def _said(state: State, event: SecretsSaid | StageSaid) -> Step[State, Action]:
    match event:
        case SecretsSaid(signal):
            return _settle(*_feed(state, signal))
        case StageSaid(message):
            return state, _say_in_session(state, message)


def _belong(state: State, event: Assigned | Dismissed | Quit) -> Step[State, Action]:
    call = getattr(state.membership, "call", 0)
    match event:
        case Assigned(target):
            leaving = _depart(state, "this node joins another coordinator")
            dialing = Dialing(target, call + 1)
            return replace(state, membership=dialing), (*leaving, Dial(target, call + 1))
        case Dismissed(reason):
            return replace(state, membership=Unassigned(call)), _depart(state, reason)
        case Quit(reason):
            return replace(state, membership=Left()), (*_depart(state, reason), Finish())


def _depart(state: State, reason: str) -> tuple[Action, ...]:
    """What ends the membership there is, in order."""
    match state.membership:
        case Joined(call=call, session=session, attempt=phase):
            ended = _orders(session, attempt.transition(phase, attempt.Ended(retries=False))[1])
            orders = tuple(action for action in ended if isinstance(action, Order))
            leave = messages.Leave(
                federation=session.federation, epoch=session.epoch, reason=reason[:MAX_SENTENCE]
            )
            return (*orders, Say(leave), ForgetEdges(), CancelTimer(SETTLED), HangUp(call, reason))
        case Joining(call=call):
            return CancelTimer(JOIN), HangUp(call, reason)
        case Dialing(call=call):
            return (HangUp(call, reason),)
        case Resting():
            return (CancelTimer(REDIAL),)
        case _:
            return ()


def _timer(state: State, timer: str) -> Step[State, Action]:
    if timer == START:
        return state, _end_if_starting(state)
    match state.membership, timer:
        case Resting(target, call, failures), "redial":
            dialing = Dialing(target, call + 1, failures)
            return replace(state, membership=dialing), (Dial(target, call + 1),)
        case Joining(call=call), "join":
            cause = f"no answer to Join within {JOIN_TIMEOUT_S:g} s"
            after, actions = _rest(state, cause)
            return after, (HangUp(call, cause), *actions)
        case Joined() as joined, "settled":
            return replace(state, membership=replace(joined, failures=0)), ()
        case Joined(attempt=attempt.Binding()), "bind":
            reason = f"it did not say within {BIND_TIMEOUT_S:g} s what it holds of the state"
            return state, (EndWorker(reason),)
        case _:
            # It ran out while its cancelling was on the way.
            return state, ()


def _end_if_starting(state: State) -> tuple[Action, ...]:
    if not isinstance(state.worker, Starting):
        return ()
    reason = f"it did not open its dataset within {state.me.start_timeout_s:g} s"
    return (EndWorker(reason),)


# ---- the link ----


def _link(state: State, event: LinkUp | LinkDown | Heard | Misheard) -> Step[State, Action]:
    match state.membership, event:
        case ((Resting() | Unassigned()), _):
            # The last words of a link that was hung up.
            return state, ()
        case Dialing(target, call, failures), LinkUp():
            joining = Joining(target, call, failures)
            arm = ArmTimer(JOIN, JOIN_TIMEOUT_S)
            return replace(state, membership=joining), (SayJoin(target, call), arm)
        case ((Dialing() | Joining()), LinkDown(cause=cause)):
            return _rest(state, cause)
        case Joining() as joining, (Heard() | Misheard()):
            return _answer(state, joining, event)
        case Joined() as joined, (LinkDown() | Heard() | Misheard()):
            return _in_session(state, joined, event)
        case _:
            raise InvalidTransition(state.membership, event)


def _in_session(
    state: State, joined: Joined, event: LinkDown | Heard | Misheard
) -> Step[State, Action]:
    match event:
        case LinkDown(cause=cause):
            return _interrupt(state, joined, cause)
        case Heard(message=message):
            return _settle(*_heard(state, joined, message))
        case Misheard(code=code, reason=reason):
            return state, (Count(code, reason),)


def _rest(state: State, cause: str, *, refused: bool = False) -> Step[State, Action]:
    membership = state.membership
    if not isinstance(membership, Dialing | Joining | Joined):
        raise InvalidTransition(membership, cause)
    me, failures = state.me, membership.failures
    delay = min(me.backoff_s * float(1 << min(failures, 30)), me.backoff_max_s)
    delay = REFUSED_DELAY_S if refused else delay
    target = membership.target
    resting = Resting(target, membership.call, failures + 1, cause, delay, refused)
    timer = JOIN if isinstance(membership, Joining) else SETTLED
    redial = Redial(target, cause, delay, refused)
    return replace(state, membership=resting), (CancelTimer(timer), redial)


def _refuse(state: State, cause: str) -> Step[State, Action]:
    call = getattr(state.membership, "call", 0)
    after, actions = _rest(state, cause, refused=True)
    return after, (HangUp(call, cause), *actions)


def _interrupt(state: State, joined: Joined, cause: str) -> Step[State, Action]:
    _, left = attempt.transition(joined.attempt, attempt.Interrupted())
    after, actions = _rest(state, cause)
    return after, (ForgetEdges(), *_orders(joined.session, left), *actions)


def _answer(state: State, joining: Joining, event: Heard | Misheard) -> Step[State, Action]:
    if isinstance(event, Misheard):
        return _refuse(state, event.reason)
    match event.message:
        case messages.Welcome() as welcome:
            return _welcome(state, joining, welcome)
        case messages.Refused(code=code, reason=reason, remediation=remediation, final=final):
            cause = f"refused ({code}): {reason}" + (f" {remediation}" if remediation else "")
            if final:
                return _refuse(state, cause)
            after, actions = _rest(state, cause)
            return after, (HangUp(joining.call, cause), *actions)
        case message:
            return state, (Count("before_welcome", type(message).__name__),)


def _welcome(state: State, joining: Joining, welcome: messages.Welcome) -> Step[State, Action]:
    target = joining.target
    if target.federation not in {None, welcome.federation}:
        cause = (
            f"coordinator {target.node} now leads the federation {welcome.federation}; this node "
            f"joined {target.federation}: join again with a new ticket"
        )
        return _refuse(state, cause)
    try:
        me = state.me
        terms = agree(welcome, me.pinned, plain=me.share_plain, entry=me.task_entry)
    except ContractViolation as error:
        return _refuse(state, f"{error.message}. {error.remediation}")
    target = replace(target, federation=welcome.federation)
    session = Session(
        welcome.federation, welcome.epoch, welcome.coordinator, welcome.build, terms, welcome.last
    )
    joined = Joined(target, joining.call, session, failures=joining.failures)
    worker, ordered = _closing(_for_terms(state.worker, terms), state.me, welcome.last)
    idle = not terms.trains or worker_terms(state.worker) == terms
    run = () if idle else (RunWorker(terms), _start_within(state.me))
    offer = OfferStages(session, target.node)
    first = (CancelTimer(JOIN), ArmTimer(SETTLED, SETTLED_S), Remember(target), offer)
    return replace(state, worker=worker, membership=joined), (*first, *run, *ordered)


# ---- the worker ----


def worker_terms(worker: Worker) -> Terms | None:
    return None if isinstance(worker, NoWorker) else worker.terms


def _for_terms(worker: Worker, terms: Terms) -> Worker:
    if not terms.trains or worker_terms(worker) == terms:
        return worker
    return Starting(terms)


def _closing(worker: Worker, me: Me, last: messages.LastRecord) -> tuple[Worker, tuple[Order, ...]]:
    """Have the worker close round ``last``, now or as soon as it can."""
    if isinstance(worker, NoWorker) or last.round < 0:
        return worker, ()
    close = signals.Close(round=last.round, digest=last.digest, adopt=me.node in last.contributors)
    orders = (Order(close),) if isinstance(worker, Able) else ()
    return replace(worker, owed=close), orders


def _worker(state: State, event: WorkerSaid | WorkerStarted | WorkerLost) -> Step[State, Action]:
    worker = state.worker
    match event:
        case _ if isinstance(worker, NoWorker):
            return state, ()
        case WorkerStarted():
            starting = Starting(worker.terms, worker.owed)
            return replace(state, worker=starting), (_start_within(state.me),)
        case WorkerLost(code) if isinstance(worker, Unable) and worker.code != code:
            # It said itself what was wrong before it ended.
            return state, ()
        case WorkerLost(code, reason, remediation):
            return _unable(state, worker, attempt.WorkerLost(code, reason, remediation))
        case WorkerSaid(signal):
            return _worker_said(state, worker, signal)


def _worker_said(
    state: State, worker: Starting | Able | Unable, signal: signals.Event
) -> Step[State, Action]:
    match signal:
        case signals.Configured():
            return _able(state, worker, signal)
        case signals.Closed(round=closed):
            paid = worker.owed is not None and worker.owed.round <= closed
            return replace(state, worker=replace(worker, owed=None) if paid else worker), ()
        case signals.Failed(round=None) if isinstance(worker, Starting):
            lost = attempt.WorkerLost(signal.code, signal.message, signal.remediation)
            return _unable(state, worker, lost)
        case _ if isinstance(signal, attempt.Signal):
            return _settle(*_feed(state, signal))
        case _:
            # The slot signals and Attached, Detached go to the provisioner.
            return state, ()


def _start_within(me: Me) -> ArmTimer:
    return ArmTimer(START, me.start_timeout_s)


def _able(
    state: State, worker: Starting | Able | Unable, facts: signals.Configured
) -> Step[State, Action]:
    if facts.layout_digest != worker.terms.layout_digest:
        reason = f"the worker lays the workload out as {facts.layout_digest}"
        return _unable(state, worker, attempt.WorkerLost("contract_violation", reason))
    able = Able(worker.terms, facts, worker.owed)
    owed = () if worker.owed is None else (Order(worker.owed),)
    return _settle(replace(state, worker=able), (CancelTimer(START), *owed))


def _unable(
    state: State, worker: Starting | Able | Unable, lost: attempt.WorkerLost
) -> Step[State, Action]:
    unable = Unable(worker.terms, lost.code, lost.reason, lost.remediation, worker.owed)
    after, actions = _feed(replace(state, worker=unable), lost)
    return _settle(after, (CancelTimer(START), *actions))


# ---- the edges ----


def _edges(state: State, event: EdgesLive | EdgesGone | EdgesTornDown) -> Step[State, Action]:
    joined = state.membership
    if not isinstance(joined, Joined):
        return state, ()
    federation, epoch = joined.session.federation, joined.session.epoch
    match event:
        case EdgesTornDown(edges):
            down = messages.TornDown(federation=federation, epoch=epoch, edges=edges)
            return state, (Say(down),)
        case _ if isinstance(joined.edges, NoEdges) or joined.edges.pair != event.pair:
            return state, ()
        case EdgesLive(pair):
            usable = replace(joined, edges=Usable(pair), fresh=True)
            provisioned = messages.Provisioned(federation=federation, epoch=epoch, edges=pair.edges)
            return replace(state, membership=usable), (Say(provisioned),)
        case EdgesGone(_, reason, lost):
            bare = replace(state, membership=replace(joined, edges=NoEdges()))
            after, actions = _feed(bare, attempt.EdgeTorn(reason))
            if lost is None:
                return after, actions
            said = messages.EdgeLost(
                federation=federation, epoch=epoch, edge=lost, reason=reason[:MAX_SENTENCE]
            )
            return after, (Say(said), *actions)


def _provision(state: State, joined: Joined, message: messages.Provision) -> Step[State, Action]:
    us, them = state.me.node, joined.target.node
    ends = (message.state.producer, message.state.consumer)
    back = (message.update.producer, message.update.consumer)
    if ends != (them, us) or back != (us, them) or message.state.edge == message.update.edge:
        lost = messages.EdgeLost(
            federation=message.federation,
            epoch=message.epoch,
            edge=message.state.edge,
            reason="the edges do not join this node and its coordinator, one each way",
        )
        return state, (Count("foreign_edge", f"edges {ends} and {back}"), Say(lost))
    pair = Pair(message.epoch, message.state, message.update)
    torn = attempt.transition(joined.attempt, attempt.EdgeTorn("replaced by a newer pair"))[0]
    wanted = replace(joined, edges=Wanted(pair), attempt=torn)
    return replace(state, membership=wanted), ()


# ---- stages ----


def _say_in_session(
    state: State, message: stages.StageAnswer | stages.BurstAnswer
) -> tuple[Action, ...]:
    """Nothing of an earlier session is said in a later one: its coordinator has given it up."""
    match state.membership:
        case Joined(session=session) if (message.federation, message.epoch) == (
            session.federation,
            session.epoch,
        ):
            return (Say(message),)
        case _:
            return ()


# ---- a session's messages ----


def _heard(state: State, joined: Joined, message: FromCoordinator) -> Step[State, Action]:
    session = joined.session
    match message:
        case messages.Refused(code=code, reason=reason) if code in PAST:
            # About what was said for an earlier attempt; the one in hand goes on.
            return state, (Count("refused_by_coordinator", f"{code}: {reason}"),)
        case messages.Refused(code=code, reason=reason):
            after, actions = _feed(state, attempt.Turned(code, reason))
            return after, (Count("refused_by_coordinator", f"{code}: {reason}"), *actions)
        case messages.Welcome():
            return state, (Count("second_welcome"),)
        case _ if message.federation != session.federation:
            return state, (Count("other_federation", message.federation),)
        case _ if message.epoch != session.epoch:
            return state, (Count("stale_epoch", f"epoch {message.epoch}, now {session.epoch}"),)
        case messages.Leave() | messages.Provision() | messages.Teardown():
            return _of_session(state, joined, message)
        case (
            stages.StageProvision()
            | stages.StageOpen()
            | stages.StageLook()
            | stages.StageTeardown()
            | stages.BurstExpect()
            | stages.BurstSend()
            | circle.Circle()
            | circle.MemberNote()
        ):
            return state, (_beside_rounds(joined, message),)
        case _:
            return _of_round(state, joined, message)


def _beside_rounds(
    joined: Joined, message: stages.StageOrder | stages.BurstOrder | circle.CircleOrder
) -> Stage | Introduce:
    if isinstance(message, circle.CircleOrder):
        return Introduce(joined.target.node, message)
    return Stage(message)


def _of_session(
    state: State, joined: Joined, message: messages.Leave | messages.Provision | messages.Teardown
) -> Step[State, Action]:
    match message:
        case messages.Leave(reason=reason):
            cause = f"the coordinator left: {reason}"
            after, actions = _interrupt(state, joined, cause)
            return after, (HangUp(joined.call, cause), *actions)
        case messages.Provision():
            return _provision(state, joined, message)
        case messages.Teardown(edges=edges):
            return _teardown(state, joined, edges)


def _teardown(state: State, joined: Joined, edges: tuple[int, ...]) -> Step[State, Action]:
    pair = None if isinstance(joined.edges, NoEdges) else joined.edges.pair
    if isinstance(joined.edges, Wanted) and pair is not None and set(edges) & set(pair.edges):
        joined = replace(joined, edges=NoEdges())
    return replace(state, membership=joined), (Withdraw(edges),)


OfAttempt: TypeAlias = (
    messages.Roster | messages.Collect | messages.UnmaskRequest | messages.RoundClose
)


def _of_round(
    state: State, joined: Joined, message: messages.RoundOpen | OfAttempt
) -> Step[State, Action]:
    match message:
        case messages.RoundOpen():
            return _round_open(state, joined, message)
        case messages.RoundClose(outcome="closed"):
            return _closed(state, joined, message)
    now = joined.attempt
    if isinstance(now, attempt.Idle):
        # Late joiners hear of attempts that they have no part in.
        return state, ()
    if (message.round, message.attempt) != (now.open.round, now.open.attempt):
        detail = f"round {message.round} attempt {message.attempt}"
        return state, (Count("stale_attempt", detail),)
    return _feed(state, _news(state.me, message))


def _news(me: Me, message: OfAttempt) -> attempt.Event:
    match message:
        case messages.Roster():
            return attempt.RosterCame(message)
        case messages.Collect(roster=roster, envelopes=envelopes):
            return attempt.Collected(me.node in roster, envelopes)
        case messages.UnmaskRequest(survivors=survivors):
            return attempt.UnmaskAsked(survivors)
        case messages.RoundClose(retries=retries):
            return attempt.Ended(retries)


def _round_open(state: State, joined: Joined, message: messages.RoundOpen) -> Step[State, Action]:
    last, now, edges = joined.session.last.round, joined.attempt, joined.edges
    asked = (message.round, message.attempt)
    if message.round <= last:
        return state, (Count("stale_round", f"round {message.round}; {last} is committed"),)
    if not isinstance(now, attempt.Idle):
        current = (now.open.round, now.open.attempt)
        if asked < current or (asked == current and not joined.fresh):
            return state, (Count("stale_attempt", f"asked for {asked}, in hand {current}"),)
    if not isinstance(edges, Usable):
        return state, (Count("no_edges", f"round {message.round} opened before its edges"),)
    state = replace(state, membership=replace(joined, fresh=False))
    terms = joined.session.terms
    against = objection(terms, message) or _spent(state.unmasked, message)
    if against is None:
        edge = EdgeId(edges.pair.update.edge)
        return _feed(state, attempt.Opened(message, edge, terms.masked))
    return _feed(
        state, attempt.Objected(message, against.code, against.message, against.remediation)
    )


def _spent(unmasked: Unmasked | None, asked: messages.RoundOpen) -> LensembleError | None:
    if unmasked is None or unmasked.federation != asked.federation:
        return None
    if (asked.round, asked.attempt) > (unmasked.round, unmasked.attempt):
        return None
    return SecureAggregationError(
        f"attempt {asked.attempt} of round {asked.round}: this node has helped to unmask attempt "
        f"{unmasked.attempt} of round {unmasked.round} and takes part in later ones only"
    )


def _closed(state: State, joined: Joined, message: messages.RoundClose) -> Step[State, Action]:
    if message.round <= joined.session.last.round:
        return state, (Count("stale_round", f"round {message.round} closed again"),)
    last = messages.LastRecord(
        round=message.round, digest=message.digest, contributors=message.contributors
    )
    counted = state.me.node in message.contributors
    ended, actions = _feed(state, attempt.Ended(retries=False, counted=counted))
    if not isinstance(ended.membership, Joined):
        raise InvalidTransition(ended.membership, message)
    session = replace(joined.session, last=last)
    worker, orders = _closing(ended.worker, state.me, last)
    membership = replace(ended.membership, session=session)
    return replace(ended, worker=worker, membership=membership), (*actions, *orders)


# ---- the attempt in hand ----


def _feed(state: State, event: attempt.Event) -> Step[State, Action]:
    joined = state.membership
    if not isinstance(joined, Joined):
        return state, ()
    after, actions = attempt.transition(joined.attempt, event)
    orders = (*_orders(joined.session, actions), *_patience(joined.attempt, after))
    unmasked = state.unmasked
    if isinstance(after, attempt.Answered):
        opened = after.open
        unmasked = Unmasked(opened.federation, opened.round, opened.attempt)
    return replace(state, membership=replace(joined, attempt=after), unmasked=unmasked), orders


def _patience(before: attempt.State, after: attempt.State) -> tuple[Action, ...]:
    match before, after:
        case attempt.Binding(), attempt.Binding():
            return ()
        case _, attempt.Binding():
            return (ArmTimer(BIND, BIND_TIMEOUT_S),)
        case attempt.Binding(), _:
            return (CancelTimer(BIND),)
        case _:
            return ()


def _settle(state: State, actions: tuple[Action, ...]) -> Step[State, Action]:
    """Go on with what only waited for the worker or for edges."""
    joined, worker = state.membership, state.worker
    if not isinstance(joined, Joined):
        return state, actions
    more: tuple[Action, ...] = ()
    if isinstance(joined.edges, Wanted) and isinstance(worker, Able):
        pair = joined.edges.pair
        more = (*more, Provide(pair))
        state = replace(state, membership=replace(joined, edges=Provided(pair)))
    match joined.attempt, worker:
        case ((attempt.Offered() | attempt.Agreed()), Able(facts=facts)):
            able = attempt.WorkerAble(Digest(facts.dataset_root), facts.episodes)
            state, fed = _feed(state, able)
        case (
            (attempt.Offered() | attempt.Agreed()),
            Unable(code=code, reason=reason, remediation=remediation),
        ):
            state, fed = _feed(state, attempt.WorkerLost(code, reason, remediation))
        case _:
            fed = ()
    return state, (*actions, *more, *fed)


def _orders(session: Session, actions: tuple[attempt.Action, ...]) -> tuple[Action, ...]:
    return tuple(_order(session, action) for action in actions)


def _order(session: Session, action: attempt.Action) -> Action:
    match action:
        case attempt.Commit():
            return Commit(session, action)
        case attempt.Announce():
            return Announce(session, action)
        case attempt.Order(command):
            return Order(command)
        case attempt.Tear(reason):
            return DropEdges(reason)
        case attempt.Ignore(reason):
            return Count(reason)
        case attempt.Tell() | attempt.Decline() | attempt.GiveShares():
            return Say(_told(session, action))
        case _:
            return OnSecrets(session, action)


def _told(
    session: Session, action: attempt.Tell | attempt.Decline | attempt.GiveShares
) -> FromNode:
    asked = action.open
    if isinstance(action, attempt.Tell):
        return messages.Progress(
            federation=session.federation,
            epoch=session.epoch,
            round=asked.round,
            attempt=asked.attempt,
            phase=action.phase,
            done=action.done,
            total=action.total,
        )
    if isinstance(action, attempt.GiveShares):
        return messages.Shares(
            federation=session.federation,
            epoch=session.epoch,
            round=asked.round,
            attempt=asked.attempt,
            commitments=action.commitments,
            sealed=action.sealed,
        )
    return messages.Fault(
        federation=session.federation,
        epoch=session.epoch,
        round=asked.round,
        attempt=asked.attempt,
        code=action.code[:64],
        reason=action.reason[:MAX_SENTENCE],
        remediation=action.remediation[:MAX_SENTENCE],
    )
