"""The runs of this coordinator on disk: one small file each, replaced as one step.

A run epoch is written before any node hears of it, so that none comes twice, also not after the
coordinator was killed.
"""

from pathlib import Path

import msgspec

from lensemble import files
from lensemble.ctl.replies import ModelRunStatus
from lensemble.errors import StorageError
from lensemble.ids import NodeId
from lensemble.logs import logger

MAX_ROW_BYTES = 1 << 22
MAX_OVER = 64
"""Runs that are over and can still be inspected."""


class Wish(msgspec.Struct, frozen=True):
    """What is to be run; ``ctx`` 0 takes what the model was trained for, up to 2048.

    ``replaces``: a stage that is lost is replaced, ``most`` times at most.
    """

    model: str
    ctx: int = 0
    sessions: int = 1
    rows: int = 32
    split: str = ""
    fetch: str = "edge"
    replaces: bool = False
    most: int = 3


class RunRow(msgspec.Struct, frozen=True):
    """One run: what was asked for, its latest plan, and the last that is known of it.

    ``nodes`` are those of the plan of ``epoch``; ``dropped`` are left out of further plans.
    ``ending`` is why an operator wants it to end, as soon as its requests have.
    """

    run: str
    wish: Wish
    epoch: int
    nodes: tuple[NodeId, ...]
    status: ModelRunStatus
    dropped: frozenset[NodeId] = frozenset()
    replaced: int = 0
    over: bool = False
    ending: str = ""


class RunRows:
    """Rows in ``directory``; all methods block, call them in a thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._log = logger("runs")

    def load(self) -> list[RunRow]:
        """Every row, oldest first; a file that is not sound is named in the log and passed by.

        Raises:
            StorageError: the directory cannot be read.
        """
        with files.storage(self._directory):
            if not self._directory.is_dir():
                return []
            paths = sorted(self._directory.glob("*.json"), key=_age)
        found = []
        for path in paths:
            try:
                raw = files.read_limited(path, MAX_ROW_BYTES)
                found.append(msgspec.json.decode(raw, type=RunRow))
            except (StorageError, msgspec.DecodeError) as error:
                self._log.warning("run.row_unreadable", path=str(path), reason=str(error))
        return found

    def write(self, row: RunRow) -> None:
        """Make ``row`` durable.

        Raises:
            StorageError: the disk does not take it.
        """
        with files.storage(self._directory):
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        files.write_durably(self._path(row.run), msgspec.json.encode(row))

    def forget(self, run: str) -> None:
        """Remove the row of ``run``, if there is one."""
        with files.storage(self._directory):
            self._path(run).unlink(missing_ok=True)

    def _path(self, run: str) -> Path:
        return self._directory / f"{run}.json"


def _age(path: Path) -> tuple[int, str]:
    return path.stat().st_mtime_ns, path.name
