"""How often a worker says how far it is."""

import time

INTERVAL_S = 0.5


class Pace:
    """Lets one report through in each interval, and none before the first has passed."""

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._due = time.monotonic() + interval_s

    def due(self) -> bool:
        """Whether a report may be made now; if so, the next interval begins."""
        now = time.monotonic()
        if now < self._due:
            return False
        self._due = now + self._interval_s
        return True
