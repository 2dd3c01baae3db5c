"""Whether a round may go on, and the sentence that says why not yet.

Pure counting over node ids; K is ``max(min_participants, secure_agg_threshold)``.
"""

from typing import TypeAlias

import msgspec

from lensemble.ids import NodeId


class Enough(msgspec.Struct, frozen=True, tag=True):
    """Go on with ``nodes``, sorted."""

    nodes: tuple[NodeId, ...]


class NotYet(msgspec.Struct, frozen=True, tag=True):
    """Wait; ``on`` are the nodes waited for, none of them if the wait is for newcomers.

    ``sufficient``: the quorum is there, only stragglers are waited for.
    """

    reason: str
    on: tuple[NodeId, ...] = ()
    sufficient: bool = False


class TooFew(msgspec.Struct, frozen=True, tag=True):
    """The quorum cannot be reached any more."""

    reason: str


Verdict: TypeAlias = Enough | NotYet | TooFew


def surely_waits(need: int, have: int, possible: int) -> bool:
    """Whether counts alone say ``NotYet``, as they do at nearly every word of a large round.

    ``have`` are settled, of at least ``possible`` who may still be.  False where names decide.
    """
    return have < possible and possible >= need


def to_collect(
    quorum: int, asked: frozenset[NodeId], bound: frozenset[NodeId], *, hurry: bool
) -> Enough | NotYet:
    """May a round leave OPEN?  ``asked`` are the nodes here that have not declined.

    With ``hurry`` a quorum goes on without those that were asked and have not answered.
    """
    outstanding = tuple(sorted(asked - bound))
    have, enough = len(bound), len(bound) >= quorum
    if enough and (hurry or not outstanding):
        return Enough(tuple(sorted(bound)))
    if outstanding:
        return NotYet(
            f"waiting for {len(outstanding)} of {len(asked)} asked to bind "
            f"(have {have}, quorum {quorum})",
            outstanding,
            enough,
        )
    missing = quorum - have
    plural = "" if missing == 1 else "s"
    return NotYet(f"waiting for {missing} more participant{plural} (have {have}, quorum {quorum})")


def to_share(
    need: int, shared: frozenset[NodeId], due: frozenset[NodeId], *, hurry: bool
) -> Verdict:
    """May masked updates be collected?  ``due`` are bound and have not sent their shares."""
    possible = len(shared) if hurry else len(shared) + len(due)
    if possible < need:
        return TooFew(f"only {possible} of the {need} participants needed can exchange shares")
    if hurry or not due:
        return Enough(tuple(sorted(shared)))
    return NotYet(
        f"waiting for the mask shares of {len(due)} of {len(shared) + len(due)} bound "
        f"(have {len(shared)}, need {need})",
        tuple(sorted(due)),
        len(shared) >= need,
    )


def to_unmask(
    threshold: int, answered: frozenset[NodeId], due: frozenset[NodeId], *, hurry: bool
) -> Verdict:
    """Can the masks be taken off?  ``due`` are survivors that have not answered."""
    possible = len(answered) if hurry else len(answered) + len(due)
    if possible < threshold:
        return TooFew(
            f"only {possible} of the {threshold} unmasking answers needed can arrive; "
            "nothing was revealed"
        )
    if hurry or not due:
        return Enough(tuple(sorted(answered)))
    return NotYet(
        f"waiting for the unmasking answers of {len(due)} of {len(answered) + len(due)} survivors "
        f"(have {len(answered)}, threshold {threshold})",
        tuple(sorted(due)),
        len(answered) >= threshold,
    )


def to_aggregate(
    quorum: int,
    verified: frozenset[NodeId],
    outstanding: frozenset[NodeId],
    *,
    hurry: bool,
) -> Verdict:
    """May a round leave COLLECTING?  ``outstanding`` may still send an update.

    With ``hurry`` nobody is waited for.
    """
    have = len(verified)
    possible = have if hurry else have + len(outstanding)
    if possible < quorum:
        late = f", {len(outstanding)} too late" if hurry and outstanding else ""
        return TooFew(f"only {possible} of the {quorum} updates needed can arrive{late}")
    if hurry or not outstanding:
        return Enough(tuple(sorted(verified)))
    return NotYet(
        f"waiting for {len(outstanding)} of {have + len(outstanding)} updates "
        f"(have {have}, quorum {quorum})",
        tuple(sorted(outstanding)),
        have >= quorum,
    )
