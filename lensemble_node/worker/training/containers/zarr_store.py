"""zarr in the layout of diffusion policy: ``data/*`` of one row a step, ``meta/episode_ends``.

A directory or a ``.zip``, in zarr's format 2 or 3.  The last action of an episode leads nowhere.
"""

import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lensemble.errors import DatasetError
from lensemble_node.worker.training.containers import stored
from lensemble_node.worker.training.containers.blocks import CACHE_BYTES, Blocks
from lensemble_node.worker.training.containers.flat import (
    FlatContainer,
    Shared,
    episode_bounds,
    flat_key,
)
from lensemble_node.worker.training.containers.stored import Container, Kind, Layout

EXTRA = "zarr"
_MARKS = (".zgroup", "zarr.json")
_METADATA = (".zarray", ".zattrs", "zarr.json")
_BLOSC_HEADER = 16
_ONE_READ = 4
"""More chunks than this are read in one go and not kept: so does a pass over all rows."""


def is_zarr(path: Path) -> bool:
    """Whether ``path`` looks like a zarr group, by its files."""
    zipped = path.is_file() and path.suffix == ".zip"
    return zipped or any((path / name).is_file() for name in _MARKS)


def open_zarr(path: Path) -> Container:
    """The episodes in the group at ``path``.

    Raises:
        DatasetError: the package is missing, or the group is damaged or laid out otherwise.
    """
    zarr = stored.optional("zarr", EXTRA, f"{path}: a zarr group")
    store: Any = str(path)
    try:
        if path.is_file():
            store = zarr.storage.ZipStore(path, mode="r")
        root = zarr.open_group(store, mode="r")
        arrays = _arrays(root["data"])
        _check_blosc(path, {f"data/{key}": item for key, item in arrays.items()})
        _check_blosc(path, {"meta/episode_ends": root["meta/episode_ends"]})
        ends = np.asarray(root["meta/episode_ends"][:], dtype=np.int64)
        label = stored.label(root.attrs.get(stored.EMBODIMENT, ""))
        cache = Blocks()
        held = {flat_key(key): _shared(key, item, cache) for key, item in arrays.items()}
    except stored.DAMAGE as error:
        raise DatasetError(
            f"{path} is damaged, or lacks data/ or meta/episode_ends: {error}",
            "Use the layout of diffusion policy's replay buffers.",
        ) from error
    if not held:
        raise DatasetError(f"{path} has no array below data/")
    close = (lambda: None) if isinstance(store, str) else store.close
    found = _Labelled((path, Layout.ZARR), held, episode_bounds(ends), partial(_files, path), close)
    found.label = label
    return found


def _arrays(group: Any) -> dict[str, Any]:  # noqa: ANN401 - of an optional package
    with warnings.catch_warnings():
        # It warns of files that it does not know; what matters is what is read.
        warnings.simplefilter("ignore")
        members = dict(group.members(max_depth=None))
    return {key: item for key, item in members.items() if hasattr(item, "chunks")}


def _check_blosc(path: Path, arrays: dict[str, Any]) -> None:
    """That chunks compressed by Blosc are whole: it reads beyond the end of one that is not.

    A chunk in a shard or in a zip file has a checksum there.

    Raises:
        ValueError: one is of another size than its header says.
    """
    for key, item in arrays.items():
        names = [type(codec).__name__.lower() for codec in item.compressors]
        decoded = item.dtype.itemsize * int(np.prod(item.chunks, dtype=np.int64))
        if path.is_file() or item.shards or not any("blosc" in name for name in names):
            continue
        for file in (path / key).rglob("*"):
            if not file.is_file() or file.name in _METADATA:
                continue
            with file.open("rb") as chunk:
                head = chunk.read(_BLOSC_HEADER)
            size, packed = (int.from_bytes(head[at : at + 4], "little") for at in (4, 12))
            if (size, packed) != (decoded, file.stat().st_size):
                raise ValueError(
                    f"{file.relative_to(path)} has {file.stat().st_size} bytes of {packed}, for "
                    f"{size} of {decoded}"
                )


class _Labelled(FlatContainer):
    label = ""

    def embodiment(self, episode: int) -> str:
        return super().embodiment(episode) or self.label


def _shared(key: str, item: Any, cache: Blocks) -> Shared:  # noqa: ANN401 - of an optional package
    shape = tuple(int(size) for size in item.shape)
    if not shape:
        raise ValueError(f"data/{key} has no rows")
    # zarr has types of its own for text; as numpy sees them they are objects.
    text = item.dtype.kind in "OTU"
    kind = Kind(item.dtype, shape[1:], text)
    return Shared(kind, shape[0], partial(_read, key, item, cache))


def _read(key: str, item: Any, cache: Blocks, start: int, stop: int) -> NDArray[Any]:  # noqa: ANN401
    """Rows of an array; whole chunks are decoded, and the last ones used are kept."""
    chunk = int(item.chunks[0])
    row_bytes = item.dtype.itemsize * int(np.prod(item.shape[1:], dtype=np.int64))
    large = chunk * row_bytes > CACHE_BYTES // 4
    if item.dtype.kind in "OTU" or large or stop - start > _ONE_READ * chunk:
        return _block(item, start, stop)
    parts = []
    for number in range(start // chunk, -(-stop // chunk)):
        first = number * chunk
        block = cache.get((key, number), partial(_block, item, first, first + chunk))
        parts.append(block[max(0, start - first) : stop - first])
    return np.concatenate(parts) if parts else _block(item, start, stop)


def _block(item: Any, start: int, stop: int) -> NDArray[Any]:  # noqa: ANN401 - as above
    return np.asarray(item[start:stop])


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    else:
        yield from (file for file in sorted(path.rglob("*")) if file.is_file())
