"""What the coordinator says of rounds: which attempts are taken, what a closed one leaves to do.

An attempt is taken if it is newer than the one in hand, than the last committed round, and than any
that this node has helped to unmask; the same one again only on newer edges.
"""

from typing import TypeAlias

from msgspec.structs import replace

from lensemble.errors import InvalidTransition, LensembleError, SecureAggregationError
from lensemble.ids import EdgeId
from lensemble.machine import Step
from lensemble.wire import messages
from lensemble_node import attempt
from lensemble_node.participation import in_hand, workers
from lensemble_node.participation.actions import Action, Count
from lensemble_node.participation.states import Joined, Me, State, Unmasked, Usable
from lensemble_node.terms import objection

OfAttempt: TypeAlias = (
    messages.Roster | messages.Collect | messages.UnmaskRequest | messages.RoundClose
)


def hear(
    state: State, joined: Joined, message: messages.RoundOpen | OfAttempt
) -> Step[State, Action]:
    match message:
        case messages.RoundOpen():
            return _round_open(state, joined, message)
        case messages.RoundClose(outcome="closed"):
            return _closed(state, joined, message)
    now = joined.attempt
    if isinstance(now, attempt.Idle):
        # Late joiners hear of attempts that they have no part in.
        return state, ()
    if (message.round, message.attempt) != (now.open.round, now.open.attempt):
        detail = f"round {message.round} attempt {message.attempt}"
        return state, (Count("stale_attempt", detail),)
    return in_hand.feed(state, _news(state.me, message))


def _news(me: Me, message: OfAttempt) -> attempt.Event:
    match message:
        case messages.Roster():
            return attempt.RosterCame(message)
        case messages.Collect(roster=roster, envelopes=envelopes):
            return attempt.Collected(me.node in roster, envelopes)
        case messages.UnmaskRequest(survivors=survivors):
            return attempt.UnmaskAsked(survivors)
        case messages.RoundClose(retries=retries):
            return attempt.Ended(retries)


def _round_open(state: State, joined: Joined, message: messages.RoundOpen) -> Step[State, Action]:
    last, now, edges = joined.session.last.round, joined.attempt, joined.edges
    asked = (message.round, message.attempt)
    if message.round <= last:
        return state, (Count("stale_round", f"round {message.round}; {last} is committed"),)
    if not isinstance(now, attempt.Idle):
        current = (now.open.round, now.open.attempt)
        if asked < current or (asked == current and not joined.fresh):
            return state, (Count("stale_attempt", f"asked for {asked}, in hand {current}"),)
    if not isinstance(edges, Usable):
        return state, (Count("no_edges", f"round {message.round} opened before its edges"),)
    state = replace(state, membership=replace(joined, fresh=False))
    terms = joined.session.terms
    against = objection(terms, message) or _spent(state.unmasked, message)
    if against is None:
        edge = EdgeId(edges.pair.update.edge)
        return in_hand.feed(state, attempt.Opened(message, edge, terms.masked))
    return in_hand.feed(
        state, attempt.Objected(message, against.code, against.message, against.remediation)
    )


def _spent(unmasked: Unmasked | None, asked: messages.RoundOpen) -> LensembleError | None:
    if unmasked is None or unmasked.federation != asked.federation:
        return None
    if (asked.round, asked.attempt) > (unmasked.round, unmasked.attempt):
        return None
    return SecureAggregationError(
        f"attempt {asked.attempt} of round {asked.round}: this node has helped to unmask attempt "
        f"{unmasked.attempt} of round {unmasked.round} and takes part in later ones only"
    )


def _closed(state: State, joined: Joined, message: messages.RoundClose) -> Step[State, Action]:
    if message.round <= joined.session.last.round:
        return state, (Count("stale_round", f"round {message.round} closed again"),)
    last = messages.LastRecord(
        round=message.round, digest=message.digest, contributors=message.contributors
    )
    counted = state.me.node in message.contributors
    ended, actions = in_hand.feed(state, attempt.Ended(retries=False, counted=counted))
    if not isinstance(ended.membership, Joined):
        raise InvalidTransition(ended.membership, message)
    session = replace(joined.session, last=last)
    worker, orders = workers.closing(ended.worker, state.me, last)
    membership = replace(ended.membership, session=session)
    return replace(ended, worker=worker, membership=membership), (*actions, *orders)
