"""Where the episodes of a LeRobot data set are, from its ``meta`` directory.

Versions 2.0 and 2.1 have a parquet file and a video file for each episode; version 3 packs many
into one file and says in ``meta/episodes`` which rows and which seconds are whose.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lensemble.errors import DatasetError
from lensemble_node.worker.training.containers import stored
from lensemble_node.worker.training.containers.parquet import Parquet

INFO = Path("meta/info.json")
MAX_LINE = 1 << 22
_CHUNK = 1000
_DATA2 = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
_VIDEO2 = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
_DATA3 = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
_VIDEO3 = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"

Whole = NDArray[np.int64]


@dataclass(frozen=True)
class Clip:
    """Where the frames of one episode are: a file, and seconds in it."""

    path: Path
    start_s: float


@dataclass(frozen=True)
class Index:
    """Lengths and places of all episodes.

    ``places``: for ``data`` and each video key, chunk and file numbers (episodes, 2).  ``firsts``:
    the row of its file that an episode begins with.  ``starts_s``: seconds, by video key.
    """

    root: Path
    info: dict[str, Any]
    lengths: Whole
    places: dict[str, Whole]
    firsts: Whole
    starts_s: dict[str, NDArray[np.float64]]
    tasks: dict[int, str]

    @property
    def packed(self) -> bool:
        return bool(self.places)

    @property
    def interval_s(self) -> float:
        return 1.0 / float(self.info["fps"])

    def data_path(self, episode: int) -> Path:
        return self._path("data_path", _DATA3 if self.packed else _DATA2, "data", episode)

    def clip(self, key: str, episode: int) -> Clip:
        path = self._path("video_path", _VIDEO3 if self.packed else _VIDEO2, key, episode)
        return Clip(path, float(self.starts_s[key][episode]) if self.packed else 0.0)

    def _path(self, name: str, default: str, key: str, episode: int) -> Path:
        template = str(self.info.get(name) or default)
        numbers = self.places[key][episode] if self.packed else (0, 0)
        return self.root / template.format(
            episode_chunk=episode // int(self.info.get("chunks_size") or _CHUNK),
            episode_index=episode,
            chunk_index=int(numbers[0]),
            file_index=int(numbers[1]),
            video_key=key,
        )


def read_index(root: Path, parquet: Parquet) -> Index:
    """The index of the data set in directory ``root``.

    Raises:
        DatasetError: a version that is not known, an episode left out, or files that are damaged.
    """
    try:
        info = json.loads((root / INFO).read_bytes())
        version = str(info["codebase_version"])
        videos = [k for k, about in info["features"].items() if about["dtype"] == "video"]
        if float(info["fps"]) <= 0:
            raise ValueError(f"fps is {info['fps']}")
        if version in ("v2.0", "v2.1"):
            found = _by_episode(root, info)
        elif version.startswith("v3."):
            found = _packed(root, info, videos, parquet)
        else:
            raise DatasetError(
                f"{root / INFO} is of version {version}; versions 2.0, 2.1 and 3 are read",
                "Convert the data set with lerobot's own tools.",
            )
        _check_files(found, videos)
    except (AttributeError, *stored.DAMAGE) as error:
        raise DatasetError(
            f"{root}: the index in {INFO.parent}/ is damaged: {error!r}", "Copy it again."
        ) from error
    return found


def _by_episode(root: Path, info: dict[str, Any]) -> Index:
    entries = list(_lines(root / "meta/episodes.jsonl"))
    order = _in_order(root, [int(entry["episode_index"]) for entry in entries], info)
    lengths = np.array([int(entries[at]["length"]) for at in order], dtype=np.int64)
    tasks = {int(e["task_index"]): str(e["task"]) for e in _lines(root / "meta/tasks.jsonl")}
    return Index(root, info, lengths, {}, np.zeros_like(lengths), {}, tasks)


def _packed(root: Path, info: dict[str, Any], videos: list[str], parquet: Parquet) -> Index:
    columns: dict[str, list[Any]] = {}
    wanted = ("episode_index", "length", "dataset_from_index", "data/", "videos/")
    for path in sorted((root / "meta/episodes").glob("*/*.parquet")):
        for name, values in parquet.table(path, wanted).items():
            columns.setdefault(name, []).extend(values)
    order = _in_order(root, [int(value) for value in columns.get("episode_index", ())], info)

    def taken(name: str, dtype: type[np.generic]) -> NDArray[Any]:
        return np.array(columns[name], dtype=dtype)[order]

    places = {}
    for key, prefix in (("data", "data"), *((key, f"videos/{key}") for key in videos)):
        numbers = [taken(f"{prefix}/{which}_index", np.int64) for which in ("chunk", "file")]
        places[key] = np.stack(numbers, axis=1)
    starts = {key: taken(f"videos/{key}/from_timestamp", np.float64) for key in videos}
    begins = taken("dataset_from_index", np.int64)
    _, which = np.unique(places["data"], axis=0, return_inverse=True)
    least = np.full(int(which.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(least, which, begins)
    firsts = begins - least[which]
    table = parquet.table(root / "meta/tasks.parquet", ("",))
    names = next((v for k, v in table.items() if k != "task_index" and v and _is_text(v)), [])
    tasks = {int(n): str(text) for n, text in zip(table["task_index"], names, strict=False)}
    return Index(root, info, taken("length", np.int64), places, firsts, starts, tasks)


def _is_text(values: list[Any]) -> bool:
    return isinstance(values[0], str)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        while line := file.readline(MAX_LINE):
            if line.strip():
                yield json.loads(line)


def _in_order(root: Path, numbers: list[int], info: dict[str, Any]) -> Whole:
    """Where in the index each episode is, by its number.

    Raises:
        DatasetError: one is left out, or there twice.
    """
    order = np.argsort(np.array(numbers, dtype=np.int64), kind="stable")
    for expected, at in enumerate(order.tolist()):
        if numbers[at] != expected:
            what = "there twice" if numbers[at] < expected else "missing"
            which = min(numbers[at], expected)
            raise DatasetError(f"{root}: episode {which} is {what} in meta/episodes")
    total = int(info.get("total_episodes") or len(numbers))
    if total > len(numbers):
        raise DatasetError(
            f"{root}: episode {len(numbers)} is missing in meta/episodes; {INFO} says there are "
            f"{total}"
        )
    if not numbers:
        raise DatasetError(f"{root} holds no episode")
    return order


def _check_files(found: Index, videos: list[str]) -> None:
    known: set[Path] = set()
    for episode in range(len(found.lengths)):
        if found.lengths[episode] < 1:
            raise DatasetError(
                f"{found.root}: episode {episode} (index {episode}) has the length "
                f"{found.lengths[episode]}"
            )
        paths = (found.data_path(episode), *(found.clip(key, episode).path for key in videos))
        for path in paths:
            if path not in known and not path.is_file():
                raise DatasetError(
                    f"{found.root}: episode {episode} (index {episode}): "
                    f"{path.relative_to(found.root)} is missing"
                )
        if found.packed:
            known.update(paths)
