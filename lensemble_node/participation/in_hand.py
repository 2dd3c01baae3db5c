"""The attempt in hand: what happens is fed to its machine, what that asks for is done in session.

``attempt`` knows of no session and no messages; here its actions become ours.  Outside of a session
nothing is fed.  The newest attempt that this node has helped to unmask is remembered here.
"""

from msgspec.structs import replace

from lensemble.ids import Digest
from lensemble.machine import ArmTimer, CancelTimer, Step
from lensemble.wire import messages
from lensemble.wire.messages import FromNode
from lensemble_node import attempt
from lensemble_node.participation.actions import (
    BIND,
    Action,
    Announce,
    Commit,
    Count,
    DropEdges,
    OnSecrets,
    Order,
    Provide,
    Say,
)
from lensemble_node.participation.states import (
    Able,
    Joined,
    Provided,
    Session,
    State,
    Unable,
    Unmasked,
    Wanted,
)

MAX_SENTENCE = 500


BIND_TIMEOUT_S = 120.0
"""A worker that has not even looked up what it holds by then is wedged."""


def feed(state: State, event: attempt.Event) -> Step[State, Action]:
    joined = state.membership
    if not isinstance(joined, Joined):
        return state, ()
    after, actions = attempt.transition(joined.attempt, event)
    asked = (*orders(joined.session, actions), *_patience(joined.attempt, after))
    unmasked = state.unmasked
    if isinstance(after, attempt.Answered):
        opened = after.open
        unmasked = Unmasked(opened.federation, opened.round, opened.attempt)
    return replace(state, membership=replace(joined, attempt=after), unmasked=unmasked), asked


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


def settle(state: State, actions: tuple[Action, ...]) -> Step[State, Action]:
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
            state, fed = feed(state, able)
        case (
            (attempt.Offered() | attempt.Agreed()),
            Unable(code=code, reason=reason, remediation=remediation),
        ):
            state, fed = feed(state, attempt.WorkerLost(code, reason, remediation))
        case _:
            fed = ()
    return state, (*actions, *more, *fed)


def orders(session: Session, actions: tuple[attempt.Action, ...]) -> tuple[Action, ...]:
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
