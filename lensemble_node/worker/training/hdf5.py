"""The three HDF5 layouts that trajectories come in, read as one.

robomimic: ``data/demo_N/{obs/*, actions, next_obs/*}``.  Minari: ``episode_N/{observations,
actions}`` with one more observation than actions.  Flat (stable-worldmodel): one row a step in
every column, ``ep_len`` and ``ep_offset`` say which rows are an episode; the last action of an
episode leads nowhere and may be NaN.

An episode is a set of named columns, each a span of rows of one stored array; keys are the same
whatever the layout: ``observation.KEY``, ``next_observation.KEY``, ``action``, else the stored
name.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import h5py
import numpy as np
from numpy.typing import NDArray

from lensemble.errors import DatasetError
from lensemble.merkle import Column, text_column

MAX_EPISODES = 10_000_000
_PIECE_BYTES = 1 << 20
_DAMAGE = (KeyError, OSError, RuntimeError, TypeError, ValueError)
"""What h5py raises on damaged structures."""
_ACTION = "action"
_FLAT_INDEX = ("ep_len", "ep_offset")
_BESIDE_OBSERVATION = (
    "reward", "rewards", "terminated", "truncated", "done", "episode_idx", "ep_idx", "step_idx",
)  # fmt: skip


class Layout(StrEnum):
    ROBOMIMIC = "robomimic"
    MINARI = "minari"
    FLAT = "flat"


@dataclass(frozen=True)
class Span:
    """Rows ``start`` to ``stop`` of the array stored at ``path``, each of ``row_shape``.

    A scalar counts as one row and has no ``row_shape``.
    """

    path: str
    start: int
    stop: int
    dtype: np.dtype[np.generic]
    text: bool
    row_shape: tuple[int, ...] | None

    @property
    def rows(self) -> int:
        return self.stop - self.start

    @property
    def is_vector(self) -> bool:
        """Whether every row is a float or a vector of floats."""
        return self.dtype.kind == "f" and self.row_shape is not None and len(self.row_shape) < 2

    @property
    def width(self) -> int:
        """Numbers in a row."""
        return int(np.prod(self.row_shape or (), dtype=np.int64))

    def part(self, start: int, stop: int) -> "Span":
        """Rows ``start`` to ``stop`` of this span."""
        return replace(self, start=self.start + start, stop=self.start + stop)


@dataclass(frozen=True)
class Episode:
    """Stored columns of one episode by canonical key."""

    name: str
    columns: dict[str, Span]


def open_file(path: Path) -> h5py.File:
    """The file, open for reading.

    Raises:
        DatasetError: missing, truncated, or not HDF5.
    """
    if not path.is_file():
        raise DatasetError(f"dataset {path} does not exist", "Correct `path` of the dataset.")
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise DatasetError(
            f"dataset {path} is truncated or no HDF5 file: {error}", "Copy it again."
        ) from error


def index(file: h5py.File) -> tuple[Layout, list[Episode]]:
    """Layout and all episodes of the open ``file``, in order of their numbers.

    Raises:
        DatasetError: no known layout, no episode, a number left out, an index that does not fit its
            columns, or structures that are damaged.
    """
    try:
        layout = _detect(file)
        match layout:
            case Layout.ROBOMIMIC:
                found = _groups(file["data"], "demo_", "data/")
            case Layout.MINARI:
                found = _groups(file, "episode_", "")
            case Layout.FLAT:
                found = _flat(file)
    except _DAMAGE as error:
        raise DatasetError(f"{file.filename} is damaged: {error}", "Copy it again.") from error
    if not found:
        raise DatasetError(f"{file.filename} holds no episode")
    return layout, found


def _detect(file: h5py.File) -> Layout:
    if isinstance(file.get("data"), h5py.Group):
        return Layout.ROBOMIMIC
    if all(isinstance(file.get(key), h5py.Dataset) for key in _FLAT_INDEX):
        return Layout.FLAT
    if any(_number(key, "episode_") is not None for key in file):
        return Layout.MINARI
    raise DatasetError(
        f"{file.filename} has neither data/demo_N, episode_N nor ep_len and ep_offset",
        "Use the robomimic, Minari or flat stable-worldmodel layout.",
    )


def _span(path: str, item: h5py.Dataset) -> Span:
    shape = tuple(int(size) for size in item.shape or ())
    text = h5py.check_string_dtype(item.dtype) is not None
    scalar = not shape
    return Span(path, 0, 1 if scalar else shape[0], item.dtype, text, None if scalar else shape[1:])


def _number(name: str, prefix: str) -> int | None:
    tail = name.removeprefix(prefix)
    return int(tail) if name.startswith(prefix) and tail.isdigit() else None


def _groups(parent: h5py.Group, prefix: str, where: str) -> list[Episode]:
    numbered = {n: key for key in parent if (n := _number(key, prefix)) is not None}
    for index in range(max(numbered, default=-1) + 1):
        if index not in numbered:
            raise DatasetError(f"{parent.file.filename}: episode {where}{prefix}{index} is missing")
    found = []
    for index in sorted(numbered):
        name = f"{where}{numbered[index]}"
        columns: dict[str, Span] = {}

        def visit(
            key: str, item: object, name: str = name, columns: dict[str, Span] = columns
        ) -> None:
            if isinstance(item, h5py.Dataset):
                columns[_canonical(key)] = _span(f"{name}/{key}", item)

        parent[numbered[index]].visititems(visit)
        found.append(Episode(name, columns))
    return found


def _canonical(key: str) -> str:
    head, _, tail = key.partition("/")
    names = {
        "obs": "observation",
        "observations": "observation",
        "next_obs": "next_observation",
        "actions": _ACTION,
    }
    return ".".join([names.get(head, head), *([tail.replace("/", ".")] if tail else [])])


def _flat(file: h5py.File) -> list[Episode]:
    spans = {key: _span(key, file[key]) for key in file if isinstance(file[key], h5py.Dataset)}
    for key in _FLAT_INDEX:
        if spans[key].rows > MAX_EPISODES or spans[key].row_shape != ():
            raise DatasetError(f"{file.filename}: {key} has shape {file[key].shape}")
    lengths, offsets = (read(file, spans.pop(key)).tolist() for key in _FLAT_INDEX)
    if len(lengths) != len(offsets):
        raise DatasetError(
            f"{file.filename}: ep_len has {len(lengths)} rows, ep_offset {len(offsets)}"
        )
    found = []
    for number, (length, offset) in enumerate(zip(lengths, offsets, strict=True)):
        columns = {}
        for key, span in spans.items():
            if length < 1 or offset < 0 or offset + length > span.rows:
                raise DatasetError(
                    f"{file.filename}: episode {number} is rows {offset} to {offset + length}, "
                    f"column {key!r} has {span.rows} rows"
                )
            columns[_flat_key(key)] = span.part(int(offset), int(offset + length))
        found.append(Episode(f"episode {number}", columns))
    return found


def _flat_key(key: str) -> str:
    if key in (_ACTION, "actions"):
        return _ACTION
    return key if key in _BESIDE_OBSERVATION else f"observation.{key}"


# ---- rows ----


def read(file: h5py.File, span: Span) -> NDArray[np.generic]:
    """The rows of ``span`` as stored.

    Raises:
        DatasetError: they cannot be read, for example because the file is cut short.
    """
    try:
        item = file[span.path]
        rows = item[()] if span.row_shape is None else item[span.start : span.stop]
    except _DAMAGE as error:
        raise DatasetError(
            f"{file.filename}: rows {span.start} to {span.stop} of {span.path} cannot be read: "
            f"{error}",
            "The file is damaged or cut short: copy it again.",
        ) from error
    return np.asarray(rows)


def column(file: h5py.File, span: Span) -> Column:
    """``span`` as a column of a Merkle leaf, read piece by piece.

    Raises:
        DatasetError: a dtype that is neither numeric nor text, or rows that cannot be read.
    """
    if span.text:
        raw = np.atleast_1d(read(file, span)).ravel().tolist()
        return text_column([v.decode(errors="replace") if isinstance(v, bytes) else v for v in raw])
    if span.dtype.kind not in "biufc":
        raise DatasetError(
            f"{file.filename}: column {span.path} has the dtype {span.dtype}, which a commitment "
            "cannot cover",
            "Store it as numbers or text, or leave it out.",
        )
    shape = () if span.row_shape is None else (span.rows, *span.row_shape)
    size = span.rows * span.width * span.dtype.itemsize
    return Column(span.dtype.newbyteorder("<").name, shape, _pieces(file, span), size)


def _pieces(file: h5py.File, span: Span) -> Iterator[bytes]:
    stride = max(1, _PIECE_BYTES // max(1, span.width * span.dtype.itemsize))
    little = span.dtype.newbyteorder("<")
    for start in range(0, span.rows, stride):
        rows = read(file, span.part(start, min(span.rows, start + stride)))
        yield np.ascontiguousarray(rows, dtype=little).tobytes()
