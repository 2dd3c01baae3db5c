"""Which container a path holds, found out from what is in it, not from its name."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lensemble.errors import DatasetError
from lensemble.merkle import Column
from lensemble_node.worker.training.containers import stored
from lensemble_node.worker.training.containers.hdf5 import open_hdf5
from lensemble_node.worker.training.containers.lerobot import LeRobot, is_lerobot
from lensemble_node.worker.training.containers.stored import Container, Layout, Stored
from lensemble_node.worker.training.containers.zarr_store import is_zarr, open_zarr

AUTO = "auto"
FORMATS = (AUTO, *Layout)
MAX_FILES = 256
"""HDF5 files of one directory; all of them are open at once."""

_MINARI = Path("data/main_data.hdf5")
_SUFFIXES = (".h5", ".hdf5")


def open_container(path: Path, wanted: str = AUTO) -> Container:
    """The episodes at ``path``: a file, a directory of one data set, or one of HDF5 files.

    Args:
        path: what to open.
        wanted: a layout, or ``auto``.

    Raises:
        DatasetError: nothing there, nothing known, another layout than ``wanted``, or damaged.
    """
    if wanted not in FORMATS:
        raise DatasetError(
            f"{wanted!r} is no format of a data set", f"Choose one of {', '.join(FORMATS)}."
        )
    if not path.exists():
        raise DatasetError(f"dataset {path} does not exist", "Correct `path` of the dataset.")
    layout = None if wanted == AUTO else Layout(wanted)
    for found, recognised, opened in _OWN_MARKS:
        if layout in (None, found) and recognised(path):
            return opened(path)
    if layout in (Layout.LEROBOT, Layout.ZARR):
        raise DatasetError(f"{path} is no data set in the layout {layout}")
    if path.is_file():
        return open_hdf5(path, layout)
    return _directory(path, layout)


def _directory(path: Path, layout: Layout | None) -> Container:
    if (path / _MINARI).is_file():
        return open_hdf5(path / _MINARI, layout)
    files = sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES)
    if not 1 <= len(files) <= MAX_FILES:
        raise DatasetError(
            f"{path} is no LeRobot, Minari or zarr data set, and holds {len(files)} HDF5 files",
            f"Name a data set, or a directory of 1 to {MAX_FILES} HDF5 files.",
        )
    return _joined(path, files, layout)


_OWN_MARKS: tuple[tuple[Layout, Callable[[Path], bool], Callable[[Path], Container]], ...] = (
    (Layout.LEROBOT, is_lerobot, LeRobot),
    (Layout.ZARR, is_zarr, open_zarr),
)


class Chosen:
    """Some episodes of one or more containers, in the order given."""

    def __init__(self, parts: Sequence[Container], places: Sequence[tuple[int, int]]) -> None:
        self._parts = parts
        self._places: NDArray[np.int64] = np.array(places, dtype=np.int64).reshape(-1, 2)
        self.layout, self.extra_state = parts[0].layout, parts[0].extra_state

    def _at(self, episode: int) -> tuple[Container, int]:
        part, inner = self._places[episode]
        return self._parts[int(part)], int(inner)

    def __len__(self) -> int:
        return len(self._places)

    def named(self, episode: int) -> str:
        part, inner = self._at(episode)
        return part.named(inner)

    def columns(self, episode: int) -> Mapping[str, Stored]:
        part, inner = self._at(episode)
        return part.columns(inner)

    def embodiment(self, episode: int) -> str:
        part, inner = self._at(episode)
        return part.embodiment(inner)

    def read(self, episode: int, key: str, start: int, stop: int) -> NDArray[Any]:
        part, inner = self._at(episode)
        return part.read(inner, key, start, stop)

    def column(self, episode: int, key: str) -> Column:
        part, inner = self._at(episode)
        return part.column(inner, key)

    def check(self, episode: int) -> None:
        part, inner = self._at(episode)
        part.check(inner)

    def files(self) -> Iterator[Path]:
        for part in self._parts:
            yield from part.files()

    def close(self) -> None:
        for part in self._parts:
            part.close()


def _joined(path: Path, files: list[Path], layout: Layout | None) -> Container:
    parts: list[Container] = []
    try:
        parts.extend(open_hdf5(file, layout) for file in files)
        _check_alike(path, files, parts)
    except DatasetError:
        for part in parts:
            part.close()
        raise
    places = [(which, inner) for which, part in enumerate(parts) for inner in range(len(part))]
    return Chosen(parts, places)


def _check_alike(path: Path, files: list[Path], parts: list[Container]) -> None:
    for file, part in zip(files, parts, strict=True):
        if part.layout is not parts[0].layout:
            raise DatasetError(
                f"{path}: {file.name} has the layout {part.layout}, {files[0].name} "
                f"{parts[0].layout}",
                "Keep data of one layout in one directory.",
            )


def of_embodiment(container: Container, path: Path, wanted: str) -> tuple[Container, str]:
    """The episodes of one embodiment, and its name.

    Data that do not name any are of the one that is ``wanted``.

    Raises:
        DatasetError: there are several and none is wanted, or the one wanted is not there.
    """
    labels = [container.embodiment(episode) for episode in range(len(container))]
    known = sorted(set(labels))
    if known == [""]:
        return container, wanted
    named = stored.label(wanted)
    if named and named not in known:
        raise DatasetError(
            f"{path} holds no episode of the embodiment {named!r}; it holds {_listed(known)}",
            "Name one of them in `embodiment` of the dataset.",
        )
    if not named and len(known) > 1:
        raise DatasetError(
            f"{path} holds episodes of several embodiments, {_listed(known)}, and a node trains "
            "the actions of one",
            "Name it in `embodiment` of the dataset.",
        )
    named = named or known[0]
    if len(known) == 1:
        return container, named
    places = [(0, index) for index, label in enumerate(labels) if label == named]
    return Chosen([container], places), named


def _listed(labels: list[str]) -> str:
    return ", ".join(repr(label) if label else "some without a name" for label in labels)
