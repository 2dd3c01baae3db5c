"""When the latest chunks of a stage landed, were computed, and left: cheap, and bounded.

Times are CLOCK_MONOTONIC of this host, which daemon and worker share.  Chunks are computed in the
order in which they land, so that no step has to be known of one that has only landed.
"""

import time
from collections import deque

from lensemble.wire.stages import MAX_TIMELINE, Times
from lensemble_node.stage_signals import Computed

MAX_LANDED = 256
"""Chunks that have landed and are not computed; no edge has so many slots."""


class Timeline:
    """Of one stage; each method is called when that happens."""

    def __init__(self) -> None:
        self._landed: deque[int] = deque(maxlen=MAX_LANDED)
        self._left_ns = 0
        self._latest: deque[tuple[int, Computed, int]] = deque(maxlen=MAX_TIMELINE)

    def landed(self) -> None:
        """A chunk is in the inbound ring, and the worker is told of it."""
        self._landed.append(time.monotonic_ns())

    def left(self) -> None:
        """What became of a chunk is with the outbound edge."""
        self._left_ns = time.monotonic_ns()

    def computed(self, signal: Computed) -> None:
        """The worker is done with the oldest chunk that has landed."""
        landed = self._landed.popleft() if self._landed else signal.began_ns
        self._latest.append((landed, signal, self._left_ns))
        self._left_ns = 0

    def told(self) -> tuple[Times, ...]:
        """The latest chunks, as of now."""
        now = time.monotonic_ns()
        return tuple(
            (
                signal.step,
                signal.rows,
                _microseconds(now - landed),
                _microseconds(signal.began_ns - landed),
                _microseconds(signal.ended_ns - signal.began_ns),
                _microseconds(left - signal.ended_ns) if left else 0,
            )
            for landed, signal, left in self._latest
        )


def _microseconds(nanoseconds: int) -> int:
    return max(0, nanoseconds) // 1000
