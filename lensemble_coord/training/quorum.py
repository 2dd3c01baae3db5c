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
