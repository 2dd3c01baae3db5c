"""A private copy of a ledger, for reading it without touching the original or trusting its tail.

SQLite ends a write-ahead log silently at the first frame that does not check out, which is right
after a power failure and wrong after a flipped bit: committed rounds would vanish.  So the frames
are checked here first, by the format that SQLite documents.
"""

import shutil
import struct
from pathlib import Path

from lensemble import files
from lensemble.errors import StorageError

WAL_SUFFIX = "-wal"
COPY_ATTEMPTS = 5
MAX_WAL_BYTES = 1 << 30
_HEADER = struct.Struct(">8I")
_FRAME = struct.Struct(">6I")
_MAGIC = 0x377F0682
_WORD = 0xFFFFFFFF


def copy_ledger(path: Path, into: Path) -> tuple[Path, list[str], list[str]]:
    """Copy the ledger at ``path``, and its log, into the directory ``into``.

    A running coordinator may write meanwhile: then the copy is made again.  Returns the copy, what
    is wrong with the log, and what is only worth a note.

    Raises:
        StorageError: missing, unreadable, or never at rest.
    """
    wal = path.with_name(path.name + WAL_SUFFIX)
    copy = into / path.name
    for _ in range(COPY_ATTEMPTS):
        before = _state(path), _state(wal)
        with files.storage(path):
            shutil.copyfile(path, copy)
            log = files.read_limited(wal, MAX_WAL_BYTES) if wal.exists() else b""
        if before == (_state(path), _state(wal)):
            break
    else:
        raise StorageError(f"{path} is written to all the time", "Verify a copy of the directory.")
    copy.with_name(copy.name + WAL_SUFFIX).write_bytes(log)
    problems, notes = check_wal(log)
    return copy, problems, notes


def _state(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_size, found.st_mtime_ns


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
