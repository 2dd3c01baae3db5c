"""Files that survive a crash: written aside, flushed, renamed, and their directory flushed."""

import errno
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lensemble.crash_points import reached
from lensemble.errors import OutOfMemory, StorageError

PIECE_BYTES = 1 << 20
PART_PREFIX = ".part-"
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_DESCRIPTOR = {errno.EMFILE, errno.ENFILE}


@contextmanager
def storage(path: Path, need: int = 0) -> Iterator[None]:
    """Turn the operating system's refusals about ``path`` into ``StorageError``.

    ``need`` is the number of bytes the block wants to write, for the message.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise StorageError(
                f"{path}: no room for {need} bytes, {free_bytes(path)} are free",
                "Free space on that file system, or keep fewer rounds.",
            ) from error
        if error.errno == errno.ENOMEM:
            raise OutOfMemory(f"{path}: no memory for {need or 'all of its'} bytes") from error
        if error.errno in _NO_DESCRIPTOR:
            raise StorageError(
                f"{path}: {os.strerror(error.errno)}",
                "Raise the limit of open files (LimitNOFILE= of the unit, `ulimit -n`).",
            ) from error
        raise StorageError(
            f"{path}: {os.strerror(error.errno or 0)}",
            "Give the daemon's user a state directory that it can read and write.",
        ) from error


def free_bytes(path: Path) -> int:
    """Bytes that are free on the file system of ``path``, which need not exist; 0 if unknown."""
    for place in (path, *path.parents):
        if place.is_dir():
            return shutil.disk_usage(place).free
    return 0


def make_directory(path: Path, mode: int = 0o700) -> None:
    """Make ``path`` and what is missing above it, each durable; does nothing to what exists."""
    if path.is_dir():
        return
    make_directory(path.parent, mode)
    path.mkdir(mode=mode, exist_ok=True)
    flush_directory(path.parent)


def flush_directory(path: Path) -> None:
    """Make the names in directory ``path`` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, piece: bytes | memoryview, offset: int) -> None:
    """Write the whole of ``piece`` (contiguous bytes) at ``offset``."""
    left = memoryview(piece)
    while left.nbytes:
        done = os.pwrite(fd, left, offset)
        left, offset = left[done:], offset + done


def read_exactly(fd: int, into: memoryview, offset: int) -> None:
    """Fill ``into`` (writable bytes) from ``offset``.

    Raises:
        StorageError: the file ends before.
    """
    while into.nbytes:
        done = os.preadv(fd, [into], offset)
        if done == 0:
            raise StorageError(f"a file ends at byte {offset}, {into.nbytes} bytes early")
        into, offset = into[done:], offset + done


def read_pieces(
    fd: int, start: int, stop: int, piece_bytes: int = PIECE_BYTES, kept: int = 1
) -> Iterator[memoryview]:
    """The bytes ``start`` to ``stop`` in order; each is valid until the ``kept``-th after it.

    Reads, never maps, so that the resident size of the process does not follow the file's.
    """
    size = min(piece_bytes, max(stop - start, 0))
    rooms = itertools.cycle([memoryview(bytearray(size)) for _ in range(kept)])
    for offset in range(start, stop, piece_bytes):
        piece = next(rooms)[: min(piece_bytes, stop - offset)]
        read_exactly(fd, piece, offset)
        yield piece


def write_durably(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Replace ``path`` by ``content`` as one step: after a crash it is the old file or the new.

    Raises:
        StorageError: the file system refuses.
    """
    with storage(path, len(content)):
        fd, part = tempfile.mkstemp(prefix=PART_PREFIX, dir=path.parent)
        try:
            os.fchmod(fd, mode)
            write_all(fd, content, 0)
            reached("file.written", path)
            os.fsync(fd)
            reached("file.flushed", path)
            os.replace(part, path)
            reached("file.named", path)
        except BaseException:
            os.unlink(part)
            raise
        finally:
            os.close(fd)
        flush_directory(path.parent)
        reached("file.listed", path)


def read_limited(path: Path, limit: int) -> bytes:
    """The content of ``path``, of at most ``limit`` bytes.

    Raises:
        StorageError: missing, unreadable, or larger.
    """
    with storage(path), path.open("rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise StorageError(f"{path} is larger than {limit} bytes", "Restore the file from a copy.")
    return content
