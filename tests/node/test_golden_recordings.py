"""Files written by minari, stable-worldmodel and lerobot themselves; see their README."""

from pathlib import Path

import numpy as np
import pytest

from lensemble_node.worker.training.dataset import DataSource, open_dataset

GOLDEN = Path(__file__).parents[1] / "golden" / "recordings"


def generator(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(seed))


def test_minari() -> None:
    draw = generator(9)
    keys = ("state", "goal")
    with open_dataset(DataSource(GOLDEN / "minari", keys, image_keys=("image",))) as data:
        assert data.lengths == [6, 7, 8]
        for index, steps in enumerate(data.lengths):
            found = data.episode(index)
            states = draw.normal(size=(steps + 1, 3)).astype(np.float32)
            assert np.array_equal(found.observations[:, :3], states)
            assert (found.observations[:, 3:] == [0.5, -0.5]).all()
            actions = draw.uniform(-1, 1, (steps, 2)).astype(np.float32)
            assert np.array_equal(found.actions, actions)
            pictures = data.images(index, 0, steps + 1)
            assert pictures.shape == (steps + 1, 16, 16, 3)
            assert (pictures == 40 * index + np.arange(steps + 1)[:, None, None, None]).all()
        assert data.commitment().root == (
            "57884876719a3300b4adf7c4d5d438a91f092a1adf1e769c2ed879bff0317eb9"
        )


def test_stable_worldmodel() -> None:
    draw = generator(4)
    path = GOLDEN / "stable-worldmodel.h5"
    with open_dataset(DataSource(path, image_keys=("pixels",))) as data:
        assert data.lengths == [4, 2, 3]
        assert data.observation_keys == ("observation.proprio",)
        for index, steps in enumerate(data.lengths):
            found = data.episode(index)
            actions = np.stack([draw.normal(size=2) for _ in range(steps)]).astype(np.float32)
            states = np.stack([draw.normal(size=3) for _ in range(steps + 1)]).astype(np.float32)
            assert np.array_equal(found.observations, states)
            assert np.array_equal(found.actions, actions)
            shades = 10 * np.arange(steps + 1) + steps + 1
            assert (data.images(index, 0, steps + 1) == shades[:, None, None, None]).all()


@pytest.mark.parametrize("version", ["2.1", "3.0"])
def test_lerobot(version: str) -> None:
    draw = generator(13)
    path = GOLDEN / f"lerobot-{version}"
    with open_dataset(DataSource(path, image_keys=("images.top",))) as data:
        assert (data.lengths, data.embodiment) == ([4, 5, 6], "so100_follower")
        assert data.image_shape == (64, 64, 3)
        for index, steps in enumerate(data.lengths):
            found = data.episode(index)
            rows = [(draw.normal(size=3), draw.normal(size=2)) for _ in range(steps + 1)]
            states = np.stack([state for state, _ in rows]).astype(np.float32)
            actions = np.stack([action for _, action in rows]).astype(np.float32)
            assert np.array_equal(found.observations, states)
            assert np.array_equal(found.actions, actions[:-1])
            shades = 30 + 40 * index + 5 * np.arange(steps + 1)
            pictures = data.images(index, 0, steps + 1).astype(int)
            assert np.abs(pictures - shades[:, None, None, None]).max() <= 6
        texts = [data.container.read(index, "task", 0, 1)[0] for index in range(3)]
        assert texts == ["lift the cube", "open the drawer", "lift the cube"]
        data.commitment()


def test_both_versions_of_lerobot_hold_the_same_rows() -> None:
    roots = set()
    for version in ("2.1", "3.0"):
        with open_dataset(DataSource(GOLDEN / f"lerobot-{version}")) as data:
            columns = {
                key: [data.container.read(index, key, 0, 5).tolist() for index in range(3)]
                for key in data.container.columns(0)
                if not key.startswith("observation.images")
            }
            roots.add(str(columns))
    assert len(roots) == 1
