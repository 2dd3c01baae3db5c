"""What is known of the bytes in one model's file: a log of JSON lines, appended as they come.

A line that a crash cut short is passed over.  Lines are believed outright only while the file is
as ``Settled`` left it; otherwise whoever reads them computes the digests again.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import msgspec

from lensemble import files
from lensemble.errors import WeightsDiskFull

MAX_JOURNAL_BYTES = 64 << 20


_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Line(msgspec.Struct, frozen=True, tag=True):
    pass


class Verified(Line, frozen=True, tag=True):
    """The tensor ``name`` lies here whole; ``digest`` is the BLAKE3 of its bytes."""

    name: str
    offset: int
    nbytes: int
    digest: str


class Mark(Line, frozen=True, tag=True):
    """Of the tensor at ``offset`` the bytes before ``end`` are on the disk."""

    offset: int
    end: int


class Dropped(Line, frozen=True, tag=True):
    """What was known of the tensor at ``offset`` is void."""

    offset: int


class Settled(Line, frozen=True, tag=True):
    """The file as it was when its digests were last computed and nothing was under way."""

    file_bytes: int
    mtime_ns: int
    inode: int


class Origin(Line, frozen=True, tag=True):
    """What is here comes from the state of the source that had this etag."""

    etag: str


AnyLine: TypeAlias = Verified | Mark | Dropped | Settled | Origin
_DECODER = msgspec.json.Decoder(AnyLine)


class Journal:
    """The log at ``path``, made if absent; several processes may append to it."""

    def __init__(self, path: Path, *, write: bool = True) -> None:
        self._path = path
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT if write else os.O_RDONLY
        with files.storage(path):
            self._fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
        self._seen = 0
        self._tail = b""
        self._begun = False
        self.verified: dict[int, Verified] = {}
        """By offset."""
        self.marks: dict[int, int] = {}
        """By offset: up to where a tensor that is not verified lies here."""
        self.settled: Settled | None = None
        self.origin: str | None = None
        self.refresh()

    def refresh(self) -> None:
        """Take in what was appended since, by whomever."""
        with files.storage(self._path):
            size = min(os.fstat(self._fd).st_size, MAX_JOURNAL_BYTES)
            for piece in files.read_pieces(self._fd, self._seen, size):
                *whole, self._tail = (self._tail + bytes(piece)).split(b"\n")
                for text in whole:
                    self._take(text)
            self._seen = max(self._seen, size)

    def append(self, *lines: AnyLine) -> None:
        """Raises ``WeightsDiskFull`` or ``StorageError``; then none of ``lines`` counts."""
        text = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
        if not self._begun:
            # Ends a line that a crash may have cut short.
            text = b"\n" + text
        self._begun = False
        with writing(self._path, len(text)):
            left = memoryview(text)
            while left.nbytes:
                left = left[os.write(self._fd, left) :]
        self._begun = True
        for line in lines:
            self._apply(line)

    def flush(self) -> None:
        """Make durable what was appended; raises as ``append``."""
        with writing(self._path, 0):
            os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)

    def _take(self, text: bytes) -> None:
        if text:
            try:
                self._apply(_DECODER.decode(text))
            except msgspec.DecodeError:
                return

    def _apply(self, line: AnyLine) -> None:
        match line:
            case Verified():
                self.verified[line.offset] = line
                self.marks.pop(line.offset, None)
            case Mark():
                self.marks[line.offset] = line.end
            case Dropped():
                self.verified.pop(line.offset, None)
                self.marks.pop(line.offset, None)
            case Settled():
                self.settled = line
            case Origin():
                self.origin = line.etag


@contextmanager
def writing(path: Path, nbytes: int) -> Iterator[None]:
    """Turn refusals to write ``nbytes`` bytes to ``path`` into errors with a name.

    Raises:
        WeightsDiskFull: no room there, or over a quota.
        StorageError: anything else that the operating system says.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise WeightsDiskFull(
                f"{path}: no room for {nbytes or 'the last'} bytes, "
                f"{files.free_bytes(path)} are free"
            ) from error
        with files.storage(path, nbytes):
            raise
