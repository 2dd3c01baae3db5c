"""A node's trajectories: opened, checked, cut into windows, and committed to.

Problems are refused by file, episode, column and row.  Small sets of state vectors are held in
memory, larger ones are read on demand; either way nothing is normalised.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import h5py
import msgspec
import numpy as np
from numpy.typing import NDArray

from lensemble import merkle
from lensemble.errors import DatasetError
from lensemble.merkle import DatasetFacts
from lensemble_node.worker.training import hdf5
from lensemble_node.worker.training.source import DataSource
from lensemble_node.worker.training.storage import write_atomically

__all__ = ["DataSource", "Dataset", "Trajectory", "Windows", "open_dataset"]

RESIDENT_BYTES = 256 << 20
CACHE_NAME = "dataset.json"
_OBSERVATION, _NEXT, _ACTION = "observation", "next_observation", "action"

Floats = NDArray[np.float32]
Images = NDArray[np.uint8]


@dataclass(frozen=True)
class Trajectory:
    """``observations`` (steps + 1, observation_dim) and ``actions`` (steps, action_dim)."""

    observations: Floats
    actions: Floats


class Dataset:
    """Episodes of one file.  ``lengths`` counts transitions, so an episode has one more state."""

    def __init__(self, source: DataSource, file: h5py.File, resident_bytes: int) -> None:
        self.source = source
        self._file = file
        self.layout, self._episodes = hdf5.index(self._file)
        self._keys = self._observation_columns()
        self._widths = {key: self._width(0, key) for key in (*self._keys, _ACTION)}
        self.observation_dim = sum(self._widths[key] for key in self._keys)
        self.action_dim = self._widths[_ACTION]
        self.lengths = [self._length(index) for index in range(len(self._episodes))]
        self._resident: list[Trajectory] | None = None
        states = self.steps + len(self.lengths)
        if 4 * (states * self.observation_dim + self.steps * self.action_dim) <= resident_bytes:
            self._resident = [self._load(index) for index in range(len(self._episodes))]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    @property
    def steps(self) -> int:
        return sum(self.lengths)

    @property
    def observation_keys(self) -> tuple[str, ...]:
        """The observation columns in use, in the order they are concatenated."""
        return self._keys

    @property
    def resident(self) -> bool:
        return self._resident is not None

    def expect(self, observation_dim: int) -> None:
        """Refuse the data when it does not fit the model.

        Raises:
            DatasetError: another number of observation columns than ``observation_dim``.
        """
        if self.observation_dim != observation_dim:
            raise DatasetError(
                f"{self.source.path} has {self.observation_dim} observation columns "
                f"({', '.join(self._keys)}); the workload's model takes {observation_dim}",
                "Name the columns to use in `observation_keys`.",
            )

    def episode(self, index: int) -> Trajectory:
        """One episode, checked.

        Raises:
            DatasetError: a value that is not finite, or rows that cannot be read.
        """
        return self._resident[index] if self._resident is not None else self._load(index)

    def cut(self, index: int, start: int, span: int) -> Trajectory:
        """``span`` transitions of an episode from ``start`` on.

        Raises:
            DatasetError: as ``episode``.
        """
        if self._resident is not None:
            whole = self._resident[index]
            return Trajectory(
                whole.observations[start : start + span + 1], whole.actions[start : start + span]
            )
        return self._load(index, start, start + span)

    def windows(self, span: int) -> "Windows":
        """All runs of ``span`` consecutive transitions within an episode.

        Raises:
            DatasetError: every episode is shorter.
        """
        return Windows(self, span)

    def commitment(self, state_dir: Path | None = None, *, full: bool = False) -> DatasetFacts:
        """Merkle root and counts, from the cache in ``state_dir`` while the file is the same.

        Computing it reads every stored column and checks every value that training reads.

        Args:
            state_dir: where the cache is; none, no cache.
            full: compute it even when cached.

        Raises:
            DatasetError: as ``episode``.
        """
        identity = self._identity()
        cache = None if state_dir is None else state_dir / CACHE_NAME
        if cache is not None and not full:
            known = _cached(cache, identity)
            if known is not None:
                return known
        facts = DatasetFacts(
            merkle.root(self._leaves()),
            len(self._episodes),
            self.steps,
            self.observation_dim,
            self.action_dim,
        )
        if cache is not None:
            entry = {"identity": identity, "facts": msgspec.to_builtins(facts)}
            write_atomically(cache, json.dumps(entry).encode())
        return facts

    def _identity(self) -> list[str | int | list[str]]:
        about = self.source.path.stat()
        where = str(self.source.path.resolve())
        return [where, about.st_size, about.st_mtime_ns, about.st_ino, list(self._keys)]

    def _leaves(self) -> Iterable[bytes]:
        for index, episode in enumerate(self._episodes):
            if self._resident is None:
                self._load(index)
            columns = {key: hdf5.column(self._file, span) for key, span in episode.columns.items()}
            yield merkle.leaf(columns)

    @property
    def image_shape(self) -> tuple[int, int, int] | None:
        """Height, width and channels of ``images``; None without an image column."""
        keys = self._image_columns()
        if not keys:
            return None
        shapes = [self._episodes[0].columns[key].row_shape or () for key in keys]
        height, width = shapes[0][:2]
        return height, width, sum(shape[2] for shape in shapes)

    def images(self, index: int, start: int, stop: int) -> Images:
        """Pictures of states ``start`` to ``stop`` of an episode: uint8 (n, *image_shape).

        Raises:
            DatasetError: no image column, or rows that cannot be read.
        """
        keys = self._image_columns()
        if not keys:
            raise DatasetError(
                f"{self.source.path} has no image column, or several and none is named",
                "Name the columns to use in `image_keys`.",
            )
        parts = []
        for key in keys:
            span = self._span(index, key)
            rows = hdf5.read(self._file, span.part(start, min(stop, span.rows)))
            if stop > span.rows:
                after = self._span(index, self._next(key))
                last = hdf5.read(self._file, after.part(after.rows - 1, after.rows))
                rows = np.concatenate([rows, last])
            parts.append(rows.astype(np.uint8))
        return np.concatenate(parts, axis=-1)

    # ---- structure ----

    def _image_columns(self) -> tuple[str, ...]:
        if self.source.image_keys:
            return tuple(f"{_OBSERVATION}.{key}" for key in self.source.image_keys)
        columns = self._episodes[0].columns
        found = [
            key
            for key, span in columns.items()
            if key.split(".", 1)[0] == _OBSERVATION
            and span.dtype == np.uint8
            and len(span.row_shape or ()) == 3
        ]
        return tuple(found) if len(found) == 1 else ()

    def _observation_columns(self) -> tuple[str, ...]:
        columns = self._episodes[0].columns
        if self.source.observation_keys:
            return tuple(f"{_OBSERVATION}.{key}" for key in self.source.observation_keys)
        found = [
            key
            for key in sorted(columns)
            if key.split(".", 1)[0] == _OBSERVATION and columns[key].is_vector
        ]
        if not found:
            raise DatasetError(
                f"{self.source.path}: {self._episodes[0].name} has no float observation column; "
                f"it has {', '.join(sorted(columns)) or 'none at all'}",
                "Name the columns to use in `observation_keys`.",
            )
        return tuple(found)

    def _span(self, index: int, key: str) -> hdf5.Span:
        episode = self._episodes[index]
        span = episode.columns.get(key)
        if span is None:
            raise DatasetError(
                f"{self.source.path}: {episode.name} (index {index}) has no column {key!r}; "
                f"it has {', '.join(sorted(episode.columns)) or 'none'}"
            )
        return span

    def _width(self, index: int, key: str) -> int:
        span = self._span(index, key)
        if not span.is_vector:
            raise DatasetError(
                f"{self.source.path}: {self._episodes[index].name} (index {index}) column {key!r} "
                f"has rows of shape {span.row_shape} and dtype {span.dtype}; float vectors are "
                "needed"
            )
        return span.width

    def _has_next(self, index: int) -> bool:
        columns = self._episodes[index].columns
        return all(self._next(key) in columns for key in self._keys)

    @staticmethod
    def _next(key: str) -> str:
        return key.replace(_OBSERVATION, _NEXT, 1)

    def _length(self, index: int) -> int:
        actions = self._span(index, _ACTION).rows
        states = actions + 1 if self.layout is hdf5.Layout.MINARI else actions
        wanted = {_ACTION: actions} | dict.fromkeys(self._keys, states)
        if self._has_next(index):
            wanted |= {self._next(key): actions for key in self._keys}
        for key, rows in wanted.items():
            width = self._width(index, key)
            expected = self._widths[key.replace(_NEXT, _OBSERVATION, 1)]
            found = self._span(index, key).rows
            if (found, width) != (rows, expected):
                raise DatasetError(
                    f"{self.source.path}: {self._episodes[index].name} (index {index}) column "
                    f"{key!r} has {found} rows of {width}; expected {rows} rows of {expected}"
                )
        whole = self.layout is hdf5.Layout.MINARI or self._has_next(index)
        return actions if whole else actions - 1

    # ---- values ----

    def _load(self, index: int, start: int = 0, stop: int | None = None) -> Trajectory:
        stop = self.lengths[index] if stop is None else stop
        parts = [self._observations(index, key, start, stop + 1) for key in self._keys]
        actions = self._rows(index, _ACTION, start, stop)
        return Trajectory(np.concatenate(parts, axis=1), actions)

    def _observations(self, index: int, key: str, start: int, stop: int) -> Floats:
        stored = self._span(index, key).rows
        rows = self._rows(index, key, start, min(stop, stored))
        if stop <= stored:
            return rows
        last = self._rows(index, self._next(key), stored - 1, stored)
        return np.concatenate([rows, last])

    def _rows(self, index: int, key: str, start: int, stop: int) -> Floats:
        span = self._span(index, key)
        stored = hdf5.read(self._file, span.part(start, stop))
        with np.errstate(over="ignore"):
            rows = stored.reshape(stop - start, -1).astype(np.float32)
        bad = np.flatnonzero(~np.isfinite(rows).all(axis=1))
        if len(bad):
            row = int(bad[0])
            at = int(np.flatnonzero(~np.isfinite(rows[row]))[0])
            # Not the row's values: this sentence may travel to the coordinator.
            kind = "NaN" if np.isnan(rows[row, at]) else "infinite"
            raise DatasetError(
                f"{self.source.path}: {self._episodes[index].name} (index {index}) column {key!r} "
                f"row {start + row} is {kind} at component {at}"
            )
        return rows


class Windows:
    """Runs of ``span`` transitions, numbered through all episodes; ``count`` of them."""

    def __init__(self, dataset: Dataset, span: int) -> None:
        self._dataset = dataset
        self._span = span
        starts = np.maximum(np.array(dataset.lengths, dtype=np.int64) - span + 1, 0)
        self._ends = np.cumsum(starts)
        self.count = int(self._ends[-1])
        if self.count == 0:
            raise DatasetError(
                f"{dataset.source.path}: the longest episode has {max(dataset.lengths)} "
                f"transitions, a window needs {span}"
            )

    @property
    def episodes(self) -> int:
        """How many episodes there are, those too short for a window included."""
        return len(self._ends)

    def of_episode(self, index: int) -> range:
        """The numbers of the windows in one episode; none if it is too short."""
        return range(int(self._ends[index - 1]) if index else 0, int(self._ends[index]))

    def gather(self, numbers: NDArray[np.int64]) -> tuple[Floats, Floats]:
        """Observations (n, span + 1, observation_dim) and actions (n, span, action_dim).

        Raises:
            DatasetError: as ``Dataset.episode``.
        """
        episodes, starts = self._places(numbers)
        cuts = [
            self._dataset.cut(int(episode), int(start), self._span)
            for episode, start in zip(episodes, starts, strict=True)
        ]
        return np.stack([c.observations for c in cuts]), np.stack([c.actions for c in cuts])

    def images(self, numbers: NDArray[np.int64]) -> Images:
        """The pictures of the windows: uint8 (n, span + 1, height, width, channels).

        Read from storage on every call, whatever is held in memory.

        Raises:
            DatasetError: no image column, or rows that cannot be read.
        """
        episodes, starts = self._places(numbers)
        stop = self._span + 1
        return np.stack(
            [
                self._dataset.images(int(episode), int(start), int(start) + stop)
                for episode, start in zip(episodes, starts, strict=True)
            ]
        )

    def _places(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        episodes = np.searchsorted(self._ends, numbers, side="right")
        return episodes, numbers - np.concatenate([[0], self._ends])[episodes]


def open_dataset(source: DataSource, resident_bytes: int = RESIDENT_BYTES) -> Dataset:
    """The data at ``source``, its structure checked and, when held in memory, every value too.

    Args:
        source: the file and what to take from it.
        resident_bytes: up to this size of observations and actions, they are held in memory.

    Raises:
        DatasetError: names file, episode, column and row of what is wrong.
    """
    file = hdf5.open_file(source.path)
    try:
        return Dataset(source, file, resident_bytes)
    except DatasetError:
        file.close()
        raise


def _cached(cache: Path, identity: list[str | int | list[str]]) -> DatasetFacts | None:
    try:
        entry = json.loads(cache.read_bytes())
        if entry["identity"] == identity:
            return msgspec.convert(entry["facts"], DatasetFacts)
    except (OSError, ValueError, KeyError, TypeError, msgspec.ValidationError):
        # A cache that cannot be read is no cache.
        return None
    return None
