"""The Merkle root of a data set, and the note that spares computing it again."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import msgspec

from lensemble import merkle
from lensemble.errors import DatasetError
from lensemble.merkle import Column, DatasetFacts
from lensemble_node.worker.training.containers.stored import EMBODIMENT, Container
from lensemble_node.worker.training.storage import write_atomically

CACHE_NAME = "dataset.json"


def leaf(container: Container, episode: int, embodiment: str = "") -> bytes:
    """The 32-byte leaf of an episode: of every stored column, used or not.

    An embodiment that is stored beside the columns counts as one.

    Raises:
        DatasetError: a column that cannot be read or covered.
    """
    keys = container.columns(episode)
    columns: dict[str, Column] = {key: container.column(episode, key) for key in keys}
    if embodiment and EMBODIMENT not in columns:
        columns[EMBODIMENT] = merkle.text_column([embodiment])
    return merkle.leaf(columns)


def identity(files: Iterator[Path], about: list[str]) -> str:
    """SHA-256 over path, size, time of change and inode of every file, and over ``about``.

    Raises:
        DatasetError: a file that is not there any more.
    """
    running = hashlib.sha256(json.dumps(about).encode())
    for path in files:
        try:
            found = path.stat()
        except OSError as error:
            raise DatasetError(f"{path} cannot be read: {error.strerror}") from error
        line = [str(path.resolve()), found.st_size, found.st_mtime_ns, found.st_ino]
        running.update(json.dumps(line).encode())
    return running.hexdigest()


def recall(cache: Path, files: str) -> DatasetFacts | None:
    """What is noted at ``cache``, if it is about the data of identity ``files``."""
    try:
        entry = json.loads(cache.read_bytes())
        if entry["identity"] == files:
            return msgspec.convert(entry["facts"], DatasetFacts)
    except (OSError, ValueError, KeyError, TypeError, msgspec.ValidationError):
        # A note that cannot be read is none.
        return None
    return None


def note(cache: Path, files: str, facts: DatasetFacts) -> None:
    """Leave ``facts`` at ``cache``.

    Raises:
        StorageError: the file system refuses.
    """
    entry = {"identity": files, "facts": msgspec.to_builtins(facts)}
    write_atomically(cache, json.dumps(entry).encode())
