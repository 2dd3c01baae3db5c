"""Blobs on their way from an edge to the state store: a state and its momentum, or sums.

What a round starts from comes in one of two ways, and the coordinator chooses by what this node
says it holds: the parameters from byte ``held`` on and then the outer momentum beside them, or, if
the last rounds started from what lies here, the sums of those rounds one after the other.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from lensemble import blob
from lensemble.blob import BlobReader, Complete, Data, Expected
from lensemble.crash_points import reached
from lensemble.errors import ContractViolation, FrameError, LensembleError, StorageError
from lensemble.ids import Digest
from lensemble.params import ParamLayout
from lensemble.secagg.plan import WORD_BYTES
from lensemble.wire.steps import TakenStep
from lensemble.workload import Workload
from lensemble_node.worker.state_store import Goal, Item, PartFile, StateStore
from lensemble_node.worker.stepping import (
    FileStepping,
    MemoryStepping,
    Stepping,
    end_of,
    start_of,
    stepped,
    sum_of,
)


class Held(NamedTuple):
    """What lies here of what a round starts from.

    ``nbytes``: leading bytes of its parameters and momentum.  ``follows``: so many of the last
    steps lead there from what lies here, 0 if none do.  ``of_sum``: leading bytes of the first sum
    of those.
    """

    nbytes: int
    follows: int = 0
    of_sum: int = 0


@dataclass
class _Wanted:
    """What was asked for: ``goal``, for ``at``; or that to which ``steps`` lead."""

    at: tuple[int, int]
    goal: Goal
    steps: tuple[TakenStep, ...]
    due: deque[tuple[Item, TakenStep | None]] = field(default_factory=deque)
    """What is still to come, once the first header has said which way."""
    by_sums: bool = False


class _Passed:
    """A blob of what lies here by now; it is read to its end and kept nowhere."""

    def __init__(self, header: blob.BlobHeader) -> None:
        self._left = 2 + len(list(blob.data_ranges(header)))

    def feed(self, _: memoryview) -> bool:
        """Take the next chunk; whether it was the last."""
        self._left -= 1
        return self._left == 0

    def close(self) -> None:
        """Nothing is open."""


class _Coming:
    """One blob that is read; a sum is stepped along as it comes, all else is kept in ``part``.

    So is a sum whose step would begin anew after a crash, to be read again.
    """

    def __init__(
        self, item: Item, reader: BlobReader, part: PartFile | None, stepping: Stepping | None
    ) -> None:
        self.item = item
        self.reader = reader
        self.stepping = stepping
        self._part = part

    def feed(self, chunk: memoryview) -> bool:
        """Take the next chunk; whether it was the last, and the whole was right."""
        event = self.reader.feed(chunk)
        if isinstance(event, Data):
            if self._part is not None:
                self._part.write(event.view, event.offset)
                reached("state.written", self.item.kind)
            if self.stepping is not None:
                self.stepping.feed(event.view)
        return isinstance(event, Complete)

    def close(self) -> None:
        if self._part is not None:
            self._part.close()
        if self.stepping is not None:
            self.stepping.close()


class Inbound:
    """What comes in on the state edge, in the order in which it was asked for.

    Args:
        store: where it goes.
        federation: whose states.
        workload: of which outer step.
        layout: of which shape.
    """

    def __init__(
        self, store: StateStore, federation: str, workload: Workload, layout: ParamLayout
    ) -> None:
        self._store = store
        self._federation = federation
        self._workload = workload
        self._layout = layout
        self._blob: _Coming | _Passed | None = None
        self._now: _Wanted | None = None
        self._next: _Wanted | None = None
        self._halfway: MemoryStepping | None = None
        """A step in memory that was interrupted, and can go on."""
        self._distrusted: Goal | None = None
        """To which the steps, taken here, did not lead."""
        self.at: tuple[int, int] | None = None
        """The (round, attempt) of the blob that was last begun."""

    def expect(self, at: tuple[int, int], goal: Goal, steps: Sequence[TakenStep] = ()) -> Held:
        """Prepare for ``goal`` as it is sent for ``at`` = (round, attempt); ``steps`` lead there.

        Returns:
            What is held; nothing will come if that is all of it.

        Raises:
            ContractViolation: the steps do not lead from one to the next, and to the goal.
            StorageError: the file system refuses.
        """
        _require_chain(steps, goal)
        self._next = None
        if self._store.holds(goal):
            self._settle(goal)
            return Held(self._store.goal_bytes(goal))
        missed = self._missed(goal, steps)
        of_sum = self._of_sum(missed[0]) if missed else 0
        self._next = _Wanted(at, goal, missed)
        return Held(self._store.held_of(goal), len(missed), of_sum)

    def _missed(self, goal: Goal, steps: Sequence[TakenStep]) -> tuple[TakenStep, ...]:
        """The fewest of the last ``steps`` that start from what lies here; none if none does."""
        if goal == self._distrusted:
            return ()
        for count in range(1, len(steps) + 1):
            step = steps[-count]
            if self._half_taken(step) is not None or self._store.holds(start_of(step)):
                return tuple(steps[-count:])
        return ()

    def _half_taken(self, step: TakenStep) -> MemoryStepping | None:
        """The step in memory that is under way, or was left, if it is ``step``."""
        taken: Stepping | None = self._halfway
        if isinstance(self._blob, _Coming) and self._blob.stepping is not None:
            taken = self._blob.stepping
        return taken if isinstance(taken, MemoryStepping) and taken.step == step else None

    def _of_sum(self, step: TakenStep) -> int:
        item = self._sum(step)
        taken = self._half_taken(step)
        if taken is None:
            return self._store.held_bytes(item)
        # As of a file: with the last word comes the trailer.
        return min(taken.position, item.shape.nbytes - WORD_BYTES)

    def _settle(self, goal: Goal) -> None:
        self._halfway = None
        self._store.settle(goal)

    def _sum(self, step: TakenStep) -> Item:
        return sum_of(step, self._layout, self._workload)

    def feed(self, chunk: memoryview) -> Digest | None:
        """Take the next chunk; the digest of the parameters if all that was asked for is here.

        Raises:
            PeerError: not a blob that was asked for; what came of it is forgotten.
            CheckpointIntegrityError: the step that was taken along comes to something else; what
                it started from is kept, and no step to there is tried again.
            StorageError: the file system refuses.
        """
        coming = self._blob or self._open(chunk)
        try:
            if not coming.feed(chunk):
                return None
            wanted = self._done(coming)
        except LensembleError as error:
            self._forget(coming, error)
            raise
        if wanted is None or not self._store.holds(wanted.goal):
            return None
        self._settle(wanted.goal)
        return wanted.goal.state

    @property
    def by(self) -> Literal["sum", "state"]:
        """How it comes."""
        wanted = self._now
        return "sum" if wanted is not None and wanted.by_sums else "state"

    @property
    def progress(self) -> tuple[int, int]:
        """Of what is coming in: bytes that are here, and of how many."""
        wanted, coming = self._now, self._blob
        if wanted is None or not isinstance(coming, _Coming):
            return 0, 0
        total, position = self._store.goal_bytes(wanted.goal), coming.reader.position
        if coming.item.kind == "sum":
            # As a part of the state that it stands for, so that the total stays the same.
            left = len(wanted.due)
            done = len(wanted.steps) - left + position / coming.item.shape.nbytes
            return int(total * done / len(wanted.steps)), total
        return position + (self._layout.nbytes if coming.item.kind == "momentum" else 0), total

    def reset(self) -> None:
        """The edge is gone; a blob half-way stays as far as it came."""
        self._drop()
        self._now = self._next = None

    # ---- one blob ----

    def _open(self, chunk: memoryview) -> _Coming | _Passed:
        header = blob.read_header(chunk)
        wanted = self._turn(header)
        item, step = wanted.due[0]
        self.at = wanted.at
        if self._is_here(wanted, item, step):
            self._blob = _Passed(header)
            return self._blob
        expected = Expected(item.kind, self._federation, *wanted.at, item.shape, item.digest)
        held = min(header.offset, self._store.held_bytes(item))
        prefix = self._store.pieces(item, held)
        if step is None:
            reader = BlobReader(expected, prefix=prefix)
            self._blob = _Coming(item, reader, self._store.open_part(item), None)
            return self._blob
        try:
            self._blob = self._begin_step(step, header, expected, prefix)
        except LensembleError as error:
            self._doubt(step, error)
            raise
        return self._blob

    def _begin_step(
        self,
        step: TakenStep,
        header: blob.BlobHeader,
        expected: Expected,
        prefix: Iterator[memoryview],
    ) -> _Coming:
        item = self._sum(step)
        if (in_memory := self._in_memory(step)) is not None:
            in_memory.again_from(header.offset)
            reader = BlobReader(expected, unhashed_from=in_memory.position)
            return _Coming(item, reader, None, in_memory)
        stepping = FileStepping(self._store, self._layout, self._workload, step)
        try:
            reader = BlobReader(expected, prefix=stepped(prefix, stepping))
            return _Coming(item, reader, self._store.open_part(item), stepping)
        except BaseException:
            stepping.close()
            raise

    def _in_memory(self, step: TakenStep) -> MemoryStepping | None:
        """``step`` as it was left, or at its beginning; None where it goes from file to file."""
        taken, self._halfway = self._half_taken(step), None
        if taken is not None:
            return taken
        resident = self._store.load(start_of(step))
        if resident is None:
            return None
        return MemoryStepping(resident, self._store, self._layout, self._workload, step)

    def _doubt(self, step: TakenStep, error: LensembleError) -> None:
        """What a step starts from is looked at anew; to where it did not lead, none is tried."""
        self._store.doubt(start_of(step))
        if self._now is not None and not isinstance(error, StorageError):
            self._distrusted = self._now.goal

    def _is_here(self, wanted: _Wanted, item: Item, step: TakenStep | None) -> bool:
        """Whether a blob that was on its way when this one was asked for has made it needless."""
        held = self._store.holds(wanted.goal) or self._store.whole(item)
        return held or (step is not None and self._store.holds(end_of(step)))

    def _turn(self, header: blob.BlobHeader) -> _Wanted:
        """Which blob begins with ``header``: the next of what is coming, or the first of another.

        Raises:
            FrameError: none was asked for.
            ContractViolation: of another kind than what is due.
        """
        if self._now is None or not self._now.due:
            self._now, self._next = self._next, None
            if self._now is None:
                raise FrameError("a chunk on the state edge that no state was asked for")
            self._now.due = self._way(self._now, header)
        (item, _), *_ = self._now.due
        if item.kind != header.kind:
            raise ContractViolation(f"a blob whose kind is {header.kind}; expected {item.kind}")
        return self._now

    def _way(
        self, wanted: _Wanted, header: blob.BlobHeader
    ) -> deque[tuple[Item, TakenStep | None]]:
        wanted.by_sums = header.kind == "sum" and bool(wanted.steps)
        if wanted.by_sums:
            return deque((self._sum(step), step) for step in wanted.steps)
        parts: deque[tuple[Item, TakenStep | None]] = deque(
            (item, None) for item in self._store.items(wanted.goal)
        )
        if header.kind == "momentum" and len(parts) > 1:
            # The parameters were here when they were asked for.
            parts.popleft()
        return parts

    def _done(self, coming: _Coming | _Passed) -> _Wanted | None:
        """All of a blob is here; what it was a part of, unless that was here already."""
        wanted = self._now
        if isinstance(coming, _Coming):
            if coming.stepping is not None:
                coming.stepping.finish()
            else:
                self._store.complete(coming.item)
                self._store.outdate(*self._awaited())
        self._drop()
        self._halfway = None
        if wanted is None:
            return None
        wanted.due.popleft()
        return wanted if isinstance(coming, _Coming) else None

    def _awaited(self) -> Iterator[Goal]:
        """What is coming or will come, and what it may start from."""
        for wanted in filter(None, (self._now, self._next)):
            yield wanted.goal
            yield from map(start_of, wanted.steps)

    def _forget(self, coming: _Coming | _Passed, error: LensembleError) -> None:
        """Nothing of the blob stays."""
        self._drop()
        self._halfway = None
        if isinstance(coming, _Coming):
            if coming.stepping is not None:
                coming.stepping.forget()
                self._doubt(coming.stepping.step, error)
            self._store.forget_part(coming.item)

    def _drop(self) -> None:
        blob_, self._blob = self._blob, None
        if blob_ is None:
            return
        blob_.close()
        if isinstance(blob_, _Coming) and isinstance(blob_.stepping, MemoryStepping):
            self._halfway = blob_.stepping


def _require_chain(steps: Sequence[TakenStep], goal: Goal) -> None:
    ends = [end_of(step) for step in steps]
    starts = [*(start_of(step) for step in steps[1:]), goal]
    if steps and ends != starts:
        raise ContractViolation(
            f"the {len(steps)} steps that the coordinator names do not lead to {goal.state}"
        )
