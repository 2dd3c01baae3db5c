"""Who is here, who rests, and what it means for the round in flight.

====================  ============================================================================
A member leaves in    and
====================  ============================================================================
``Open``              it is not bound and not waited for any more
``Sharing``           it is dropped, with its shares: ``sharing.leave``
``Collecting``        it is dropped, unless its contribution is verified: ``collecting.drop``
``Unmasking``         its update stays in, its answer is not waited for: ``unmasking.cannot_answer``
any other             the round goes on as it is
====================  ============================================================================

A member that comes is asked too while the round is open; else it waits for the next attempt.
"""

from msgspec.structs import replace

from lensemble.ids import NodeId
from lensemble.machine import Step
from lensemble_coord.training.outer_round import collecting, opening, sharing, unmasking
from lensemble_coord.training.outer_round.actions import Action, AskAlso
from lensemble_coord.training.outer_round.events import MemberLost, MemberRests
from lensemble_coord.training.outer_round.states import (
    Binding,
    Collecting,
    Dropped,
    Ground,
    Open,
    Sharing,
    State,
    Unmasking,
)


def welcome(state: State, node: NodeId) -> Step[State, Action]:
    here = tuple(sorted({*state.ground.here, node}))
    joined = replace(state, ground=replace(state.ground, here=here))
    match joined:
        case Open() if node not in joined.ground.resting:
            declined = tuple(d for d in joined.declined if d.node != node)
            bound = tuple(b for b in joined.bound if b.node != node)
            after, actions = opening.consider(replace(joined, declined=declined, bound=bound))
            return after, (AskAlso(node), *actions)
        case _:
            return joined, ()


def rest(state: State, event: MemberRests) -> Step[State, Action]:
    ground = state.ground
    others = ground.resting - {event.node}
    resting = others | {event.node} if event.resting else others
    after = replace(state, ground=replace(ground, resting=resting))
    match after:
        case Open() if event.resting:
            return opening.consider(after)
        case Open(bound=bound) if event.node in ground.here and not _asked(
            ground, bound, event.node
        ):
            return welcome(after, event.node)
        case _:
            return after, ()


def _asked(ground: Ground, bound: tuple[Binding, ...], node: NodeId) -> bool:
    return node in ground.asked or any(b.node == node for b in bound)


def lose(state: State, event: MemberLost) -> Step[State, Action]:
    here = tuple(n for n in state.ground.here if n != event.node)
    left = replace(state, ground=replace(state.ground, here=here))
    match left:
        case Open():
            bound = tuple(b for b in left.bound if b.node != event.node)
            return opening.consider(replace(left, bound=bound))
        case Sharing():
            return sharing.leave(left, Dropped(event.node, event.code, event.reason))
        case Collecting():
            return collecting.drop(left, Dropped(event.node, event.code, event.reason))
        case Unmasking():
            return unmasking.cannot_answer(left, event.node)
        case _:
            return left, ()
