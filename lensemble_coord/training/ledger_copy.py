"""A private copy of a ledger, for reading it without touching the original or trusting its tail.

SQLite ends a write-ahead log silently at the first frame that does not check out, which is right
after a power failure and wrong after a flipped bit: committed rounds would vanish.  So the frames
are checked here first, by the format that SQLite documents.
"""

import os
import shutil
import struct
from pathlib import Path
from typing import NamedTuple, TypeAlias

from lensemble import files
from lensemble.errors import StorageError

WAL_SUFFIX = "-wal"
COPY_ATTEMPTS = 5
MAX_WAL_BYTES = 1 << 30
State: TypeAlias = tuple[tuple[int, int], ...]
_HEADER = struct.Struct(">8I")
_FRAME = struct.Struct(">6I")
_MAGIC = 0x377F0682
_WORD = 0xFFFFFFFF


class Copied(NamedTuple):
    """A copy of the ledger as it was in ``state``, and what its log is like."""

    path: Path
    state: State
    problems: list[str]
    notes: list[str]


def copy_ledger(path: Path, into: Path) -> Copied:
    """Copy the ledger at ``path``, and its log, into the directory ``into``.

    A running coordinator may write meanwhile: then the copy is made again.

    Raises:
        StorageError: missing, unreadable, or never at rest.
    """
    wal = path.with_name(path.name + WAL_SUFFIX)
    copy = into / path.name
    for _ in range(COPY_ATTEMPTS):
        state = state_of(path)
        with files.storage(path):
            shutil.copyfile(path, copy)
            log = files.read_limited(wal, MAX_WAL_BYTES) if wal.exists() else b""
        if state == state_of(path):
            copy.with_name(copy.name + WAL_SUFFIX).write_bytes(log)
            return Copied(copy, state, *check_wal(log))
    raise StorageError(f"{path} is written to all the time", "Verify a copy of the directory.")


def state_of(path: Path) -> State:
    """Sizes and times of the ledger at ``path`` and of its log; changes with every write."""
    return tuple(
        (found.st_size, found.st_mtime_ns)
        for found in map(_stat, (path, path.with_name(path.name + WAL_SUFFIX)))
        if found is not None
    )


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def check_wal(log: bytes) -> tuple[list[str], list[str]]:
    """Problems and notes about the bytes of a write-ahead log; none of either for an empty one.

    The ledger truncates its log at every checkpoint, so no frame of an older log remains in it.
    """
    if not log:
        return [], []
    if len(log) < _HEADER.size:
        return [], [f"{len(log)} bytes of a log that was never begun"]
    magic, _, page, _, salt, other_salt, *seal = _HEADER.unpack_from(log)
    if magic not in {_MAGIC, _MAGIC | 1}:
        return ["its header is not one of a log"], []
    order = ">" if magic & 1 else "<"
    sums = _checksum(log[: _HEADER.size - 8], order, (0, 0))
    if list(sums) != seal:
        return ["its header does not have its checksum"], []
    step = _FRAME.size + page
    for number, at in enumerate(range(_HEADER.size, len(log), step), 1):
        if at + step > len(log):
            return [], [f"an unfinished write after frame {number - 1}"]
        _, _, first, second, *seal = _FRAME.unpack_from(log, at)
        body = log[at : at + 8] + log[at + _FRAME.size : at + step]
        sums = _checksum(body, order, sums)
        if (first, second) != (salt, other_salt) or list(sums) != seal:
            return [f"frame {number} of page {page} bytes does not have its checksum"], []
    return [], []


def _checksum(content: bytes, order: str, start: tuple[int, int]) -> tuple[int, int]:
    low, high = start
    words = struct.unpack(f"{order}{len(content) // 4}I", content)
    for first, second in zip(words[::2], words[1::2], strict=True):
        low = (low + first + high) & _WORD
        high = (high + second + low) & _WORD
    return low, high
