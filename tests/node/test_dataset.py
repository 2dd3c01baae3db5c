import contextlib
from pathlib import Path

import h5py
import numpy as np
import pytest

from lensemble.errors import DatasetError
from lensemble_node.worker.training.dataset import CACHE_NAME, DataSource, Layout, open_dataset

LENGTHS = (7, 4, 9)


def episodes() -> list[dict[str, np.ndarray]]:
    draw = np.random.Generator(np.random.Philox(5))
    return [
        {
            "angles": draw.normal(size=(length + 1, 4)).astype(np.float32),
            "speed": draw.normal(size=(length + 1, 2)).astype(np.float32),
            "action": draw.normal(size=(length, 3)).astype(np.float32),
        }
        for length in LENGTHS
    ]


def robomimic(path: Path, **storage: object) -> Path:
    with h5py.File(path, "w") as file:
        for index, episode in enumerate(episodes()):
            demo = file.create_group(f"data/demo_{index}")
            demo.create_dataset("actions", data=episode["action"], **storage)
            demo.create_dataset("rewards", data=np.zeros(len(episode["action"])), **storage)
            for key in ("angles", "speed"):
                demo.create_dataset(f"obs/{key}", data=episode[key][:-1], **storage)
                demo.create_dataset(f"next_obs/{key}", data=episode[key][1:], **storage)
            demo.create_dataset(
                "obs/camera", data=np.zeros((len(episode["action"]), 2, 2, 3), "u1")
            )
    return path


def minari(path: Path) -> Path:
    with h5py.File(path, "w") as file:
        for index, episode in enumerate(episodes()):
            group = file.create_group(f"episode_{index}")
            states = np.concatenate([episode["angles"], episode["speed"]], axis=1)
            group.create_dataset("observations", data=states.astype(np.float64))
            group.create_dataset("actions", data=episode["action"])
            group.create_dataset("infos/note", data=["a"] * len(episode["action"]))
    return path


def flat(path: Path) -> Path:
    rows = [len(e["angles"]) for e in episodes()]
    with h5py.File(path, "w") as file:
        for key in ("angles", "speed"):
            file.create_dataset(key, data=np.concatenate([e[key] for e in episodes()]))
        last = np.full((1, 3), np.nan, dtype=np.float32)
        actions = [np.concatenate([e["action"], last]) for e in episodes()]
        file.create_dataset("action", data=np.concatenate(actions))
        file.create_dataset("reward", data=np.zeros(sum(rows), dtype=np.float32))
        file.create_dataset("ep_len", data=np.array(rows))
        file.create_dataset("ep_offset", data=np.concatenate([[0], np.cumsum(rows)[:-1]]))
    return path


LAYOUTS = {Layout.ROBOMIMIC: robomimic, Layout.MINARI: minari, Layout.FLAT: flat}


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_every_layout_reads_back_the_same_episodes(tmp_path: Path, layout: Layout) -> None:
    with open_dataset(DataSource(LAYOUTS[layout](tmp_path / "d.h5"))) as data:
        assert data.layout is layout
        assert (data.lengths, data.observation_dim, data.action_dim) == (list(LENGTHS), 6, 3)
        for index, episode in enumerate(episodes()):
            found = data.episode(index)
            states = np.concatenate([episode["angles"], episode["speed"]], axis=1)
            assert np.array_equal(found.observations, states)
            assert np.array_equal(found.actions, episode["action"])
            assert found.observations.dtype == found.actions.dtype == np.float32


def test_without_next_observations_the_last_action_leads_nowhere(tmp_path: Path) -> None:
    path = robomimic(tmp_path / "d.h5")
    with h5py.File(path, "r+") as file:
        for index in range(3):
            del file[f"data/demo_{index}/next_obs"]
    with open_dataset(DataSource(path)) as data:
        assert data.lengths == [length - 1 for length in LENGTHS]


def test_episodes_are_in_order_of_their_numbers(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "d.h5", "w") as file:
        for index in range(12):
            file.create_dataset(f"episode_{index}/observations", data=np.full((3, 1), float(index)))
            file.create_dataset(f"episode_{index}/actions", data=np.zeros((2, 1)))
    with open_dataset(DataSource(tmp_path / "d.h5")) as data:
        assert [float(data.episode(i).observations[0, 0]) for i in range(12)] == list(range(12))


