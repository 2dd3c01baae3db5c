"""Threads beside a loop over pieces, each of which takes its share of every piece in order.

A hash or a file takes the pieces of a vector one after the other, so that none of them can use two
cores; several of them beside each other can.  The loop goes on meanwhile, up to so many pieces
ahead.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self


class Lanes:
    """``count`` threads that work up to ``behind`` pieces behind their caller.

    What the calls of a piece read stays as it is until ``give`` was called ``kept`` times since.
    Leaving the context waits until nothing runs.
    """

    def __init__(self, count: int, name: str, behind: int = 2) -> None:
        self.kept = behind + 1
        self._behind = behind
        self._threads = [ThreadPoolExecutor(1, f"{name}-{index}") for index in range(count)]
        self._flight: deque[list[Future[None]]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        for thread in self._threads:
            thread.shutdown(wait=True, cancel_futures=True)

    def give(self, *calls: Callable[[], None]) -> None:
        """One call for each lane, of the piece that is next; raises what an earlier one raised."""
        given = [thread.submit(call) for thread, call in zip(self._threads, calls, strict=True)]
        self._flight.append(given)
        self._wait_for(self._behind)

    def finish(self) -> None:
        """Wait for all pieces; raises what a call of one of them raised."""
        self._wait_for(0)

    def _wait_for(self, left: int) -> None:
        while len(self._flight) > left:
            for done in self._flight.popleft():
                done.result()
