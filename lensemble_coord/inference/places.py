"""Where models may go: what is known of the nodes that are here, as the planner wants it."""

from collections.abc import Mapping

import msgspec
import trio

from lensemble.errors import PlanInfeasible
from lensemble.ids import NodeId
from lensemble_coord.drains import Drains
from lensemble_coord.inference import placement, split
from lensemble_coord.inference.chain import Offer, Segment, Task
from lensemble_coord.inference.footprint import Wanted
from lensemble_coord.inference.models import Model
from lensemble_coord.inference.paths import Paths
from lensemble_coord.inference.run_rows import Wish
from lensemble_coord.peers import Peer, Peers

DEFAULT_CTX = 2048
DOUBT_S = 5.0
"""A run that lost a stage waits so long for nodes that are only suspect."""

LOOK_S = 0.2
LOST = "this run has lost a stage on it"
UNLINKED = "it has no link to the coordinator"
NOBODY: frozenset[NodeId] = frozenset()


class Places:
    """Plans models on ``peers``, but for those of ``drains``, with what is known of ``paths``."""

    def __init__(self, peers: Peers, drains: Drains, paths: Paths) -> None:
        self._peers = peers
        self._drains = drains
        self._paths = paths

    async def find(
        self,
        wish: Wish,
        model: Model,
        without: frozenset[NodeId] | None = None,
        freed: Mapping[NodeId, int] | None = None,
    ) -> placement.Plan:
        """Plan ``model``; with ``without`` not for the first time, and on other nodes than those.

        ``freed``: bytes on nodes that will be free by then.

        Raises:
            PlanInfeasible: it does not fit.
            ConfigError: the split by hand is wrong.
        """
        offers = [self._offer(each, without or NOBODY, freed or {}) for each in self._here()]
        facts = model.facts
        segments: tuple[Segment, ...] = ()
        if wish.split:
            segments = split.parse(wish.split, facts.layers, offers, again=without is not None)
        wanted = Wanted(wish.ctx or min(facts.trained_ctx, DEFAULT_CTX), wish.sessions, wish.rows)
        task = Task(facts, model.tensors, wanted, segments)
        absent = [
            Offer(each.node, each.name, barred=each.unfit or UNLINKED)
            for each in self._peers.absent()
        ]
        everyone, links = [*offers, *absent], self._paths.links()
        return await trio.to_thread.run_sync(placement.plan, task, everyone, links)

    async def again(self, wish: Wish, model: Model, without: frozenset[NodeId]) -> placement.Plan:
        """As ``find``, for a run that lost a stage: doubts that come with a loss may pass."""
        until = trio.current_time() + DOUBT_S
        while True:
            try:
                return await self.find(wish, model, without)
            except PlanInfeasible:
                here = [each.node for each in self._here() if each.node not in without]
                if trio.current_time() >= until or not any(map(self._peers.unfit, here)):
                    raise
            await trio.sleep(LOOK_S)

    def _here(self) -> list[Peer]:
        return list(self._peers.here.values())

    def _offer(self, peer: Peer, without: frozenset[NodeId], freed: Mapping[NodeId, int]) -> Offer:
        barred = self._drains.why(peer.node) or self._peers.unfit(peer.node)
        barred = LOST if peer.node in without else barred
        inventory = peer.inventory
        if inventory is not None and (less := freed.get(peer.node, 0)):
            taken = max(0, inventory.taken_bytes - less)
            inventory = msgspec.structs.replace(inventory, taken_bytes=taken)
        return Offer(peer.node, peer.name, inventory, barred)