def test_named_keys_are_taken_in_the_given_order(tmp_path: Path) -> None:
    path = robomimic(tmp_path / "d.h5")
    with open_dataset(DataSource(path, ("speed",))) as data:
        assert data.observation_dim == 2
        with pytest.raises(DatasetError, match=r"has 2 observation columns.*takes 6"):
            data.expect(6)
    with pytest.raises(DatasetError, match=r"demo_0 \(index 0\) has no column 'observation.force'"):
        open_dataset(DataSource(path, ("force",)))
    with pytest.raises(DatasetError, match="dtype uint8"):
        open_dataset(DataSource(path, ("camera",)))


def test_on_demand_equals_resident(tmp_path: Path) -> None:
    path = robomimic(tmp_path / "d.h5")
    numbers = np.arange(LENGTHS[0] + LENGTHS[1] + LENGTHS[2] - 6, dtype=np.int64)
    with open_dataset(DataSource(path)) as data:
        assert data.resident
        resident = data.windows(3).gather(numbers)
    with open_dataset(DataSource(path), resident_bytes=0) as data:
        assert not data.resident
        demand = data.windows(3).gather(numbers)
    for first, second in zip(resident, demand, strict=True):
        assert np.array_equal(first, second)


def test_windows_stay_within_episodes(tmp_path: Path) -> None:
    with open_dataset(DataSource(robomimic(tmp_path / "d.h5"))) as data:
        windows = data.windows(5)
        assert windows.count == 3 + 0 + 5
        observations, actions = windows.gather(np.array([0, 2, 3, 7]))
        assert observations.shape == (4, 6, 6)
        assert actions.shape == (4, 5, 3)
        third = data.episode(2)
        assert np.array_equal(observations[2], third.observations[:6])
        assert np.array_equal(actions[3], third.actions[4:9])
        with pytest.raises(DatasetError, match="longest episode has 9 transitions"):
            data.windows(10)


# ---- commitment ----


def root(path: Path) -> str:
    with open_dataset(DataSource(path)) as data:
        return data.commitment().root


def test_root_survives_recompression_and_byte_order(tmp_path: Path) -> None:
    plain = root(robomimic(tmp_path / "a.h5"))
    assert root(robomimic(tmp_path / "b.h5", compression="gzip", shuffle=True)) == plain
    assert root(robomimic(tmp_path / "c.h5", chunks=True, fletcher32=True)) == plain
    path = robomimic(tmp_path / "d.h5")
    with h5py.File(path, "r+") as file:
        values = file["data/demo_1/actions"][()]
        del file["data/demo_1/actions"]
        file.create_dataset("data/demo_1/actions", data=values.astype(">f4"))
    assert root(path) == plain


@pytest.mark.parametrize(
    "column", ["actions", "rewards", "obs/angles", "next_obs/speed", "obs/camera"]
)
def test_root_covers_every_stored_value(tmp_path: Path, column: str) -> None:
    plain = root(robomimic(tmp_path / "a.h5"))
    path = robomimic(tmp_path / "b.h5")
    with h5py.File(path, "r+") as file:
        item = file[f"data/demo_2/{column}"]
        item[1] = item[1] + 1
    assert root(path) != plain


def test_facts_count_and_text_columns_are_covered(tmp_path: Path) -> None:
    path = minari(tmp_path / "d.h5")
    with open_dataset(DataSource(path)) as data:
        facts = data.commitment()
    assert (facts.episodes, facts.steps, facts.observation_dim, facts.action_dim) == (3, 20, 6, 3)
    with h5py.File(path, "r+") as file:
        file["episode_0/infos/note"][2] = "b"
    assert root(path) != facts.root


def test_cache_holds_while_the_file_is_the_same(tmp_path: Path) -> None:
    path = robomimic(tmp_path / "d.h5")
    with open_dataset(DataSource(path)) as data:
        facts = data.commitment(tmp_path)
    cache = tmp_path / CACHE_NAME
    text = cache.read_text().replace(facts.root, "0" * 64)
    cache.write_text(text)
    with open_dataset(DataSource(path)) as data:
        assert data.commitment(tmp_path).root == "0" * 64
        assert data.commitment(tmp_path, full=True) == facts
    with h5py.File(path, "r+") as file:
        file["data/demo_0/rewards"][0] = 9.0
    with open_dataset(DataSource(path)) as data:
        assert data.commitment(tmp_path).root not in ("0" * 64, facts.root)
    cache.write_text("{")
    assert root(path) == root(path)
    with open_dataset(DataSource(path)) as data:
        assert data.commitment(tmp_path).root == root(path)


