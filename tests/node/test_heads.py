from pathlib import Path

import h5py
import numpy as np
import pytest
from safetensors.numpy import load_file

from lensemble.workload import initial_parameters
from lensemble_node.worker.training import heads
from lensemble_node.worker.training.inner_loop import LocalState
from lensemble_node.worker.training.local_round import Trainer
from lensemble_node.worker.training.source import DataSource
from tests.node import worlds

WORKLOAD = worlds.small()
PRIOR = initial_parameters(WORKLOAD)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = worlds.data(tmp_path_factory.mktemp("arm"), nodes=2)
    with h5py.File(place / "node1.h5", "r+") as file:
        for demo in file["data"].values():
            actions = demo["actions"][:]
            del demo["actions"]
            demo["actions"] = np.concatenate([actions, actions[:, :1]], axis=1)
    return place


def trainer(folder: Path, state: Path, node: int, embodiment: str) -> Trainer:
    source = DataSource(folder / f"node{node}.h5", embodiment=embodiment)
    return Trainer(WORKLOAD, source, state, "n0", 1)


def arrays(state: Path, name: str) -> dict[str, np.ndarray]:
    return load_file(state / "local" / f"{name}.safetensors")


def one_round(made: Trainer, index: int, *, adopt: bool = True) -> np.ndarray:
    done = made.train(PRIOR, **worlds.order(WORKLOAD, index))
    words = np.array(done.vector)
    if adopt:
        assert made.adopt(index)
    else:
        made.discard(index)
    return words


def test_a_node_goes_over_to_another_embodiment_and_back(folder: Path, tmp_path: Path) -> None:
    """The other embodiment has another number of actions, so its head could not even be loaded."""
    state = tmp_path / "state"
    one_round(trainer(folder, state, 0, "left"), 0)
    left = arrays(state, "head")
    assert set(left) == {f"left/{part}" for part in _parts()}
    one_round(trainer(folder, state, 1, "right"), 1)
    both = arrays(state, "head")
    assert set(both) == set(left) | {f"right/{part}" for part in _parts()}
    assert all(np.array_equal(both[name], left[name]) for name in left)
    moments = arrays(state, "optimizer")
    assert float(moments["right/head.step"][0]) == WORKLOAD.inner.steps
    one_round(trainer(folder, state, 0, "left"), 2)
    after = arrays(state, "head")
    assert all(np.array_equal(after[name], both[name]) for name in both if "right" in name)
    assert any(not np.array_equal(after[name], left[name]) for name in left)


def test_an_aborted_round_rolls_back_head_and_cursor(folder: Path, tmp_path: Path) -> None:
    files = worlds.tree
    state, straight = tmp_path / "state", tmp_path / "straight"
    one_round(trainer(folder, state, 0, "left"), 0)
    before = files(state / "local")
    one_round(trainer(folder, state, 1, "right"), 1, adopt=False)
    assert files(state / "local") == before
    again = one_round(trainer(folder, state, 0, "left"), 2)
    one_round(trainer(folder, straight, 0, "left"), 0)
    assert np.array_equal(again, one_round(trainer(folder, straight, 0, "left"), 2))


def test_the_arrays_of_one_embodiment_are_not_those_of_another() -> None:
    one = np.ones(1, dtype=np.float32)
    head, optimizer = heads.with_others(
        LocalState({"input.weight": one}, {"shared.exp_avg": one, "head.exp_avg": one}, 3),
        {"input.weight": 2 * one, "b/input.weight": 3 * one},
        {"shared.exp_avg": 4 * one, "head.exp_avg": 5 * one, "b/head.exp_avg": 6 * one},
        "a",
    )
    assert {name: float(each[0]) for name, each in head.items()} == {
        "input.weight": 2,
        "a/input.weight": 1,
        "b/input.weight": 3,
    }
    assert {name: float(each[0]) for name, each in optimizer.items()} == {
        "shared.exp_avg": 1,
        "head.exp_avg": 5,
        "a/head.exp_avg": 1,
        "b/head.exp_avg": 6,
    }
    for label, head_value, moment in (("", 2, 5), ("a", 1, 1), ("b", 3, 6)):
        found = heads.mine(head, optimizer, 7, label)
        assert found.cursor == 7
        assert float(found.head["input.weight"][0]) == head_value
        assert {name: float(each[0]) for name, each in found.optimizer.items()} == {
            "shared.exp_avg": 1,
            "head.exp_avg": moment,
        }
    fresh = heads.mine(head, optimizer, 7, "c")
    assert not fresh.head
    assert set(fresh.optimizer) == {"shared.exp_avg"}


def _parts() -> set[str]:
    return {"input.weight", "input.bias", "output.weight", "output.bias"}
