import contextlib
import json
import os
import re
from fractions import Fraction
from pathlib import Path

import av
import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lensemble.errors import DatasetError
from lensemble.workload import Normalize
from lensemble_node.worker.training.containers import stored
from lensemble_node.worker.training.containers.blocks import Blocks
from lensemble_node.worker.training.dataset import DataSource, open_dataset
from tests.node import recordings
from tests.node.recordings import WRITERS, Recording

LENGTHS = (7, 4, 9)
SAME_COLUMNS = ("robomimic", "flat", "zarr2", "zarr3")
"""Layouts that store nothing but state and action, under the same keys."""


def root(path: Path, **source: object) -> str:
    with open_dataset(DataSource(path, **source)) as data:
        return data.commitment().root


def refused(path: Path, **source: object) -> str:
    """What is said of the data at ``path``, on opening or on committing to them."""
    with pytest.raises(DatasetError) as caught, open_dataset(DataSource(path, **source)) as data:
        data.commitment()
    return str(caught.value)


# ---- what is read ----


@pytest.mark.parametrize("layout", WRITERS)
@pytest.mark.parametrize("resident_bytes", [0, 1 << 20])
def test_every_layout_gives_the_same_transitions(
    tmp_path: Path, layout: str, resident_bytes: int
) -> None:
    made = recordings.recordings(LENGTHS)
    path = WRITERS[layout](tmp_path / "d", made)
    with open_dataset(DataSource(path), resident_bytes) as data:
        assert data.resident is bool(resident_bytes)
        assert data.lengths == [rows - 1 for rows in LENGTHS]
        assert (data.observation_dim, data.action_dim) == (4, 3)
        for index, each in enumerate(made):
            found = data.episode(index)
            assert np.array_equal(found.observations, each.state)
            assert np.array_equal(found.actions, each.action[:-1])
        windows = data.windows(3)
        observations, actions = windows.gather(np.arange(windows.count))
        assert np.array_equal(observations[-1], made[2].state[-4:])
        assert np.array_equal(actions[0], made[0].action[:3])


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(2, 12), min_size=1, max_size=5),
    dims=st.tuples(st.integers(1, 5), st.integers(1, 4)),
    seed=st.integers(0, 1 << 30),
)
def test_random_episodes_survive_every_layout_under_one_root(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    dims: tuple[int, int],
    seed: int,
) -> None:
    made = recordings.recordings(lengths, seed, dims)
    folder = tmp_path_factory.mktemp("drawn")
    roots = {}
    for layout, write in WRITERS.items():
        path = write(folder / layout, made)
        with open_dataset(DataSource(path), 0 if seed % 2 else 1 << 20) as data:
            roots[layout] = data.commitment().root
            for index, each in enumerate(made):
                found = data.episode(index)
                assert np.array_equal(found.observations, each.state)
                assert np.array_equal(found.actions, each.action[:-1])
    assert len({roots[layout] for layout in SAME_COLUMNS}) == 1, roots
    assert roots["lerobot2"] == roots["lerobot3"]
    assert roots["minari"] != roots["flat"]


def test_the_root_survives_compression_and_chunking(tmp_path: Path) -> None:
    made = recordings.recordings(LENGTHS)
    plain = root(recordings.flat(tmp_path / "plain.h5", made))
    packed = recordings.flat(tmp_path / "p.h5", made, compression="gzip", shuffle=True, chunks=True)
    assert root(packed) == plain
    assert root(recordings.zarr_group(tmp_path / "z", made, chunk=3)) == plain
    assert root(recordings.lerobot3(tmp_path / "a", made, per_file=1, group=2)) == root(
        recordings.lerobot3(tmp_path / "b", made, per_file=3, group=100)
    )


def test_the_order_of_episodes_does_not_change_the_root(tmp_path: Path) -> None:
    made = recordings.recordings(LENGTHS)
    assert root(recordings.flat(tmp_path / "a.h5", made)) == root(
        recordings.flat(tmp_path / "b.h5", made[::-1])
    )


