"""The HDF5 layouts that trajectories come in.

robomimic: ``data/demo_N/{obs/*, actions, next_obs/*}``.  Minari: ``episode_N/{observations,
actions}`` with one more observation than actions.  Flat (stable-worldmodel): one row a step in
every column, ``ep_len`` and ``ep_offset`` say which rows are an episode; the last action of an
episode leads nowhere and may be NaN.  D4RL: the same, but ``terminals`` and ``timeouts`` mark the
last row of each.

An attribute ``embodiment`` of the file or of an episode, or a text column of that name, says what
recorded it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from lensemble.errors import DatasetError
from lensemble.merkle import Column
from lensemble_node.worker.training.containers import stored
from lensemble_node.worker.training.containers.flat import (
    FlatContainer,
    Shared,
    episode_bounds,
    flat_key,
)
from lensemble_node.worker.training.containers.stored import Container, Kind, Layout, Stored

_FLAT_INDEX = ("ep_len", "ep_offset")
_D4RL = ("observations", "actions", "terminals")
_MOST_NAMED = 5


def open_hdf5(path: Path, wanted: Layout | None = None) -> Container:
    """The episodes in the file at ``path``, in order of their numbers.

    Args:
        path: the file.
        wanted: how they are laid out, if not to be found out.

    Raises:
        DatasetError: missing, truncated or no HDF5 file, another layout, no episode, a number left
            out, an index that does not fit its columns, or structures that are damaged.
    """
    if not path.is_file():
        raise DatasetError(f"dataset {path} does not exist", "Correct `path` of the dataset.")
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise DatasetError(
            f"dataset {path} is truncated or no HDF5 file: {error}", "Copy it again."
        ) from error
    try:
        return _open(path, file, wanted)
    except stored.DAMAGE as error:
        file.close()
        raise DatasetError(f"{path} is damaged: {error}", "Copy it again.") from error
    except DatasetError:
        file.close()
        raise


def _open(path: Path, file: h5py.File, wanted: Layout | None) -> Container:
    found = detect(file)
    if found is None or wanted not in (None, found):
        raise DatasetError(
            f"{path} has neither data/demo_N, episode_N, ep_len and ep_offset, nor observations "
            "and terminals"
            if found is None
            else f"{path} has the layout {found}, not {wanted}",
            "Use the robomimic, Minari, D4RL or flat stable-worldmodel layout.",
        )
    match found:
        case Layout.ROBOMIMIC:
            return Grouped(path, file, found, "demo_")
        case Layout.MINARI:
            return Grouped(path, file, found, "episode_")
        case Layout.D4RL:
            rows = {k: v for k, v in _arrays(file).items() if not k.startswith("metadata/")}
            arrays = {stored.canonical(key): value for key, value in rows.items()}
            return _shared(path, file, found, arrays, _by_flags(file))
        case _:
            arrays = {flat_key(k): v for k, v in _arrays(file).items() if k not in _FLAT_INDEX}
            return _shared(path, file, found, arrays, _by_lengths(path, file))


def detect(file: h5py.File) -> Layout | None:
    if isinstance(file.get("data"), h5py.Group):
        return Layout.ROBOMIMIC
    if all(isinstance(file.get(key), h5py.Dataset) for key in _FLAT_INDEX):
        return Layout.FLAT
    if all(isinstance(file.get(key), h5py.Dataset) for key in _D4RL):
        return Layout.D4RL
    return Layout.MINARI if any(_number(key, "episode_") is not None for key in file) else None


def _number(name: str, prefix: str) -> int | None:
    tail = name.removeprefix(prefix)
    return int(tail) if name.startswith(prefix) and tail.isdecimal() else None


def _stored(item: h5py.Dataset) -> Stored:
    shape = tuple(int(size) for size in item.shape or ())
    text = h5py.check_string_dtype(item.dtype) is not None
    row_shape = shape[1:] if shape else None
    # Bytes of any length are pictures as Minari stores them when it encodes; not decoded here.
    coded = h5py.check_vlen_dtype(item.dtype) == np.uint8
    return Stored(Kind(item.dtype, row_shape, text, coded), shape[0] if shape else 1)


# ---- a group an episode ----


@dataclass(frozen=True)
class _Place:
    below: str
    stored: Stored


class Grouped:
    """Episodes that are groups ``prefix`` and a number; equal tables of columns are held once."""

    def __init__(self, path: Path, file: h5py.File, layout: Layout, prefix: str) -> None:
        self.path, self.layout, self._file = path, layout, file
        self.extra_state = layout is Layout.MINARI
        self._parent = "data/" if layout is Layout.ROBOMIMIC else ""
        numbered = self._numbered(prefix)
        self._names = [f"{self._parent}{numbered[index]}" for index in sorted(numbered)]
        interned: dict[tuple[tuple[str, _Place], ...], dict[str, _Place]] = {}
        self._tables: list[dict[str, _Place]] = []
        self._labels: list[str] = []
        common = _label_of(file) or (_label_of(file[self._parent]) if self._parent else "")
        for name in self._names:
            table = self._table(name)
            self._tables.append(
                interned.setdefault(tuple(sorted(table.items(), key=_first)), table)
            )
            self._labels.append(_label_of(file[name]) or common)

    def _numbered(self, prefix: str) -> dict[int, str]:
        group = self._file[self._parent or "/"]
        numbered = {n: key for key in group if (n := _number(key, prefix)) is not None}
        if not numbered:
            raise DatasetError(f"{self.path} holds no episode")
        # Not a set of all numbers up to the last: a damaged name may hold any.
        missing: list[str] = []
        after = 0
        for index in sorted(numbered):
            more = range(after, min(index, after + _MOST_NAMED - len(missing)))
            missing += [f"{self._parent}{prefix}{number}" for number in more]
            after = index + 1
        if missing:
            are = "are" if len(missing) > 1 else "is"
            names = f"episode{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
            raise DatasetError(f"{self.path}: {names} {are} missing")
        return numbered

    def _table(self, name: str) -> dict[str, _Place]:
        table: dict[str, _Place] = {}

        def visit(key: str, item: object) -> None:
            if isinstance(item, h5py.Dataset):
                table[stored.canonical(key)] = _Place(key, _stored(item))

        self._file[name].visititems(visit)
        return table

    def __len__(self) -> int:
        return len(self._names)

    def named(self, episode: int) -> str:
        return f"{self.path}: {self._names[episode]} (index {episode})"

    def columns(self, episode: int) -> Mapping[str, Stored]:
        return {key: place.stored for key, place in self._tables[episode].items()}

    def embodiment(self, episode: int) -> str:
        return self._labels[episode]

    def read(self, episode: int, key: str, start: int, stop: int) -> NDArray[Any]:
        place = self._tables[episode][key]
        once = place.stored.kind.row_shape is None
        try:
            item = self._file[f"{self._names[episode]}/{place.below}"]
            return np.asarray(item[()] if once else item[start:stop])
        except stored.DAMAGE as error:
            raise DatasetError(
                f"{self.named(episode)} column {key!r}: rows {start} to {stop} cannot be read: "
                f"{error}",
                stored.AGAIN,
            ) from error

    def column(self, episode: int, key: str) -> Column:
        return stored.column_of(self, episode, key)

    def check(self, episode: int) -> None:
        """Nothing to add: the structure of every episode is read on opening."""

    def files(self) -> Iterator[Path]:
        yield self.path

    def close(self) -> None:
        self._file.close()


def _first(pair: tuple[str, _Place]) -> str:
    return pair[0]


def _label_of(group: h5py.Group) -> str:
    return stored.label(group.attrs.get(stored.EMBODIMENT, ""))


# ---- arrays that all episodes share ----


def _arrays(file: h5py.File) -> dict[str, h5py.Dataset]:
    found: dict[str, h5py.Dataset] = {}

    def visit(key: str, item: object) -> None:
        if isinstance(item, h5py.Dataset) and item.shape:
            found[key] = item

    file.visititems(visit)
    return found


def _shared(
    path: Path,
    file: h5py.File,
    layout: Layout,
    arrays: Mapping[str, h5py.Dataset],
    bounds: tuple[NDArray[np.int64], NDArray[np.int64]],
) -> Container:
    least = int(bounds[1].max(initial=0))
    held = {}
    for key, item in arrays.items():
        about = _stored(item)
        held[key] = Shared(about.kind, about.rows, partial(_slice, item))
    if not held:
        raise DatasetError(f"{path}: {least} rows are indexed and no column is there")
    return FlatContainer((path, layout), held, bounds, lambda: iter((path,)), file.close)


def _slice(item: h5py.Dataset, start: int, stop: int) -> NDArray[Any]:
    return np.asarray(item[start:stop])


def _by_lengths(path: Path, file: h5py.File) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    for key in _FLAT_INDEX:
        if file[key].ndim != 1 or file[key].shape[0] > stored.MAX_EPISODES:
            raise DatasetError(f"{path}: {key} has shape {file[key].shape}")
    lengths, offsets = (file[key][()].astype(np.int64) for key in _FLAT_INDEX)
    if len(lengths) != len(offsets):
        raise DatasetError(f"{path}: ep_len has {len(lengths)} rows, ep_offset {len(offsets)}")
    return offsets, offsets + lengths


def _by_flags(file: h5py.File) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    last = file["terminals"][()].astype(bool).ravel()
    if "timeouts" in file:
        last = last | file["timeouts"][()].astype(bool).ravel()
    ends = np.flatnonzero(last) + 1
    if len(last) and (not len(ends) or ends[-1] != len(last)):
        ends = np.append(ends, len(last))
    return episode_bounds(ends) if len(ends) else (ends, ends)
