"""How a node comes into a federation and leaves it: dial, join, be welcomed or refused, come back.

A lost link is dialled again after a pause that doubles to its limit, and anew from the least once a
session was settled; a refusal that trying again will not change has a long pause of its own.
"""

from msgspec.structs import replace

from lensemble.errors import ContractViolation, InvalidTransition
from lensemble.machine import ArmTimer, CancelTimer, Step
from lensemble.wire import messages
from lensemble_node import attempt
from lensemble_node.participation import in_hand, workers
from lensemble_node.participation.actions import (
    JOIN,
    REDIAL,
    SETTLED,
    Action,
    Count,
    Dial,
    Finish,
    ForgetEdges,
    HangUp,
    OfferStages,
    Order,
    Redial,
    Remember,
    RunWorker,
    Say,
)
from lensemble_node.participation.events import Assigned, Dismissed, Heard, Misheard, Quit
from lensemble_node.participation.states import (
    Dialing,
    Joined,
    Joining,
    Left,
    Resting,
    Session,
    State,
    Unassigned,
)
from lensemble_node.terms import agree

JOIN_TIMEOUT_S = 10.0


SETTLED_S = 5.0
"""A session this old was a success: the next loss starts the backoff anew."""


REFUSED_DELAY_S = 60.0
"""Between two tries after an answer that trying again will not change by itself."""


def belong(state: State, event: Assigned | Dismissed | Quit) -> Step[State, Action]:
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
            ended = in_hand.orders(
                session, attempt.transition(phase, attempt.Ended(retries=False))[1]
            )
            orders = tuple(action for action in ended if isinstance(action, Order))
            leave = messages.Leave(
                federation=session.federation,
                epoch=session.epoch,
                reason=reason[: in_hand.MAX_SENTENCE],
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


def rest(state: State, cause: str, *, refused: bool = False) -> Step[State, Action]:
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


def refuse(state: State, cause: str) -> Step[State, Action]:
    call = getattr(state.membership, "call", 0)
    after, actions = rest(state, cause, refused=True)
    return after, (HangUp(call, cause), *actions)


def interrupt(state: State, joined: Joined, cause: str) -> Step[State, Action]:
    _, left = attempt.transition(joined.attempt, attempt.Interrupted())
    after, actions = rest(state, cause)
    return after, (ForgetEdges(), *in_hand.orders(joined.session, left), *actions)


def answer(state: State, joining: Joining, event: Heard | Misheard) -> Step[State, Action]:
    if isinstance(event, Misheard):
        return refuse(state, event.reason)
    match event.message:
        case messages.Welcome() as welcome:
            return _welcome(state, joining, welcome)
        case messages.Refused(code=code, reason=reason, remediation=remediation, final=final):
            cause = f"refused ({code}): {reason}" + (f" {remediation}" if remediation else "")
            if final:
                return refuse(state, cause)
            after, actions = rest(state, cause)
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
        return refuse(state, cause)
    try:
        me = state.me
        terms = agree(welcome, me.pinned, plain=me.share_plain, entry=me.task_entry)
    except ContractViolation as error:
        return refuse(state, f"{error.message}. {error.remediation}")
    target = replace(target, federation=welcome.federation)
    session = Session(
        welcome.federation, welcome.epoch, welcome.coordinator, welcome.build, terms, welcome.last
    )
    joined = Joined(target, joining.call, session, failures=joining.failures)
    worker, ordered = workers.closing(
        workers.for_terms(state.worker, terms), state.me, welcome.last
    )
    idle = not terms.trains or workers.worker_terms(state.worker) == terms
    run = () if idle else (RunWorker(terms), workers.start_within(state.me))
    offer = OfferStages(session, target.node)
    first = (CancelTimer(JOIN), ArmTimer(SETTLED, SETTLED_S), Remember(target), offer)
    return replace(state, worker=worker, membership=joined), (*first, *run, *ordered)
