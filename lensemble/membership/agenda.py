"""What is to be done and when, in a clock that stands still while its owner is not run."""

import heapq
import itertools
from enum import IntEnum

import msgspec

from lensemble.ids import NodeId

NOBODY = NodeId("")

GRAIN_S = 1e-6
"""Two clocks that differ by sums of pauses differ by less, for what rounding is worth."""


class Timer(IntEnum):
    INTERVAL = 0
    ANSWER = 1
    """``number`` is that of a probe."""
    HELP = 2
    """``number`` is that of a probe for another."""
    SUSPICION = 3
    """Of ``node`` in its incarnation ``number``."""


class Entry(msgspec.Struct, frozen=True, order=True, gc=False):
    due: float
    order: int
    timer: Timer
    number: int
    node: NodeId


class Agenda:
    """Timers, and the time ``here``: the caller's clock less one's own pauses, in seconds.

    Args:
        patience_s: a call that comes later than this after something was due ends a pause.
    """

    def __init__(self, patience_s: float) -> None:
        self.now = 0.0
        self.here = 0.0
        self._patience_s = patience_s
        self._paused_s = 0.0
        self._entries: list[Entry] = []
        self._count = itertools.count()

    def __len__(self) -> int:
        return len(self._entries)

    def come(self, now: float) -> bool:
        """It is ``now``; returns whether that ends a pause."""
        self.now, here = now, now - self._paused_s
        late = here - self._entries[0].due if self._entries else 0.0
        if late > self._patience_s:
            self._paused_s += late
            self.here = here - late
            return True
        self.here = here
        return False

    def arm(self, due: float, timer: Timer, number: int = 0, node: NodeId = NOBODY) -> None:
        """Have the entry come up at ``due``, by the time ``here``."""
        heapq.heappush(self._entries, Entry(due, next(self._count), timer, number, node))

    def take(self) -> Entry | None:
        """The earliest entry that is due."""
        if self._entries and self._entries[0].due <= self.here + GRAIN_S:
            self.here = max(self.here, self._entries[0].due)
            return heapq.heappop(self._entries)
        return None

    def next_due(self) -> float | None:
        """When an entry is due, by the caller's clock."""
        return self._entries[0].due + self._paused_s if self._entries else None

    def clear(self) -> None:
        self._entries.clear()
