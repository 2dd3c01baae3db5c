"""A node whose latent frame is turned at random before every release: what alignment is for."""

from pathlib import Path
from typing import Unpack

import numpy as np
import torch

from lensemble.params import FlatParameters
from lensemble.secagg.field import encode
from lensemble.secagg.plan import FieldPlan
from lensemble.workload import Gauge, Workload, WorldModelTask
from lensemble_node.worker.training.dataset import open_dataset
from lensemble_node.worker.training.gauge import Alignment, Sight, turn_weights
from lensemble_node.worker.training.inner_loop import Learner, LocalState, Losses, Segment
from lensemble_node.worker.training.kinds import RoundOrder
from lensemble_node.worker.training.local_round import Release
from lensemble_node.worker.training.probe import Probe
from lensemble_node.worker.training.release import Pipeline, release
from lensemble_node.worker.training.source import DataSource


def orthogonal(seed: list[int], width: int) -> np.ndarray:
    """A uniformly random element of O(width)."""
    draw = np.random.default_rng(seed).normal(size=(width, width))
    left, upper = np.linalg.qr(draw)
    return left * np.sign(np.diag(upper))


class TurnedNode:
    """Trains as a node does, then turns its weights by a random Q, which changes no prediction.

    The first of two turns (``turn``) happens in what it trained; the second, back, is alignment's.
    Its words have 32 bits.
    """

    def __init__(
        self, workload: Workload, data: tuple[str, Path], probe: Probe, *, turn: bool
    ) -> None:
        task = workload.task
        if not isinstance(task, WorldModelTask):
            raise TypeError("only a world model has a frame")
        node, path = data
        dataset = open_dataset(DataSource(path))
        self._learner = Learner(workload, dataset.windows(task.history), dataset.action_dim, node)
        self._workload, self._task, self._turn = workload, task, turn
        self._points = probe.spread()
        self._seed = [workload.root_seed, *node.encode()]
        self._local = LocalState()

    def train(self, prior: FlatParameters, **order: Unpack[RoundOrder]) -> Release:
        learner, at = self._learner, order["round_index"]
        learner.load(prior, self._local)
        layout = learner.model.layout
        before = Sight(learner.model.latents(self._points), layout.views(prior))
        segment = Segment(self._workload.inner.steps, order["global_step"], order["sketch_seed"])
        losses: Losses = learner.run(segment, order["progress"], order["should_stop"])
        self._local = learner.local_state()
        if self._turn:
            turn = orthogonal([*self._seed, at], self._task.latent_dim)
            turn_weights(learner.model.named(), turn, self._task.history)
        terms: Gauge = self._workload.gauge
        after = Sight(learner.model.latents(self._points), learner.model.named())
        found = Alignment(terms, before, after, self._task.history)
        pipeline = Pipeline(on_weights=(found.stage(layout),))
        sent = release(learner.model.named(), prior, layout, pipeline)
        room = self._workload.room
        return Release(
            encode(sent.values, room),
            FieldPlan(layout, room),
            sent.extent.l2_norm,
            sent.extent.max_abs,
            losses.first,
            losses.last,
            reused=False,
            drift=found.drift,
        )

    def adopt(self, _: int) -> bool:
        return True


torch.set_num_threads(1)
