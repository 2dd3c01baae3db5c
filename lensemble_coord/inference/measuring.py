"""Measuring the links of a plan before it is carried out, by asking their nodes for bursts.

Nothing is measured unless somebody asks for it.  A plan is made, its links between nodes that were
not measured lately are, one after the other, and it is made again with what was found, until every
link of it is measured: no chain is better then, where what nobody measured is taken for 1 ms and a
gigabit.  What nodes refuse stays as it was.
"""

from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Protocol

import trio

from lensemble.edge.spec import EdgeSpec
from lensemble.ids import EdgeId, FederationId, NodeId
from lensemble.wire import stages
from lensemble_coord.inference.paths import Pair, PathBook
from lensemble_coord.inference.placement import Plan
from lensemble_coord.peers import Peer, Peers

MOST_PAIRS = 16
WITHIN_S = 30.0
"""For all bursts of one plan."""

BURST_WITHIN_S = 12.0
"""From asking the two nodes of one burst to its end: a node takes 10 s at most."""


class Note(Protocol):
    """Records an event."""

    def __call__(self, event: str, *, warn: bool = False, **fields: str | float) -> None: ...


class _Asked:
    """The burst that is under way."""

    def __init__(self, burst: int, pair: Pair) -> None:
        self.burst = burst
        self.pair = pair
        self.ready = trio.Event()
        self.over = trio.Event()
        self.taken: stages.BurstTaken | None = None
        self.against = ""

    def end(self, against: str = "") -> None:
        self.against = self.against or against
        self.ready.set()
        self.over.set()


class Measuring:
    """Asks nodes of ``peers`` for bursts, one at a time, and writes down what they find.

    Args:
        federation: what their answers are fenced with.
        peers: who is here.
        book: what is found goes into it.
        draw_edge: gives ids that are never used again.
        note: records each measurement, or why there is none.
    """

    def __init__(
        self,
        federation: FederationId,
        peers: Peers,
        book: PathBook,
        draw_edge: Callable[[], EdgeId],
        note: Note,
    ) -> None:
        self._federation = federation
        self._peers = peers
        self._book = book
        self._draw_edge = draw_edge
        self._note = note
        self._turn = trio.Lock()
        self._asked: _Asked | None = None

    async def refine(
        self, plan: Plan, again: Callable[[], Awaitable[Plan]]
    ) -> tuple[Plan, tuple[str, ...]]:
        """``plan``, or what ``again`` plans with what was measured; and what was not, and why."""
        against: dict[Pair, str] = {}
        tried: set[Pair] = set()
        with trio.move_on_after(WITHIN_S) as limit:
            while pairs := [pair for pair in self._unmeasured(plan) if pair not in tried]:
                if len(tried) >= MOST_PAIRS:
                    return plan, (*against.values(), f"{MOST_PAIRS} links were enough for once")
                tried.add(pairs[0])
                if why := await self._measure(pairs[0]):
                    against[pairs[0]] = why
                plan = await again()
        if limit.cancelled_caught:
            return plan, (*against.values(), f"after {WITHIN_S:g} s nothing more was measured")
        return plan, tuple(against.values())

    def heard(self, node: NodeId, message: stages.BurstAnswer) -> None:
        """What a node says of a burst; of one that is not under way it is passed by."""
        asked = self._asked
        if asked is None or message.burst != asked.burst or node not in asked.pair:
            return
        match message:
            case stages.BurstReady() if node == asked.pair[1]:
                asked.ready.set()
            case stages.BurstTaken() if node == asked.pair[1] and asked.ready.is_set():
                asked.taken = asked.taken or message
                asked.end()
            case stages.BurstRefused(reason=reason):
                asked.end(f"{self._name(node)} says: {reason}")
            case _:
                return

    def lost(self, node: NodeId) -> None:
        """The link to ``node`` has ended."""
        if self._asked is not None and node in self._asked.pair:
            self._asked.end(f"{self._name(node)} is gone")

    def _unmeasured(self, plan: Plan) -> list[Pair]:
        """Between nodes only: what passes the coordinator is a few bytes a token."""
        since = trio.current_time() - stages.BURST_REST_S
        fresh = {
            pair
            for pair, rate in self._book.rates().items()
            if rate.how == "measured" and rate.at > since
        }
        pairs = pairwise(stage.node for stage in plan.stages)
        return [pair for pair in pairs if pair not in fresh and pair[::-1] not in fresh]

    async def _measure(self, pair: Pair) -> str:
        """Measure one link; what is in the way, as a sentence, if something is."""
        what = f"{self._name(pair[0])} to {self._name(pair[1])}"
        async with self._turn:
            self._asked = asked = _Asked(self._draw_edge(), pair)
            try:
                with trio.move_on_after(BURST_WITHIN_S):
                    await self._ask(asked)
            finally:
                self._asked = None
        taken = asked.taken
        if taken is None:
            why = f"{what}: {asked.against or f'no answer within {BURST_WITHIN_S:g} s'}"
            self._note("link.unmeasured", warn=True, reason=why)
            return why
        rate = taken.landed_bytes * 1_000_000 // max(1, taken.microseconds)
        self._book.measured(pair, rate, None if taken.rtt_us is None else taken.rtt_us * 1000)
        self._note("link.measured", link=what, mbit_s=round(rate * 8 / 1e6, 3))
        return ""

    async def _ask(self, asked: _Asked) -> None:
        near, far = (self._peers.here.get(node) for node in asked.pair)
        if near is None or far is None:
            asked.end("one of them is not here")
            return
        for peer in (near, far):
            # It would refuse; the other one would wait for it.
            if peer.inventory is not None and peer.inventory.taken_bytes:
                asked.end(f"a stage is live on {peer.name}")
                return
        edge = EdgeSpec(EdgeId(asked.burst), near.node, far.node, stages.BURST_FRAME_BYTES, 1)
        far.tell(self._order(stages.BurstExpect, far, edge, near))
        await asked.ready.wait()
        if not asked.over.is_set():
            near.tell(self._order(stages.BurstSend, near, edge, far))
        await asked.over.wait()

    def _order(
        self,
        kind: type[stages.BurstExpect] | type[stages.BurstSend],
        to: Peer,
        edge: EdgeSpec,
        far: Peer,
    ) -> stages.BurstOrder:
        addresses = () if far.inventory is None else far.inventory.addresses
        return kind(
            federation=self._federation,
            epoch=to.epoch,
            burst=edge.edge,
            edge=edge,
            far=stages.Address(node=far.node, addresses=addresses),
        )

    def _name(self, node: NodeId) -> str:
        peer = self._peers.here.get(node)
        return node[:12] if peer is None else peer.name
