"""The search for a chain of nodes that holds a model.

Depth first over nodes, the roomiest first, with bounds on what the rest of a chain can still hold
and on the time that it must still take; exact until ``MAX_STEPS``.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Literal, TypeAlias

import msgspec

from lensemble.ids import NodeId
from lensemble.model_facts import ModelFacts
from lensemble.wire.fence import MAX_STAGES
from lensemble.wire.stages import Inventory, TensorPart
from lensemble_coord.inference.footprint import Footprint, Need, Wanted

COORDINATOR = NodeId("")
"""In ``links``: this host."""

MAX_STEPS = 200_000
"""Of the search for chains of one length, after which the best chain found so far is taken."""

_TOKEN_BYTES = 64
"""Of a chunk with one token, and of a result."""

_SCALE = 1 << 20


How: TypeAlias = Literal["measured", "seen", "assumed"]
"""Whence a rate is known: from a burst, from weights that went that way, or not at all."""


class Link(msgspec.Struct, frozen=True):
    """There and back, and how much it carries; in one direction only where the other is given."""

    rtt_ns: int
    bytes_per_s: int = 125_000_000
    how: How = "assumed"
    timed: bool = True
    """Whether ``rtt_ns`` was measured."""


NEUTRAL = Link(rtt_ns=1_000_000, timed=False)
"""Of a pair that nobody measured."""


class Offer(msgspec.Struct, frozen=True):
    """A node that is here; without inventory it has not said what it can hold.

    ``barred``: why nothing may be placed on it, if so.
    """

    node: NodeId
    name: str
    inventory: Inventory | None = None
    barred: str = ""


class Segment(msgspec.Struct, frozen=True):
    """Layers ``first`` to ``last`` (not included) of a split by hand, on ``node`` if given."""

    first: int
    last: int
    node: NodeId | None = None


class PlannedStage(msgspec.Struct, frozen=True):
    node: NodeId
    name: str
    first: int
    last: int
    need: Need
    required_bytes: int
    """The need with headroom."""

    have_bytes: int


class Task(msgspec.Struct, frozen=True):
    """What is to be placed; ``split`` fixes the cuts, and nodes where it names them."""

    facts: ModelFacts
    tensors: tuple[TensorPart, ...]
    wanted: Wanted
    split: tuple[Segment, ...] = ()


Links = Mapping[tuple[NodeId, NodeId], Link]
"""Looked up in the direction that is gone, then in the other."""


class Found(msgspec.Struct, frozen=True):
    order: tuple[int, ...]
    link_ns: int


class Candidate(msgspec.Struct, frozen=True):
    offer: Offer
    have: int
    footprint: Footprint


class Search:
    """Depth first over chains of nodes, the roomiest first, with bounds on reach and on time."""

    def __init__(self, task: Task, offers: Sequence[Offer], links: Links) -> None:
        self._task = task
        self._layers = task.facts.layers
        self._nodes = candidates(task, offers)
        self.exhaustive = True
        self._any_will_do = False
        self._furthest: dict[tuple[int, int], int] = {}
        ids = [candidate.offer.node for candidate in self._nodes]
        narrow, wide = chunk_bytes(task.facts, 1)
        self._hops = [[hop_ns(links, a, b, wide) for b in ids] for a in ids]
        self._ins = [hop_ns(links, COORDINATOR, node, narrow) for node in ids]
        self._outs = [hop_ns(links, node, COORDINATOR, narrow) for node in ids]
        self._least_hop = min(
            (hop for a, row in enumerate(self._hops) for b, hop in enumerate(row) if a != b),
            default=0,
        )
        self._least_out = min(self._outs, default=0)
        self._middle = sorted(map(self._most_between, self._nodes), reverse=True)
        self._final = max(map(self._most_at_the_end, self._nodes), default=0)
        self._hopeless: dict[int, int] = {}
        """By nodes used, as bits: whoever has come no further than so far cannot be completed."""
        self._twins = [self._twin_before(index) for index in range(len(ids))]

    def fits(self) -> bool:
        """Whether there is a chain at all."""
        self._any_will_do = True
        return self.fewest() is not None

    def fewest(self) -> Found | None:
        """The best chain of the least length."""
        if self._task.split:
            return self._of_length(len(self._task.split))
        for length in range(1, min(len(self._nodes), MAX_STAGES, self._layers) + 1):
            found = self._of_length(length)
            if found is not None:
                return found
        return None

    def stages(self, found: Found) -> tuple[PlannedStage, ...]:
        """``found`` with cuts that level how full the nodes become."""
        planned = []
        for index, (first, last) in zip(found.order, self._cuts(found.order), strict=True):
            node = self._nodes[index]
            need = node.footprint.need(first, last)
            offer = node.offer
            planned.append(
                PlannedStage(offer.node, offer.name, first, last, need, need.required, node.have)
            )
        return tuple(planned)

    def _of_length(self, length: int) -> Found | None:
        self._best: Found | None = None
        self._steps = 0
        self._hopeless.clear()
        reaches = accumulate((self._final, *self._middle[: length - 1]))
        self._reach = (0, *reaches)
        if length <= len(self._nodes):
            self._extend((), 0, 0, length)
        return self._best

    def _extend(self, order: tuple[int, ...], begin: int, spent: int, left: int) -> bool:
        """Whether the rest of the model fits somehow, or that was not looked into to the end."""
        used = sum(1 << index for index in order)
        if begin <= self._hopeless.get(used, -1):
            return False
        hopeful = self._try_each(order, begin, spent, left)
        if not hopeful:
            self._hopeless[used] = begin
        return hopeful

    def _try_each(self, order: tuple[int, ...], begin: int, spent: int, left: int) -> bool:
        """As ``_extend``, with every node that may come next."""
        hopeful = False
        for index in range(len(self._nodes)):
            if index in order or self._twins[index] not in {None, *order}:
                continue
            if self._may_stop():
                return True
            end = self._end(order, index, begin, left)
            if end is None:
                continue
            time = spent + (self._hops[order[-1]][index] if order else self._ins[index])
            least = (left - 1) * self._least_hop
            least += self._outs[index] if left == 1 else self._least_out
            if self._best is not None and time + least >= self._best.link_ns:
                hopeful = True
            elif left == 1:
                self._best = Found((*order, index), time + self._outs[index])
                hopeful = True
            else:
                hopeful = self._extend((*order, index), end, time, left - 1) or hopeful
        return hopeful

    def _may_stop(self) -> bool:
        if self._any_will_do and self._best is not None:
            return True
        self._steps += 1
        if self._steps > MAX_STEPS:
            self.exhaustive = False
        return self._steps > MAX_STEPS

    def _end(self, order: tuple[int, ...], index: int, begin: int, left: int) -> int | None:
        """How far the chain reaches with ``index`` next; None if it cannot be completed."""
        split = self._task.split
        if split:
            segment = split[len(order)]
            node = self._nodes[index]
            pinned = segment.node in {None, node.offer.node}
            fits = pinned and node.footprint.need(begin, segment.last).required <= node.have
            return segment.last if fits else None
        if left == 1:
            node = self._nodes[index]
            return (
                self._layers
                if node.footprint.need(begin, self._layers).required <= node.have
                else None
            )
        end = min(self._furthest_of(index, begin), self._layers - (left - 1))
        if end <= begin or end + self._reach[left - 1] < self._layers:
            return None
        return end

    def _furthest_of(self, index: int, begin: int) -> int:
        key = (index, begin)
        if key not in self._furthest:
            node = self._nodes[index]
            self._furthest[key] = furthest(node, begin, node.have, self._layers)
        return self._furthest[key]

    def _most_between(self, node: Candidate) -> int:
        """Layers that ``node`` can hold wherever it stands, except at the end."""
        limits = {
            furthest(node, begin, node.have, self._layers) - begin for begin in range(self._layers)
        }
        return max(limits)

    def _most_at_the_end(self, node: Candidate) -> int:
        """Layers that ``node`` can hold with the head."""
        return bisect_right(
            range(1, self._layers + 1),
            node.have,
            key=lambda count: node.footprint.need(self._layers - count, self._layers).required,
        )

    def _twin_before(self, index: int) -> int | None:
        """The nearest node before ``index`` that is like it in everything; it goes first."""
        if self._task.split:
            return None
        for other in reversed(range(index)):
            if (
                self._nodes[other].have == self._nodes[index].have
                and self._nodes[other].footprint is self._nodes[index].footprint
                and self._ins[other] == self._ins[index]
                and self._outs[other] == self._outs[index]
                and self._hops[other][index] == self._hops[index][other]
                and all(
                    self._hops[other][each] == self._hops[index][each]
                    and self._hops[each][other] == self._hops[each][index]
                    for each in range(len(self._nodes))
                    if each not in {other, index}
                )
            ):
                return other
        return None

    def _cuts(self, order: tuple[int, ...]) -> list[tuple[int, int]]:
        if self._task.split:
            return [(segment.first, segment.last) for segment in self._task.split]
        low, high = 0, _SCALE
        while low < high:
            middle = (low + high) // 2
            if self._cut_at(order, middle) is None:
                low = middle + 1
            else:
                high = middle
        cuts = self._cut_at(order, low)
        return list(pairwise(cuts or ()))

    def _cut_at(self, order: tuple[int, ...], fill: int) -> list[int] | None:
        """Cuts that fill no node beyond ``fill`` of ``_SCALE`` parts, or None."""
        cuts = [0]
        for place, index in enumerate(order[:-1]):
            node = self._nodes[index]
            end = furthest(node, cuts[-1], node.have * fill // _SCALE, self._layers)
            end = min(end, self._layers - (len(order) - 1 - place))
            if end <= cuts[-1]:
                return None
            cuts.append(end)
        last = self._nodes[order[-1]]
        if last.footprint.need(cuts[-1], self._layers).required > last.have * fill // _SCALE:
            return None
        return [*cuts, self._layers]


def have_bytes(inventory: Inventory) -> int:
    """What is free for another stage."""
    return max(inventory.memory_bytes - inventory.taken_bytes, 0)


def furthest(node: Candidate, begin: int, limit: int, layers: int) -> int:
    """The last end, before the model's, up to which ``node`` takes layers within ``limit``."""
    return begin + bisect_right(
        range(begin + 1, layers),
        limit,
        key=lambda end: node.footprint.need(begin, end).required,
    )


