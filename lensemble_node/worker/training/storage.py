"""Files of the worker: written whole or not at all."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from lensemble import files
from lensemble.crash_points import reached

PART = ".part"


def write_atomically(
    path: Path, pieces: bytes | Iterable[bytes | memoryview], *, flush: bool = True
) -> None:
    """Write ``pieces`` to ``path`` so that a crash leaves the old file or the new one.

    Without ``flush`` a loss of power may leave a new one whose bytes are not there.

    Raises:
        StorageError: the file system refuses.
    """
    with replacing(path, flush=flush) as file:
        file.writelines((pieces,) if isinstance(pieces, bytes) else pieces)


@contextmanager
def replacing(path: Path, *, flush: bool = True) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of ``path`` once all went well, or not at all.

    ``flush`` as for ``write_atomically``.

    Raises:
        StorageError: the file system refuses.
    """
    part = path.with_name(path.name + PART)
    with files.storage(path):
        try:
            with open(part, "wb", opener=_private) as file:
                yield file
                file.flush()
                reached("local.written", path)
                if flush:
                    os.fsync(file.fileno())
            reached("local.flushed", path)
            part.replace(path)
            reached("local.named", path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        files.flush_directory(path.parent)
        reached("local.listed", path)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
