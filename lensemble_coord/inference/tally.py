"""What all runs of this coordinator have done together, since it started."""

from collections import Counter
from typing import Protocol

from lensemble.histogram import Histogram

TRIP_BOUNDS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 30.0)


class Served(Protocol):
    """A request that has ended."""

    @property
    def drawn(self) -> int: ...

    @property
    def first_token_s(self) -> float | None: ...


class Tally:
    """Counts that only grow: a run that is over takes none of them with it."""

    def __init__(self) -> None:
        self.answers: Counter[str] = Counter()
        """By how they ended: stop, length, cancelled, faulted."""

        self.prompt_tokens = 0
        self.tokens = 0
        self.first_token = Histogram()
        """Seconds from a request to its first token, the wait for a session with them."""

        self.trips = Histogram(TRIP_BOUNDS_S)
        """Seconds of each token's way round."""

    def ended(self, request: Served, prompt_tokens: int, finish: str) -> None:
        """A request has ended so."""
        self.answers[finish] += 1
        self.prompt_tokens += prompt_tokens
        self.tokens += request.drawn
        if request.first_token_s is not None:
            self.first_token.observe(request.first_token_s)
