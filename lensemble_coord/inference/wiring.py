"""What the stages of a run are told: their layers, their edges, their neighbours."""

from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from lensemble import stage_chunk
from lensemble.edge.spec import DEFAULT_SLOTS, EdgeSpec
from lensemble.ids import Digest, EdgeId, FederationId, NodeId
from lensemble.model_facts import ModelFacts, tensors_for
from lensemble.version import BUILD
from lensemble.wire import stages
from lensemble.wire.stages import Address, FromEdge, FromPath, FromUrl, TensorPart
from lensemble_coord.inference.placement import Plan
from lensemble_coord.inference.tokens import Tokenizer
from lensemble_coord.inference.weights_out import CAPACITY_BYTES, SLOTS


class Material(msgspec.Struct, frozen=True):
    """A model that is open: what its file says, and where stages get its weights.

    ``file`` is the coordinator's own, which it sends over edges; else every node reads from
    ``place`` by itself.
    """

    facts: ModelFacts
    tensors: tuple[TensorPart, ...]
    digest: Digest
    tokenizer: Tokenizer
    file: Path | None = None
    place: FromPath | FromUrl | None = None


class Origin(msgspec.Struct, frozen=True):
    """Which run, and whose; ``me`` is the coordinator with its addresses."""

    run: str
    federation: FederationId
    me: Address
    run_epoch: int = 1


class Wiring:
    """The ring of one run and the edges that bring weights.

    Args:
        origin: of the run.
        model: what is run.
        plan: on which nodes.
        draw_edge: gives ids that are never used again.
    """

    def __init__(
        self, origin: Origin, model: Material, plan: Plan, draw_edge: Callable[[], EdgeId]
    ) -> None:
        me = origin.me
        self.nodes = tuple(stage.node for stage in plan.stages)
        self._origin = origin
        self._model = model
        self._plan = plan
        capacity = stage_chunk.capacity_bytes(plan.rows, model.facts.hidden)
        self.ring = tuple(
            EdgeSpec(draw_edge(), a, b, capacity, DEFAULT_SLOTS)
            for a, b in pairwise((me.node, *self.nodes, me.node))
        )
        """In order: into stage 0, between stages, out of the last one."""
        self.weights = tuple(
            EdgeSpec(draw_edge(), me.node, node, CAPACITY_BYTES, SLOTS) for node in self.nodes
        )

    @property
    def run_epoch(self) -> int:
        """Counts the plans of the run."""
        return self._origin.run_epoch

    def fenced(self, stage: int) -> dict[str, Any]:
        """The fence of a message about ``stage``; its epoch is for the session to fill in."""
        return {
            "federation": self._origin.federation,
            "epoch": 0,
            "run": self._origin.run,
            "run_epoch": self._origin.run_epoch,
            "stage": stage,
        }

    def is_of(self, node: NodeId, message: stages.StageAnswer) -> bool:
        """Whether ``node`` speaks of its own stage of this run's plan."""
        return (
            not isinstance(message, stages.Inventory)
            and (message.run, message.run_epoch) == (self._origin.run, self._origin.run_epoch)
            and message.stage < len(self.nodes)
            and self.nodes[message.stage] == node
        )

    def order(
        self, stage: int, addresses: Mapping[NodeId, tuple[str, ...]]
    ) -> stages.StageProvision:
        """What ``stage`` is told first; ``addresses`` are where nodes are reached."""
        model, plan, planned = self._model, self._plan, self._plan.stages[stage]
        source = model.place or FromEdge(edge=self.weights[stage])
        around = [
            self._origin.me,
            *(Address(node=node, addresses=addresses.get(node, ())) for node in self.nodes),
            self._origin.me,
        ]
        return stages.StageProvision(
            **self.fenced(stage),
            stages=len(self.nodes),
            build=BUILD,
            protocol=stages.STAGE_PROTOCOL,
            engine=plan.engine,
            model=model.facts.canonical(),
            manifest_digest=model.digest,
            tokenizer_digest=model.facts.tokenizer_digest,
            first=planned.first,
            last=planned.last,
            tensors=tensors_for(model.facts, model.tensors, planned.first, planned.last),
            source=source,
            inbound=self.ring[stage],
            outbound=self.ring[stage + 1],
            upstream=around[stage],
            downstream=around[stage + 2],
            ctx=plan.ctx,
            sessions=plan.sessions,
            rows=plan.rows,
        )