@pytest.mark.parametrize("write", [recordings.lerobot2, recordings.lerobot3])
def test_video_comes_out_frame_by_frame(tmp_path: Path, write: recordings.Writer) -> None:
    made = recordings.recordings(LENGTHS)
    path = write(tmp_path / "d", made, video=True)
    with open_dataset(DataSource(path, image_keys=("images.top",))) as data:
        assert data.image_shape == (32, 32, 3)
        assert data.observation_keys == ("observation.state",)
        for index, each in enumerate(made):
            shown = recordings.frames(each).astype(int)
            found = data.images(index, 0, each.rows)
            assert found.dtype == np.uint8
            assert np.abs(found.astype(int) - shown).max() <= 3
            assert np.abs(data.images(index, 2, 4).astype(int) - shown[2:4]).max() <= 3
        windows = data.windows(2)
        pictures = windows.images(np.array([windows.count - 1, 0]))
        assert pictures.shape == (2, 3, 32, 32, 3)
        assert np.abs(pictures[0].astype(int) - recordings.frames(made[2])[-3:]).max() <= 3
        data.commitment()


def test_the_last_picture_is_the_one_that_follows(tmp_path: Path) -> None:
    made = recordings.recordings(LENGTHS)
    path = recordings.robomimic(tmp_path / "d.h5", made)
    with h5py.File(path, "r+") as file:
        for index, each in enumerate(made):
            shown = recordings.frames(each)
            file[f"data/demo_{index}/obs/camera"] = shown
            file[f"data/demo_{index}/next_obs/state"] = each.state
            file[f"data/demo_{index}/next_obs/camera"] = shown + 1
    with open_dataset(DataSource(path, image_keys=("camera",))) as data:
        assert data.lengths == list(LENGTHS)
        shown = recordings.frames(made[1])
        assert np.array_equal(data.images(1, 0, 5), np.concatenate([shown, shown[-1:] + 1]))
    with h5py.File(path, "r+") as file:
        del file["data/demo_0/next_obs/camera"]
    with open_dataset(DataSource(path, image_keys=("camera",))) as data:
        assert data.lengths == [LENGTHS[0] - 1, *LENGTHS[1:]]


def test_pictures_alone_are_a_data_set(tmp_path: Path) -> None:
    made = recordings.recordings(LENGTHS)
    path = recordings.flat(tmp_path / "d.h5", made)
    with h5py.File(path, "r+") as file:
        del file["state"]
        file["pixels"] = np.concatenate([recordings.frames(each) for each in made])
    with open_dataset(DataSource(path)) as data:
        assert (data.observation_dim, data.image_shape) == (0, (32, 32, 3))
        windows = data.windows(3)
        numbers = np.array([0, windows.count - 1])
        assert windows.gather(numbers)[0].shape == (2, 4, 0)
        assert np.array_equal(windows.images(numbers)[1], recordings.frames(made[2])[-4:])


def test_channels_first_and_whole_floats_are_pictures_too(tmp_path: Path) -> None:
    made = recordings.recordings(LENGTHS)
    path = recordings.flat(tmp_path / "d.h5", made)
    shown = np.concatenate([recordings.frames(each) for each in made])
    with h5py.File(path, "r+") as file:
        file["first"] = np.moveaxis(shown, -1, 1)
        file["floats"] = shown[..., :1].astype(np.float32)
        file["halves"] = shown[..., :1].astype(np.float32) + 0.5
    keys = ("first", "floats")
    with open_dataset(DataSource(path, image_keys=keys)) as data:
        assert data.image_shape == (32, 32, 4)
        assert np.array_equal(data.images(0, 0, 7)[..., :3], recordings.frames(made[0]))
    with (
        open_dataset(DataSource(path, image_keys=("halves",))) as data,
        pytest.raises(DatasetError, match=r"'observation\.halves'.*whole numbers"),
    ):
        data.images(1, 0, 2)


