"""The fences before a message acts: of another federation or session it is counted, no more.

Those of rounds are fenced further, in ``rounds``.
"""

from lensemble.machine import Step
from lensemble.wire import circle, messages, stages
from lensemble.wire.messages import FromCoordinator
from lensemble_node import attempt
from lensemble_node.participation import edges, in_hand, joining, rounds
from lensemble_node.participation.actions import Action, Count, HangUp, Introduce, Stage
from lensemble_node.participation.states import Joined, State

PAST = frozenset({"stale", "stale_epoch"})
"""Codes of refusals of what was said too late."""


def hear(state: State, joined: Joined, message: FromCoordinator) -> Step[State, Action]:
    session = joined.session
    match message:
        case messages.Refused(code=code, reason=reason) if code in PAST:
            # About what was said for an earlier attempt; the one in hand goes on.
            return state, (Count("refused_by_coordinator", f"{code}: {reason}"),)
        case messages.Refused(code=code, reason=reason):
            after, actions = in_hand.feed(state, attempt.Turned(code, reason))
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
            return rounds.hear(state, joined, message)


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
            after, actions = joining.interrupt(state, joined, cause)
            return after, (HangUp(joined.call, cause), *actions)
        case messages.Provision():
            return edges.want(state, joined, message)
        case messages.Teardown(edges=named):
            return edges.teardown(state, joined, named)
