"""Who may compute: the KV slots of the plan that is carried out, and who waits for one.

The slots of a plan are gone with it.  Who had one waits again, and comes before those who had none
yet: requests are served in the order in which they came, whatever happens to plans.
"""

from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import trio

from lensemble_coord.inference.ring import Ring
from lensemble_coord.inference.standstill import Counts

Look: TypeAlias = Callable[[str, Counts | None], Awaitable[Counts | None]]
"""How far the stages are, for a request in that phase that has seen them at so many chunks before.

None where they have not moved: then their plan ends.
"""


class Seat:
    """One KV slot of one plan, with the ring that leads to it."""

    def __init__(self, slot: int, ring: Ring, look: Look) -> None:
        self.slot, self.ring, self.look = slot, ring, look


class _Waiting:
    def __init__(self, number: int) -> None:
        self.number = number
        self.grant, self.granted = trio.open_memory_channel[Seat](1)


class Seats:
    """The slots of one plan after the other."""

    def __init__(self) -> None:
        self._free: deque[Seat] = deque()
        self._taken: set[Seat] = set()
        self._waiting: list[_Waiting] = []

    def open(self, count: int, ring: Ring, look: Look) -> None:
        """``count`` slots of a plan that is ready."""
        self.close()
        self._free.extend(Seat(slot, ring, look) for slot in range(count))
        self._grant()

    def close(self) -> None:
        """The plan is gone: nobody is granted anything until the next one is ready."""
        self._free.clear()
        self._taken.clear()

    async def take(self, number: int) -> Seat:
        """A slot, as soon as there is one and no lower ``number`` waits for it."""
        waiting = _Waiting(number)
        self._waiting.append(waiting)
        self._waiting.sort(key=lambda each: each.number)
        self._grant()
        try:
            return await waiting.granted.receive()
        except trio.Cancelled:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            else:
                self.give(waiting.granted.receive_nowait())
            raise

    def give(self, seat: Seat) -> None:
        """``seat`` is free; one of a plan that is gone is forgotten."""
        if seat in self._taken:
            self._taken.remove(seat)
            self._free.append(seat)
            self._grant()

    def _grant(self) -> None:
        while self._free and self._waiting:
            waiting, seat = self._waiting.pop(0), self._free.popleft()
            self._taken.add(seat)
            waiting.grant.send_nowait(seat)
