"""Small worlds for tests of training: workloads, arm data on disk, orders of a round."""

from pathlib import Path

import numpy as np

from lensemble import seeds
from lensemble.workload import Inner, NoopTask, Workload, WorldModelTask
from lensemble_local import arm
from lensemble_node.worker.training.kinds import RoundOrder
from lensemble_node.worker.training.local_round import Trainer
from lensemble_node.worker.training.source import DataSource

SMALL = WorldModelTask(hidden=24, latent_dim=8, action_embedding=4, head_hidden=8, history=2)


def small(**inner: object) -> Workload:
    return Workload(task=SMALL, inner=Inner(**({"steps": 6, "batch": 16} | inner)))


def noop(parameters: int = 1000) -> Workload:
    return Workload(name="noop", task=NoopTask(parameters=parameters))


def data(folder: Path, nodes: int = 1, episodes: int = 3, seed: int = 0) -> Path:
    arm.make(folder, arm.Order(nodes=nodes, episodes=episodes, engine="numpy", seed=seed))
    return folder


def order(workload: Workload, round_index: int = 0, attempt: int = 0) -> RoundOrder:
    return RoundOrder(
        round_index=round_index,
        attempt=attempt,
        sketch_seed=seeds.sketch(workload.root_seed, round_index),
        global_step=round_index * workload.inner.steps,
        progress=lambda _step, _loss: None,
        should_stop=lambda: False,
    )


def trainer(workload: Workload, folder: Path, state: Path, node: str = "n0") -> Trainer:
    return Trainer(workload, DataSource(folder / "node0.h5"), state, node, 1)


def tree(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def delta(vector: np.ndarray, workload: Workload) -> np.ndarray:
    return vector.view(np.int32) / float(1 << workload.field.k)
