"""The weights that lie on this node: one directory per model, named by its digest.

``tensors`` is as long as the model's own file and has each tensor at its true offset; what was
never fetched is a hole and takes no room.  So one mapping serves the engine, and stages of the same
model share what they hold, whichever layers they compute.  Beside it lie ``journal`` (what is
verified), ``about.json`` and ``lock``: whoever uses a model holds a shared lock on it, and only
what nobody holds is pruned.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
from blake3 import blake3

from lensemble import files
from lensemble.errors import WeightsCacheFull, WeightsDiskFull
from lensemble.wire.stages import TensorPart
from lensemble_node.worker.inference.journal import Journal

LOCK, JOURNAL, TENSORS, ABOUT = "lock", "journal", "tensors", "about.json"
MAX_ABOUT_BYTES = 1 << 14
MAX_MODELS = 4096
_DYING = ".pruned-"
_BLOCK_BYTES = 512
_SPARE_BYTES = 1 << 20
"""Left on the file system for journals."""


class About(msgspec.Struct, frozen=True):
    """For people: where a model came from.  ``path`` is set when it is used where it lies."""

    name: str
    manifest_digest: str
    file_bytes: int
    source: str
    path: str = ""


class Held(msgspec.Struct, frozen=True):
    """One model of the cache."""

    identity: str
    about: About
    tensors: int
    """Verified ones."""

    tensor_bytes: int
    disk_bytes: int
    used_s: float
    """Of the last use, seconds since the epoch."""

    in_use: bool


class Pin:
    """A model that is not pruned while this is open."""

    def __init__(self, directory: Path, fd: int) -> None:
        self.directory = directory
        self._fd = fd

    def close(self) -> None:
        os.close(self._fd)


class Cache:
    """Models below ``directory``, of at most ``limit_bytes`` on the disk; 0: no limit."""

    def __init__(self, directory: Path, limit_bytes: int = 0) -> None:
        self.directory = directory
        self._limit_bytes = limit_bytes

    def pin(self, identity: str, about: About) -> Pin:
        """The model's directory, made if absent, held against pruning.

        Raises:
            StorageError: the file system refuses.
        """
        place = self.directory / identity
        with files.storage(place):
            while True:
                place.mkdir(mode=0o700, parents=True, exist_ok=True)
                fd = os.open(place / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                fcntl.flock(fd, fcntl.LOCK_SH)
                if _is_still(fd, place / LOCK):
                    break
                os.close(fd)
            os.utime(fd)
        if not (place / ABOUT).exists():
            files.write_durably(place / ABOUT, msgspec.json.encode(about))
        return Pin(place, fd)

    def held(self) -> list[Held]:
        """Every model, the longest unused first."""
        found = [held for place in self._places() if (held := self._look(place)) is not None]
        return sorted(found, key=lambda each: each.used_s)

    def make_room(self, need_bytes: int) -> None:
        """See to it that so many bytes may be fetched; unused models go, the oldest first.

        Raises:
            WeightsCacheFull: what is in use leaves too little of the limit.
            WeightsDiskFull: the file system has too little.
        """
        if self._limit_bytes:
            over = self._used_bytes() + need_bytes - self._limit_bytes
            if over > 0:
                over -= self.prune(over)
            if over > 0:
                raise WeightsCacheFull(
                    f"{self.directory} may hold {self._limit_bytes} bytes; the stage needs "
                    f"{need_bytes} more, {over} too many"
                )
        free = files.free_bytes(self.directory)
        if free < need_bytes + _SPARE_BYTES:
            raise WeightsDiskFull(
                f"{self.directory}: the stage needs {need_bytes} bytes more, {free} are free"
            )

    def prune(self, want_bytes: int | None = None, identity: str | None = None) -> int:
        """Remove models that nobody uses, until ``want_bytes`` are freed; all without it.

        Returns:
            How many bytes were freed.
        """
        freed = 0
        for model in self.held():
            if want_bytes is not None and freed >= want_bytes:
                break
            if identity in {None, model.identity} and self._remove(self.directory / model.identity):
                freed += model.disk_bytes
        return freed

    def _used_bytes(self) -> int:
        return sum(_disk_bytes(place) for place in self._places())

    def _places(self) -> Iterator[Path]:
        """Directories of models; what a prune left behind is removed on the way."""
        if not self.directory.is_dir():
            return
        with files.storage(self.directory):
            for place in sorted(self.directory.iterdir())[:MAX_MODELS]:
                if place.name.startswith(_DYING):
                    shutil.rmtree(place, ignore_errors=True)
                elif (place / LOCK).is_file():
                    yield place

    def _look(self, place: Path) -> Held | None:
        """None if it is being pruned."""
        opened = _looked_at(place / LOCK)
        if opened is None:
            return None
        fd, in_use = opened
        try:
            verified: list[int] = []
            if (place / JOURNAL).exists():
                journal = Journal(place / JOURNAL, write=False)
                verified = [line.nbytes for line in journal.verified.values()]
                journal.close()
            return Held(
                place.name,
                about_of(place),
                len(verified),
                sum(verified),
                _disk_bytes(place),
                os.fstat(fd).st_mtime,
                in_use,
            )
        finally:
            os.close(fd)

    def _remove(self, place: Path) -> bool:
        """Whether it was there and nobody used it."""
        with files.storage(place):
            try:
                fd = os.open(place / LOCK, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                return False
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                dying = self.directory / f"{_DYING}{place.name}"
                shutil.rmtree(dying, ignore_errors=True)
                place.rename(dying)
            except BlockingIOError:
                return False
            finally:
                os.close(fd)
            shutil.rmtree(dying, ignore_errors=True)
        return True


def identity_of(
    manifest_digest: str, tensors: tuple[TensorPart, ...], source: str, place: str
) -> str:
    """The directory's name: of the model, and of its source where bytes have no digest.

    Two models may have the same header; only digests of their tensors tell them apart.  A file that
    is used where it lies has a journal of its own.
    """
    if source != "path" and all(tensor.digest is not None for tensor in tensors):
        return manifest_digest
    running = blake3(b"lensemble/cache/v1")
    for part in (manifest_digest, source, place):
        running.update(b"\x00" + part.encode(errors="surrogateescape"))
    return running.hexdigest()


def _is_still(fd: int, path: Path) -> bool:
    """Whether ``path`` names the open file ``fd``: a prune may have moved it away."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _looked_at(lock: Path) -> tuple[int, bool] | None:
    """A descriptor that keeps ``lock``'s directory there, and whether others do so too."""
    try:
        fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    in_use = False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        in_use = True
    fcntl.flock(fd, fcntl.LOCK_SH)
    if _is_still(fd, lock):
        return fd, in_use
    os.close(fd)
    return None


def about_of(place: Path) -> About:
    """What ``about.json`` of a model's directory says."""
    if not (place / ABOUT).exists():
        return About("unknown", "", 0, "unknown")
    try:
        return msgspec.json.decode(files.read_limited(place / ABOUT, MAX_ABOUT_BYTES), type=About)
    except msgspec.DecodeError:
        return About("damaged", "", 0, "unknown")


def _disk_bytes(place: Path) -> int:
    """What ``place`` takes of the disk; holes take nothing."""
    found = 0
    for name in (TENSORS, JOURNAL, ABOUT, LOCK):
        try:
            found += (place / name).stat().st_blocks * _BLOCK_BYTES
        except FileNotFoundError:
            continue
    return found
