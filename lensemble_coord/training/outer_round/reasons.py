"""What is said of the nodes behind an abort: their own words, of so many at most."""

from lensemble_coord.training.outer_round.states import Dropped

MAX_REASONS = 8
"""Of how many nodes an abort repeats what they said."""


def with_reasons(reason: str, dropped: tuple[Dropped, ...]) -> str:
    gone = several(tuple(f"{d.node[:12]}: {d.reason}" for d in dropped))
    return f"{reason} ({gone})" if gone else reason


def several(sentences: tuple[str, ...]) -> str:
    more = len(sentences) - MAX_REASONS
    tail = (f"and {more} more",) if more > 0 else ()
    return "; ".join((*sentences[:MAX_REASONS], *tail))
