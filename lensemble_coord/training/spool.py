"""Updates in flight: each streams into a spool, in memory while there is room, else on disk.

A spool in memory is a ``memfd``, written and read by position and never mapped, so that it is no
part of the daemon's own resident size.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from lensemble import files
from lensemble.crash_points import reached
from lensemble.errors import ContractViolation, StorageError
from lensemble.files import PIECE_BYTES
from lensemble.ids import NodeId

MAX_SPOOLS = 4096
_SUFFIX = ".spool"


class SpoolFile:
    """One update: ``total_bytes`` of field words, written in any number of pieces without gaps.

    Positioned reads and writes may come from any thread; one writer at a time.
    """

    def __init__(
        self, spool: "Spool", participant: NodeId, total_bytes: int, fd: int, path: Path | None
    ) -> None:
        self.participant = participant
        self.total_bytes = total_bytes
        self.filled = 0
        self._spool = spool
        self._fd = fd
        self._path = path
        self._where = path or spool.directory / f"memory of {participant}"

    @property
    def updates(self) -> int:
        """One, as an addend of a sum."""
        return 1

    @property
    def in_memory(self) -> bool:
        return self._path is None

    @property
    def complete(self) -> bool:
        return self.filled == self.total_bytes

    def pwrite(self, offset: int, piece: bytes | memoryview) -> None:
        """Write ``piece`` at byte ``offset``; a piece may be written again, none left out.

        Raises:
            ContractViolation: past the end, or a gap before it.
            StorageError: no room; says how much is needed and free.
        """
        end = offset + memoryview(piece).nbytes
        if not 0 <= offset <= self.filled or end > self.total_bytes:
            raise ContractViolation(
                f"bytes {offset} to {end} of the update of {self.participant}, of which "
                f"{self.filled} of {self.total_bytes} are there"
            )
        with files.storage(self._where, self.total_bytes):
            files.write_all(self._fd, piece, offset)
        self.filled = max(self.filled, end)
        reached("spool.written")

    def read_into(self, offset: int, into: memoryview) -> None:
        """Fill ``into`` (writable bytes) from byte ``offset``."""
        with files.storage(self._where):
            files.read_exactly(self._fd, into, offset)

    def pieces(self, piece_bytes: int = PIECE_BYTES) -> Iterator[memoryview]:
        """The whole update in order; each piece is valid until the next is asked for.

        Raises:
            ContractViolation: it is not complete.
        """
        if not self.complete:
            raise ContractViolation(
                f"the update of {self.participant} has {self.filled} of {self.total_bytes} bytes"
            )
        yield from files.read_pieces(self._fd, 0, self.total_bytes, piece_bytes)

    def close(self) -> None:
        """Give its memory or its file back; does nothing the second time."""
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1
        reached("spool.closed")
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            reached("spool.removed")
        self._spool.give_back(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        self.close()


class Spool:
    """Makes spools for updates of up to ``update_bytes``.

    What a crash left in ``directory`` is removed.

    Args:
        directory: for what does not fit in memory; made if missing, owned by the spool alone.
        memory_budget_bytes: the most that all spools in memory may hold together.
        update_bytes: the size of an update whose words are all of 32 bits; none is larger.

    Raises:
        StorageError: the directory cannot be used.
    """

    def __init__(self, directory: Path, memory_budget_bytes: int, update_bytes: int) -> None:
        self.directory = directory
        self.update_bytes = update_bytes
        self._budget = memory_budget_bytes
        self._open: set[SpoolFile] = set()
        self._made = 0
        with files.storage(directory):
            files.make_directory(directory)
            for orphan in directory.glob(f"*{_SUFFIX}"):
                orphan.unlink()

    @property
    def memory_bytes(self) -> int:
        """Reserved by the open spools in memory."""
        return sum(each.total_bytes for each in tuple(self._open) if each.in_memory)

    @property
    def disk_bytes(self) -> int:
        """Reserved by the open spools on disk."""
        return sum(each.total_bytes for each in tuple(self._open) if not each.in_memory)

    def open(self, participant: NodeId, total_bytes: int) -> SpoolFile:
        """A spool for the update of ``participant``.

        Raises:
            ContractViolation: ``total_bytes`` is not the size of an update of this model.
            StorageError: no room in memory nor on disk, or too many are open.
        """
        if not 0 < total_bytes <= self.update_bytes:
            raise ContractViolation(
                f"an update of {participant} with {total_bytes} bytes; this model's have up to "
                f"{self.update_bytes}"
            )
        if len(self._open) >= MAX_SPOOLS:
            raise StorageError(f"{MAX_SPOOLS} updates are open", "Lower the number of nodes.")
        if self.memory_bytes + total_bytes <= self._budget:
            spooled = self._open_memory(participant, total_bytes)
        else:
            spooled = self._open_disk(participant, total_bytes)
        self._open.add(spooled)
        return spooled

    def give_back(self, spooled: SpoolFile) -> None:
        """Count ``spooled`` no longer; called by its ``close``."""
        self._open.discard(spooled)

    def close(self) -> None:
        """Close every open spool."""
        for spooled in tuple(self._open):
            spooled.close()

    def _open_memory(self, participant: NodeId, total_bytes: int) -> SpoolFile:
        with files.storage(self.directory, total_bytes):
            fd = os.memfd_create(f"lensemble-{participant[:12]}", os.MFD_CLOEXEC)
            try:
                os.ftruncate(fd, total_bytes)
            except OSError:
                os.close(fd)
                raise
        return SpoolFile(self, participant, total_bytes, fd, None)

    def _open_disk(self, participant: NodeId, total_bytes: int) -> SpoolFile:
        self._made += 1
        path = self.directory / f"{participant}-{self._made}{_SUFFIX}"
        with files.storage(path, total_bytes):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.posix_fallocate(fd, 0, total_bytes)
            except OSError:
                os.close(fd)
                path.unlink()
                raise
        reached("spool.opened")
        return SpoolFile(self, participant, total_bytes, fd, path)
