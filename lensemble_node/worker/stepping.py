"""The outer step of a round that this node missed, taken here while the sum of it comes in.

It is the very step that the coordinator took, from the same parameters and momentum and the same
sum, so that it comes to the same bits; that it does is checked, and so every node verifies every
commit.

``FileStepping`` goes piece by piece from the files of what was into new ones, which get their names
once both digests are right.  What was is kept until then.

``MemoryStepping`` overwrites what was, in memory.  It computes one digest, that of the parameters:
each of them is made of its momentum and of its part of the sum, so a fault in these shows there, in
this round or, where rounding hides it, in a later one.  Momentum and sum have their digests checked
where they come in whole or are read from files.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np

from lensemble import files
from lensemble.errors import CheckpointIntegrityError
from lensemble.ids import Digest
from lensemble.outer_step import OuterStep, step_terms
from lensemble.params import PARAMETER_BYTES, FlatParameters, ParameterDigest, ParamLayout
from lensemble.secagg.plan import FieldPlan
from lensemble.wire.steps import TakenStep
from lensemble.workload import Workload
from lensemble_node.worker.resident import Resident
from lensemble_node.worker.state_store import Goal, Item, StateStore

PIECE_WORDS = 1 << 16


def start_of(step: TakenStep) -> Goal:
    """What ``step`` starts from."""
    return Goal(step.start, step.start_momentum)


def end_of(step: TakenStep) -> Goal:
    """What ``step`` comes to."""
    return Goal(step.end, step.end_momentum)


def sum_of(step: TakenStep, layout: ParamLayout, workload: Workload) -> Item:
    """The sum of the round of ``step``.

    Raises:
        ContractViolation: its plan is none of this layout.
    """
    return Item("sum", step.total, FieldPlan(layout, workload.room, step.plan))


class Stepping(ABC):
    """Takes ``step`` as the bytes of its sum are fed, in order.

    Raises:
        AggregationError: more contributors than the field has room for.
        ContractViolation: the step's plan is none of this layout.
    """

    def __init__(
        self, store: StateStore, layout: ParamLayout, workload: Workload, step: TakenStep
    ) -> None:
        self.step = step
        self._store = store
        self._end = end_of(step)
        self._plan = FieldPlan(layout, workload.room, step.plan)
        self._step = OuterStep(step_terms(workload, step.contributors), PIECE_WORDS)
        self._position = 0

    @property
    def position(self) -> int:
        """How many bytes of the sum have been taken."""
        return self._position

    def feed(self, raw: memoryview) -> None:
        """Take the next bytes of the sum, whole words.

        Raises:
            AggregationError: a result is not finite.
            StorageError: the file system refuses.
        """
        plan, start = self._plan, self._position
        self._position += raw.nbytes
        first, last = plan.coordinate_at(start), plan.coordinate_at(self._position)
        for at in range(first, last, PIECE_WORDS):
            end = min(at + PIECE_WORDS, last)
            self._advance(at, end, raw[plan.byte_of(at) - start :])

    @abstractmethod
    def _advance(self, first: int, last: int, raw: memoryview) -> None:
        """Take the coordinates ``first`` to ``last``, whose words ``raw`` begins with."""

    @abstractmethod
    def finish(self) -> None:
        """The sum is whole: name what the step came to.

        Raises:
            CheckpointIntegrityError: it is not what the coordinator came to; nothing is named.
            StorageError: the file system refuses.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of what is open; how far the step has come stays."""

    @abstractmethod
    def forget(self) -> None:
        """Let go, and leave nothing of what the step came to."""


class FileStepping(Stepping):
    """From files to files; arguments and errors as for ``Stepping``.

    Raises:
        StorageError: the file system refuses.
    """

    def __init__(
        self, store: StateStore, layout: ParamLayout, workload: Workload, step: TakenStep
    ) -> None:
        super().__init__(store, layout, workload, step)
        self._fds: list[int] = []
        self._came_to: list[_Result] = []
        self._scratch = np.zeros((2, PIECE_WORDS), dtype=np.float32)
        """Parameters and momentum of a piece."""
        try:
            for item in store.items(start_of(step)):
                self._fds.append(store.open(item))
            for item in store.items(self._end):
                self._came_to.append(_Result(store, item, layout))
        except BaseException:
            self.close()
            raise

    def _advance(self, first: int, last: int, raw: memoryview) -> None:
        parameters, velocity = (row[: last - first] for row in self._scratch)
        velocity.fill(0.0)
        for fd, vector in zip(self._fds, (parameters, velocity), strict=False):
            files.read_exactly(fd, _bytes(vector), first * PARAMETER_BYTES)
        self._step.apply_planned(parameters, velocity, self._plan, first, raw)
        for result, vector in zip(self._came_to, (parameters, velocity), strict=False):
            result.write(_bytes(vector), first * PARAMETER_BYTES)

    def finish(self) -> None:
        for result in self._came_to:
            result.require()
        self.close()
        for result in self._came_to:
            self._store.complete(result.item)
        self._store.settle(self._end)

    def close(self) -> None:
        """What the step has come to so far stays in partial files."""
        for fd in self._fds:
            os.close(fd)
        self._fds = []
        for result in self._came_to:
            result.part.close()

    def forget(self) -> None:
        self.close()
        for result in self._came_to:
            self._store.forget_part(result.item)


class MemoryStepping(Stepping):
    """In place, in ``resident``, which holds what ``step`` starts from; else as ``Stepping``.

    Once it has begun, what it starts from is gone: it may be interrupted, and goes on from where it
    was, but it cannot be taken back.
    """

    def __init__(
        self,
        resident: Resident,
        store: StateStore,
        layout: ParamLayout,
        workload: Workload,
        step: TakenStep,
    ) -> None:
        super().__init__(store, layout, workload, step)
        self._resident = resident
        self._running = ParameterDigest(layout)
        self._over = 0
        """Bytes that will be fed a second time."""
        if step.start_momentum is None:
            resident.velocity.fill(0.0)

    def again_from(self, position: int) -> None:
        """The bytes from ``position`` on, at most ``self.position``, are fed next."""
        self._over = self._position - position

    def feed(self, raw: memoryview) -> None:
        passed = min(self._over, raw.nbytes)
        self._over -= passed
        if passed < raw.nbytes:
            self._store.begun()
            super().feed(raw[passed:])

    def _advance(self, first: int, last: int, raw: memoryview) -> None:
        parameters = self._resident.parameters[first:last]
        velocity = self._resident.velocity[first:last]
        self._step.apply_planned(parameters, velocity, self._plan, first, raw)
        self._running.update(_bytes(parameters))

    def finish(self) -> None:
        (parameters, *_) = self._store.items(self._end)
        if (found := self._running.hexdigest()) != self._end.state:
            raise _not_the_same(parameters, found)
        self._store.come_to(self._end)
        self._store.settle(self._end)

    def close(self) -> None:
        """Nothing is open."""

    def forget(self) -> None:
        """What was half taken is in memory, where nothing names it."""


class _Result:
    """One vector that a step comes to."""

    def __init__(self, store: StateStore, item: Item, layout: ParamLayout) -> None:
        self.item = item
        self.part = store.open_part(item)
        self._running = ParameterDigest(layout)

    def write(self, piece: memoryview, offset: int) -> None:
        self._running.update(piece)
        self.part.write(piece, offset)

    def require(self) -> None:
        if (found := self._running.hexdigest()) != self.item.digest:
            raise _not_the_same(self.item, found)


def _not_the_same(item: Item, found: Digest) -> CheckpointIntegrityError:
    return CheckpointIntegrityError(
        f"the outer step, taken here, comes to a {item.kind} with the digest {found}; the "
        f"coordinator's has {item.digest}",
        "The whole state is fetched in its place.  If this comes again, have the coordinator's "
        "operator run `lensemblectl verify`, and check this machine's memory and disk.",
    )


def _bytes(vector: FlatParameters) -> memoryview:
    return vector.data.cast("B")


def stepped(pieces: Iterator[memoryview], stepping: Stepping) -> Iterator[memoryview]:
    """``pieces`` of a sum that lay here, each fed to ``stepping`` as it passes."""
    for piece in pieces:
        stepping.feed(piece)
        yield piece
