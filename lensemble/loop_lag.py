"""How long the event loop is away from its sockets and timers at a time.

Whatever becomes ready meanwhile waits so long for its turn: a pass of the loop over its ready tasks
bounds the lag of everything in it.  An idle loop makes no passes, so that watching it costs
nothing; a pass costs two clock readings.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import trio

from lensemble.histogram import Histogram

BOUNDS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)


class LoopLag(trio.abc.Instrument):
    """Observes the seconds of each pass in ``seconds``."""

    def __init__(self) -> None:
        self.seconds = Histogram(BOUNDS_S)
        self._began: float | None = None

    def after_io_wait(self, timeout: float) -> None:
        self._began = time.perf_counter()

    def before_io_wait(self, timeout: float) -> None:
        if self._began is not None:
            self.seconds.observe(time.perf_counter() - self._began)


@contextmanager
def watching() -> Iterator[LoopLag]:
    """Watch this task's event loop for as long as the context lasts."""
    lag = LoopLag()
    trio.lowlevel.add_instrument(lag)
    try:
        yield lag
    finally:
        trio.lowlevel.remove_instrument(lag)
