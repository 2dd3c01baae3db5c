"""Episodes as they are stored, the same for every container.

An episode is a set of named columns of rows.  Keys are the same whatever the container:
``observation`` or ``observation.KEY``, ``next_observation...``, ``action`` or ``action.KEY``, else
the stored name.  What only says where an episode begins and ends is no column.
"""

import hashlib
import importlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lensemble.errors import DatasetError
from lensemble.merkle import Column, text_column

OBSERVATION, NEXT, ACTION, EMBODIMENT = "observation", "next_observation", "action", "embodiment"
MAX_EPISODES = 10_000_000
PIECE_BYTES = 1 << 20
MAX_LABEL = 64
DAMAGE = (
    EOFError,
    IndexError,
    KeyError,
    OSError,
    OverflowError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What the libraries raise on damaged structures."""

AGAIN = "The file is damaged or cut short: copy it again."


class Layout(StrEnum):
    """How episodes are laid out in their container."""

    ROBOMIMIC = "robomimic"
    MINARI = "minari"
    FLAT = "flat"
    D4RL = "d4rl"
    ZARR = "zarr"
    LEROBOT = "lerobot"


@dataclass(frozen=True)
class Kind:
    """What the rows of a column are.

    ``row_shape`` is None for a single value that an episode has once.  ``coded``: pictures stored
    encoded, whose rows come out as uint8 (height, width, channels).
    """

    dtype: np.dtype[Any]
    row_shape: tuple[int, ...] | None
    text: bool = False
    coded: bool = False

    @property
    def is_vector(self) -> bool:
        """Whether every row is a float or a vector of floats."""
        return self.dtype.kind == "f" and self.row_shape is not None and len(self.row_shape) < 2

    @property
    def is_picture(self) -> bool:
        """Whether every row is a picture: three axes, one of them of up to four channels."""
        shape = self.row_shape or ()
        whole = self.dtype == np.uint8 or self.dtype.kind == "f"
        return whole and len(shape) == 3 and (0 < shape[2] <= 4 or 0 < shape[0] <= 4)

    @property
    def width(self) -> int:
        """Numbers in a row."""
        return int(np.prod(self.row_shape or (), dtype=np.int64))


@dataclass(frozen=True)
class Stored:
    """One column of one episode."""

    kind: Kind
    rows: int


class Container(Protocol):
    """Episodes in some storage, by their position; only an index of it is held."""

    @property
    def layout(self) -> Layout: ...

    @property
    def extra_state(self) -> bool:
        """Whether observations have one row more than actions."""

    def __len__(self) -> int: ...

    def named(self, episode: int) -> str:
        """File, episode and index, as messages name them."""

    def columns(self, episode: int) -> Mapping[str, Stored]: ...

    def embodiment(self, episode: int) -> str:
        """What recorded the episode; empty where the data do not say."""

    def read(self, episode: int, key: str, start: int, stop: int) -> NDArray[Any]:
        """Rows ``start`` to ``stop`` of a column as stored; coded pictures decoded.

        Raises:
            DatasetError: they cannot be read.
        """

    def column(self, episode: int, key: str) -> Column:
        """A column as a Merkle leaf takes it.

        Raises:
            DatasetError: a dtype that is neither numeric nor text, or rows that cannot be read.
        """

    def check(self, episode: int) -> None:
        """What costs more than opening: that the index is right about this episode.

        Raises:
            DatasetError: it is not.
        """

    def files(self) -> Iterator[Path]:
        """Every file that a value may come from."""

    def close(self) -> None: ...


def optional(module: str, extra: str, why: str) -> ModuleType:
    """The module of an optional dependency.

    Raises:
        DatasetError: not installed; the message names the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.split(".", 1)[0]
        raise DatasetError(
            f"{why} needs the package {name!r}, which is not installed ({error})",
            f"Install it: pip install 'lensemble[{extra}]'.",
        ) from error


def column_of(container: Container, episode: int, key: str) -> Column:
    """A plain column of ``container``, its rows read piece by piece.

    Raises:
        DatasetError: as ``Container.column``.
    """
    stored = container.columns(episode)[key]
    kind, rows = stored.kind, stored.rows
    if kind.text:
        raw = np.atleast_1d(container.read(episode, key, 0, rows)).ravel().tolist()
        return text_column([v.decode(errors="replace") if isinstance(v, bytes) else v for v in raw])
    if kind.coded:
        raw = container.read(episode, key, 0, rows).tolist()
        return reference("image", rows, [hashlib.sha256(bytes(row)).hexdigest() for row in raw])
    if kind.dtype.kind not in "biufc":
        raise DatasetError(
            f"{container.named(episode)} column {key!r} has the dtype {kind.dtype}, which a "
            "commitment cannot cover",
            "Store it as numbers or text, or leave it out.",
        )
    shape = () if kind.row_shape is None else (rows, *kind.row_shape)
    size = rows * kind.width * kind.dtype.itemsize
    return Column(kind.dtype.newbyteorder("<").name, shape, _pieces(container, episode, key), size)


def _pieces(container: Container, episode: int, key: str) -> Iterator[bytes]:
    stored = container.columns(episode)[key]
    stride = max(1, PIECE_BYTES // max(1, stored.kind.width * stored.kind.dtype.itemsize))
    little = stored.kind.dtype.newbyteorder("<")
    for start in range(0, stored.rows, stride):
        rows = container.read(episode, key, start, min(stored.rows, start + stride))
        yield np.ascontiguousarray(rows, dtype=little).tobytes()


def reference(dtype: str, rows: int, parts: list[str]) -> Column:
    """A column that stands for files or pictures by their digests, or a file and a time in it."""
    data = json.dumps(parts, separators=(",", ":")).encode()
    return Column(dtype, (rows,), (data,), len(data))


def label(raw: object) -> str:
    """An embodiment as configurations name it: lower case, of letters, digits and ``._-``."""
    text = raw.decode(errors="replace") if isinstance(raw, bytes) else str(raw or "")
    plain = (c if (c.isalnum() and c.isascii()) or c in "._-" else "-" for c in text.lower())
    return "".join(plain)[:MAX_LABEL]


def canonical(key: str) -> str:
    """The key of a column stored under ``obs/...``, ``observations/...``, ``actions`` and so on."""
    head, _, tail = key.partition("/")
    names = {
        "obs": OBSERVATION,
        "observations": OBSERVATION,
        "next_obs": NEXT,
        "next_observations": NEXT,
        "actions": ACTION,
    }
    return ".".join([names.get(head, head), *([tail.replace("/", ".")] if tail else [])])
