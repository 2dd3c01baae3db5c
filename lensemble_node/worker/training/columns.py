"""Which stored columns are observation, picture and action, and whether episodes agree on them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lensemble.errors import DatasetError
from lensemble_node.worker.training.containers.stored import (
    ACTION,
    NEXT,
    OBSERVATION,
    Container,
    Kind,
    Stored,
)
from lensemble_node.worker.training.source import DataSource


def following(key: str) -> str:
    """The column of the observation that follows each row of ``key``."""
    return key.replace(OBSERVATION, NEXT, 1)


@dataclass(frozen=True)
class Selection:
    """The columns in use, in the order they are concatenated, and what their rows are."""

    observations: tuple[str, ...]
    images: tuple[str, ...]
    actions: tuple[str, ...]
    kinds: dict[str, Kind]

    @property
    def observation_dim(self) -> int:
        return sum(self.kinds[key].width for key in self.observations)

    @property
    def action_dim(self) -> int:
        return sum(self.kinds[key].width for key in self.actions)

    @property
    def image_shape(self) -> tuple[int, int, int] | None:
        """Height, width and all channels; None without pictures."""
        if not self.images:
            return None
        shapes = [picture_shape(self.kinds[key]) for key in self.images]
        return shapes[0][0], shapes[0][1], sum(shape[2] for shape in shapes)

    def whole(self, container: Container, episode: int) -> bool:
        """Whether the state after the last action is stored too."""
        if container.extra_state:
            return True
        columns = container.columns(episode)
        return all(following(key) in columns for key in (*self.observations, *self.images))

    def length(self, container: Container, episode: int) -> int:
        """Transitions of an episode.

        Raises:
            DatasetError: a column in use is missing, of other rows than in the first episode, or
                of another length than the others.
        """
        columns = container.columns(episode)
        rows = _present(container, episode, self.actions[0]).rows
        states = rows + 1 if container.extra_state else rows
        seen = (*self.observations, *self.images)
        wanted = dict.fromkeys(self.actions, rows) | dict.fromkeys(seen, states)
        whole = self.whole(container, episode)
        if whole and not container.extra_state:
            wanted |= {following(key): rows for key in seen}
        for key, count in wanted.items():
            found = columns.get(key) or _present(container, episode, key)
            self._compare(f"{container.named(episode)} column {key!r}", key, found, count)
        return rows if whole else rows - 1

    def _compare(self, where: str, key: str, found: Stored, rows: int) -> None:
        expected = self.kinds[key.replace(NEXT, OBSERVATION, 1)]
        pictures = expected.is_picture
        if not (found.kind.is_picture if pictures else found.kind.is_vector):
            raise DatasetError(
                f"{where} has rows of shape {found.kind.row_shape} and dtype {found.kind.dtype}; "
                f"{'pictures' if pictures else 'float vectors'} are needed"
            )
        if (found.rows, found.kind.width) != (rows, expected.width) or (
            pictures and found.kind.row_shape != expected.row_shape
        ):
            raise DatasetError(
                f"{where} has {found.rows} rows of {_size(found.kind)}; expected {rows} rows of "
                f"{_size(expected)}"
            )


def select(container: Container, source: DataSource) -> Selection:
    """The columns that ``source`` names, or those that go without saying.

    Raises:
        DatasetError: one that is named is missing or of the wrong kind, or there is none.
    """
    columns = container.columns(0)
    observations = _named(columns, source.observation_keys, OBSERVATION) or tuple(
        key for key in sorted(columns) if _is_of(key, OBSERVATION) and columns[key].kind.is_vector
    )
    pictures = picture_columns(container)
    images = _named(columns, source.image_keys, OBSERVATION) or (
        pictures if len(pictures) == 1 and not observations else ()
    )
    if not observations and not images:
        raise DatasetError(
            f"{container.named(0)} has no float observation column; it has "
            f"{', '.join(sorted(columns)) or 'none at all'}",
            "Name the columns to use in `observation_keys` or `image_keys`.",
        )
    if observations and not source.observation_keys and source.image_keys:
        observations = tuple(key for key in observations if key not in images)
    actions = _named(columns, source.action_keys, ACTION) or (
        (ACTION,)
        if ACTION in columns
        else tuple(k for k in sorted(columns) if _is_of(k, ACTION) and columns[k].kind.is_vector)
    )
    kinds = {}
    for key in (*observations, *images, *(actions or (ACTION,))):
        kinds[key] = _checked(container, key, pictures=key in images)
    _check_sizes(container, images, kinds)
    return Selection(observations, images, actions, kinds)


def picture_columns(container: Container) -> tuple[str, ...]:
    """The observation columns of the first episode that hold pictures."""
    columns = container.columns(0)
    return tuple(
        key for key in sorted(columns) if _is_of(key, OBSERVATION) and columns[key].kind.is_picture
    )


def _named(columns: Any, keys: tuple[str, ...], head: str) -> tuple[str, ...]:  # noqa: ANN401
    return tuple(key if key in columns else f"{head}.{key}" for key in keys)


def _is_of(key: str, head: str) -> bool:
    return key.split(".", 1)[0] == head


def _present(container: Container, episode: int, key: str) -> Stored:
    columns = container.columns(episode)
    if key not in columns:
        raise DatasetError(
            f"{container.named(episode)} has no column {key!r}; it has "
            f"{', '.join(sorted(columns)) or 'none'}"
        )
    return columns[key]


def _checked(container: Container, key: str, *, pictures: bool) -> Kind:
    kind = _present(container, 0, key).kind
    if not (kind.is_picture if pictures else kind.is_vector):
        raise DatasetError(
            f"{container.named(0)} column {key!r} has rows of shape {kind.row_shape} and dtype "
            f"{kind.dtype}; {'pictures' if pictures else 'float vectors'} are needed"
        )
    return kind


def _check_sizes(container: Container, images: tuple[str, ...], kinds: dict[str, Kind]) -> None:
    sizes = {key: picture_shape(kinds[key])[:2] for key in images}
    for key, size in sizes.items():
        if size != sizes[images[0]]:
            raise DatasetError(
                f"{container.named(0)}: pictures of {key!r} are {size}, of {images[0]!r} "
                f"{sizes[images[0]]}",
                "Name columns of one size in `image_keys`.",
            )


def _size(kind: Kind) -> str:
    return str(kind.row_shape if kind.is_picture else kind.width)


def picture_shape(kind: Kind) -> tuple[int, int, int]:
    """Height, width, channels of stored pictures, whichever axis comes first."""
    first, second, third = kind.row_shape or (0, 0, 0)
    return (first, second, third) if third <= 4 else (second, third, first)


def as_pictures(rows: NDArray[Any], kind: Kind) -> NDArray[np.uint8]:
    """Rows of a picture column as uint8 (n, height, width, channels).

    Raises:
        ValueError: numbers that are no whole ones within 0 to 255.
    """
    if (kind.row_shape or (0, 0, 0))[2] > 4:
        rows = np.moveaxis(rows, 1, -1)
    if rows.dtype == np.uint8:
        return np.ascontiguousarray(rows, dtype=np.uint8)
    made: NDArray[np.uint8] = np.clip(np.nan_to_num(rows), 0, 255).astype(np.uint8)
    if not np.array_equal(made, rows):
        raise ValueError("a picture stored as floats must hold whole numbers within 0 to 255")
    return made
