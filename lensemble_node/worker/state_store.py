"""The global state on this node's disk, and the outer momentum from which the next step starts.

::

    global/<digest>.f32            parameters
    global/<digest>.momentum.f32   the outer momentum beside them
    global/<...>.part              either of them while it comes in, or is computed
    global/<digest>.sum.part       the revealed sum of a round while it comes in

Chunks go to the file as they arrive, so a download goes on where a crash or a lost edge ended it.
Nothing is flushed: a file is believed only after its digest was computed by this process, once.

What this worker has come to by steps may be in its memory only (see ``resident``), until it is put
down.  The files that those steps began from stay until then: after a crash the node follows from
there, or fetches the state.
"""

import os
from collections.abc import Iterator
from itertools import chain
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
from lensemble_node.worker import resident
from lensemble_node.worker.resident import Resident

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

    While a step is taken, that from which it starts stays beside what it comes to; so do the files
    that the state in memory was made from, until it is put down.

    Args:
        directory: for the files.
        layout: of the parameters.
        in_memory: whether steps are taken in memory; when not given, where it is worth it.
    """

    def __init__(
        self, directory: Path, layout: ParamLayout, *, in_memory: bool | None = None
    ) -> None:
        self._directory = directory
        self._layout = layout
        self._verified: set[str] = set()
        self._in_memory = resident.is_worth_it(layout) if in_memory is None else in_memory
        self._memory: Resident | None = None
        self._goal: Goal | None = None
        """What is in memory; None while a step there is half taken, or nothing is known of it."""
        self._origin: Goal | None = None
        """Whose files what is in memory was made from."""
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
        if item.name in self._verified or self._remembered(item) is not None:
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
        """Believe what is in memory no more, and files of ``goal`` as those of another process."""
        self._goal = None
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
        if (vector := self._remembered(item)) is not None:
            raw = vector.data.cast("B")[:length]
            yield from (raw[at : at + _PIECE_BYTES] for at in range(0, length, _PIECE_BYTES))
            return
        path = self._path(item) if item.name in self._verified else self._part(item)
        with files.storage(path):
            fd = os.open(path, os.O_RDONLY)
            try:
                yield from files.read_pieces(fd, 0, length, _PIECE_BYTES)
            finally:
                os.close(fd)

    def read(self, digest: Digest) -> FlatParameters:
        """The complete parameters ``digest``, read-only: float32, ``(layout.size,)``.

        They are mapped from a file, or what is in memory; that changes with the next step.

        Raises:
            CheckpointIntegrityError: they are not held.
        """
        item = Item("state", digest, self._layout)
        if (remembered := self._remembered(item)) is not None:
            return remembered
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

    # ---- what is in memory ----

    def load(self, start: Goal) -> Resident | None:
        """The memory, with ``start`` in it, whose files are whole if it was not there before.

        None where steps are taken from file to file.

        Raises:
            StorageError: the file system refuses.
        """
        if not self._in_memory:
            return None
        if self._memory is None:
            try:
                self._memory = Resident(self._layout)
            except OSError:
                # Files need none.
                self._in_memory = False
                return None
        if self._goal != start:
            self._goal = None
            self._fill(self._memory, start)
            self._goal = self._origin = start
        return self._memory

    def _fill(self, memory: Resident, start: Goal) -> None:
        vectors = (memory.parameters, memory.velocity)
        for item, vector in zip(self.items(start), vectors, strict=False):
            fd = self.open(item)
            try:
                with files.storage(self._path(item)):
                    files.read_exactly(fd, vector.data.cast("B"), 0)
            finally:
                os.close(fd)

    def begun(self) -> None:
        """A step in memory has begun: what it starts from is not there any more."""
        self._goal = None

    def come_to(self, goal: Goal) -> None:
        """The step in memory has come to ``goal``."""
        self._goal = goal

    def remembers(self, digest: Digest) -> bool:
        """Whether the parameters ``digest`` are in memory."""
        return self._goal is not None and self._goal.state == digest

    def _remembered(self, item: Item) -> FlatParameters | None:
        """What is in memory of ``item``, if that is all of it."""
        if self._goal is None or self._memory is None:
            return None
        match item.kind, item.digest:
            case "state", self._goal.state:
                vector = self._memory.parameters.view()
            case "momentum", self._goal.momentum:
                vector = self._memory.velocity.view()
            case _:
                return None
        vector.flags.writeable = False
        return vector

    @property
    def owes(self) -> bool:
        """Whether what is in memory is to be put down."""
        return self._goal is not None and self._goal != self._origin

    def putting_down(self) -> Iterator[None]:
        """Write what is in memory into files, a piece at each turn; they count with the last one.

        What it was made from is removed then.  No step may be taken before that: the files would be
        of neither; drop the iterator instead.

        Raises:
            StorageError: the file system refuses.
        """
        if (goal := self._goal) is None or goal == self._origin:
            return
        for item in self.items(goal):
            part = self.open_part(item)
            try:
                at = 0
                for piece in self.pieces(item, item.shape.nbytes):
                    part.write(piece, at)
                    at += piece.nbytes
                    yield
            finally:
                part.close()
        for item in self.items(goal):
            self.complete(item)
        self._origin = goal
        self.settle(goal)

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

    def outdate(self, *goals: Goal) -> None:
        """Remove what is complete and of none of ``goals``, nor of what is put down.

        Raises:
            StorageError: the file system refuses.
        """
        wanted = (*goals, *filter(None, (self._goal, self._origin)))
        keep = {item.name for goal in wanted for item in self.items(goal)}
        with files.storage(self._directory):
            for path in self._directory.iterdir():
                if path.suffix != _PART and path.name not in keep:
                    path.unlink(missing_ok=True)
                    self._verified.discard(path.name)

    def settle(self, goal: Goal) -> None:
        """Keep ``goal``, which is whole, and nothing else that is complete or begun.

        Beside it stays what was put down last, until that in memory is.

        Raises:
            StorageError: the file system refuses.
        """
        if goal != self._goal:
            # A step in memory that was left half-way leads nowhere any more.
            self._goal = self._origin = None
        origin = () if self._origin is None else self.items(self._origin)
        keep = {item.name for item in chain(self.items(goal), origin)}
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
