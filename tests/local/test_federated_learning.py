import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
import trio

from lensemble import identity
from lensemble.config import commented
from lensemble.state_dir import IDENTITY_NAME
from lensemble.transport.memory_driver import MemoryNetwork
from lensemble.workload import FieldTerms, Workload, initial_parameters
from lensemble_coord.config import CoordinatorConfig, RoundsSection
from lensemble_local import arm, rounds
from lensemble_local.simulate import simulate
from lensemble_node.config import DataSection, NodeConfig
from lensemble_node.worker.training import baseline
from lensemble_node.worker.training.arguments import read_workload
from lensemble_node.worker.training.evaluate import Domain, Evaluator, Scores
from tests.node import worlds

NODES, ROUNDS = 3, 5
ARM = Path(__file__).parents[2] / "configs" / "workloads" / "arm.toml"


def federated(workload: Workload, folder: Path, start: np.ndarray, state: Path) -> np.ndarray:
    """Rounds as the daemons run them, without the daemons."""
    data = {f"n{i}": folder / f"node{i}.h5" for i in range(NODES)}
    made = rounds.Federation(workload, rounds.trainers(workload, data, state), start)
    for _ in range(ROUNDS):
        made.round()
    return made.parameters


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


SMALL_ROUNDS = 2


def _small(tmp_path: Path, nodes: int) -> tuple[Workload, dict[str, Path], np.ndarray]:
    # Words of 16 bits are rounded by chance.
    workload = worlds.small(steps=3).model_copy(update={"field": FieldTerms(bits=32)})
    folder = worlds.data(tmp_path / "data", nodes=nodes)
    data = {f"n{i}": folder / f"node{i}.h5" for i in range(nodes)}
    return workload, data, initial_parameters(workload)


def test_a_federation_in_process_is_deterministic_and_misses_who_is_away(tmp_path: Path) -> None:
    workload, data, start = _small(tmp_path, 2)
    digests = []
    for name, order in (("a", 1), ("b", -1)):
        turned = dict(list(data.items())[::order])
        nodes = rounds.trainers(workload, turned, tmp_path / name)
        made = rounds.Federation(workload, nodes, start)
        for _ in range(SMALL_ROUNDS):
            made.round()
        digests.append(made.digest)
    assert digests[0] == digests[1]
    alone = rounds.Federation(workload, rounds.trainers(workload, data, tmp_path / "c"), start)
    alone.round(absent={1})
    assert len(alone.releases) == 1
    assert not np.array_equal(alone.parameters, start)


@pytest.mark.soak
def test_masked_daemons_have_the_digests_of_the_federation_in_process(tmp_path: Path) -> None:
    workload, _, start = _small(tmp_path, 3)
    places = {name: tmp_path / name for name in ("hub", "node-0", "node-1", "node-2")}
    for place in places.values():
        place.mkdir(mode=0o700)
    ids = {name: identity.load_or_create(at / IDENTITY_NAME).node for name, at in places.items()}
    (tmp_path / "w.toml").write_text(
        commented(Workload, "Small.", workload.model_dump(mode="json"))
    )
    data = {f"node-{i}": tmp_path / "data" / f"node{i}.h5" for i in range(3)}
    hub = CoordinatorConfig(
        state_dir=places["hub"],
        workload=tmp_path / "w.toml",
        rounds=RoundsSection(aggregation="masked", min_participants=3),
    )
    nodes = [
        NodeConfig(name=name, state_dir=places[name], data=DataSection(path=path))
        for name, path in data.items()
    ]
    ended = trio.run(simulate, hub, nodes, SMALL_ROUNDS, MemoryNetwork(seed=0))
    members = {str(ids[name]): path for name, path in data.items()}
    made = rounds.Federation(
        workload, rounds.trainers(workload, members, tmp_path / "in-process"), start
    )
    for _ in range(SMALL_ROUNDS):
        made.round()
    assert ended.completed
    assert ended.digest == made.digest