def test_png_in_parquet_is_decoded(tmp_path: Path) -> None:
    made = recordings.recordings((3, 2))
    path = recordings.lerobot2(tmp_path / "d", made)
    info = json.loads((path / "meta/info.json").read_text())
    info["features"]["observation.image"] = {
        "dtype": "image", "shape": [3, 32, 32], "names": ["channels", "height", "width"],
    }  # fmt: skip
    (path / "meta/info.json").write_text(json.dumps(info))
    for at, each in enumerate(made):
        file = path / f"data/chunk-000/episode_{at:06d}.parquet"
        rows = [{"bytes": _png(picture), "path": None} for picture in recordings.frames(each)]
        pq.write_table(pq.read_table(file).append_column("observation.image", [rows]), file)
    with open_dataset(DataSource(path, image_keys=("image",))) as data:
        assert np.array_equal(data.images(0, 0, 3), recordings.frames(made[0]))
        before = data.commitment().root
    file = path / "data/chunk-000/episode_000001.parquet"
    table = pq.read_table(file).drop_columns(["observation.image"])
    rows = [{"bytes": _png(picture + 1), "path": None} for picture in recordings.frames(made[1])]
    pq.write_table(table.append_column("observation.image", [rows]), file)
    assert root(path) != before


def _png(picture: np.ndarray) -> bytes:
    encoder = av.CodecContext.create("png", "w")
    encoder.width, encoder.height = picture.shape[1], picture.shape[0]
    encoder.pix_fmt = "rgb24"
    encoder.time_base = Fraction(1)
    frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
    return b"".join(bytes(packet) for packet in (*encoder.encode(frame), *encoder.encode(None)))


def test_pictures_encoded_in_hdf5_are_committed_to_and_not_decoded(tmp_path: Path) -> None:
    made = recordings.recordings(LENGTHS)
    path = recordings.minari(tmp_path / "d.h5", made)
    with h5py.File(path, "r+") as file:
        for index, each in enumerate(made):
            item = file.create_dataset(
                f"episode_{index}/observations/camera", (each.rows,), h5py.vlen_dtype(np.uint8)
            )
            for row in range(each.rows):
                item[row] = np.frombuffer(_png(recordings.frames(each)[row]), dtype=np.uint8)
    before = root(path)
    with h5py.File(path, "r+") as file:
        file["episode_1/observations/camera"][2] = np.arange(5, dtype=np.uint8)
    assert root(path) != before
    assert "float vectors are needed" not in refused(path, image_keys=("camera",))
    assert "pictures are needed" in refused(path, image_keys=("camera",))


def test_the_task_of_an_episode_is_committed_to_as_text(tmp_path: Path) -> None:
    made = recordings.recordings(LENGTHS)
    before = root(recordings.lerobot2(tmp_path / "a", made))
    path = recordings.lerobot2(tmp_path / "b", made)
    tasks = path / "meta/tasks.jsonl"
    tasks.write_text(tasks.read_text().replace("cube", "ball"))
    assert root(path) != before


def test_a_directory_of_files_is_one_data_set(tmp_path: Path) -> None:
    made = recordings.recordings(LENGTHS)
    (tmp_path / "many").mkdir()
    recordings.robomimic(tmp_path / "many/a.hdf5", made[:2])
    recordings.robomimic(tmp_path / "many/b.h5", made[2:])
    whole = root(recordings.robomimic(tmp_path / "one.h5", made))
    assert root(tmp_path / "many") == whole
    recordings.minari(tmp_path / "many/c.h5", made)
    assert "c.h5 has the layout minari" in refused(tmp_path / "many")
    (tmp_path / "none").mkdir()
    assert "holds 0 HDF5 files" in refused(tmp_path / "none")


def test_a_format_may_be_forced_and_is_then_held_to(tmp_path: Path) -> None:
    path = recordings.flat(tmp_path / "d.h5", recordings.recordings(LENGTHS))
    assert root(path, format="flat") == root(path)
    assert "has the layout flat, not minari" in refused(path, format="minari")
    assert "no data set in the layout lerobot" in refused(path, format="lerobot")
    assert "'hdf6' is no format" in refused(path, format="hdf6")


