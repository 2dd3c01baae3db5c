"""How many notes of each member the coordinator passes on to others.  Pure."""

import msgspec

from lensemble.ids import NodeId

BURST = 128
"""Notes of one member that are passed on at once."""

RATE_PER_S = 32.0
"""Of one member, in the long run; the machine of a member sends a few in each interval."""


class _Bucket(msgspec.Struct):
    left: float
    at: float


class Postage:
    """A bucket of ``BURST`` for each sender that fills at ``RATE_PER_S``."""

    def __init__(self) -> None:
        self._buckets: dict[NodeId, _Bucket] = {}

    def admits(self, sender: NodeId, now: float) -> bool:
        """Whether one more note of ``sender`` is passed on at ``now``, in seconds."""
        bucket = self._buckets.setdefault(sender, _Bucket(BURST, now))
        bucket.left = min(BURST, bucket.left + RATE_PER_S * max(0.0, now - bucket.at))
        bucket.at = now
        if bucket.left < 1:
            return False
        bucket.left -= 1
        return True

    def forget(self, sender: NodeId) -> None:
        """Keep nothing of ``sender``."""
        self._buckets.pop(sender, None)
