"""``Open``: nodes bind themselves to their datasets, until those that count are enough.

With a quorum the others have a grace; all timers here end with what is bound, or with an abort.
"""

from msgspec.structs import replace

from lensemble.errors import Response
from lensemble.machine import ArmTimer, CancelTimer, Step
from lensemble_coord.training import quorum
from lensemble_coord.training.outer_round import attempts, collecting, reasons, sharing, verdicts
from lensemble_coord.training.outer_round.actions import Action, OfferState, Refuse, Timer
from lensemble_coord.training.outer_round.events import Committed
from lensemble_coord.training.outer_round.states import Binding, Open, State


def bind(state: Open, event: Committed) -> Step[State, Action]:
    if event.node not in state.ground.here:
        return state, (Refuse(event.node, "unknown", "this node was not asked"),)
    if any(b.node == event.node for b in state.bound):
        return state, (Refuse(event.node, "duplicate", "already bound for this attempt"),)
    binding = Binding(event.node, event.dataset_root, event.signature)
    declined = tuple(d for d in state.declined if d.node != event.node)
    bound = replace(state, bound=(*state.bound, binding), declined=declined)
    after, actions = consider(bound)
    return after, (OfferState(event.node, event.held), *actions)


def consider(state: Open) -> Step[State, Action]:
    ground = state.ground
    asked = len(ground.here) - len(ground.resting) - len(state.declined)
    enough = len(state.bound) >= verdicts.needed_to_collect(ground.rules)
    if asked > len(state.bound) and enough == state.graced and not state.hurry:
        return state, ()  # some are outstanding: nobody need be counted by name, see ``quorum``
    match verdicts.to_collect(state):
        case quorum.Enough():
            bound = tuple(sorted(state.bound, key=lambda b: b.node))
            timers = (CancelTimer(Timer.OPEN), CancelTimer(Timer.GRACE))
            begin = sharing.begin if state.ground.rules.masked else collecting.begin
            after, actions = begin(state.ground, bound)
            return after, (*timers, *actions)
        case quorum.NotYet(sufficient=True) if not state.graced:
            arm_grace = ArmTimer(Timer.GRACE, state.ground.rules.open_grace_s)
            return replace(state, graced=True), (arm_grace,)
        case quorum.NotYet(sufficient=False) if state.graced:
            return replace(state, graced=False), (CancelTimer(Timer.GRACE),)
        case quorum.NotYet():
            return state, ()


def give_up_waiting(state: Open) -> Step[State, Action]:
    after, actions = consider(replace(state, hurry=True))
    if not isinstance(after, Open):
        return after, actions
    response = Response.RETRY if state.ground.patience_s is None else Response.STOP
    return attempts.abort(state.ground, "fault_tolerance_exceeded", _open_reason(state), response)


def _open_reason(state: Open) -> str:
    verdict = verdicts.to_collect(state)
    reason = verdict.reason if isinstance(verdict, quorum.NotYet) else ""
    said = reasons.several(tuple(f"{d.node[:12]} declined: {d.reason}" for d in state.declined))
    return f"OPEN: {reason}" + (f"; {said}" if said else "")
