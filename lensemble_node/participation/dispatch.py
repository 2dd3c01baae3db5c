"""Which part of the machine an event goes to, and what a timer means in the state it finds."""

from msgspec.structs import replace

from lensemble.errors import InvalidTransition
from lensemble.machine import ArmTimer, Step, TimerExpired
from lensemble.wire import stages
from lensemble_node import attempt
from lensemble_node.participation import edges, hearing, in_hand, joining, workers
from lensemble_node.participation.actions import (
    JOIN,
    START,
    Action,
    Count,
    Dial,
    EndWorker,
    HangUp,
    Say,
    SayJoin,
)
from lensemble_node.participation.events import (
    Assigned,
    Dismissed,
    EdgesGone,
    EdgesLive,
    EdgesTornDown,
    Event,
    Heard,
    LinkDown,
    LinkUp,
    Misheard,
    Quit,
    SecretsSaid,
    StageSaid,
    WorkerLost,
    WorkerSaid,
    WorkerStarted,
)
from lensemble_node.participation.states import (
    Dialing,
    Joined,
    Joining,
    Left,
    Resting,
    State,
    Unassigned,
)


def transition(state: State, event: Event) -> Step[State, Action]:
    if isinstance(state.membership, Left):
        return state, ()
    match event:
        case WorkerSaid() | WorkerStarted() | WorkerLost():
            return workers.hear(state, event)
        case Assigned() | Dismissed() | Quit():
            return joining.belong(state, event)
        case LinkUp() | LinkDown() | Heard() | Misheard():
            call = getattr(state.membership, "call", None)
            return _link(state, event) if event.call == call else (state, ())
        case EdgesLive() | EdgesGone() | EdgesTornDown():
            return edges.hear(state, event)
        case SecretsSaid() | StageSaid():
            return _said(state, event)
        case TimerExpired(timer):
            return _timer(state, timer)


def _said(state: State, event: SecretsSaid | StageSaid) -> Step[State, Action]:
    match event:
        case SecretsSaid(signal):
            return in_hand.settle(*in_hand.feed(state, signal))
        case StageSaid(message):
            return state, _say_in_session(state, message)


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


def _timer(state: State, timer: str) -> Step[State, Action]:
    if timer == START:
        return state, workers.end_if_starting(state)
    match state.membership, timer:
        case Resting(target, call, failures), "redial":
            dialing = Dialing(target, call + 1, failures)
            return replace(state, membership=dialing), (Dial(target, call + 1),)
        case Joining(call=call), "join":
            cause = f"no answer to Join within {joining.JOIN_TIMEOUT_S:g} s"
            after, actions = joining.rest(state, cause)
            return after, (HangUp(call, cause), *actions)
        case Joined() as joined, "settled":
            return replace(state, membership=replace(joined, failures=0)), ()
        case Joined(attempt=attempt.Binding()), "bind":
            reason = (
                f"it did not say within {in_hand.BIND_TIMEOUT_S:g} s what it holds of the state"
            )
            return state, (EndWorker(reason),)
        case _:
            # It ran out while its cancelling was on the way.
            return state, ()


def _link(state: State, event: LinkUp | LinkDown | Heard | Misheard) -> Step[State, Action]:
    match state.membership, event:
        case ((Resting() | Unassigned()), _):
            # The last words of a link that was hung up.
            return state, ()
        case Dialing(target, call, failures), LinkUp():
            begun = Joining(target, call, failures)
            arm = ArmTimer(JOIN, joining.JOIN_TIMEOUT_S)
            return replace(state, membership=begun), (SayJoin(target, call), arm)
        case ((Dialing() | Joining()), LinkDown(cause=cause)):
            return joining.rest(state, cause)
        case Joining() as begun, (Heard() | Misheard()):
            return joining.answer(state, begun, event)
        case Joined() as joined, (LinkDown() | Heard() | Misheard()):
            return _in_session(state, joined, event)
        case _:
            raise InvalidTransition(state.membership, event)


def _in_session(
    state: State, joined: Joined, event: LinkDown | Heard | Misheard
) -> Step[State, Action]:
    match event:
        case LinkDown(cause=cause):
            return joining.interrupt(state, joined, cause)
        case Heard(message=message):
            return in_hand.settle(*hearing.hear(state, joined, message))
        case Misheard(code=code, reason=reason):
            return state, (Count(code, reason),)