def test_action_columns_may_be_chosen(tmp_path: Path) -> None:
    made = recordings.recordings(LENGTHS)
    path = tmp_path / "d.h5"
    with h5py.File(path, "w") as file:
        for index, each in enumerate(made):
            file[f"episode_{index}/observations/state"] = each.state
            file[f"episode_{index}/actions/arm"] = each.action[:-1, :2]
            file[f"episode_{index}/actions/grip"] = each.action[:-1, 2]
    with open_dataset(DataSource(path)) as data:
        assert data.selection.actions == ("action.arm", "action.grip")
        assert np.array_equal(data.episode(1).actions, made[1].action[:-1])
    with open_dataset(DataSource(path, action_keys=("grip",))) as data:
        assert data.action_dim == 1


# ---- embodiments ----


def labelled(path: Path, made: list[Recording]) -> Path:
    recordings.robomimic(path, made)
    with h5py.File(path, "r+") as file:
        for index, label in enumerate(("Franka Panda", "ur5", "ur5")):
            file[f"data/demo_{index}"].attrs["embodiment"] = label
    return path


def test_episodes_of_one_embodiment_are_chosen(tmp_path: Path) -> None:
    made = recordings.recordings(LENGTHS)
    path = labelled(tmp_path / "d.h5", made)
    with open_dataset(DataSource(path, embodiment="ur5")) as data:
        assert data.embodiment == "ur5"
        assert data.lengths == [3, 8]
        assert np.array_equal(data.episode(1).observations, made[2].state)
        assert "demo_2 (index 2)" in data.container.named(1)
    said = refused(path)
    assert "several embodiments, 'franka-panda', 'ur5'" in said
    assert "no episode of the embodiment 'spot'" in refused(path, embodiment="spot")


def test_an_embodiment_beside_the_columns_is_committed_to(tmp_path: Path) -> None:
    made = recordings.recordings(LENGTHS)
    plain = root(recordings.robomimic(tmp_path / "a.h5", made))
    path = recordings.robomimic(tmp_path / "b.h5", made)
    with h5py.File(path, "r+") as file:
        file.attrs["embodiment"] = "ur5"
    assert root(path) == root(path, embodiment="ur5") != plain
    with open_dataset(DataSource(path)) as data:
        assert data.embodiment == "ur5"


def test_the_robot_type_of_lerobot_is_the_embodiment(tmp_path: Path) -> None:
    path = recordings.lerobot3(tmp_path / "d", recordings.recordings(LENGTHS))
    with open_dataset(DataSource(path)) as data:
        assert data.embodiment == "so100_follower"
    assert "holds 'so100_follower'" in refused(path, embodiment="aloha")


def test_a_text_column_names_embodiments_in_flat_files(tmp_path: Path) -> None:
    path = recordings.flat(tmp_path / "d.h5", recordings.recordings(LENGTHS))
    with h5py.File(path, "r+") as file:
        file["embodiment"] = ["a"] * 7 + ["b"] * 13
    with open_dataset(DataSource(path, embodiment="b")) as data:
        assert data.lengths == [3, 8]


# ---- normalisation ----


def test_all_states_are_shifted_and_scaled_as_the_workload_says(tmp_path: Path) -> None:
    made = recordings.recordings(LENGTHS)
    path = recordings.flat(tmp_path / "d.h5", made)
    offset, scale = (1.0, -2.0, 0.0, 0.5), (2.0, 4.0, 1.0, 0.1)
    for resident_bytes in (0, 1 << 20):
        with open_dataset(DataSource(path), resident_bytes) as data:
            before = data.commitment().root
            data.normalize(Normalize(kind="stats", offset=offset, scale=scale))
            wanted = (made[0].state - np.array(offset)) / np.array(scale)
            assert np.allclose(data.episode(0).observations, wanted, rtol=1e-6, atol=1e-6)
            observations, actions = data.windows(2).gather(np.array([0]))
            assert np.allclose(observations[0], wanted[:3], rtol=1e-6, atol=1e-6)
            assert np.array_equal(actions[0], made[0].action[:2])
            assert data.commitment().root == before
            with pytest.raises(DatasetError, match="normalises 3"):
                data.normalize(Normalize(kind="stats", offset=(0.0,) * 3, scale=(1.0,) * 3))


