"""What a node may say, and when; whatever else it says is refused and changes nothing.

``stale`` is a word for another round or attempt, ``unknown`` a refusal of one who is not here, and
``misplaced`` a word for another state.  A node that declines is treated as one that leaves; before
its update is in, some of its reasons (``STOPPING_CODES``) end the run.
"""

from msgspec.structs import replace

from lensemble.machine import Step
from lensemble_coord.training.outer_round import attempts, collecting, opening, sharing, unmasking
from lensemble_coord.training.outer_round.actions import Action, Refuse
from lensemble_coord.training.outer_round.events import (
    BlobArrived,
    Committed,
    Declined,
    FromPeer,
    SharesSent,
    UnmaskAnswered,
    UpdateAnnounced,
)
from lensemble_coord.training.outer_round.states import (
    Collecting,
    Dropped,
    Open,
    Sharing,
    State,
    Unmasking,
)


def hear(state: State, event: FromPeer) -> Step[State, Action]:
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
            return opening.bind(state, event)
        case Declined() if event.code in attempts.STOPPING_CODES:
            return attempts.fail_closed(state.ground, event)
        case Declined():
            bound = tuple(b for b in state.bound if b.node != event.node)
            others = tuple(d for d in state.declined if d.node != event.node)
            declined = (*others, Dropped(event.node, event.code, event.reason))
            return opening.consider(replace(state, bound=bound, declined=declined))
        case _:
            return _misplaced(state, event)


def _hear_while_sharing(state: Sharing, event: FromPeer) -> Step[State, Action]:
    match event:
        case SharesSent():
            return sharing.share(state, event.node)
        case Declined() if event.code in attempts.STOPPING_CODES:
            return attempts.fail_closed(state.ground, event)
        case Declined():
            return sharing.leave(state, Dropped(event.node, event.code, event.reason))
        case _:
            return _misplaced(state, event)


def _hear_while_collecting(state: Collecting, event: FromPeer) -> Step[State, Action]:
    match event:
        case UpdateAnnounced():
            return collecting.announce(state, event)
        case BlobArrived():
            return collecting.arrive(state, event)
        case Declined() if event.code in attempts.STOPPING_CODES:
            return attempts.fail_closed(state.ground, event)
        case Declined():
            return collecting.drop(state, Dropped(event.node, event.code, event.reason))
        case _:
            return _misplaced(state, event)


def _hear_while_unmasking(state: Unmasking, event: FromPeer) -> Step[State, Action]:
    match event:
        case UnmaskAnswered():
            return unmasking.answer(state, event.node)
        case Declined():
            return unmasking.cannot_answer(state, event.node)
        case _:
            return _misplaced(state, event)


def _misplaced(state: State, event: FromPeer) -> Step[State, Action]:
    reason = f"{type(event).__name__} came while the round is {type(state).__name__.lower()}"
    return state, (Refuse(event.node, "misplaced", reason),)