def candidates(task: Task, offers: Sequence[Offer]) -> list[Candidate]:
    footprints = {
        kind: Footprint(task.facts, task.tensors, task.wanted, kind)
        for kind in ("float32", "quantised")
    }
    found = [
        Candidate(offer, have_bytes(offer.inventory), footprints[offer.inventory.weights])
        for offer in offers
        if offer.inventory is not None
    ]
    return sorted(found, key=lambda each: (-each.have, each.offer.node))


def able(offers: Sequence[Offer], engine: str | None = None) -> list[Offer]:
    return [
        offer
        for offer in offers
        if offer.inventory is not None
        and not offer.barred
        and offer.inventory.memory_bytes > 0
        and engine in {None, offer.inventory.engine}
    ]


def chunk_bytes(facts: ModelFacts, rows: int) -> tuple[int, int]:
    """Of ``rows`` tokens: from the coordinator, and between two stages."""
    return _TOKEN_BYTES + 4 * (rows - 1), _TOKEN_BYTES + 4 * rows * facts.hidden


def link_of(links: Links, a: NodeId, b: NodeId) -> Link:
    """What bytes from ``a`` to ``b`` are planned with."""
    return links.get((a, b)) or links.get((b, a)) or NEUTRAL


def hop_ns(links: Links, a: NodeId, b: NodeId, nbytes: int) -> int:
    """How long ``nbytes`` take from ``a`` to ``b``."""
    link = link_of(links, a, b)
    return link.rtt_ns // 2 + nbytes * 1_000_000_000 // max(link.bytes_per_s, 1)
