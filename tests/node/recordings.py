"""Writes the same episodes in every layout that is read, with the formats' own packages.

LeRobot's own package is too heavy to be a dependency of tests: its files are written with pyarrow
and av to the published layout of its versions 2.1 and 3.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zarr

FPS = 10
SIDE = 32


@dataclass(frozen=True)
class Recording:
    """``state`` (rows, d) and ``action`` (rows, a), float32; the last action leads nowhere."""

    state: np.ndarray
    action: np.ndarray

    @property
    def rows(self) -> int:
        return len(self.action)


def recordings(lengths: Sequence[int], seed: int = 5, dims: tuple[int, int] = (4, 3)) -> list:
    draw = np.random.Generator(np.random.Philox(seed))
    return [
        Recording(
            draw.normal(size=(rows, dims[0])).astype(np.float32),
            draw.normal(size=(rows, dims[1])).astype(np.float32),
        )
        for rows in lengths
    ]


def frames(recording: Recording) -> np.ndarray:
    """Grey pictures whose brightness tells their row, uint8 (rows, SIDE, SIDE, 3)."""
    shades = (20 + 7 * np.arange(recording.rows)) % 230
    return np.broadcast_to(
        shades[:, None, None, None].astype(np.uint8), (recording.rows, SIDE, SIDE, 3)
    )


# ---- HDF5 ----


def robomimic(path: Path, made: list[Recording], **storage: Any) -> Path:
    with h5py.File(path, "w") as file:
        for index, each in enumerate(made):
            demo = file.create_group(f"data/demo_{index}")
            demo.create_dataset("actions", data=each.action, **storage)
            demo.create_dataset("obs/state", data=each.state, **storage)
    return path


def minari(path: Path, made: list[Recording], **storage: Any) -> Path:
    """One observation more than actions: the last action is left out."""
    with h5py.File(path, "w") as file:
        for index, each in enumerate(made):
            group = file.create_group(f"episode_{index}")
            group.create_dataset("observations/state", data=each.state, **storage)
            group.create_dataset("actions", data=each.action[:-1], **storage)
    return path


def flat(path: Path, made: list[Recording], **storage: Any) -> Path:
    rows = [each.rows for each in made]
    with h5py.File(path, "w") as file:
        file.create_dataset("state", data=np.concatenate([e.state for e in made]), **storage)
        file.create_dataset("action", data=np.concatenate([e.action for e in made]), **storage)
        file.create_dataset("ep_len", data=np.array(rows))
        file.create_dataset("ep_offset", data=np.concatenate([[0], np.cumsum(rows)[:-1]]))
    return path


def d4rl(path: Path, made: list[Recording], **storage: Any) -> Path:
    ends = np.cumsum([each.rows for each in made]) - 1
    last = np.zeros(int(ends[-1]) + 1, dtype=bool)
    last[ends[::2]] = True
    late = np.zeros_like(last)
    late[ends[1::2]] = True
    with h5py.File(path, "w") as file:
        file.create_dataset("observations", data=np.concatenate([e.state for e in made]), **storage)
        file.create_dataset("actions", data=np.concatenate([e.action for e in made]), **storage)
        file.create_dataset("rewards", data=np.zeros(len(last), dtype=np.float32))
        file.create_dataset("terminals", data=last)
        file.create_dataset("timeouts", data=late)
        file.create_dataset("metadata/policy/bias", data=np.zeros(3))
    return path


# ---- zarr ----


def zarr_group(
    path: Path, made: list[Recording], *, version: int = 2, chunk: int = 5, **storage: Any
) -> Path:
    root = zarr.open_group(str(path), mode="w", zarr_format=version)
    columns = {
        "state": np.concatenate([each.state for each in made]),
        "action": np.concatenate([each.action for each in made]),
    }
    data = root.create_group("data")
    for key, values in columns.items():
        data.create_array(key, data=values, chunks=(chunk, values.shape[1]), **storage)
    ends = np.cumsum([each.rows for each in made]).astype(np.int64)
    root.create_group("meta").create_array("episode_ends", data=ends)
    return path


# ---- LeRobot ----


def _write_video(path: Path, pictures: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=FPS, options={"g": "2", "crf": "10"})
        stream.width = stream.height = SIDE
        stream.pix_fmt = "yuv420p"
        stream.time_base = Fraction(1, FPS)
        for picture in pictures:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def _table(made: list[Recording], first: int, index: int, *, fixed: bool) -> pa.Table:
    """Rows of ``made``, which are episodes ``first`` and after, from row ``index`` on."""
    columns: dict[str, Any] = {}
    for key, name in (("state", "observation.state"), ("action", "action")):
        values = np.concatenate([getattr(each, key) for each in made])
        flat_values = pa.array(values.ravel())
        width = values.shape[1]
        if fixed:
            columns[name] = pa.FixedSizeListArray.from_arrays(flat_values, width)
        else:
            offsets = np.arange(len(values) + 1, dtype=np.int32) * width
            columns[name] = pa.ListArray.from_arrays(pa.array(offsets), flat_values)
    steps = np.concatenate([np.arange(each.rows) for each in made])
    numbers = np.concatenate([np.full(e.rows, first + at) for at, e in enumerate(made)])
    columns["timestamp"] = pa.array((steps / FPS).astype(np.float32))
    columns["frame_index"] = pa.array(steps)
    columns["episode_index"] = pa.array(numbers)
    columns["index"] = pa.array(np.arange(index, index + len(steps)))
    columns["task_index"] = pa.array(numbers % 2)
    return pa.table(columns)


def _info(made: list[Recording], version: str, *, video: bool) -> dict[str, Any]:
    one = {"shape": [1], "names": None}
    features: dict[str, Any] = {
        "observation.state": {
            "dtype": "float32", "shape": [made[0].state.shape[1]], "names": None,
        },
        "action": {"dtype": "float32", "shape": [made[0].action.shape[1]], "names": None},
        "timestamp": {"dtype": "float32", **one},
        **{
            key: {"dtype": "int64", **one}
            for key in ("frame_index", "episode_index", "index", "task_index")
        },
    }  # fmt: skip
    if video:
        features["observation.images.top"] = {
            "dtype": "video", "shape": [SIDE, SIDE, 3], "names": ["height", "width", "channels"],
        }  # fmt: skip
    return {
        "codebase_version": version,
        "robot_type": "so100_follower",
        "total_episodes": len(made),
        "total_frames": sum(each.rows for each in made),
        "chunks_size": 1000,
        "fps": FPS,
        "features": features,
    }


TASKS = ("lift the cube", "open the drawer")


def lerobot2(path: Path, made: list[Recording], *, video: bool = False) -> Path:
    (path / "meta").mkdir(parents=True)
    info = _info(made, "v2.1", video=video)
    info["data_path"] = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
    info["video_path"] = (
        "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
    )
    (path / "meta/info.json").write_text(json.dumps(info))
    tasks = [{"task_index": at, "task": text} for at, text in enumerate(TASKS)]
    _write_lines(path / "meta/tasks.jsonl", tasks)
    entries = [
        {"episode_index": at, "tasks": [TASKS[at % 2]], "length": each.rows}
        for at, each in enumerate(made)
    ]
    _write_lines(path / "meta/episodes.jsonl", entries)
    (path / "data/chunk-000").mkdir(parents=True)
    index = 0
    for at, each in enumerate(made):
        table = _table([each], at, index, fixed=True)
        pq.write_table(table, path / f"data/chunk-000/episode_{at:06d}.parquet")
        index += each.rows
        if video:
            name = f"videos/chunk-000/observation.images.top/episode_{at:06d}.mp4"
            _write_video(path / name, frames(each))
    return path


def _write_lines(path: Path, entries: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def lerobot3(
    path: Path, made: list[Recording], *, video: bool = False, per_file: int = 2, group: int = 6
) -> Path:
    (path / "meta/episodes/chunk-000").mkdir(parents=True)
    (path / "data/chunk-000").mkdir(parents=True)
    info = _info(made, "v3.0", video=video)
    info["data_path"] = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
    info["video_path"] = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
    (path / "meta/info.json").write_text(json.dumps(info))
    tasks = pa.table({"task_index": [0, 1], "__index_level_0__": list(TASKS)})
    pq.write_table(tasks, path / "meta/tasks.parquet")
    rows: list[dict[str, Any]] = []
    index = 0
    for file, first in enumerate(range(0, len(made), per_file)):
        packed = made[first : first + per_file]
        table = _table(packed, first, index, fixed=False)
        pq.write_table(
            table, path / f"data/chunk-000/file-{file:03d}.parquet", row_group_size=group
        )
        since = 0
        for at, each in enumerate(packed):
            row = {
                "episode_index": first + at,
                "tasks": [TASKS[(first + at) % 2]],
                "length": each.rows,
                "data/chunk_index": 0,
                "data/file_index": file,
                "dataset_from_index": index,
                "dataset_to_index": index + each.rows,
                "stats/action/mean": [0.0] * each.action.shape[1],
            }
            if video:
                prefix = "videos/observation.images.top"
                row |= {
                    f"{prefix}/chunk_index": 0,
                    f"{prefix}/file_index": file,
                    f"{prefix}/from_timestamp": since / FPS,
                    f"{prefix}/to_timestamp": (since + each.rows) / FPS,
                }
            rows.append(row)
            index += each.rows
            since += each.rows
        if video:
            name = f"videos/observation.images.top/chunk-000/file-{file:03d}.mp4"
            _write_video(path / name, np.concatenate([frames(each) for each in packed]))
    pq.write_table(pa.Table.from_pylist(rows), path / "meta/episodes/chunk-000/file-000.parquet")
    return path


Writer = Callable[[Path, list[Recording]], Path]


def _zarr3(path: Path, made: list[Recording]) -> Path:
    return zarr_group(path, made, version=3)


WRITERS: dict[str, Writer] = {
    "robomimic": robomimic,
    "minari": minari,
    "flat": flat,
    "d4rl": d4rl,
    "zarr2": zarr_group,
    "zarr3": _zarr3,
    "lerobot2": lerobot2,
    "lerobot3": lerobot3,
}
