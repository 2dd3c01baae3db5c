"""One node's part of a round: train from the prior, keep what is local, release the difference.

A retry of a round from the same prior releases the same bytes again, after a restart too.  What was
trained counts only once the round closed with it (``adopt``); otherwise it is rolled back
(``discard``).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NotRequired, TypedDict, Unpack

import numpy as np

from lensemble import merkle, seeds
from lensemble.errors import (
    CheckpointIntegrityError,
    ConfigError,
    ContractViolation,
    GaugeError,
    ProbeError,
)
from lensemble.ids import Digest
from lensemble.merkle import DatasetFacts
from lensemble.params import FlatParameters, parameter_digest
from lensemble.secagg.field import FieldVector, encode
from lensemble.workload import NoopTask, Workload, layout
from lensemble_node.worker.training.local_store import Cursor, LocalStore, Sidecar
from lensemble_node.worker.training.release import Extent, release
from lensemble_node.worker.training.source import DataSource
from lensemble_node.worker.training.stops import pause

NOOP_REACH = 1e-3
"""Updates of the no-op task are uniform within +-this."""
_PIECE = 1 << 18


class RoundOrder(TypedDict):
    """What the coordinator says of the round, and how to report.

    ``progress`` is told steps done and loss of each; ``should_stop`` is asked before every step.
    ``prior_digest``, when given, must be the digest of the prior.
    """

    round_index: int
    attempt: int
    sketch_seed: int
    global_step: int
    progress: Callable[[int, float], None]
    should_stop: Callable[[], bool]
    prior_digest: NotRequired[Digest]


@dataclass(frozen=True)
class Release:
    """``vector``: field elements (uint32, shape ``(size,)``), mapped from the state directory.

    Norm and peak are those of the difference it encodes.  ``reused``: trained by an earlier call.
    """

    vector: FieldVector
    l2_norm: float
    max_abs: float
    loss_first: float
    loss_last: float
    reused: bool


class Trainer:
    """Trains one workload on one node's data, with its state under ``state_dir``.

    Args:
        workload: what to train.
        source: the node's data; none for the no-op task.
        state_dir: holds ``local/``, ``release/`` and the dataset cache.
        node: this node's id; seeds its batches and its action head.
        threads: torch's threads; results are reproducible for the same number.

    Raises:
        ConfigError: a world model without data.
        DatasetError: data that cannot be used.
    """

    def __init__(
        self,
        workload: Workload,
        source: DataSource | None,
        state_dir: Path,
        node: str,
        threads: int,
    ) -> None:
        self._workload = workload
        self._layout = layout(workload)
        self._state_dir = state_dir
        self._node = node
        self._store = LocalStore(state_dir)
        self._work: _Noop | _World
        if isinstance(workload.task, NoopTask):
            self._work = _Noop(workload, workload.task, node)
        elif source is None:
            raise ConfigError(
                f"workload {workload.name!r} trains a world model; this node names no dataset",
                "Give the node's configuration a dataset path.",
            )
        else:
            self._work = _World(workload, source, node, threads)

    @cached_property
    def facts(self) -> DatasetFacts:
        """Root and counts of the data, computed on first use (or read from the cache)."""
        return self._work.facts(self._state_dir)

    def pin(self, probe: Path, digest: Digest) -> None:
        """Use the landmarks of the probe at ``probe``, whose hash the federation states.

        Raises:
            ProbeError: it cannot be read, or hashes otherwise.
            ConfigError: the workload trains no world model.
        """
        self._work.pin(probe, digest)

    def train(self, prior: FlatParameters, **order: Unpack[RoundOrder]) -> Release:
        """Train from ``prior`` (float32, shape ``(layout.size,)``) and put down what to release.

        Raises:
            ContractViolation: ``prior`` does not have the layout's shape.
            GaugeError: a prior of round 0 or a sketch other than the federation's.
            ProbeError: the workload has an anchor and no probe is pinned.
            CheckpointIntegrityError: a later prior, or the local state, is damaged.
            FieldBoundExceeded: the update is too large for the field.
            Stopped, Diverged: from the inner loop; nothing is kept.
        """
        digest = self._check(prior, order)
        known = self._store.trained(order["round_index"])
        basis = (digest, self._workload.digest, self.facts.root)
        if known is not None and (known.prior, known.config_hash, known.dataset_root) == basis:
            return self._answer(known, reused=True)
        self._store.clear()
        result = self._work.train(prior, order, self._store)
        sidecar = Sidecar(
            order["round_index"],
            order["attempt"],
            *basis,
            sketch_seed=order["sketch_seed"],
            vector=result.vector,
            l2_norm=result.extent.l2_norm,
            max_abs=result.extent.max_abs,
            loss_first=result.losses[0],
            loss_last=result.losses[1],
        )
        self._store.write_sidecar(sidecar)
        return self._answer(sidecar, reused=False)

    def adopt(self, round_index: int) -> bool:
        """The round closed with our update: keep what it trained.  False when nothing is there."""
        return self._store.adopt(round_index)

    def discard(self, round_index: int) -> None:
        """The round closed without our update: forget what it trained."""
        self._store.discard(round_index)

    def _answer(self, sidecar: Sidecar, *, reused: bool) -> Release:
        return Release(
            self._store.vector(sidecar.round_index),
            sidecar.l2_norm,
            sidecar.max_abs,
            sidecar.loss_first,
            sidecar.loss_last,
            reused,
        )

    def _check(self, prior: FlatParameters, order: RoundOrder) -> Digest:
        if prior.dtype != np.float32 or prior.shape != (self._layout.size,):
            raise ContractViolation(
                f"the prior is {prior.dtype} of {prior.shape}, not float32 of "
                f"({self._layout.size},)"
            )
        wanted = seeds.sketch(self._workload.root_seed, order["round_index"])
        if order["sketch_seed"] != wanted:
            raise GaugeError(
                f"round {order['round_index']} has the sketch seed {order['sketch_seed']}; the "
                f"workload's root seed gives {wanted}",
                "Run coordinator and node with the same workload and version.",
            )
        digest = parameter_digest(self._layout, prior)
        expected = order.get("prior_digest", digest)
        if digest != expected:
            message = f"the prior of round {order['round_index']} is {digest}, not {expected}"
            raise (
                GaugeError(f"warm start: {message}")
                if order["round_index"] == 0
                else CheckpointIntegrityError(message)
            )
        return digest


@dataclass(frozen=True)
class _Result:
    vector: Digest
    extent: Extent
    losses: tuple[float, float]


class _Noop:
    """No model: a seeded update made, encoded and written piece by piece."""

    def __init__(self, workload: Workload, task: NoopTask, node: str) -> None:
        self._workload = workload
        self._task = task
        self._node = node

    def facts(self, _: Path) -> DatasetFacts:
        leaf = merkle.leaf({"noop": merkle.text_column([self._node])})
        return DatasetFacts(merkle.root([leaf]), 1, 0, 0, 0)

    def pin(self, probe: Path, _: Digest) -> None:
        raise ConfigError(f"the no-op task has no use for the probe {probe}")

    def train(self, prior: FlatParameters, order: RoundOrder, store: LocalStore) -> _Result:
        label = f"noop:{self._node}:{order['round_index']}"
        seed = seeds.derive(self._workload.root_seed, label)
        generator = np.random.Generator(np.random.Philox(seed))
        extent = Extent()
        for done in range(1, self._workload.inner.steps + 1):
            pause(self._task.step_seconds, order["should_stop"])
            order["progress"](done, 0.0)

        def pieces() -> Iterator[FieldVector]:
            for start in range(0, len(prior), _PIECE):
                count = min(_PIECE, len(prior) - start)
                piece = generator.random(count, dtype=np.float32)
                piece -= np.float32(0.5)
                piece *= np.float32(2 * NOOP_REACH)
                extent.include(piece)
                yield encode(piece, self._workload.field)

        cursor = Cursor(0, order["round_index"], self._workload.digest)
        store.write_pending({}, {}, cursor)
        vector = store.write_vector(order["round_index"], pieces())
        return _Result(vector, extent, (0.0, 0.0))


class _World:
    """The world model.  Torch is imported here only: a no-op worker starts fast and stays small."""

    def __init__(self, workload: Workload, source: DataSource, node: str, threads: int) -> None:
        import torch  # noqa: PLC0415  # see the class

        from lensemble_node.worker.training import dataset, inner_loop  # noqa: PLC0415

        torch.set_num_threads(threads)
        task = workload.task
        if isinstance(task, NoopTask):
            raise TypeError("a no-op task has no model")
        self._workload = workload
        self._data = dataset.open_dataset(source)
        self._data.expect(task.observation_dim)
        windows = self._data.windows(task.history)
        self._learner = inner_loop.Learner(workload, windows, self._data.action_dim, node)

    def facts(self, state_dir: Path) -> DatasetFacts:
        return self._data.commitment(state_dir)

    def pin(self, probe: Path, digest: Digest) -> None:
        from lensemble_node.worker.training import probe as probes  # noqa: PLC0415  # as above

        found = probes.read(probe)
        found.expect(digest)
        self._learner.landmarks = found.anchor()

    def train(self, prior: FlatParameters, order: RoundOrder, store: LocalStore) -> _Result:
        from lensemble_node.worker.training import inner_loop  # noqa: PLC0415  # as above

        if self._workload.objective.lambda_anc > 0 and self._learner.landmarks is None:
            raise ProbeError(
                f"workload {self._workload.name!r} anchors to a probe and none is pinned",
                "Give this node the federation's probe.",
            )
        head, optimizer, cursor = store.read()
        local = inner_loop.LocalState(head, optimizer, cursor.batches)
        if cursor.config_hash != self._workload.digest:
            # The first round here, or what another workload left behind.
            local = inner_loop.LocalState()
        learner = self._learner
        learner.load(prior, local)
        steps = self._workload.inner.steps
        segment = inner_loop.Segment(steps, order["global_step"], order["sketch_seed"])
        losses = learner.run(segment, order["progress"], order["should_stop"])
        encoded = release(learner.model.named(), prior, learner.model.layout, self._workload.field)
        kept = learner.local_state()
        after = Cursor(kept.cursor, order["round_index"], self._workload.digest)
        store.write_pending(kept.head, kept.optimizer, after)
        vector = store.write_vector(order["round_index"], [encoded.vector])
        return _Result(vector, encoded.extent, (losses.first, losses.last))
