"""How much a path carried while its sender had always something to send."""

from collections import deque

LEAST_BYTES = 4 << 20
LEAST_S = 0.05
"""What a window has to have, so that what the transports hold back does not count for much."""


class Busy:
    """Windows of a sender with ``slots`` slots in which one of them at least was always full.

    A window is measured between moments in which all of them were: what left between two of those
    is what was filled between them.  It is the least that the path carries; what limits it may be
    the other end.
    """

    def __init__(self, slots: int) -> None:
        self._held: deque[int] = deque(maxlen=slots - 1)
        """What is in the slots that are full when one was waited for."""

        self._filled = 0
        self._since: tuple[float, int] | None = None
        self._best: tuple[int, float] | None = None

    @property
    def bytes_per_s(self) -> int | None:
        """Of the window that carried most; None if there was none that tells anything."""
        return None if self._best is None else int(self._best[0] / self._best[1])

    def waited(self, now: float) -> None:
        """All slots were full; at ``now`` one of them is empty."""
        left = self._filled - sum(self._held)
        if self._since is None:
            self._since = now, left
        else:
            self._note(left - self._since[1], now - self._since[0])

    def filled(self, nbytes: int, *, idle: bool) -> None:
        """A slot is full, and before that none was if the sender was ``idle``."""
        if idle:
            self._since = None
        self._held.append(nbytes)
        self._filled += nbytes

    def _note(self, nbytes: int, seconds: float) -> None:
        most = 0 if self._best is None else self._best[0]
        if nbytes >= max(LEAST_BYTES, most) and seconds >= LEAST_S:
            self._best = nbytes, seconds
