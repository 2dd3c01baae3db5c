"""Counts of how long things took, in fixed buckets: small, cheap to feed, ready for Prometheus."""

from bisect import bisect_left
from collections.abc import Sequence

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds for what takes from a millisecond to half a minute."""


class Histogram:
    """How many observations there were up to each of ``bounds``, ascending, and beyond them.

    ``total`` is their sum, in the unit of what is observed.
    """

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self.bounds = tuple(bounds)
        self.total = 0.0
        self._counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        """Observations in all."""
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Each bound as text with how many observations are not above it; ``+Inf`` is the last."""
        seen, listed = 0, []
        for bound, count in zip((*self.bounds, float("inf")), self._counts, strict=True):
            seen += count
            listed.append(("+Inf" if bound == float("inf") else f"{bound:g}", float(seen)))
        return listed
