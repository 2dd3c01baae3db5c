"""Which part of the machine an event goes to, and what a timer means in the state it finds."""

from msgspec.structs import replace

from lensemble.machine import Step, TimerExpired
from lensemble_coord.training.outer_round import (
    attempts,
    collecting,
    committing,
    hearing,
    members,
    opening,
    sharing,
    unmasking,
)
from lensemble_coord.training.outer_round.actions import Action, Timer
from lensemble_coord.training.outer_round.events import (
    AbortAsked,
    Advanced,
    BlobArrived,
    Committed,
    Declined,
    Diagnosed,
    Event,
    MemberLost,
    MemberReady,
    MemberRests,
    Progressed,
    RoundsAsked,
    SharesSent,
    StepFailed,
    SumDerived,
    UnmaskAnswered,
    UpdateAnnounced,
)
from lensemble_coord.training.outer_round.states import (
    Aborted,
    Aggregating,
    Collecting,
    Committing,
    Open,
    Sharing,
    State,
    Unmasking,
)


def transition(state: State, event: Event) -> Step[State, Action]:
    match event:
        case RoundsAsked():
            return attempts.ask(state, event)
        case MemberReady() | MemberRests() | MemberLost() | Progressed():
            return _member(state, event)
        case AbortAsked():
            return attempts.stop(state, event.reason)
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
            return hearing.hear(state, event)
        case SumDerived() | Diagnosed() | Advanced() | StepFailed():
            return committing.work(state, event)


def _member(
    state: State, event: MemberReady | MemberRests | MemberLost | Progressed
) -> Step[State, Action]:
    match event:
        case MemberReady(node):
            return members.welcome(state, node)
        case MemberRests():
            return members.rest(state, event)
        case MemberLost():
            return members.lose(state, event)
        case Progressed():
            return collecting.progress(state, event)


def _expire(state: State, timer: str) -> Step[State, Action]:
    match state, timer:
        case Open(graced=True), Timer.GRACE:
            return opening.consider(replace(state, hurry=True))
        case Open(), Timer.OPEN:
            return opening.give_up_waiting(state)
        case Sharing(), Timer.SHARE:
            return sharing.consider(state, hurry=True)
        case Collecting(), Timer.COLLECT:
            return collecting.check_progress(state)
        case Collecting(), Timer.COLLECT_END if state.ground.rules.collect_max_s:
            return collecting.consider(state, hurry=True)
        case Unmasking(), Timer.UNMASK:
            return unmasking.consider(state, hurry=True)
        case ((Aggregating() | Committing() | Aborted()), Timer.RETRY):
            return _retry(state)
        case _:
            return state, ()


def _retry(state: Aggregating | Committing | Aborted) -> Step[State, Action]:
    return attempts.again(state) if isinstance(state, Aborted) else committing.again(state)
