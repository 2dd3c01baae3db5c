"""A round of training on every layout, by the trainer that a worker runs."""

from pathlib import Path

import numpy as np
import pytest

from lensemble import seeds
from lensemble.workload import Inner, Normalize, Workload, WorldModelTask, initial_parameters
from lensemble_node.worker.training.local_round import Trainer
from lensemble_node.worker.training.source import DataSource
from tests.node import recordings
from tests.node.recordings import WRITERS

TASK = WorldModelTask(observation_dim=4, hidden=8, latent_dim=4, history=2, head_hidden=4)
WORKLOAD = Workload(task=TASK, inner=Inner(steps=3, batch=8))


def released(path: Path, state: Path, workload: Workload = WORKLOAD) -> np.ndarray:
    state.mkdir()
    made = Trainer(workload, DataSource(path), state, "n0", 1).train(
        initial_parameters(workload),
        round_index=0,
        attempt=0,
        sketch_seed=seeds.sketch(workload.root_seed, 0),
        global_step=0,
        progress=lambda *_: None,
        should_stop=lambda: False,
    )
    return np.array(made.vector)


def test_the_layout_of_the_same_data_does_not_change_what_is_learned(tmp_path: Path) -> None:
    made = recordings.recordings((7, 4, 9))
    found = {
        layout: released(write(tmp_path / layout, made), tmp_path / f"{layout}-state")
        for layout, write in WRITERS.items()
    }
    for layout, vector in found.items():
        assert np.array_equal(vector, found["robomimic"]), layout


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_normalising_is_training_on_data_that_were_scaled(tmp_path: Path, scale: float) -> None:
    made = recordings.recordings((7, 4, 9))
    scaled = [recordings.Recording(each.state / np.float32(scale), each.action) for each in made]
    terms = Normalize(kind="stats", offset=(0.0,) * 4, scale=(scale,) * 4)
    by_terms = released(
        recordings.flat(tmp_path / "a.h5", made),
        tmp_path / "a",
        WORKLOAD.model_copy(update={"normalize": terms}),
    )
    by_hand = released(recordings.flat(tmp_path / "b.h5", scaled), tmp_path / "b")
    assert np.array_equal(by_terms, by_hand)
    plain = released(recordings.flat(tmp_path / "c.h5", made), tmp_path / "c")
    assert np.array_equal(plain, by_hand) is (scale == 1.0)
