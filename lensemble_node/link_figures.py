"""How far other nodes are: round trip times of links to them, told only when they have moved."""

from collections.abc import Iterable

from lensemble.ids import NodeId
from lensemble.transport.driver import Link
from lensemble.wire.stages import LINKS_LOOK_S, MAX_LINKED

LOOK_EVERY_S = LINKS_LOOK_S
"""Between two looks at the links; what was told of them is as old as that at most."""

MOVED_PART, MOVED_US = 0.25, 1000
"""By how much a time has to differ from what was told before it is worth telling: by both."""


class LinkFigures:
    """What is to be told of links, which are measured by the transport as they are used."""

    def __init__(self) -> None:
        self._told: dict[NodeId, int] = {}

    def read(self, links: Iterable[Link]) -> tuple[tuple[NodeId, int], ...]:
        """Peers in order of their ids, with microseconds there and back; of the nearest, if many.

        A link that has not been measured is left out.
        """
        seen: dict[NodeId, int] = {}
        for link in links:
            rtt_ms = link.facts().rtt_ms
            if rtt_ms is not None:
                seen[link.peer] = self._steady(link.peer, round(1000 * rtt_ms))
        self._told = seen
        nearest = sorted(seen.items(), key=lambda each: (each[1], each[0]))[:MAX_LINKED]
        return tuple(sorted(nearest))

    def _steady(self, peer: NodeId, rtt_us: int) -> int:
        told = self._told.get(peer)
        if told is None or abs(rtt_us - told) > max(MOVED_US, MOVED_PART * told):
            return rtt_us
        return told
