"""``Unmasking``: the contributors reveal what takes the masks off their sum, and no other.

The set of survivors is fixed on entry.  A contributor that is lost or declines is ``gone``: its
update stays in the sum, and the attempt goes on while the others can still reach the threshold.
Whoever is back in time may still answer.
"""

from msgspec.structs import replace

from lensemble.errors import Response
from lensemble.ids import NodeId
from lensemble.machine import ArmTimer, CancelTimer, Step
from lensemble_coord.training import quorum
from lensemble_coord.training.outer_round import attempts, committing, reasons, verdicts
from lensemble_coord.training.outer_round.actions import Action, Refuse, RequestUnmask, Timer
from lensemble_coord.training.outer_round.states import Collecting, Contribution, State, Unmasking


def begin(state: Collecting, contributors: tuple[Contribution, ...]) -> Step[State, Action]:
    """Ask exactly the contributors, of whom some may have gone since their update came."""
    ground = state.ground
    survivors = tuple(c.node for c in contributors)
    dropouts = tuple(b.node for b in state.expected if b.node not in survivors)
    gone = tuple(n for n in survivors if n not in ground.here)
    asking = Unmasking(ground, contributors, state.dropped, state.threshold, gone=gone)
    after, actions = consider(asking, hurry=False)
    if not isinstance(after, Unmasking):
        return after, actions
    arm = ArmTimer(Timer.UNMASK, ground.rules.unmask_timeout_s)
    return after, (RequestUnmask(survivors, dropouts), arm)


def answer(state: Unmasking, node: NodeId) -> Step[State, Action]:
    if all(c.node != node for c in state.contributors):
        return state, (Refuse(node, "unbound", "this node is no survivor of this attempt"),)
    if node in state.answered:
        return state, (Refuse(node, "duplicate", "a second UnmaskAnswered of one attempt"),)
    gone = tuple(n for n in state.gone if n != node)
    return consider(replace(state, answered=(*state.answered, node), gone=gone), hurry=False)


def cannot_answer(state: Unmasking, node: NodeId) -> Step[State, Action]:
    settled = (*state.answered, *state.gone)
    if node in settled or all(c.node != node for c in state.contributors):
        return state, ()
    return consider(replace(state, gone=(*state.gone, node)), hurry=False)


def consider(state: Unmasking, *, hurry: bool) -> Step[State, Action]:
    possible = len(state.contributors) - len(state.gone)
    if not hurry and quorum.surely_waits(state.threshold, len(state.answered), possible):
        return state, ()
    match verdicts.to_unmask(state, hurry=hurry):
        case quorum.Enough():
            after, actions = committing.begin(state.ground, state.contributors, state.dropped)
            return after, (CancelTimer(Timer.UNMASK), *actions)
        case quorum.TooFew(reason=reason):
            silent = (c.node for c in state.contributors if c.node not in state.answered)
            text = f"{reason}; no answer of {reasons.several(tuple(n[:12] for n in silent))}"
            return attempts.abort(state.ground, "secure_aggregation", text, Response.RETRY)
        case quorum.NotYet():
            return state, ()
