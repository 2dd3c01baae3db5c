"""LeRobot data sets of versions 2.0, 2.1 and 3: parquet rows, pictures as video or one by one.

An episode has as many observations as actions; its last action leads nowhere.  ``robot_type`` is
its embodiment, unless a text column ``embodiment`` says otherwise.  ``task_index`` is read as the
text it stands for.  Rows come a row group at a time, so that memory depends on how the files were
written; pictures stored in parquet need a whole group of them.
"""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lensemble.errors import DatasetError
from lensemble.merkle import Column, text_column
from lensemble_node.worker.training.containers import stored
from lensemble_node.worker.training.containers.lerobot_index import INFO, Index, read_index
from lensemble_node.worker.training.containers.parquet import Parquet
from lensemble_node.worker.training.containers.stored import Kind, Layout, Stored
from lensemble_node.worker.training.containers.video import Videos

TASK = "task"
_TASK_INDEX = "task_index"
_POSITIONS = ("episode_index", "frame_index", "index")
_COUNT = Kind(np.dtype(np.int64), (1,))
_PICTURES = ("image", "video")


def is_lerobot(path: Path) -> bool:
    return (path / INFO).is_file()


class LeRobot:
    """The episodes of the data set in directory ``path``.

    Raises:
        DatasetError: pyarrow is missing, or the index is not usable; see ``read_index``.
    """

    layout = Layout.LEROBOT
    extra_state = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self._parquet = Parquet(f"{path}: a LeRobot data set")
        self._videos = Videos()
        self._index: Index = read_index(path, self._parquet)
        features = self._index.info["features"]
        self._video_keys = {key for key, about in features.items() if about["dtype"] == "video"}
        self._flipped: set[str] = set()
        self._kinds = {
            key: self._kind(key, about)
            for key, about in features.items()
            if key not in (*_POSITIONS, _TASK_INDEX)
        }
        if _TASK_INDEX in features:
            self._kinds[TASK] = Kind(np.dtype(object), (), text=True)
        self._label = stored.label(self._index.info.get("robot_type"))

    def _kind(self, key: str, about: Mapping[str, Any]) -> Kind:
        try:
            shape = tuple(int(size) for size in about["shape"])
            if about["dtype"] in _PICTURES:
                if len(shape) != 3:
                    raise ValueError(f"shape {shape} of a picture")
                first = str((about.get("names") or ["height"])[0])
                if first.startswith("channel"):
                    shape = (*shape[1:], shape[0])
                return Kind(np.dtype(np.uint8), shape, coded=True)
            if about["dtype"] == "string":
                return Kind(np.dtype(object), (), text=True)
            return Kind(np.dtype(about["dtype"]), shape)
        except stored.DAMAGE as error:
            raise DatasetError(f"{self.path / INFO}: feature {key!r}: {error}") from error

    def __len__(self) -> int:
        return len(self._index.lengths)

    def named(self, episode: int) -> str:
        where = self.path if self._index.packed else self._index.data_path(episode)
        return f"{where}: episode {episode} (index {episode})"

    def columns(self, episode: int) -> Mapping[str, Stored]:
        rows = int(self._index.lengths[episode])
        return {key: Stored(kind, rows) for key, kind in self._kinds.items()}

    def embodiment(self, episode: int) -> str:
        if self._kinds.get(stored.EMBODIMENT, _COUNT).text:
            return stored.label(self.read(episode, stored.EMBODIMENT, 0, 1)[0])
        return self._label

    def read(self, episode: int, key: str, start: int, stop: int) -> NDArray[Any]:
        try:
            return self._read(episode, key, start, stop)
        except stored.DAMAGE as error:
            raise DatasetError(
                f"{self.named(episode)} column {key!r}: rows {start} to {stop} cannot be read: "
                f"{error}",
                stored.AGAIN,
            ) from error

    def _read(self, episode: int, key: str, start: int, stop: int) -> NDArray[Any]:
        if key in self._video_keys:
            return self._frames(episode, key, start, stop)
        if key == TASK:
            numbers = self._raw(episode, _TASK_INDEX, _COUNT, (start, stop)).ravel().tolist()
            texts = [self._index.tasks[number] for number in numbers]
            return np.array(texts, dtype=object)
        kind = self._kinds[key]
        rows = self._raw(episode, key, kind, (start, stop))
        if not kind.coded:
            return rows
        channels = (kind.row_shape or (0, 0, 3))[2]
        pictures = [self._videos.picture(self._picture_bytes(row), channels) for row in rows]
        return self._of_shape(np.stack(pictures), kind)

    def _raw(self, episode: int, key: str, kind: Kind, span: tuple[int, int]) -> NDArray[Any]:
        first = int(self._index.firsts[episode])
        path = self._index.data_path(episode)
        return self._parquet.read(path, key, kind, (first + span[0], first + span[1]))

    def _picture_bytes(self, row: dict[str, Any]) -> bytes:
        raw = row.get("bytes")
        return raw if raw is not None else (self.path / str(row["path"])).read_bytes()

    def _frames(self, episode: int, key: str, start: int, stop: int) -> NDArray[Any]:
        kind, clip = self._kinds[key], self._index.clip(key, episode)
        channels = (kind.row_shape or (0, 0, 3))[2]
        interval = self._index.interval_s
        times = clip.start_s + np.arange(start, stop, dtype=np.float64) * interval
        return self._of_shape(self._videos.frames(clip.path, times, interval, channels), kind)

    @staticmethod
    def _of_shape(pictures: NDArray[Any], kind: Kind) -> NDArray[Any]:
        if pictures.shape[1:] != kind.row_shape:
            raise ValueError(f"pictures are {pictures.shape[1:]}, {kind.row_shape} is declared")
        return pictures

    def column(self, episode: int, key: str) -> Column:
        rows = int(self._index.lengths[episode])
        try:
            if key in self._video_keys:
                clip = self._index.clip(key, episode)
                end = clip.start_s + rows * self._index.interval_s
                part = [self._videos.digest(clip.path), clip.start_s.hex(), end.hex()]
                return stored.reference("video", rows, part)
            if self._kinds[key].coded:
                raw = self._raw(episode, key, self._kinds[key], (0, rows))
                digests = [hashlib.sha256(self._picture_bytes(row)).hexdigest() for row in raw]
                return stored.reference("image", rows, digests)
        except stored.DAMAGE as error:
            raise DatasetError(
                f"{self.named(episode)} column {key!r} cannot be read: {error}", stored.AGAIN
            ) from error
        if self._kinds[key].text:
            return text_column([str(text) for text in self.read(episode, key, 0, rows)])
        return stored.column_of(self, episode, key)

    def check(self, episode: int) -> None:
        rows = int(self._index.lengths[episode])
        path = self._index.data_path(episode)
        try:
            held, end = self._parquet.rows(path), int(self._index.firsts[episode]) + rows
            if held < end or not (self._index.packed or held == end):
                raise ValueError(f"{path.name} has {held} rows, meta/episodes says {end}")
            self._check_positions(episode, rows)
        except stored.DAMAGE as error:
            raise DatasetError(f"{self.named(episode)}: {error}", stored.AGAIN) from error
        for key in sorted(self._video_keys):
            self._check_video(episode, key, rows)

    def _check_positions(self, episode: int, rows: int) -> None:
        wanted = {"frame_index": np.arange(rows), "episode_index": np.full(rows, episode)}
        for key, expected in wanted.items():
            if key not in self._index.info["features"]:
                continue
            found = self._raw(episode, key, _COUNT, (0, rows)).ravel()
            wrong = np.flatnonzero(found != expected)
            if len(wrong):
                at = int(wrong[0])
                raise ValueError(f"column {key!r} row {at} is {found[at]}, expected {expected[at]}")

    def _check_video(self, episode: int, key: str, rows: int) -> None:
        clip, interval = self._index.clip(key, episode), self._index.interval_s
        try:
            shown = self._videos.stamps(clip.path)
        except stored.DAMAGE as error:
            raise DatasetError(
                f"{self.named(episode)} column {key!r} cannot be read: {error}", stored.AGAIN
            ) from error
        first = clip.start_s - interval / 2
        frames = int(((shown >= first) & (shown < first + rows * interval)).sum())
        if frames < rows:
            raise DatasetError(
                f"{self.named(episode)} column {key!r}: {clip.path.name} has {frames} frames of "
                f"it, {rows} rows are there"
            )

    def files(self) -> Iterator[Path]:
        yield from (file for file in sorted(self.path.rglob("*")) if file.is_file())

    def close(self) -> None:
        self._parquet.close()
        self._videos.close()
