"""How much a path carried while its sender had always something to send."""

from collections import deque

LEAST_BYTES = 4 << 20
LEAST_S = 0.05
"""What a window has to have, so that what the transports hold back does not count for much."""


class Busy:
    """Windows of a sender with ``slots`` slots in which it waited for each of them.

    While it waits, every slot is full; so nothing in a window was ever short of bytes to send, and
    what left in it is the least that the path carries.  What limits it may be the other end.
    """

    def __init__(self, slots: int) -> None:
        self._sizes: deque[int] = deque(maxlen=slots)
        self._since: float | None = None
        self._bytes = 0
        self._best: tuple[int, float] | None = None

    @property
    def bytes_per_s(self) -> int | None:
        """Of the window that carried most; None if there was none that tells anything."""
        return None if self._best is None else int(self._best[0] / self._best[1])

    def acquired(self, now: float, *, waited: bool) -> None:
        """There is a slot to fill at ``now``, and before that there was none if it ``waited``."""
        if not waited:
            self._since = None
        elif self._since is None:
            self._since, self._bytes = now, 0
        elif len(self._sizes) == self._sizes.maxlen:
            self._bytes += self._sizes[0]
            self._note(now - self._since)

    def filled(self, nbytes: int) -> None:
        """The slot is to be sent."""
        self._sizes.append(nbytes)

    def _note(self, seconds: float) -> None:
        most = 0 if self._best is None else self._best[0]
        if self._bytes >= max(LEAST_BYTES, most) and seconds >= LEAST_S:
            self._best = self._bytes, seconds
