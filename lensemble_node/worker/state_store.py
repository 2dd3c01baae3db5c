"""The global state on this node's disk, and the outer momentum from which the next step starts.

::

    global/<digest>.f32            parameters
    global/<digest>.momentum.f32   the outer momentum beside them
    global/<...>.part              either of them while it comes in, or is computed
    global/<digest>.sum.part       the revealed sum of a round while it comes in

Chunks go to the file as they arrive, so a download goes on where a crash or a lost edge ended it.
Nothing is flushed: a file is believed only after its digest was computed by this process, once.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

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
    Shape,
)

_PIECE_BYTES = 1 << 20
_PART = ".part"

Kind: TypeAlias = Literal["state", "momentum", "sum"]
_SUFFIXES: dict[Kind, str] = {"state": ".f32", "momentum": ".momentum.f32", "sum": ".sum"}


class Goal(NamedTuple):
    """What a round starts from; without ``momentum`` it is nought, or not needed."""

    state: Digest
    momentum: Digest | None = None


class Item(NamedTuple):
    """One file of the store, and what its digest covers besides its bytes."""

    kind: Kind
    digest: Digest
    shape: Shape

    @property
    def name(self) -> str:
        return self.digest + _SUFFIXES[self.kind]


class StateStore:
    """What a node holds of one layout under ``directory``; at most one goal and one partial stay.

    While a step is taken, that from which it starts stays beside what it comes to.
    """

    def __init__(self, directory: Path, layout: ParamLayout) -> None:
        self._directory = directory
        self._layout = layout
        self._verified: set[str] = set()
        with files.storage(directory):
            files.make_directory(directory)

    # ---- what is held ----

    def items(self, goal: Goal) -> tuple[Item, ...]:
        """The files that make up ``goal``, in the order in which they come."""
        state = Item("state", goal.state, self._layout)
        if goal.momentum is None:
            return (state,)
        return state, Item("momentum", goal.momentum, self._layout)

    def goal_bytes(self, goal: Goal) -> int:
        """Size of all of ``goal``."""
        return sum(item.shape.nbytes for item in self.items(goal))

    def holds(self, goal: Goal) -> bool:
        """Whether all of ``goal`` lies here, verified.

        Raises:
            StorageError: the file system refuses.
        """
        return all(self.whole(item) for item in self.items(goal))

    def held_of(self, goal: Goal) -> int:
        """Leading bytes of ``goal`` that lie here: of its parameters, then of its momentum.

        Raises:
            StorageError: the file system refuses.
        """
        held = 0
        for item in self.items(goal):
            held += self.held_bytes(item)
            if not self.whole(item):
                break
        return held

    def whole(self, item: Item) -> bool:
        """Whether ``item`` is complete; a complete file that is not what it is named is removed.

        Raises:
            StorageError: the file system refuses.
        """
        if item.name in self._verified:
            return True
        path = self._path(item)
        with files.storage(path):
            if not path.exists():
                return False
            if self._digest_of(path, item.shape) != item.digest:
                path.unlink()
                return False
        self._verified.add(item.name)
        return True

    def doubt(self, goal: Goal) -> None:
        """Believe the files of ``goal`` no more than those of another process."""
        self._verified -= {item.name for item in self.items(goal)}

    def held_bytes(self, item: Item) -> int:
        """Leading bytes of ``item`` that lie here, a multiple of four; its size means all of it.

        Raises:
            StorageError: the file system refuses.
        """
        size = item.shape.nbytes
        if self.whole(item):
            return size
        part = self._part(item)
        with files.storage(part):
            held = part.stat().st_size if part.exists() else 0
            if held > size:
                part.unlink()
                held = 0
        # Of a partial file that is whole the last word is asked for again: with it comes the
        # trailer, and what is verified then is all of the file.
        return min(held - held % PARAMETER_BYTES, size - PARAMETER_BYTES)

    def pieces(self, item: Item, length: int) -> Iterator[memoryview]:
        """The first ``length`` bytes of what lies here of ``item``, in order."""
        if not length:
            return
        path = self._path(item) if item.name in self._verified else self._part(item)
        with files.storage(path):
            fd = os.open(path, os.O_RDONLY)
            try:
                yield from files.read_pieces(fd, 0, length, _PIECE_BYTES)
            finally:
                os.close(fd)

    def read(self, digest: Digest) -> FlatParameters:
        """The complete parameters ``digest``, mapped read-only: float32, ``(layout.size,)``.

        Raises:
            CheckpointIntegrityError: they are not held.
        """
        item = Item("state", digest, self._layout)
        if not self.whole(item):
            raise CheckpointIntegrityError(f"the state {digest} is not on this node")
        with files.storage(self._path(item)):
            mapped: FlatParameters = np.memmap(self._path(item), dtype="<f4", mode="r")
        return mapped

    def open(self, item: Item) -> int:
        """A descriptor for reading of the complete ``item``; the caller closes it.

        Raises:
            StorageError: the file system refuses.
        """
        with files.storage(self._path(item)):
            return os.open(self._path(item), os.O_RDONLY | os.O_CLOEXEC)

    # ---- what comes in ----

    def open_part(self, item: Item) -> "PartFile":
        """The partial file of ``item``, made if absent, for writing."""
        return PartFile(self._part(item))

    def complete(self, item: Item) -> None:
        """The partial file of ``item`` is whole and its digest was verified on the way."""
        part = self._part(item)
        with files.storage(part):
            reached("state.received", item.kind)
            os.replace(part, self._path(item))
            reached("state.named", item.kind)
        self._verified.add(item.name)

    def forget_part(self, item: Item) -> None:
        """What lies here of ``item`` turned out to be something else, or is not needed."""
        with files.storage(self._directory):
            self._part(item).unlink(missing_ok=True)

    def settle(self, goal: Goal) -> None:
        """Keep ``goal``, which is whole, and nothing else that is complete or begun.

        Raises:
            StorageError: the file system refuses.
        """
        keep = {item.name for item in self.items(goal)}
        with files.storage(self._directory):
            for path in self._directory.iterdir():
                if path.name not in keep:
                    path.unlink(missing_ok=True)
        self._verified &= keep
        reached("state.settled")

    def _digest_of(self, path: Path, shape: Shape) -> Digest | None:
        if path.stat().st_size != shape.nbytes:
            return None
        running = ParameterDigest(shape)
        fd = os.open(path, os.O_RDONLY)
        try:
            for piece in files.read_pieces(fd, 0, shape.nbytes, _PIECE_BYTES):
                running.update(piece)
        finally:
            os.close(fd)
        return running.hexdigest()

    def _path(self, item: Item) -> Path:
        return self._directory / item.name

    def _part(self, item: Item) -> Path:
        return self._directory / (item.name + _PART)


class PartFile:
    """A file coming in."""

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

    def close(self) -> None:
        """Does nothing the second time."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
