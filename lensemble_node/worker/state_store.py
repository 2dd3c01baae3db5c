"""The global state on this node's disk: ``global/<digest>.f32``, a ``.part`` while it comes in.

Chunks go to the file as they arrive, so a download goes on where a crash or a lost edge ended it.
Nothing is flushed: a file is believed only after its digest was computed by this process, once.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lensemble import files
from lensemble.crash_points import reached
from lensemble.errors import CheckpointIntegrityError
from lensemble.ids import Digest
from lensemble.params import (
    PARAMETER_BYTES,
    FlatParameters,
    ParameterDigest,
    ParamLayout,
)

_PIECE_BYTES = 1 << 20


class StateStore:
    """The states of one layout under ``directory``; at most one complete and one partial stay."""

    def __init__(self, directory: Path, layout: ParamLayout) -> None:
        self._directory = directory
        self._layout = layout
        self._verified: Digest | None = None
        with files.storage(directory):
            files.make_directory(directory)

    def held_bytes(self, digest: Digest) -> int:
        """Leading bytes of the state ``digest`` that lie here; the layout's size means all of it.

        A complete file that is not what its name says is removed.

        Raises:
            StorageError: the file system refuses.
        """
        if self._verified == digest:
            return self._layout.nbytes
        complete = self._path(digest)
        with files.storage(complete):
            if complete.exists():
                if self._digest_of(complete) == digest:
                    self._settle(digest)
                    return self._layout.nbytes
                complete.unlink()
            part = self._part(digest)
            size = part.stat().st_size if part.exists() else 0
            if size > self._layout.nbytes:
                part.unlink()
                size = 0
        # Of a partial file that is whole the last word is asked for again: with it comes the
        # trailer, and what is verified then is all of the file.
        return min(size - size % PARAMETER_BYTES, self._layout.nbytes - PARAMETER_BYTES)

    def pieces(self, digest: Digest, length: int) -> Iterator[memoryview]:
        """The first ``length`` bytes of what lies here of ``digest``, in order."""
        if not length:
            return
        whole = self._verified == digest
        path = self._path(digest) if whole else self._part(digest)
        with files.storage(path):
            fd = os.open(path, os.O_RDONLY)
            try:
                yield from files.read_pieces(fd, 0, length, _PIECE_BYTES)
            finally:
                os.close(fd)

    def open_part(self, digest: Digest) -> "PartFile":
        """The partial file of ``digest``, made if absent, for writing."""
        return PartFile(self._part(digest))

    def complete(self, digest: Digest) -> None:
        """The partial file of ``digest`` is whole and its digest was verified on the way."""
        part = self._part(digest)
        with files.storage(part):
            reached("state.received")
            os.replace(part, self._path(digest))
            reached("state.named")
        self._settle(digest)
        reached("state.settled")

    def forget_part(self, digest: Digest) -> None:
        """What lies here of ``digest`` turned out to be something else."""
        with files.storage(self._directory):
            self._part(digest).unlink(missing_ok=True)

    def read(self, digest: Digest) -> FlatParameters:
        """The complete state ``digest``, mapped read-only: float32, shape ``(layout.size,)``.

        Raises:
            CheckpointIntegrityError: it is not held.
        """
        if self.held_bytes(digest) != self._layout.nbytes:
            raise CheckpointIntegrityError(f"the state {digest} is not on this node")
        with files.storage(self._path(digest)):
            mapped: FlatParameters = np.memmap(self._path(digest), dtype="<f4", mode="r")
        return mapped

    def _settle(self, digest: Digest) -> None:
        """Keep ``digest`` and nothing else that is complete or begun."""
        self._verified = digest
        for path in self._directory.iterdir():
            if path != self._path(digest):
                path.unlink(missing_ok=True)

    def _digest_of(self, path: Path) -> Digest | None:
        if path.stat().st_size != self._layout.nbytes:
            return None
        running = ParameterDigest(self._layout)
        fd = os.open(path, os.O_RDONLY)
        try:
            for piece in files.read_pieces(fd, 0, self._layout.nbytes, _PIECE_BYTES):
                running.update(piece)
        finally:
            os.close(fd)
        return running.hexdigest()

    def _path(self, digest: Digest) -> Path:
        return self._directory / f"{digest}.f32"

    def _part(self, digest: Digest) -> Path:
        return self._directory / f"{digest}.f32.part"


class PartFile:
    """A state coming in."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with files.storage(path):
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(self, piece: memoryview, offset: int) -> None:
        """Raises ``StorageError`` when the file system refuses."""
        with files.storage(self._path, piece.nbytes):
            if offset == 0:
                os.ftruncate(self._fd, 0)
            files.write_all(self._fd, piece, offset)
        reached("state.written")

    def close(self) -> None:
        os.close(self._fd)
