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
from lensemble.workload import Workload, layout
from lensemble_coord.training import aggregate
from lensemble_node.worker.training.kinds import RoundOrder
from lensemble_node.worker.training.local_round import Release, Trainer
from lensemble_node.worker.training.source import DataSource


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

    ``bend`` is done to the sum of every round; a control experiment gives one.
    """

    workload: Workload
    nodes: Sequence[Trains]
    parameters: FlatParameters
    bend: Callable[[FieldVector], FieldVector] = lambda words: words
    velocity: FlatParameters = field(init=False)
    index: int = field(default=0, init=False)
    releases: list[Release] = field(default_factory=list, init=False)
    """Of the last round."""

    def __post_init__(self) -> None:
        self.parameters = self.parameters.copy()
        self.velocity = np.zeros_like(self.parameters)

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
        )
        present = [node for number, node in enumerate(self.nodes) if number not in absent]
        prior = self.parameters.copy()
        self.releases = [node.train(prior, **order) for node in present]
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
        step, start = OuterStep(step_terms(workload, count)), 0
        nbytes = self.parameters.nbytes
        for words in aggregate.summed_pieces(updates, nbytes, 4 * PIECE_WORDS):
            signed = words.view(np.int32)
            largest = max(int(signed.max()), -int(signed.min()))
            aggregate.require_plausible(largest, count, workload.room)
            part = slice(start, start + len(words))
            step.apply(self.parameters[part], self.velocity[part], self.bend(words))
            start = part.stop
