import math
from pathlib import Path

import numpy as np
import pytest
import torch

from lensemble.workload import Inner, Objective, Privacy, Workload, initial_parameters
from lensemble_node.worker.training.dataset import DataSource, open_dataset
from lensemble_node.worker.training.episode_steps import EpisodeLearner
from lensemble_node.worker.training.inner_loop import LocalState, Segment
from lensemble_node.worker.training.noise import SecretNoise
from lensemble_node.worker.training.objective import directions
from tests.node import worlds

torch.set_num_threads(1)
EPISODES = 6
SKETCH = torch.from_numpy(directions(7, 0, 8, 16))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return worlds.data(tmp_path_factory.mktemp("arm"), episodes=EPISODES)


def learner(folder: Path, **terms: object) -> EpisodeLearner:
    given = {"enabled": True, "unit": "episode"} | terms
    workload = Workload(
        task=worlds.SMALL,
        inner=Inner(steps=6, batch=16),
        objective=Objective(sketch_dim=16),
        privacy=Privacy.model_validate(given),
    )
    data = open_dataset(DataSource(folder / "node0.h5"))
    made = EpisodeLearner(workload, data.windows(2), data.action_dim, "n0")
    made.load(initial_parameters(workload), LocalState())
    made.noise = SecretNoise()
    return made


def whole(made: EpisodeLearner) -> np.ndarray:
    return np.concatenate(made.gradients).astype(np.float64)


def test_episodes_have_the_windows_that_are_theirs(folder: Path) -> None:
    windows = learner(folder).windows
    ranges = [windows.of_episode(index) for index in range(windows.episodes)]
    assert windows.episodes == EPISODES
    assert [n for part in ranges for n in part] == list(range(windows.count))


def test_the_sum_of_a_step_is_bounded_by_the_episodes_that_entered(folder: Path) -> None:
    """With next to no noise: every episode moves it by at most the limit, so all by 6 of them."""
    limit = 1e-3
    made = learner(folder, clip_norm=limit, noise_multiplier=1e-3)
    made.gradient(SKETCH)
    assert np.linalg.norm(whole(made)) <= limit * (1 + 0.1)
    assert np.linalg.norm(whole(made)) > 0.1 * limit


def test_noise_of_a_step_has_its_deviation_in_head_and_shared(folder: Path) -> None:
    made = learner(folder, clip_norm=0.01, noise_multiplier=50.0, sample_rate=0.5)
    draws = []
    for _ in range(40):
        made.gradient(SKETCH)
        draws.append(whole(made))
    noise = np.stack(draws)
    wanted = 50.0 * 0.01 / (0.5 * EPISODES)
    shared = made.gradients[0].size
    for part in (noise[:, :shared], noise[:, shared:]):
        count = part.size
        assert part.std() == pytest.approx(wanted, rel=5 / math.sqrt(2 * count))


def test_without_noise_or_clipping_it_is_the_mean_of_the_episodes(folder: Path) -> None:
    """What enters is each episode's own gradient: a step learns what the plain one learns."""
    made = learner(folder, clip_norm=1e3, noise_multiplier=1e-9)
    losses: list[float] = []
    made.run(Segment(60, 0, 7), lambda _step, value: losses.append(value), lambda: False)
    assert np.mean(losses[-10:]) < 0.8 * np.mean(losses[:10])


def test_a_step_that_nothing_entered_is_noise(folder: Path) -> None:
    made = learner(folder, sample_rate=1e-9, noise_multiplier=1.0, clip_norm=1e-9)
    assert made.gradient(SKETCH) == 0.0
    assert whole(made).std() == pytest.approx(1 / EPISODES, rel=0.1)


def test_what_is_not_finite_counts_as_nothing(folder: Path) -> None:
    made = learner(folder, clip_norm=1.0, noise_multiplier=1e-6)
    made.model.load(np.full_like(initial_parameters(made.workload), np.inf))
    made.gradient(SKETCH)
    assert np.abs(whole(made)).max() < 1e-4
