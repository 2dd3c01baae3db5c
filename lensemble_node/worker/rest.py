"""When a worker puts down the state in its memory: at rest, and at times where there is no rest.

Rounds that follow close upon one another leave it in memory, so that none of them pays for files.
After a crash the node then follows from what was put down last, if the coordinator has still the
sums, or fetches the whole state.
"""

import time
from collections.abc import Callable

from lensemble_node.worker.state_store import StateStore

REST_S = 10.0
"""Without a command for so long, the worker is at rest."""
LATEST_S = 600.0
"""Nothing waits longer than this for a rest: what comes then is used, however short."""


class Rest:
    """Puts down what ``states`` owes to the disk."""

    def __init__(self, states: StateStore) -> None:
        self._states = states
        self._put_down_at = time.monotonic()

    @property
    def is_due(self) -> bool:
        """Whether there is something to put down."""
        return self._states.owes

    @property
    def patience_s(self) -> float:
        """How long there must be nothing else to do, in seconds."""
        late = time.monotonic() - self._put_down_at > LATEST_S
        return 0.0 if late else REST_S

    def put_down(self, may_go_on: Callable[[], bool]) -> None:
        """Write until all is written, or until ``may_go_on`` says no: then all was in vain.

        Raises:
            StorageError: the file system refuses.
        """
        for _ in self._states.putting_down():
            if not may_go_on():
                return
        self._put_down_at = time.monotonic()
