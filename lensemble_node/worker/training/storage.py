"""Files of the worker: written whole or not at all."""

import os
from collections.abc import Iterable
from pathlib import Path

PART = ".part"


def write_atomically(path: Path, pieces: bytes | Iterable[bytes | memoryview]) -> None:
    """Write ``pieces`` to ``path`` so that a crash leaves the old file or the new one."""
    part = path.with_name(path.name + PART)
    with part.open("wb") as file:
        for piece in (pieces,) if isinstance(pieces, bytes) else pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make renames and removals within ``path`` durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
