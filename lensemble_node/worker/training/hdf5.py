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
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import h5py
import numpy as np
from numpy.typing import NDArray

from lensemble.errors import DatasetError
from lensemble.merkle import Column, text_column

MAX_EPISODES = 10_000_000
_PIECE_BYTES = 1 << 20
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
    """Rows ``start`` to ``stop`` of the array stored at ``path``; the whole scalar when 0-d."""

    path: str
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


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


def detect(file: h5py.File) -> Layout:
    """Which layout the open ``file`` has.

    Raises:
        DatasetError: none that is known.
    """
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


def episodes(file: h5py.File, layout: Layout) -> list[Episode]:
    """All episodes of the open ``file`` in order of their numbers.

    Raises:
        DatasetError: none at all, a number left out, or an index that does not fit its columns.
    """
    match layout:
        case Layout.ROBOMIMIC:
            found = _groups(file["data"], "demo_", "data/")
        case Layout.MINARI:
            found = _groups(file, "episode_", "")
        case Layout.FLAT:
            found = _flat(file)
    if not found:
        raise DatasetError(f"{file.filename} holds no episode")
    return found


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
                columns[_canonical(key)] = Span(f"{name}/{key}", 0, _rows(item))

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


def _rows(item: h5py.Dataset) -> int:
    return int(item.shape[0]) if item.shape else 1


def _flat(file: h5py.File) -> list[Episode]:
    lengths, offsets = (read(file, Span(key, 0, _rows(file[key]))) for key in _FLAT_INDEX)
    if lengths.shape != offsets.shape or lengths.ndim != 1 or len(lengths) > MAX_EPISODES:
        raise DatasetError(
            f"{file.filename}: ep_len has shape {lengths.shape}, ep_offset {offsets.shape}"
        )
    rows = {
        key: _rows(file[key])
        for key in file
        if key not in _FLAT_INDEX and isinstance(file[key], h5py.Dataset)
    }
    found = []
    for index, (length, offset) in enumerate(zip(lengths.tolist(), offsets.tolist(), strict=True)):
        columns = {}
        for key, count in rows.items():
            if length < 1 or offset < 0 or offset + length > count:
                raise DatasetError(
                    f"{file.filename}: episode {index} is rows {offset} to {offset + length}, "
                    f"column {key!r} has {count} rows"
                )
            columns[_flat_key(key)] = Span(key, int(offset), int(offset + length))
        found.append(Episode(f"episode {index}", columns))
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
    item = file[span.path]
    try:
        rows = item[span.start : span.stop] if item.shape else item[()]
    except (OSError, RuntimeError) as error:
        raise DatasetError(
            f"{file.filename}: rows {span.start} to {span.stop} of {span.path} cannot be read: "
            f"{error}",
            "The file is damaged or cut short: copy it again.",
        ) from error
    return np.asarray(rows)


def column(file: h5py.File, span: Span) -> Column:
    """``span`` as a column of a Merkle leaf, read piece by piece.

    Raises:
        DatasetError: a dtype that is neither numeric nor text.
    """
    item = file[span.path]
    if h5py.check_string_dtype(item.dtype) is not None:
        raw = np.atleast_1d(read(file, span)).ravel().tolist()
        return text_column([v.decode() if isinstance(v, bytes) else str(v) for v in raw])
    if item.dtype.kind not in "biufc":
        raise DatasetError(
            f"{file.filename}: column {span.path} has the dtype {item.dtype}, which a commitment "
            "cannot cover",
            "Store it as numbers or text, or leave it out.",
        )
    shape = (span.rows, *item.shape[1:]) if item.shape else ()
    size = int(np.prod(shape, dtype=np.int64)) * item.dtype.itemsize
    return Column(item.dtype.newbyteorder("<").name, shape, _pieces(file, span), size)


def _pieces(file: h5py.File, span: Span) -> Iterator[bytes]:
    item = file[span.path]
    row_bytes = int(np.prod(item.shape[1:], dtype=np.int64)) * item.dtype.itemsize
    stride = max(1, _PIECE_BYTES // max(1, row_bytes))
    little = item.dtype.newbyteorder("<")
    for start in range(span.start, span.stop, stride):
        rows = read(file, Span(span.path, start, min(span.stop, start + stride)))
        yield np.ascontiguousarray(rows, dtype=little).tobytes()
