import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lensemble.errors import CheckpointIntegrityError, ConfigError
from lensemble.workload import Inner, initial_parameters
from lensemble_node.worker.training.dataset import DataSource, open_dataset
from lensemble_node.worker.training.device import choose
from lensemble_node.worker.training.inner_loop import (
    Learner,
    LocalState,
    Segment,
    batch_numbers,
    learning_rate,
)
from lensemble_node.worker.training.stops import Diverged, Stopped
from tests.node import worlds

torch.set_num_threads(1)
WORKLOAD = worlds.small()
SEGMENT = Segment(25, 0, 7)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return worlds.data(tmp_path_factory.mktemp("arm"))


def learner(folder: Path, node: str = "n0") -> Learner:
    data = open_dataset(DataSource(folder / "node0.h5"))
    made = Learner(WORKLOAD, data.windows(2), data.action_dim, node)
    made.load(initial_parameters(WORKLOAD), LocalState())
    return made


def run(made: Learner, segment: Segment = SEGMENT) -> list[float]:
    seen: list[float] = []
    made.run(segment, lambda _step, value: seen.append(value), lambda: False)
    return seen


def test_rate_is_a_cosine_over_the_global_step() -> None:
    inner = Inner(lr=1.0, schedule_steps=100, final_lr_fraction=0.1)
    assert learning_rate(inner, 0) == 1.0
    assert learning_rate(inner, 50) == pytest.approx(0.55)
    assert learning_rate(inner, 100) == learning_rate(inner, 10_000) == pytest.approx(0.1)
    rates = [learning_rate(inner, step) for step in range(101)]
    assert rates == sorted(rates, reverse=True)


@given(st.integers(0, (1 << 63) - 1), st.integers(0, 1 << 40), st.integers(1, 10_000))
def test_batches_are_a_function_of_seed_and_cursor(seed: int, cursor: int, count: int) -> None:
    numbers = batch_numbers(seed, cursor, count, 64)
    assert numbers.min() >= 0
    assert numbers.max() < count
    assert np.array_equal(numbers, batch_numbers(seed, cursor, count, 64))
    if count > 100:
        assert not np.array_equal(numbers, batch_numbers(seed, cursor + 1, count, 64))
        assert not np.array_equal(numbers, batch_numbers(seed + 1, cursor, count, 64))


def test_loss_falls_and_parameters_move(folder: Path) -> None:
    made = learner(folder)
    losses = run(made, Segment(60, 0, 7))
    assert np.mean(losses[-10:]) < 0.8 * np.mean(losses[:10])
    assert made.cursor == 60
    assert float(np.abs(made.weights() - initial_parameters(WORKLOAD)).max()) > 1e-3


def test_same_seeds_give_the_same_bits(folder: Path) -> None:
    first, second = learner(folder), learner(folder)
    assert run(first) == run(second)
    assert np.array_equal(first.weights(), second.weights())
    other = learner(folder, "n1")
    run(other)
    assert not np.array_equal(first.weights(), other.weights())


def test_a_carried_over_state_goes_on_where_it_was(folder: Path) -> None:
    first = learner(folder)
    run(first, Segment(10, 0, 7))
    weights, state = first.weights().copy(), first.local_state()
    second = learner(folder)
    second.load(weights, state)
    assert second.cursor == 10
    assert run(second, Segment(10, 10, 7)) == run(first, Segment(10, 10, 7))
    assert np.array_equal(first.weights(), second.weights())


def test_loading_rolls_everything_back(folder: Path) -> None:
    made = learner(folder)
    first = run(made)
    made.load(initial_parameters(WORKLOAD), LocalState())
    assert run(made) == first


def test_global_step_and_sketch_matter(folder: Path) -> None:
    base, late, other = (learner(folder) for _ in range(3))
    run(base, Segment(5, 0, 7))
    run(late, Segment(5, 300, 7))
    run(other, Segment(5, 0, 8))
    start = initial_parameters(WORKLOAD)
    assert np.abs(late.weights() - start).sum() < 0.5 * np.abs(base.weights() - start).sum()
    assert not np.array_equal(other.weights(), base.weights())


def test_stop_is_asked_between_steps(folder: Path) -> None:
    made = learner(folder)
    seen: list[int] = []
    with pytest.raises(Stopped, match="before step 4 of 25"):
        made.run(SEGMENT, lambda step, _loss: seen.append(step), lambda: len(seen) == 3)
    assert seen == [1, 2, 3]


def test_a_loss_that_is_not_finite_ends_training(folder: Path) -> None:
    made = learner(folder)
    made.load(np.full_like(initial_parameters(WORKLOAD), math.inf), LocalState())
    with pytest.raises(Diverged, match="step 1"):
        run(made)


def test_state_of_another_head_is_refused(folder: Path) -> None:
    made = learner(folder)
    run(made, Segment(1, 0, 7))
    state = made.local_state()
    assert set(state.optimizer) == {
        f"{of}.{what}" for of in ("shared", "head") for what in ("exp_avg", "exp_avg_sq")
    }
    bad = state.head | {"input.weight": np.zeros((3, 3), dtype=np.float32)}
    with pytest.raises(
        CheckpointIntegrityError, match=r"'input.weight'.*\(3, 3\).*\(8, 2\)"
    ) as caught:
        made.load(initial_parameters(WORKLOAD), LocalState(bad, state.optimizer, 1))
    assert "fresh action head" in caught.value.remediation


def test_moments_are_carried_and_not_shared(folder: Path) -> None:
    made = learner(folder)
    run(made, Segment(3, 0, 7))
    state = made.local_state()
    before = state.optimizer["shared.exp_avg"].copy()
    run(made, Segment(3, 3, 7))
    assert np.array_equal(state.optimizer["shared.exp_avg"], before)
    fresh, warm = learner(folder), learner(folder)
    warm.load(initial_parameters(WORKLOAD), LocalState(state.head, state.optimizer, 0))
    run(fresh, Segment(1, 0, 7))
    run(warm, Segment(1, 0, 7))
    assert not np.array_equal(fresh.weights(), warm.weights())


def test_a_device_that_is_not_there_is_refused() -> None:
    assert choose("cpu").type == "cpu"
    assert choose("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"worker.device is .cuda."):
            choose("cuda")


@pytest.mark.gpu
def test_an_accelerator_learns_what_the_processor_learns(folder: Path) -> None:
    data = open_dataset(DataSource(folder / "node0.h5"))
    found = []
    for name in ("cpu", "cuda"):
        made = Learner(WORKLOAD, data.windows(2), data.action_dim, "n0", choose(name))
        made.load(initial_parameters(WORKLOAD), LocalState())
        made.run(SEGMENT, lambda _step, _loss: None, lambda: False)
        assert made.model.flat.device.type == name
        kept = made.local_state()
        made.load(initial_parameters(WORKLOAD), kept)
        assert all(np.array_equal(kept.head[n], v) for n, v in made.head.named().items())
        found.append(made.weights().copy())
        made.load(initial_parameters(WORKLOAD), LocalState())
        made.run(SEGMENT, lambda _step, _loss: None, lambda: False)
        found.append(made.weights().copy())
    assert np.array_equal(found[0], found[1])
    assert np.abs(found[0] - found[2]).max() < 1e-3
