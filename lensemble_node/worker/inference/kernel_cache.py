"""The engine's file of compiled kernels: only ever a saving, so a bad one is thrown away."""

import sqlite3
from contextlib import closing
from pathlib import Path

from lensemble import files

MAX_BYTES = 256 << 20
"""Each context length and model adds kernels; at this size it begins anew."""

_BESIDE = ("", "-wal", "-shm")


def make_usable(path: Path) -> bool:
    """Remove the file at ``path`` if it is damaged or too big; whether it was removed.

    A worker that has it open goes on with what it opened.

    Raises:
        StorageError: the file system refuses.
    """
    with files.storage(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or (path.stat().st_size <= MAX_BYTES and _is_sound(path)):
            return False
        for suffix in _BESIDE:
            path.with_name(path.name + suffix).unlink(missing_ok=True)
    return True


def _is_sound(path: Path) -> bool:
    try:
        with closing(sqlite3.connect(path, timeout=60)) as database:
            return bool(database.execute("PRAGMA quick_check(1)").fetchone() == ("ok",))
    except sqlite3.OperationalError:
        # Locked or unreadable, which says nothing against it.
        return True
    except sqlite3.DatabaseError:
        return False
