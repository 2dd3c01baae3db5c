"""How long a participant is waited for: as long as it comes further, and not for ever.

What a node says of its progress is believed only where it goes forward: from phase to phase in
their order, and within a phase from ``done`` to the ``total`` first named.  A node that
says nothing else is still, and so is one that repeats itself.  Whatever is said, an attempt
collects for ``MAX_PATIENCE`` timeouts at most.  Pure; a look is taken ``CHECKS`` times within one.
"""

import msgspec

from lensemble.ids import NodeId

CHECKS = 4
"""Looks at who has come further within one timeout: who stalls is found at most a quarter late."""

MAX_PATIENCE = 144
"""Timeouts for which one attempt collects at most, a day by default.  Without it a node that sends
one byte more each time would hold the round for ever."""

PHASES = ("", "fetching", "waiting", "training", "releasing", "sending", "sent", "arriving")
"""In the order in which a participant goes through them; the last is what is seen at this end."""


class Advance(msgspec.Struct, frozen=True, gc=False):
    """How far ``node`` has come: ``done`` of ``total`` steps or bytes of ``phase``.

    ``still`` counts the looks since it last came further.
    """

    node: NodeId
    phase: str = ""
    done: int = 0
    total: int = 0
    still: int = 0


def further(known: Advance, phase: str, done: int, total: int) -> Advance:
    """``known`` after its node said this; the same if that is no progress."""
    if phase not in PHASES or not 0 <= done <= total:
        return known
    later = PHASES.index(phase) - PHASES.index(known.phase)
    nearer = later == 0 and total == known.total and done > known.done
    return Advance(known.node, phase, done, total) if later > 0 or nearer else known


def check_every_s(timeout_s: float) -> float:
    """Seconds between two looks."""
    return timeout_s / CHECKS


def is_stalled(advance: Advance) -> bool:
    """Whether a whole timeout has passed without progress."""
    return advance.still >= CHECKS


def is_over(checks: int) -> bool:
    """Whether an attempt has been waited for as long as any may be."""
    return checks >= CHECKS * MAX_PATIENCE


_DOING = {
    "": "it has yet to begin",
    "waiting": "it holds the state",
    "sent": "it has sent its update",
}
_COUNTED = {
    "fetching": "of the state is there",
    "training": "of its steps are done",
    "releasing": "of its update is made",
    "sending": "of its update is sent",
    "arriving": "of its update is here",
}


def describe(advance: Advance) -> str:
    """How far a participant has come, in words."""
    if advance.phase in _DOING:
        return _DOING[advance.phase]
    share = advance.done / advance.total if advance.total else 0.0
    return f"{share:.0%} {_COUNTED[advance.phase]}"


def left_s(advance: Advance, timeout_s: float, next_look_s: float) -> float:
    """Seconds until it is left out if it comes no further; the next look is ``next_look_s`` off."""
    return max(0.0, next_look_s) + max(0, CHECKS - 1 - advance.still) * check_every_s(timeout_s)


def outlook(advance: Advance, timeout_s: float, next_look_s: float) -> str:
    """How far it is, whether it moves, and when it is left out."""
    far = describe(advance)
    if advance.still < CHECKS // 2:
        return f"{far} and it moves; left out if it stalls for {timeout_s:g} s"
    left = left_s(advance, timeout_s, next_look_s)
    return f"{far} and it stands still; left out in {left:.0f} s unless it moves"
