"""What is known of the paths that chunks would take: how it was had, and how old it is.

Round trips come from the transports, which measure the links that there are.  How much a path
carries is *measured* by a burst, *seen* when weights go that way and its sender is never idle (a
lower bound), or *assumed*.
"""

from itertools import pairwise
from typing import Literal, TypeAlias, TypeVar

import msgspec
import trio

from lensemble.ids import NodeId
from lensemble.wire.stages import LINKS_LOOK_S
from lensemble_coord.inference.chain import COORDINATOR, NEUTRAL, How, Link
from lensemble_coord.peers import Peers

KEPT_S = 3600.0
"""What was measured or seen before that is forgotten, and assumed again."""

MAX_KEPT = 4096
"""Pairs of nodes; beyond that the oldest is forgotten."""

RTT_GRAIN_NS = 100_000
"""Round-trip times are planned with so finely, so that noise does not move a plan."""

Pair: TypeAlias = tuple[NodeId, NodeId]
"""In the direction in which bytes go; of round trips, in order."""


Kept = TypeVar("Kept")


class Rate(msgspec.Struct, frozen=True):
    """``at`` is when, in seconds of the event loop's clock."""

    bytes_per_s: int
    how: Literal["measured", "seen"]
    at: float


class Path(msgspec.Struct, frozen=True):
    """One direction between two nodes, or a node and the coordinator; ages in seconds.

    ``rtt_ns`` is None, and ``how`` assumed, where nothing is known.
    """

    bytes_per_s: int = NEUTRAL.bytes_per_s
    how: How = "assumed"
    age_s: float | None = None
    rtt_ns: int | None = None
    rtt_age_s: float | None = None


class _Trip(msgspec.Struct, frozen=True):
    rtt_ns: int
    at: float


class PathBook:
    """What was measured and seen, for as long as this process lives and ``KEPT_S``."""

    def __init__(self) -> None:
        self._rates: dict[Pair, Rate] = {}
        self._trips: dict[Pair, _Trip] = {}

    def measured(self, pair: Pair, bytes_per_s: int, rtt_ns: int | None) -> None:
        """A burst went from the first to the second of ``pair``."""
        now = trio.current_time()
        _keep(self._rates, pair, Rate(max(1, bytes_per_s), "measured", now))
        if rtt_ns is not None:
            _keep(self._trips, _ordered(pair), _Trip(rtt_ns, now))

    def seen(self, pair: Pair, bytes_per_s: int) -> None:
        """So much went that way at least; less than was measured says nothing."""
        before = self.rates().get(pair)
        if before is None or before.how == "seen" or before.bytes_per_s < bytes_per_s:
            _keep(self._rates, pair, Rate(max(1, bytes_per_s), "seen", trio.current_time()))

    def rates(self) -> dict[Pair, Rate]:
        """Those that are not too old."""
        since = trio.current_time() - KEPT_S
        return {pair: rate for pair, rate in self._rates.items() if rate.at >= since}

    def trips(self) -> dict[Pair, _Trip]:
        """Round trips that bursts came with."""
        since = trio.current_time() - KEPT_S
        return {pair: trip for pair, trip in self._trips.items() if trip.at >= since}


class Paths:
    """The paths between the nodes of ``peers``, with what ``book`` knows of them."""

    def __init__(self, peers: Peers, book: PathBook) -> None:
        self._peers = peers
        self._book = book

    def links(self) -> dict[Pair, Link]:
        """As the planner wants them: coarse enough that noise does not move a plan."""
        trips, rates = self._trips(), self._book.rates()
        here = {COORDINATOR, *self._peers.here}
        links = {}
        for pair in sorted({*trips, *map(_ordered, rates)}):
            if not here.issuperset(pair):
                continue
            trip, there, back = trips.get(pair), rates.get(pair), rates.get(pair[::-1])
            links[pair] = _link(trip, there or back)
            if there and back:
                links[pair[::-1]] = _link(trip, back)
        return links

    def of(self, chain: tuple[NodeId, ...]) -> tuple[Path, ...]:
        """The paths of a ring: from the coordinator through ``chain`` and back to it."""
        ends, now = (COORDINATOR, *chain, COORDINATOR), trio.current_time()
        trips, rates = self._trips(), self._book.rates()
        found = []
        for pair in pairwise(ends):
            path = Path()
            if (rate := rates.get(pair) or rates.get(pair[::-1])) is not None:
                path = Path(rate.bytes_per_s, rate.how, now - rate.at)
            if (trip := trips.get(_ordered(pair))) is not None:
                path = msgspec.structs.replace(path, rtt_ns=trip.rtt_ns, rtt_age_s=now - trip.at)
            found.append(path)
        return tuple(found)

    def _trips(self) -> dict[Pair, _Trip]:
        """From here to nodes, and by nodes to each other, where of two ends the shorter counts.

        Of links that are gone, what was measured with a burst.
        """
        now = trio.current_time()
        told: dict[Pair, _Trip] = {}
        for peer in self._peers.here.values():
            facts, said = peer.facts(), peer.inventory
            if facts.rtt_ms is not None:
                trip = _Trip(round(facts.rtt_ms * 1e6), now - facts.heard_s)
                told[COORDINATOR, peer.node] = trip
            if said is None:
                continue
            # A node says so again when it does not hold any more, and looks so often.
            at = max(peer.said_at, now - LINKS_LOOK_S)
            for node, rtt_us in zip(said.linked, said.rtts_us, strict=False):
                pair, found = _ordered((node, peer.node)), _Trip(rtt_us * 1000, at)
                if node in self._peers.here and found.rtt_ns <= told.get(pair, found).rtt_ns:
                    told[pair] = found
        return {**self._book.trips(), **told}


def _link(trip: _Trip | None, rate: Rate | None) -> Link:
    rtt_ns = None if trip is None else max(1, round(trip.rtt_ns / RTT_GRAIN_NS)) * RTT_GRAIN_NS
    return Link(
        NEUTRAL.rtt_ns if rtt_ns is None else rtt_ns,
        NEUTRAL.bytes_per_s if rate is None else _two_digits(rate.bytes_per_s),
        "assumed" if rate is None else rate.how,
        rtt_ns is not None,
    )


def _two_digits(value: int) -> int:
    return round(value, 2 - len(str(value)))


def _ordered(pair: Pair) -> Pair:
    return (min(pair), max(pair))


def _keep(book: dict[Pair, Kept], pair: Pair, what: Kept) -> None:
    book.pop(pair, None)
    book[pair] = what
    if len(book) > MAX_KEPT:
        del book[next(iter(book))]