# ---- what is refused ----


@pytest.mark.parametrize("layout", ["flat", "zarr2", "zarr3", "lerobot2", "lerobot3", "d4rl"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_named(tmp_path: Path, layout: str, bad: float) -> None:
    made = recordings.recordings(LENGTHS)
    made[1].state[2, 1] = bad
    said = refused(WRITERS[layout](tmp_path / "d", made))
    assert "episode 1 (index 1) column 'observation" in said
    assert f"row 2 is {'NaN' if np.isnan(bad) else 'infinite'} at component 1" in said


@pytest.mark.parametrize("missing", [[1], [0], [1, 2]])
def test_missing_episodes_are_all_named(tmp_path: Path, missing: list[int]) -> None:
    path = recordings.robomimic(tmp_path / "d.h5", recordings.recordings((3, 3, 3, 3)))
    with h5py.File(path, "r+") as file:
        for index in missing:
            del file[f"data/demo_{index}"]
    said = refused(path)
    assert all(f"data/demo_{index}" in said for index in missing)
    assert "missing" in said


def test_a_missing_episode_of_lerobot_is_named(tmp_path: Path) -> None:
    made = recordings.recordings(LENGTHS)
    path = recordings.lerobot2(tmp_path / "a", made)
    (path / "data/chunk-000/episode_000001.parquet").unlink()
    assert "episode 1 (index 1): data/chunk-000/episode_000001.parquet is missing" in refused(path)
    path = recordings.lerobot2(tmp_path / "b", made)
    lines = (path / "meta/episodes.jsonl").read_text().splitlines()
    (path / "meta/episodes.jsonl").write_text("\n".join([lines[0], lines[2]]))
    assert "episode 1 is missing in meta/episodes" in refused(path)
    (path / "meta/episodes.jsonl").write_text("\n".join([lines[0], lines[0], lines[1]]))
    assert "episode 0 is there twice" in refused(path)
    (path / "meta/episodes.jsonl").write_text("\n".join(lines[:2]))
    assert "episode 2 is missing in meta/episodes" in refused(path)
    path = recordings.lerobot3(tmp_path / "c", made, video=True)
    (path / "videos/observation.images.top/chunk-000/file-001.mp4").unlink()
    assert "episode 2 (index 2): videos/observation.images.top" in refused(path)


def rewritten(path: Path, change: dict[str, pa.Array]) -> None:
    table = pq.read_table(path)
    for name, values in change.items():
        at = table.schema.get_field_index(name)
        table = table.set_column(at, name, values)
    pq.write_table(table, path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"frame_index": pa.array([0, 1, 1, 3])}, "column 'frame_index' row 2 is 1, expected 2"),
        ({"frame_index": pa.array([0, 2, 1, 3])}, "column 'frame_index' row 1 is 2, expected 1"),
        ({"episode_index": pa.array([1, 1, 2, 1])}, "column 'episode_index' row 2 is 2"),
        ({"action": pa.array([[1.0] * 3] * 4)}, "rows are float64, float32 is declared"),
        (
            {"action": pa.array([[1.0] * n for n in (3, 2, 3, 3)], pa.list_(pa.float32()))},
            "row 1 has 2 values, 3 are declared",
        ),
        ({"action": pa.array([[1.0] * 3, None] * 2, pa.list_(pa.float32()))}, "row 1 is missing"),
        (
            {"action": pa.array([[1.0, None, 1.0]] * 4, pa.list_(pa.float32()))},
            "row 0 is missing a value",
        ),
        ({"action": pa.array([1.0] * 4, pa.float32())}, "(3,) is declared"),
        ({"task_index": pa.array([9] * 4)}, "column 'task'"),
    ],
)  # fmt: skip
def test_what_lerobot_declares_is_held_to(
    tmp_path: Path, change: dict[str, pa.Array], said: str
) -> None:
    path = recordings.lerobot2(tmp_path / "d", recordings.recordings(LENGTHS))
    rewritten(path / "data/chunk-000/episode_000001.parquet", change)
    found = refused(path)
    assert said in found
    assert "episode_000001.parquet: episode 1 (index 1)" in found


