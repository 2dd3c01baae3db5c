"""Episodes as ranges of rows in arrays that all episodes share: flat HDF5, D4RL, zarr."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lensemble.errors import DatasetError
from lensemble.merkle import Column
from lensemble_node.worker.training.containers import stored
from lensemble_node.worker.training.containers.stored import Kind, Layout, Stored

_BESIDE_OBSERVATION = (
    "reward", "rewards", "terminated", "truncated", "done", "episode_idx", "ep_idx", "step_idx",
    stored.EMBODIMENT,
)  # fmt: skip


@dataclass(frozen=True)
class Shared:
    """An array that holds one row a step, of all episodes."""

    kind: Kind
    rows: int
    read: Callable[[int, int], NDArray[Any]]


class FlatContainer:
    """Episodes are rows ``starts[i]`` to ``stops[i]`` of every array."""

    extra_state = False

    def __init__(
        self,
        place: tuple[Path, Layout],
        arrays: Mapping[str, Shared],
        bounds: tuple[NDArray[np.int64], NDArray[np.int64]],
        files: Callable[[], Iterator[Path]],
        close: Callable[[], None],
    ) -> None:
        self.path, self.layout = place
        self._labels = arrays.get(stored.EMBODIMENT)
        self._arrays = arrays
        self._starts, self._stops = bounds
        self._files, self._close = files, close
        self._check_bounds()

    def _check_bounds(self) -> None:
        if len(self._starts) > stored.MAX_EPISODES:
            raise DatasetError(
                f"{self.path} has {len(self._starts)} episodes, over {stored.MAX_EPISODES}"
            )
        if not len(self._starts):
            raise DatasetError(f"{self.path} holds no episode")
        for key, array in self._arrays.items():
            wrong = (self._stops <= self._starts) | (self._starts < 0) | (self._stops > array.rows)
            if wrong.any():
                at = int(np.flatnonzero(wrong)[0])
                raise DatasetError(
                    f"{self.path}: episode {at} is rows {self._starts[at]} to {self._stops[at]}, "
                    f"column {key!r} has {array.rows} rows"
                )

    def __len__(self) -> int:
        return len(self._starts)

    def named(self, episode: int) -> str:
        return f"{self.path}: episode {episode} (index {episode})"

    def columns(self, episode: int) -> Mapping[str, Stored]:
        rows = int(self._stops[episode] - self._starts[episode])
        return {key: Stored(array.kind, rows) for key, array in self._arrays.items()}

    def embodiment(self, episode: int) -> str:
        if self._labels is None or not self._labels.kind.text:
            return ""
        return stored.label(self.read(episode, stored.EMBODIMENT, 0, 1)[0])

    def read(self, episode: int, key: str, start: int, stop: int) -> NDArray[Any]:
        first = int(self._starts[episode])
        try:
            return self._arrays[key].read(first + start, first + stop)
        except stored.DAMAGE as error:
            raise DatasetError(
                f"{self.named(episode)} column {key!r}: rows {start} to {stop} cannot be read: "
                f"{error}",
                stored.AGAIN,
            ) from error

    def column(self, episode: int, key: str) -> Column:
        return stored.column_of(self, episode, key)

    def check(self, episode: int) -> None:
        """Nothing to add: the bounds are checked when they are read."""

    def files(self) -> Iterator[Path]:
        return self._files()

    def close(self) -> None:
        self._close()


def episode_bounds(ends: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Starts and stops of episodes that follow each other and end before ``ends``."""
    return np.concatenate([[0], ends[:-1]]).astype(np.int64), ends.astype(np.int64)


def flat_key(key: str) -> str:
    """The key of an array stored as ``key``, where everything but action and reward is observed."""
    if key in (stored.ACTION, "actions"):
        return stored.ACTION
    dotted = key.replace("/", ".")
    return dotted if key in _BESIDE_OBSERVATION else f"{stored.OBSERVATION}.{dotted}"