# ---- problems ----


def refused(path: Path) -> str:
    with pytest.raises(DatasetError) as caught:
        open_dataset(DataSource(path))
    return str(caught.value)


def test_a_missing_episode_is_named(tmp_path: Path) -> None:
    path = robomimic(tmp_path / "d.h5")
    with h5py.File(path, "r+") as file:
        del file["data/demo_1"]
    assert "episode data/demo_1 is missing" in refused(path)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_named(tmp_path: Path, bad: float) -> None:
    path = robomimic(tmp_path / "d.h5")
    with h5py.File(path, "r+") as file:
        file["data/demo_1/obs/speed"][2, 1] = bad
    text = "demo_1 (index 1) column 'observation.speed' row 2"
    assert text in refused(path)
    with (
        open_dataset(DataSource(path), resident_bytes=0) as data,
        pytest.raises(DatasetError) as caught,
    ):
        data.commitment()
    assert text in str(caught.value)


def test_ragged_columns_and_wrong_types_are_named(tmp_path: Path) -> None:
    path = robomimic(tmp_path / "a.h5")
    with h5py.File(path, "r+") as file:
        rows = file["data/demo_2/obs/angles"][:-2]
        del file["data/demo_2/obs/angles"]
        file["data/demo_2/obs/angles"] = rows
    assert "demo_2 (index 2) column 'observation.angles' has 7 rows of 4; expected 9" in refused(
        path
    )

    path = robomimic(tmp_path / "b.h5")
    with h5py.File(path, "r+") as file:
        rows = file["data/demo_1/actions"][()].astype(np.int32)
        del file["data/demo_1/actions"]
        file["data/demo_1/actions"] = rows
    assert "demo_1 (index 1) column 'action' has rows of shape (3,) and dtype int32" in refused(
        path
    )

    path = minari(tmp_path / "c.h5")
    with h5py.File(path, "r+") as file:
        rows = file["episode_1/observations"][:, :5]
        del file["episode_1/observations"]
        file["episode_1/observations"] = rows
    assert (
        "episode_1 (index 1) column 'observation' has 5 rows of 5; expected 5 rows of 6"
        in refused(path)
    )


def test_a_flat_index_that_does_not_fit_is_named(tmp_path: Path) -> None:
    path = flat(tmp_path / "d.h5")
    with h5py.File(path, "r+") as file:
        file["ep_len"][2] = 11
    assert "episode 2 is rows 13 to 24, column 'action' has 23 rows" in refused(path)


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_a_file_cut_short_anywhere_is_refused(tmp_path: Path, layout: Layout) -> None:
    whole = LAYOUTS[layout](tmp_path / "whole.h5").read_bytes()
    for keep in (0, 1, 100, len(whole) // 3, len(whole) // 2, len(whole) - 1):
        path = tmp_path / f"cut{keep}.h5"
        path.write_bytes(whole[:keep])
        assert str(path) in refused(path)


def test_what_is_no_dataset_is_refused(tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path / "none.h5")
    (tmp_path / "text.h5").write_text("hello")
    assert "no HDF5 file" in refused(tmp_path / "text.h5")
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"] = np.zeros(3)
    assert "neither data/demo_N" in refused(tmp_path / "other.h5")
    with h5py.File(tmp_path / "empty.h5", "w") as file:
        file.create_group("data")
    assert "holds no episode" in refused(tmp_path / "empty.h5")


def test_a_dataset_closes_its_file(tmp_path: Path) -> None:
    path = robomimic(tmp_path / "d.h5")
    with open_dataset(DataSource(path)):
        pass
    with h5py.File(path, "r+") as file:
        assert "data" in file


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_damage_anywhere_is_refused_or_harmless(tmp_path: Path, layout: Layout) -> None:
    whole = LAYOUTS[layout](tmp_path / "whole.h5").read_bytes()
    draw = np.random.Generator(np.random.Philox(11))
    path = tmp_path / "damaged.h5"
    for trial in range(60):
        raw = bytearray(whole)
        raw[draw.integers(0, 3000 if trial % 2 else len(raw))] ^= 1 << int(draw.integers(0, 8))
        path.write_bytes(raw)
        with contextlib.suppress(DatasetError), open_dataset(DataSource(path)) as data:
            data.commitment()