def test_a_length_that_lerobot_does_not_keep_is_named(tmp_path: Path) -> None:
    path = recordings.lerobot2(tmp_path / "d", recordings.recordings(LENGTHS))
    file = path / "data/chunk-000/episode_000002.parquet"
    pq.write_table(pq.read_table(file).slice(0, 5), file)
    assert "has 5 rows, meta/episodes says 9" in refused(path)


def test_versions_of_lerobot_that_are_not_known_are_refused(tmp_path: Path) -> None:
    path = recordings.lerobot2(tmp_path / "d", recordings.recordings(LENGTHS))
    info = path / "meta/info.json"
    info.write_text(info.read_text().replace("v2.1", "v1.6"))
    assert "is of version v1.6" in refused(path)
    info.write_text("{")
    assert "damaged" in refused(path)


@pytest.mark.parametrize("write", [recordings.lerobot2, recordings.lerobot3])
def test_video_with_fewer_frames_than_rows_is_named(
    tmp_path: Path, write: recordings.Writer
) -> None:
    made = recordings.recordings(LENGTHS)
    path = write(tmp_path / "d", made, video=True)
    short = write(
        tmp_path / "short",
        [*made[:2], Recording(made[2].state[:6], made[2].action[:6])],
        video=True,
    )
    file = max(path.rglob("*.mp4"))
    file.write_bytes((short / file.relative_to(path)).read_bytes())
    said = refused(path)
    assert "(index 2) column 'observation.images.top'" in said
    assert "has 6 frames of it, 9 rows are there" in said


