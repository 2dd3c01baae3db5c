"""``Sharing``, masked only: the bound nodes give each other shares of their mask secrets.

A node that is lost, declines, or is late is dropped and does not train in this attempt; those who
have shared go on to collect, if they are enough.
"""

from msgspec.structs import replace

from lensemble.errors import Response
from lensemble.ids import NodeId
from lensemble.machine import ArmTimer, CancelTimer, Step
from lensemble_coord.training import quorum
from lensemble_coord.training.outer_round import attempts, collecting, reasons, verdicts
from lensemble_coord.training.outer_round.actions import Action, Refuse, SendRoster, Timer
from lensemble_coord.training.outer_round.states import Binding, Dropped, Ground, Sharing, State


def begin(ground: Ground, bound: tuple[Binding, ...]) -> Step[State, Action]:
    # More than half of those who hold shares, so that no two survivor sets can both be answered.
    threshold = max(ground.rules.threshold, len(bound) // 2 + 1)
    return Sharing(ground, bound, threshold), (
        SendRoster(bound, threshold),
        ArmTimer(Timer.SHARE, ground.rules.share_timeout_s),
    )


def share(state: Sharing, node: NodeId) -> Step[State, Action]:
    if all(b.node != node for b in state.bound) or any(d.node == node for d in state.dropped):
        return state, (Refuse(node, "unbound", "no commitment of this node for this attempt"),)
    if node in state.shared:
        return state, (Refuse(node, "duplicate", "a second SharesSent of one attempt"),)
    return consider(replace(state, shared=(*state.shared, node)), hurry=False)


def leave(state: Sharing, dropped: Dropped) -> Step[State, Action]:
    node = dropped.node
    known = any(b.node == node for b in state.bound)
    if not known or any(d.node == node for d in state.dropped):
        return state, ()
    shared = tuple(n for n in state.shared if n != node)
    after = replace(state, shared=shared, dropped=(*state.dropped, dropped))
    return consider(after, hurry=False)


def consider(state: Sharing, *, hurry: bool) -> Step[State, Action]:
    ground = state.ground
    possible = len(state.bound) - len(state.dropped)
    if not hurry and quorum.surely_waits(
        verdicts.needed_to_share(state), len(state.shared), possible
    ):
        return state, ()
    silence = f"no mask shares within {ground.rules.share_timeout_s:g} s"
    late = sorted(verdicts.due_to_share(state)) if hurry else ()
    dropped = (*state.dropped, *(Dropped(n, "timeout", silence) for n in late))
    match verdicts.to_share(state, hurry=hurry):
        case quorum.Enough(nodes=nodes):
            expected = tuple(b for b in state.bound if b.node in nodes)
            after, actions = collecting.begin(ground, expected, dropped, state.threshold)
            return after, (CancelTimer(Timer.SHARE), *actions)
        case quorum.TooFew(reason=reason):
            text = reasons.with_reasons(reason, dropped)
            return attempts.abort(ground, "secure_aggregation", text, Response.RETRY)
        case quorum.NotYet():
            return state, ()
