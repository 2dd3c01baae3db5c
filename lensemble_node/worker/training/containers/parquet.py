"""Rows of parquet files, a row group at a time, the groups used last kept decoded."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lensemble_node.worker.training.containers import stored
from lensemble_node.worker.training.containers.blocks import Blocks
from lensemble_node.worker.training.containers.stored import Kind

EXTRA = "lerobot"
MAX_OPEN_FILES = 16


class Parquet:
    """Reads columns of parquet files by row.

    Raises:
        DatasetError: pyarrow is not installed.
    """

    def __init__(self, why: str) -> None:
        self._parquet = stored.optional("pyarrow.parquet", EXTRA, why)
        self._open: OrderedDict[Path, Any] = OrderedDict()
        self._ends: dict[Path, NDArray[np.int64]] = {}
        """The row after the last of each group, of every file seen: what is held of all of them."""
        self._blocks = Blocks()
        self._pictures: tuple[tuple[Path, str, int], Any] | None = None

    def table(self, path: Path, prefixes: tuple[str, ...]) -> dict[str, list[Any]]:
        """All values of the columns of a small file that start with one of ``prefixes``."""
        file = self._parquet.ParquetFile(path)
        names = [name for name in file.schema_arrow.names if name.startswith(prefixes)]
        found: dict[str, list[Any]] = file.read(columns=names).to_pydict()
        return found

    def rows(self, path: Path) -> int:
        """Rows of a file."""
        return int(self._groups(path)[-1])

    def read(self, path: Path, name: str, kind: Kind, span: tuple[int, int]) -> NDArray[Any]:
        """Rows of column ``name`` as ``kind`` says they are; text as objects, pictures as bytes.

        Raises:
            ValueError: values of another type, missing, or of another number.
            OSError, KeyError: see ``stored.DAMAGE``.
        """
        start, stop = span
        ends = self._groups(path)
        if not 0 <= start < stop <= ends[-1]:
            raise ValueError(f"rows {start} to {stop} of {path.name}, which has {ends[-1]}")
        parts = []
        for group in range(
            int(np.searchsorted(ends, start, side="right")),
            int(np.searchsorted(ends, stop, side="left")) + 1,
        ):
            first = int(ends[group - 1]) if group else 0
            inner = slice(max(0, start - first), stop - first)
            parts.append(self._group(path, name, kind, group)[inner])
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()

    def _file(self, path: Path) -> Any:  # noqa: ANN401 - of an optional package
        if path in self._open:
            self._open.move_to_end(path)
            return self._open[path]
        file = self._parquet.ParquetFile(path)
        self._open[path] = file
        if len(self._open) > MAX_OPEN_FILES:
            self._open.popitem(last=False)[1].close()
        return file

    def _groups(self, path: Path) -> NDArray[np.int64]:
        if path not in self._ends:
            about = self._file(path).metadata
            sizes = [about.row_group(index).num_rows for index in range(about.num_row_groups)]
            self._ends[path] = np.cumsum(sizes or [0], dtype=np.int64)
        return self._ends[path]

    def _group(self, path: Path, name: str, kind: Kind, group: int) -> NDArray[Any]:
        def decode() -> NDArray[Any]:
            table = self._file(path).read_row_group(group, columns=[name])
            column = table.column(name).combine_chunks()
            return _plain(column) if kind.text or kind.coded else _numbers(column, kind)

        if not (kind.text or kind.coded):
            return self._blocks.get((path, name, group), decode)
        # Objects have no size that could be counted: the last group alone is kept.
        at = path, name, group
        if self._pictures is None or self._pictures[0] != at:
            self._pictures = at, decode()
        held: NDArray[Any] = self._pictures[1]
        return held


def _plain(column: Any) -> NDArray[Any]:  # noqa: ANN401 - of an optional package
    rows = column.to_pylist()
    made = np.empty(len(rows), dtype=object)
    for index, row in enumerate(rows):
        if row is None:
            raise ValueError(f"row {index} is missing")
        made[index] = row
    return made


def _numbers(column: Any, kind: Kind) -> NDArray[Any]:  # noqa: ANN401 - as above
    rows, values = len(column), column
    shape = kind.row_shape or ()
    for size in shape:
        values = getattr(values, "storage", values)
        if not hasattr(values.type, "value_type"):
            # A vector of one is stored as its value.
            if shape == (1,):
                break
            raise ValueError(f"rows are {values.type}, {shape} is declared")
        if values.null_count:
            raise ValueError(f"row {_row_of(values, rows)} is missing")
        sizes = np.asarray(values.value_lengths())
        if (sizes != size).any():
            at = int(np.flatnonzero(sizes != size)[0])
            raise ValueError(
                f"row {at * rows // max(1, len(sizes))} has {sizes[at]} values, {size} are declared"
            )
        values = values.flatten()
    if values.null_count:
        raise ValueError(f"row {_row_of(values, rows)} is missing a value")
    found = values.to_numpy(zero_copy_only=False)
    if found.dtype != kind.dtype:
        raise ValueError(f"rows are {found.dtype}, {kind.dtype} is declared")
    return np.asarray(found).reshape(rows, *shape)


def _row_of(values: Any, rows: int) -> int:  # noqa: ANN401 - as above
    absent = np.flatnonzero(np.asarray(values.is_null()))
    return int(absent[0]) * rows // max(1, len(values))