@pytest.mark.parametrize("layout", WRITERS)
def test_a_file_cut_short_is_refused(tmp_path: Path, layout: str) -> None:
    path = WRITERS[layout](tmp_path / "d", recordings.recordings(LENGTHS))
    files = [path] if path.is_file() else sorted(f for f in path.rglob("*") if f.is_file())
    for file in files:
        raw = file.read_bytes()
        for keep in (len(raw) // 2, len(raw) - 1):
            file.write_bytes(raw[:keep])
            if not _whole_lines(file):
                assert str(path) in refused(path), (file, keep)
        file.write_bytes(raw)
    root(path)


def _whole_lines(file: Path) -> bool:
    """Whether all that was cut off is the end of the last line, or a file of no meaning."""
    if file.suffix == ".jsonl":
        return file.read_text().endswith("}")
    return file.name == ".zattrs" or (
        file.parent.name == "meta" and file.name in (".zgroup", "zarr.json")
    )


def test_a_chunk_that_blosc_would_read_beyond_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "d"
    blosc = zarr.codecs.BloscCodec()
    recordings.zarr_group(path, recordings.recordings(LENGTHS), version=3, compressors=blosc)
    file = path / "data/state/c/1/0"
    file.write_bytes(file.read_bytes()[:-1])
    assert re.search(r"data/state/c/1/0 has \d+ bytes of \d+", refused(path))


def test_a_truncated_video_is_refused(tmp_path: Path) -> None:
    path = recordings.lerobot3(tmp_path / "d", recordings.recordings(LENGTHS), video=True)
    file = next(path.rglob("*.mp4"))
    file.write_bytes(file.read_bytes()[:300])
    assert "(index 0) column 'observation.images.top' cannot be read" in refused(path)


def test_actions_of_another_width_in_one_episode_are_named(tmp_path: Path) -> None:
    path = recordings.robomimic(tmp_path / "d.h5", recordings.recordings(LENGTHS))
    with h5py.File(path, "r+") as file:
        rows = file["data/demo_2/actions"][()]
        del file["data/demo_2/actions"]
        file["data/demo_2/actions"] = np.concatenate([rows, rows], axis=1)
    assert "demo_2 (index 2) column 'action' has 9 rows of 6; expected 9 rows of 3" in refused(path)


def test_a_zarr_group_of_another_layout_is_refused(tmp_path: Path) -> None:
    zarr.open_group(str(tmp_path / "z"), mode="w").create_array("x", data=np.zeros(3))
    assert "lacks data/ or meta/episode_ends" in refused(tmp_path / "z")
    path = recordings.zarr_group(tmp_path / "d", recordings.recordings(LENGTHS))
    zarr.open_group(str(path), mode="r+")["meta/episode_ends"][:] = np.array([7, 11, 40])
    assert "episode 2 is rows 11 to 40" in refused(path)


def _with_video(write: recordings.Writer, path: Path, made: list[Recording]) -> Path:
    return (
        write(path, made, video=True) if write.__name__.startswith("lerobot") else write(path, made)
    )


@pytest.mark.parametrize("layout", ["d4rl", "zarr2", "zarr3", "lerobot2", "lerobot3"])
def test_damage_anywhere_is_refused_or_harmless(tmp_path: Path, layout: str) -> None:
    path = _with_video(WRITERS[layout], tmp_path / "d", recordings.recordings(LENGTHS))
    files = [path] if path.is_file() else sorted(f for f in path.rglob("*") if f.is_file())
    keys = ("images.top",) if layout.startswith("lerobot") else ()
    draw = np.random.Generator(np.random.Philox(17))
    for _ in range(30):
        file = files[draw.integers(len(files))]
        whole = file.read_bytes()
        raw = bytearray(whole)
        raw[draw.integers(len(raw))] ^= 1 << int(draw.integers(0, 8))
        file.write_bytes(raw)
        with (
            contextlib.suppress(DatasetError),
            open_dataset(DataSource(path, image_keys=keys)) as data,
        ):
            data.commitment()
            for index in range(len(data.lengths) if keys else 0):
                data.images(index, 0, data.lengths[index] + 1)
        file.write_bytes(whole)


def test_a_length_beyond_the_rows_is_named_and_nothing_is_allocated(tmp_path: Path) -> None:
    path = recordings.lerobot3(tmp_path / "d", recordings.recordings(LENGTHS))
    rewritten(
        path / "meta/episodes/chunk-000/file-000.parquet", {"length": pa.array([7, 4, 1 << 53])}
    )
    with open_dataset(DataSource(path), 0) as data:
        data.checked(1)
        with pytest.raises(DatasetError, match=r"episode 2 .*file-001.parquet has 9 rows"):
            data.checked(2)


def test_a_package_that_is_not_installed_is_named_with_its_extra() -> None:
    with pytest.raises(DatasetError, match="needs the package 'no_such_package'") as caught:
        stored.optional("no_such_package.parquet", "lerobot", "d: a LeRobot data set")
    assert "lensemble[lerobot]" in caught.value.remediation


# ---- the note of a root ----


def test_the_note_is_about_every_file(tmp_path: Path) -> None:
    path = recordings.lerobot2(tmp_path / "d", recordings.recordings(LENGTHS))
    with open_dataset(DataSource(path)) as data:
        facts = data.commitment(tmp_path)
    note = tmp_path / "dataset.json"
    note.write_text(note.read_text().replace(facts.root, "0" * 64))
    with open_dataset(DataSource(path)) as data:
        assert data.commitment(tmp_path).root == "0" * 64
        assert data.commitment(tmp_path, full=True).root == facts.root
    note.write_text(note.read_text().replace(facts.root, "0" * 64))
    file = path / "data/chunk-000/episode_000001.parquet"
    os.utime(file, ns=(1, 1))
    with open_dataset(DataSource(path)) as data:
        assert data.commitment(tmp_path).root == facts.root


def test_what_was_decoded_is_kept_within_a_limit() -> None:
    blocks = Blocks(100)
    decoded: list[int] = []

    def block(name: int, size: int = 40) -> np.ndarray:
        def decode() -> np.ndarray:
            decoded.append(name)
            return np.zeros(size, dtype=np.uint8)

        return blocks.get(name, decode)

    for name in (1, 2, 1, 3, 1, 2):
        block(name)
        assert blocks.held_bytes <= 100
    assert decoded == [1, 2, 3, 2]
    block(9, 200)
    assert blocks.held_bytes <= 100
