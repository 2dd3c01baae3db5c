"""Who counts in each state, how many are needed, and so what the round waits for.

====================  =========================================  ===================================
To leave              who counts                                 needed
====================  =========================================  ===================================
``Open``              asked or bound, and not declined           the quorum; masked, also the
                                                                 configured threshold
``Sharing``           bound, and not dropped                     the quorum and the threshold
``Collecting``        expected, and not dropped                  the quorum and the threshold
``Unmasking``         contributors that are not gone             the threshold
====================  =========================================  ===================================

``quorum`` does the counting.  What is told of a round that waits is the verdict that moves it on.
"""

from bisect import bisect_left
from operator import attrgetter

import msgspec

from lensemble.ids import NodeId
from lensemble_coord.training import patience, quorum
from lensemble_coord.training.outer_round.states import (
    Aborted,
    Aggregating,
    Collecting,
    Committing,
    Open,
    RoundState,
    Rules,
    Sharing,
    State,
    Unmasking,
    public_state,
)


def needed_to_collect(rules: Rules) -> int:
    return max(rules.quorum, rules.threshold) if rules.masked else rules.quorum


def to_collect(state: Open) -> quorum.Enough | quorum.NotYet:
    declined = {d.node for d in state.declined}
    bound = frozenset(b.node for b in state.bound)
    asked = frozenset(n for n in state.ground.asked if n not in declined) | bound
    k = needed_to_collect(state.ground.rules)
    return quorum.to_collect(k, asked, bound, hurry=state.hurry)


def needed_to_share(state: Sharing) -> int:
    return max(state.ground.rules.quorum, state.threshold)


def due_to_share(state: Sharing) -> frozenset[NodeId]:
    gone = {d.node for d in state.dropped}
    return frozenset(b.node for b in state.bound) - gone - set(state.shared)


def to_share(state: Sharing, *, hurry: bool) -> quorum.Verdict:
    need = needed_to_share(state)
    return quorum.to_share(need, frozenset(state.shared), due_to_share(state), hurry=hurry)


def needed_to_aggregate(state: Collecting) -> int:
    # Only those who contributed can unmask, so fewer than the threshold of them are in vain.
    return max(state.ground.rules.quorum, state.threshold)


def may_send(state: Collecting, node: NodeId) -> bool:
    """Whether ``node`` may still send an update: it is one of the ``outstanding``."""
    place = bisect_left(state.expected, node, key=attrgetter("node"))
    if place == len(state.expected) or state.expected[place].node != node:
        return False
    return all(each.node != node for settled in (state.verified, state.dropped) for each in settled)


def outstanding(state: Collecting) -> frozenset[NodeId]:
    """Who may still send an update."""
    settled = {c.node for c in state.verified} | {d.node for d in state.dropped}
    return frozenset(b.node for b in state.expected) - settled


def awaited(state: Collecting) -> tuple[patience.Advance, ...]:
    """How far those have come that may still send an update."""
    due = outstanding(state)
    return tuple(each for each in state.advances if each.node in due)


def to_aggregate(state: Collecting, *, hurry: bool) -> quorum.Verdict:
    k = needed_to_aggregate(state)
    verified = frozenset(c.node for c in state.verified)
    return quorum.to_aggregate(k, verified, outstanding(state), hurry=hurry)


def to_unmask(state: Unmasking, *, hurry: bool) -> quorum.Verdict:
    survivors = frozenset(c.node for c in state.contributors)
    due = survivors - set(state.answered) - set(state.gone)
    return quorum.to_unmask(state.threshold, frozenset(state.answered), due, hurry=hurry)


def participants(state: State) -> frozenset[NodeId]:
    """The nodes that the round in flight has use for."""
    match state:
        case Open(bound=some) | Sharing(bound=some):
            return frozenset(each.node for each in some)
        case Collecting(expected=expected, dropped=dropped):
            gone = {each.node for each in dropped}
            return frozenset(each.node for each in expected) - gone
        case Unmasking(contributors=contributors, gone=gone):
            return frozenset(each.node for each in contributors) - frozenset(gone)
        case _:
            return frozenset()


class Waiting(msgspec.Struct, frozen=True):
    """The reason a state lasts, and the nodes it lasts for."""

    reason: str
    on: tuple[NodeId, ...] = ()


def waiting(state: State) -> Waiting:
    """Why the round is where it is; the very decision that will move it on."""
    match state:
        case Open():
            return _undecided(to_collect(state))
        case Collecting():
            return _undecided(to_aggregate(state, hurry=False))
        case Sharing():
            return _undecided(to_share(state, hurry=False))
        case Unmasking():
            return _undecided(to_unmask(state, hurry=False))
        case Aggregating(reason=reason) | Committing(reason=reason) if reason:
            return Waiting(f"trying again after a pause: {reason}")
        case Aborted():
            lead = "retrying after a pause" if state.retrying else "stopped"
            return Waiting(f"{lead}: {state.reason}")
        case Aggregating():
            return Waiting(f"summing {len(state.contributors)} updates twice and comparing")
        case _:
            return Waiting(_BUSY[public_state(state)])


_BUSY = {
    RoundState.CLOSED: "at rest: no round is asked for",
    RoundState.ALIGNING: "diagnosing the revealed sum",
    RoundState.COMMITTING: "taking the outer step and writing the checkpoint",
}


def _undecided(verdict: quorum.Verdict) -> Waiting:
    if isinstance(verdict, quorum.NotYet):
        return Waiting(verdict.reason, verdict.on)
    return Waiting("moving on")
