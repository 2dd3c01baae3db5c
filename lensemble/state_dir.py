"""A daemon's state directory: made private, and held by one process at a time."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lensemble import files
from lensemble.crash_points import reached
from lensemble.errors import StorageError

GROUP = "lensemble"
"""Whoever belongs to it may ask the daemons of the system."""
LOCK_NAME = "lock"
CHARGES = ("privacy/ledger.jsonl", "local/privacy.jsonl")
"""A node's privacy charges, twice: removing one directory loses nothing."""
IDENTITY_NAME = "identity.key"
MAX_PID_BYTES = 32
STRAYS = (files.PART_PREFIX, f".{IDENTITY_NAME}.")


@contextmanager
def held(path: Path) -> Iterator[Path]:
    """Make ``path`` if it is missing and keep every other daemon out of it.

    What a crash left half-written in it, copies of a key among that, is removed.

    The lock is the kernel's and dies with the process, so nothing has to be cleaned after a kill.

    Raises:
        StorageError: another process holds it (named by its pid), or it cannot be written.
    """
    with files.storage(path):
        files.make_directory(path)
        fd = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _take(fd, path)
        _remove_strays(path)
        yield path
    finally:
        os.close(fd)


def _take(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(fd, MAX_PID_BYTES, 0).decode("ascii", "replace").strip() or "unknown"
        raise StorageError(
            f"{path} is in use by the process with pid {holder}",
            "Stop that daemon, or give this one a state_dir of its own.",
        ) from error
    with files.storage(path):
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    reached("lock.taken")


def _remove_strays(path: Path) -> None:
    """Remove files that were written aside and never got their name."""
    with files.storage(path):
        for entry in path.iterdir():
            if entry.name.startswith(STRAYS) and entry.is_file():
                entry.unlink(missing_ok=True)
