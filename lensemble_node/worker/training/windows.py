"""Runs of consecutive steps within episodes, by number, read when they are drawn."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lensemble.errors import DatasetError
from lensemble_node.worker.training.source import DataSource

Floats = NDArray[np.float32]
Images = NDArray[np.uint8]


@dataclass(frozen=True)
class Trajectory:
    """``observations`` (steps + 1, observation_dim) and ``actions`` (steps, action_dim)."""

    observations: Floats
    actions: Floats


class Episodes(Protocol):
    """What windows are cut from; see ``Dataset``."""

    source: DataSource
    lengths: list[int]

    def cut(self, index: int, start: int, span: int) -> Trajectory: ...

    def images(self, index: int, start: int, stop: int) -> Images: ...


class Windows:
    """Runs of ``span`` transitions, numbered through all episodes; ``count`` of them."""

    def __init__(self, dataset: Episodes, span: int) -> None:
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
        cuts = [self._dataset.cut(*place, self._span) for place in self._places(numbers)]
        return np.stack([c.observations for c in cuts]), np.stack([c.actions for c in cuts])

    def images(self, numbers: NDArray[np.int64]) -> Images:
        """The pictures of the windows: uint8 (n, span + 1, height, width, channels).

        Read from storage on every call, whatever is held in memory.

        Raises:
            DatasetError: no image column, or rows that cannot be read.
        """
        places = self._places(numbers)
        stop = self._span + 1
        return np.stack([self._dataset.images(at, first, first + stop) for at, first in places])

    def _places(self, numbers: NDArray[np.int64]) -> list[tuple[int, int]]:
        episodes = np.searchsorted(self._ends, numbers, side="right")
        starts = numbers - np.concatenate([[0], self._ends])[episodes]
        return list(zip(episodes.tolist(), starts.tolist(), strict=True))
