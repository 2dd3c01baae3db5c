import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

from lensemble.secagg import field
from lensemble.workload import Workload
from lensemble_local import arm
from lensemble_node.worker.training import baseline
from lensemble_node.worker.training.arguments import read_workload
from lensemble_node.worker.training.evaluate import Domain, Evaluator, Scores
from lensemble_node.worker.training.local_round import Trainer
from lensemble_node.worker.training.source import DataSource
from tests.node import worlds

NODES, ROUNDS = 3, 5
ARM = Path(__file__).parents[2] / "configs" / "workloads" / "arm.toml"


def federated(workload: Workload, folder: Path, start: np.ndarray, state: Path) -> np.ndarray:
    """Rounds as the daemons run them, without the daemons."""
    trainers = [
        Trainer(workload, DataSource(folder / f"node{i}.h5"), state / f"n{i}", f"n{i}", 1)
        for i in range(NODES)
    ]
    parameters, velocity = start.copy(), np.zeros_like(start)
    for index in range(ROUNDS):
        total = np.zeros(len(start), dtype=np.uint32)
        for trainer in trainers:
            field.fold(total, trainer.train(parameters, **worlds.order(workload, index)).vector)
        field.check_sum(total, workload.field, NODES)
        mean = (field.decode(total, workload.field) / NODES).astype(np.float32)
        velocity = np.float32(workload.outer.momentum) * velocity + mean
        step = mean + np.float32(workload.outer.momentum) * velocity
        parameters = parameters + np.float32(workload.outer.lr) * step
        assert all(trainer.adopt(index) for trainer in trainers)
    return parameters


@pytest.mark.soak
@pytest.mark.parametrize("seed", [0, 1])
def test_a_federation_beats_its_nodes_alone(tmp_path: Path, seed: int) -> None:
    torch.set_num_threads(1)
    workload = read_workload(ARM).model_copy(update={"root_seed": seed})
    folder = tmp_path / "data"
    arm.make(folder, arm.Order(nodes=NODES, engine="numpy", seed=seed))
    start = baseline.warm_start(workload, folder / "public.h5", 200)
    names = [(folder / f"node{i}.h5", folder / f"heldout-{i}.h5") for i in range(NODES)]
    evaluator = Evaluator(workload, [Domain.read(*pair, workload) for pair in names])

    def score(parameters: np.ndarray) -> Scores:
        return Scores.mean(evaluator.score(parameters))

    together = score(federated(workload, folder, start, tmp_path))
    steps = ROUNDS * workload.inner.steps
    alone = [
        score(baseline.local_only(workload, folder / f"node{i}.h5", start, steps, f"n{i}"))
        for i in range(NODES)
    ]
    mean = Scores.mean(alone)
    assert together.state5 <= 0.8 * mean.state5
    assert together.latent <= 0.8 * mean.latent
    assert together.state5 < min(one.state5 for one in alone)
    assert together.state5 <= 0.5 * score(start).state5


def test_the_shipped_workload_names_every_key() -> None:
    tree = tomllib.loads(ARM.read_text())
    whole = read_workload(ARM).model_dump()
    assert tree.keys() == whole.keys()
    for section, value in whole.items():
        if isinstance(value, dict):
            assert tree[section].keys() == value.keys()
