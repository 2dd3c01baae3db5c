"""Rounds of a federation in one process, without daemons, edges or masks: for benchmarks and tests.

Nodes train and release, the coordinator's sum and outer step follow, and nodes adopt: the product's
own pieces, called one after the other.  Sums in the field do not depend on order or masks, so a
federation of daemons with the same node ids, start and workload has the same digests.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, Unpack

import numpy as np

from lensemble import seeds
from lensemble.ids import Digest, NodeId
from lensemble.outer_step import PIECE_WORDS, OuterStep, step_terms
from lensemble.params import FlatParameters, parameter_digest
from lensemble.secagg.field import FieldVector
from lensemble.secagg.plan import WORD_BYTES, FieldPlan, words_of
from lensemble.secagg.scale import Moments, next_code, why_wide
from lensemble.workload import Workload, layout
from lensemble_coord.training import aggregate
from lensemble_node.worker.training.kinds import RoundOrder
from lensemble_node.worker.training.local_round import Release, Trainer
from lensemble_node.worker.training.source import DataSource
from lensemble_node.worker.training.words import Words


class Trains(Protocol):
    """A node's part of a round; ``Trainer`` is one."""

    def train(self, prior: FlatParameters, **order: Unpack[RoundOrder]) -> Release: ...

    def adopt(self, round_index: int) -> bool: ...


@dataclass(frozen=True)
class Held:
    """An update in memory, as the coordinator's sum takes it."""

    participant: NodeId
    vector: FieldVector
    complete: bool = True
    updates: int = 1

    @property
    def total_bytes(self) -> int:
        return self.vector.nbytes

    def read_into(self, offset: int, into: memoryview) -> None:
        raw = self.vector.data.cast("B")
        into[:] = raw[offset : offset + len(into)]


def trainers(workload: Workload, data: Mapping[str, Path], state_dir: Path) -> list[Trainer]:
    """A node for each of ``data``, which gives files by node id; its state is under ``state_dir``.

    Raises:
        DatasetError: see ``Trainer``.
    """
    return [
        Trainer(workload, DataSource(path), state_dir / node, node, 1)
        for node, path in data.items()
    ]


@dataclass
class Federation:
    """The global state and its nodes; ``parameters`` and ``velocity`` are float32, flat.

    ``bend`` is done to the words of the sum of every round; a control experiment gives one.
    """

    workload: Workload
    nodes: Sequence[Trains]
    parameters: FlatParameters
    bend: Callable[[Words], Words] = lambda words: words
    velocity: FlatParameters = field(init=False)
    index: int = field(default=0, init=False)
    plan: FieldPlan = field(init=False)
    """Of the words of the next round."""
    releases: list[Release] = field(default_factory=list, init=False)
    """Of the last round."""
    sent: list[float] = field(default_factory=list, init=False)
    """Bytes of an update for each parameter, by round."""

    def __post_init__(self) -> None:
        self.parameters = self.parameters.copy()
        self.velocity = np.zeros_like(self.parameters)
        self.plan = FieldPlan(layout(self.workload), self.workload.room)

    @property
    def digest(self) -> Digest:
        return parameter_digest(layout(self.workload), self.parameters)

    def round(self, absent: Collection[int] = ()) -> None:
        """One round, which the nodes numbered ``absent`` miss.

        Raises:
            AggregationError: the sum is out of the field's range, or the step out of float32's.
            Diverged, GaugeError, FieldBoundExceeded: from a node.
        """
        order = RoundOrder(
            round_index=self.index,
            attempt=0,
            sketch_seed=seeds.sketch(self.workload.root_seed, self.index),
            global_step=self.index * self.workload.inner.steps,
            progress=lambda _step, _loss: None,
            should_stop=lambda: False,
            plan=self.plan.code,
        )
        present = [node for number, node in enumerate(self.nodes) if number not in absent]
        prior = self.parameters.copy()
        self.releases = [node.train(prior, **order) for node in present]
        self.sent.append(self.plan.nbytes / len(self.parameters))
        self._step()
        for node in present:
            node.adopt(self.index)
        self.index += 1

    def _step(self) -> None:
        workload, count = self.workload, len(self.releases)
        updates = [
            Held(NodeId(str(number)), release.vector)
            for number, release in enumerate(self.releases)
        ]
        plan, peaks, start = self.plan, aggregate.Peaks(self.plan), 0
        total = np.empty(plan.nbytes // WORD_BYTES, dtype=np.uint32)
        for words in aggregate.summed_pieces(updates, plan):
            peaks.include(start, words)
            total[start // WORD_BYTES : start // WORD_BYTES + len(words)] = words
            start += words.nbytes
        facts = peaks.facts(Digest(""), Path(), count)
        aggregate.require_plausible(facts, plan, workload.room)
        self._advance(total, count)

    def _advance(self, total: FieldVector, count: int) -> None:
        """Take the outer step from the sum ``total`` of ``count`` updates, and plan the next."""
        workload, plan, raw = self.workload, self.plan, total.data.cast("B")
        if not why_wide(workload):
            moments = Moments(plan)
            moments.include(0, plan.layout.size, raw)
            self.plan = FieldPlan(plan.layout, workload.room, next_code(moments, count))
        for span in plan.spans(0, plan.tail):
            words = words_of(total, span)
            words[:] = self.bend(words)
        step = OuterStep(step_terms(workload, count))
        for first in range(0, len(self.parameters), PIECE_WORDS):
            part = slice(first, min(len(self.parameters), first + PIECE_WORDS))
            sums = raw[plan.byte_of(first) :]
            step.apply_planned(self.parameters[part], self.velocity[part], plan, first, sums)
