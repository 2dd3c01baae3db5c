"""A node's trajectories: opened, checked, cut into windows, and committed to.

Problems are refused by file, episode, column and row.  Small sets of state vectors are held in
memory, larger ones and all pictures are read on demand; beside an index nothing else is held.
State vectors are as stored, unless the workload gives all nodes the same shift and scale.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from lensemble import merkle
from lensemble.errors import DatasetError
from lensemble.merkle import DatasetFacts
from lensemble.workload import Normalize, WorldModelTask
from lensemble_node.worker.training import commitment
from lensemble_node.worker.training.columns import (
    Selection,
    as_pictures,
    following,
    picture_columns,
    select,
)
from lensemble_node.worker.training.commitment import CACHE_NAME
from lensemble_node.worker.training.containers.opening import of_embodiment, open_container
from lensemble_node.worker.training.containers.stored import Container, Layout
from lensemble_node.worker.training.source import DataSource
from lensemble_node.worker.training.windows import Floats, Images, Trajectory, Windows

__all__ = [
    "CACHE_NAME",
    "DataSource",
    "Dataset",
    "Layout",
    "Trajectory",
    "Windows",
    "open_dataset",
]

RESIDENT_BYTES = 256 << 20

Complain = Callable[[DatasetError], None]


def _refuse(problem: DatasetError) -> None:
    raise problem


class Dataset:
    """Episodes of one embodiment.

    ``lengths`` counts transitions, so an episode has one more state.  ``complain`` is told of each
    episode that cannot be used; unless it raises, as by default, the others go on without it, and
    it is in ``unusable`` with no transitions.
    """

    def __init__(
        self,
        source: DataSource,
        container: Container,
        resident_bytes: int,
        complain: Complain = _refuse,
    ) -> None:
        self.source = source
        self.container, self.embodiment = of_embodiment(container, source.path, source.embodiment)
        self.selection: Selection = select(self.container, source)
        self.layout = self.container.layout
        self.unusable: set[int] = set()
        self.lengths = [self._length(index, complain) for index in range(len(self.container))]
        self._shift: Floats | None = None
        self._scale: Floats = np.ones(1, dtype=np.float32)
        self._resident: list[Trajectory] | None = None
        states = self.steps + len(self.lengths)
        if 4 * (states * self.observation_dim + self.steps * self.action_dim) <= resident_bytes:
            self._resident = [self.checked(index) for index in range(len(self.lengths))]

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
        self.container.close()

    def _length(self, index: int, complain: Complain) -> int:
        try:
            return self.selection.length(self.container, index)
        except DatasetError as error:
            complain(error)
            self.unusable.add(index)
            return 0

    # ---- what it is ----

    @property
    def observation_dim(self) -> int:
        return self.selection.observation_dim

    @property
    def action_dim(self) -> int:
        return self.selection.action_dim

    @property
    def image_shape(self) -> tuple[int, int, int] | None:
        """Height, width and channels of ``images``; None without an image column in use."""
        return self.selection.image_shape

    @property
    def steps(self) -> int:
        return sum(self.lengths)

    @property
    def observation_keys(self) -> tuple[str, ...]:
        """The observation columns in use, in the order they are concatenated."""
        return self.selection.observations

    @property
    def resident(self) -> bool:
        return self._resident is not None

    def expect(self, observation_dim: int) -> None:
        """Refuse the data when they do not fit the model.

        Raises:
            DatasetError: another number of observation columns than ``observation_dim``.
        """
        if self.observation_dim != observation_dim:
            raise DatasetError(
                f"{self.source.path} has {self.observation_dim} observation columns "
                f"({', '.join(self.observation_keys)}); the workload's model takes "
                f"{observation_dim}",
                "Name the columns to use in `observation_keys`.",
            )

    def fit(self, task: WorldModelTask, normalize: Normalize) -> None:
        """Refuse the data when the model of ``task`` cannot take them; normalise states.

        Raises:
            DatasetError: other columns, or pictures of another shape, than the model's.
        """
        if not task.pictures:
            self.expect(task.observation_dim)
            self.normalize(normalize)
            return
        self._use_only_picture()
        if self.image_shape != task.image_shape:
            raise DatasetError(
                f"{self.source.path} has "
                + (f"pictures of {self.image_shape}" if self.image_shape else "no pictures in use")
                + f"; the workload's model takes {task.image_shape} (height, width, channels)",
                "Name the columns to use in `image_keys`.",
            )

    def _use_only_picture(self) -> None:
        """Beside state vectors too, a picture column needs no name where it is the only one."""
        found = picture_columns(self.container)
        if self.selection.images or len(found) != 1:
            return
        seen = replace(
            self.source,
            observation_keys=self.selection.observations,
            image_keys=found,
            action_keys=self.selection.actions,
        )
        self.selection = select(self.container, seen)
        self.lengths = [self._length(index, _refuse) for index in range(len(self.container))]

    def normalize(self, terms: Normalize) -> None:
        """Have every state vector from here on shifted and scaled as ``terms`` say.

        Raises:
            DatasetError: terms for another number of observation columns.
        """
        if terms.kind == "none":
            self._shift = None
            return
        if len(terms.offset) != self.observation_dim:
            raise DatasetError(
                f"the workload normalises {len(terms.offset)} observation columns, "
                f"{self.source.path} has {self.observation_dim}",
                "Name the columns to use in `observation_keys`.",
            )
        self._shift = np.array(terms.offset, dtype=np.float32)
        self._scale = np.float32(1) / np.array(terms.scale, dtype=np.float32)

    # ---- values ----

    def episode(self, index: int) -> Trajectory:
        """One episode, checked.

        Raises:
            DatasetError: a value that is not finite, or rows that cannot be read.
        """
        whole = self._resident[index] if self._resident is not None else self.checked(index)
        return self._normalised(whole)

    def cut(self, index: int, start: int, span: int) -> Trajectory:
        """``span`` transitions of an episode from ``start`` on.

        Raises:
            DatasetError: as ``episode``.
        """
        if self._resident is None:
            return self._normalised(self._load(index, start, start + span))
        whole = self._resident[index]
        return self._normalised(
            Trajectory(
                whole.observations[start : start + span + 1], whole.actions[start : start + span]
            )
        )

    def images(self, index: int, start: int, stop: int) -> Images:
        """Pictures of states ``start`` to ``stop`` of an episode: uint8 (n, *image_shape).

        Raises:
            DatasetError: no image column, or rows that cannot be read.
        """
        if not self.selection.images:
            raise DatasetError(
                f"no image column of {self.source.path} is in use",
                "Name the columns to use in `image_keys`.",
            )
        parts = []
        for key in self.selection.images:
            rows = self._stored(index, key, start, stop)
            try:
                parts.append(as_pictures(rows, self.selection.kinds[key]))
            except ValueError as error:
                raise DatasetError(
                    f"{self.container.named(index)} column {key!r}: {error}"
                ) from error
        return np.concatenate(parts, axis=-1)

    def windows(self, span: int) -> Windows:
        """All runs of ``span`` consecutive transitions within an episode.

        Raises:
            DatasetError: every episode is shorter.
        """
        return Windows(self, span)

    def checked(self, index: int) -> Trajectory:
        """One episode as stored, and that the container's index is right about it.

        Raises:
            DatasetError: as ``episode``.
        """
        self.container.check(index)
        return self._load(index, 0, self.lengths[index])

    # ---- commitment ----

    def commitment(self, state_dir: Path | None = None, *, full: bool = False) -> DatasetFacts:
        """Merkle root and counts, from the note in ``state_dir`` while the files are the same.

        Computing it reads every stored column and checks every value that training reads, decoded
        pictures excepted.

        Args:
            state_dir: where the note is; none, no note.
            full: compute it even when noted.

        Raises:
            DatasetError: as ``episode``.
        """
        known = None if full or state_dir is None else self.noted(state_dir)
        if known is not None:
            return known
        facts = self.facts(self.leaves())
        if state_dir is not None:
            self.note(state_dir, facts)
        return facts

    def leaves(self) -> Iterator[bytes]:
        """The Merkle leaf of each episode, its values checked on the way.

        Raises:
            DatasetError: as ``episode``.
        """
        for index in range(len(self.lengths)):
            if self._resident is None:
                self.checked(index)
            label = self.container.embodiment(index)
            yield commitment.leaf(self.container, index, label)

    def facts(self, leaves: Iterable[bytes]) -> DatasetFacts:
        """Counts, and the root over ``leaves``."""
        return DatasetFacts(
            merkle.root(leaves),
            len(self.lengths),
            self.steps,
            self.observation_dim,
            self.action_dim,
        )

    def noted(self, state_dir: Path) -> DatasetFacts | None:
        """What was noted in ``state_dir``, if files and columns in use are the same."""
        return commitment.recall(state_dir / CACHE_NAME, self._identity())

    def note(self, state_dir: Path, facts: DatasetFacts) -> None:
        """Leave ``facts`` in ``state_dir``.

        Raises:
            StorageError: the file system refuses.
        """
        commitment.note(state_dir / CACHE_NAME, self._identity(), facts)

    def _identity(self) -> str:
        used = (*self.selection.observations, *self.selection.images, *self.selection.actions)
        about = [str(self.layout), self.embodiment, *used]
        return commitment.identity(self.container.files(), about)

    # ---- rows ----

    def _normalised(self, as_stored: Trajectory) -> Trajectory:
        if self._shift is None:
            return as_stored
        return Trajectory((as_stored.observations - self._shift) * self._scale, as_stored.actions)

    def _load(self, index: int, start: int, stop: int) -> Trajectory:
        return Trajectory(
            self._joined(index, self.selection.observations, start, stop + 1),
            self._joined(index, self.selection.actions, start, stop),
        )

    def _joined(self, index: int, keys: tuple[str, ...], start: int, stop: int) -> Floats:
        if not keys:
            return np.zeros((stop - start, 0), dtype=np.float32)
        return np.concatenate([self.rows(index, key, start, stop) for key in keys], axis=1)

    def rows(self, index: int, key: str, start: int, stop: int) -> Floats:
        """Rows of a float column as float32 (rows, width); one beyond the last is what follows it.

        Raises:
            DatasetError: a value that is not finite, or rows that cannot be read.
        """
        stored = self._stored(index, key, start, stop)
        with np.errstate(over="ignore"):
            rows = stored.reshape(stop - start, -1).astype(np.float32)
        bad = np.flatnonzero(~np.isfinite(rows).all(axis=1))
        if len(bad):
            row = int(bad[0])
            at = int(np.flatnonzero(~np.isfinite(rows[row]))[0])
            # Not the value itself: messages are logged.
            kind = "NaN" if np.isnan(rows[row, at]) else "infinite"
            held = self.container.columns(index)[key].rows
            raise DatasetError(
                f"{self.container.named(index)} column "
                f"{(following(key) if start + row >= held else key)!r} "
                f"row {min(start + row, held - 1)} is {kind} at component {at}"
            )
        return rows

    def _stored(self, index: int, key: str, start: int, stop: int) -> NDArray[np.generic]:
        held = self.container.columns(index)[key].rows
        rows: NDArray[np.generic] = self.container.read(index, key, start, min(stop, held))
        if stop > held:
            last = self.container.read(index, following(key), held - 1, held)
            rows = np.concatenate([rows, last])
        if len(rows) != stop - start:
            raise DatasetError(
                f"{self.container.named(index)} column {key!r} has {len(rows)} of the rows "
                f"{start} to {stop}"
            )
        return rows


def open_dataset(
    source: DataSource, resident_bytes: int = RESIDENT_BYTES, complain: Complain = _refuse
) -> Dataset:
    """The data at ``source``, their structure checked and, when held in memory, every value too.

    Args:
        source: where they are and what to take from them.
        resident_bytes: up to this size of observations and actions, they are held in memory.
        complain: told of each episode whose structure is wrong; see ``Dataset``.

    Raises:
        DatasetError: names file, episode, column and row of what is wrong.
    """
    container = open_container(source.path, source.format)
    try:
        return Dataset(source, container, resident_bytes, complain)
    except DatasetError:
        container.close()
        raise
