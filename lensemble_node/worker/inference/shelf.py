"""One model's file while a stage uses it: what of it is verified, who is fetching which tensor.

A tensor is fetched by one process at a time: it holds an exclusive lock on the tensor's bytes of
the file.  Locks are of the open file description (fcntl(2), F_OFD_SETLK), so they go with the
process however it ends.
"""

import errno
import fcntl
import os
import stat
import struct
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3

from lensemble import files
from lensemble.errors import WeightsChanged, WeightsUnreachable
from lensemble.http_ranges import Stopped
from lensemble.wire.stages import TensorPart
from lensemble_node.worker.inference import journal as log
from lensemble_node.worker.inference.cache import JOURNAL, TENSORS, Pin

_FLOCK = struct.Struct("hhqqi4x")
_HELD_BY_ANOTHER = {errno.EAGAIN, errno.EACCES}


class Shelf:
    """The file of one model.

    Args:
        pin: keeps it from being pruned; closed with this.
        file_bytes: length of the model's file.
        path: the file itself where it is used in place, read only; otherwise it is the cache's.

    Raises:
        WeightsUnreachable: ``path`` cannot be read.
        WeightsChanged: ``path`` is of another length.
        WeightsDiskFull: no room for the file.
    """

    def __init__(self, pin: Pin, file_bytes: int, path: Path | None = None) -> None:
        self._pin = pin
        self._file_bytes = file_bytes
        self.in_place = path is not None
        self.path = path or pin.directory / TENSORS
        self._fd = self._open_in_place() if self.in_place else self._open_own()
        self.journal = log.Journal(pin.directory / JOURNAL)

    def is_settled(self) -> bool:
        """Whether the file is as it was when its digests were last computed."""
        return self.journal.settled == self._state()

    def settle(self) -> None:
        """Every digest that the journal has is known to be right; raises as ``write``."""
        if not self.in_place:
            with log.writing(self.path, 0):
                os.fdatasync(self._fd)
        if not self.is_settled():
            self.journal.append(self._state())
        self.journal.flush()

    def claim(self, tensor: TensorPart) -> bool:
        """Whether ``tensor`` is this process's to fetch; on the next ``release`` it is not."""
        try:
            self._lock(fcntl.F_WRLCK, tensor)
        except OSError as error:
            if error.errno in _HELD_BY_ANOTHER:
                return False
            raise
        return True

    def release(self, tensor: TensorPart) -> None:
        self._lock(fcntl.F_UNLCK, tensor)

    def write(self, piece: memoryview, offset: int) -> None:
        """Raises ``WeightsDiskFull`` or ``StorageError``."""
        with log.writing(self.path, piece.nbytes):
            files.write_all(self._fd, piece, offset)

    def mark(self, ends: dict[int, int]) -> None:
        """Make durable what was written, and that of the tensors at each offset it reaches so far.

        Raises ``WeightsDiskFull`` or ``StorageError``, and then nothing is marked.
        """
        with log.writing(self.path, 0):
            os.fdatasync(self._fd)
            self.journal.append(*(log.Mark(offset, end) for offset, end in ends.items()))
            self.journal.flush()

    def hashed(
        self, offset: int, end: int, should_stop: Callable[[], bool] = lambda: False
    ) -> blake3:
        """BLAKE3 of the bytes ``offset`` to ``end`` as they lie here, not finished.

        Raises:
            Stopped: asked to.
            StorageError: the file cannot be read.
        """
        running = blake3()
        with files.storage(self.path):
            for piece in files.read_pieces(self._fd, offset, end):
                if should_stop():
                    raise Stopped
                running.update(piece)
        return running

    def close(self) -> None:
        """Let go of the file and of every tensor claimed."""
        self.journal.close()
        os.close(self._fd)
        self._pin.close()

    def _state(self) -> log.Settled:
        with files.storage(self.path):
            found = os.fstat(self._fd)
        return log.Settled(found.st_size, found.st_mtime_ns, found.st_ino)

    def _open_in_place(self) -> int:
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise WeightsUnreachable(f"{self.path}: {error.strerror}") from error
        size = os.fstat(fd).st_size
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise WeightsUnreachable(f"{self.path} is a directory or device, not a file")
        if size != self._file_bytes:
            os.close(fd)
            raise WeightsChanged(
                f"{self.path} is not as long as the planned model, {self._file_bytes} bytes"
            )
        return fd

    def _open_own(self) -> int:
        with files.storage(self.path):
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with log.writing(self.path, self._file_bytes):
            if os.fstat(fd).st_size != self._file_bytes:
                os.ftruncate(fd, self._file_bytes)
        return fd

    def _lock(self, kind: int, tensor: TensorPart) -> None:
        wanted = _FLOCK.pack(kind, os.SEEK_SET, tensor.offset, tensor.nbytes, 0)
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, wanted)
