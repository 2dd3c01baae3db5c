"""What a worker holds of the global state and how it comes in, as ``worker.download`` does it.

A file is an entry of the disk whose value is the digest of its content; it is named for what its
content should be.  A step is a digest over what it starts from, as it is in the coordinator.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lensemble.errors import CheckpointIntegrityError, FrameError
from lensemble.ids import Digest
from lensemble.wire.steps import TakenStep
from lensemble_node.worker.download import Held
from lensemble_node.worker.state_store import Goal
from lensemble_node.worker.stepping import end_of, start_of
from tests.sim.disk import Torn
from tests.sim.mask_side import At, digest_of
from tests.sim.terms import LAYOUT

if TYPE_CHECKING:
    from tests.sim.node_host import NodeHost

DATA_CHUNKS = 2
NBYTES = LAYOUT.nbytes
CHUNK = NBYTES // DATA_CHUNKS
Key = tuple[str, Digest]


def keys_of(goal: Goal) -> tuple[Key, ...]:
    if goal.momentum is None:
        return (("state", goal.state),)
    return ("state", goal.state), ("momentum", goal.momentum)


def stepped(start: Goal, total: str, contributors: int) -> Goal:
    """What the outer step comes to."""
    return Goal(
        digest_of("state", start.state, total, contributors),
        digest_of("momentum", start.momentum, total, contributors),
    )


@dataclass
class _Wanted:
    at: At
    goal: Goal
    steps: tuple[TakenStep, ...]
    due: deque[tuple[Key, TakenStep | None]] = field(default_factory=deque)


@dataclass
class _Coming:
    key: Key
    step: TakenStep | None
    position: int
    keep: bool


class SimStates:
    """The states of one process on ``node``."""

    def __init__(self, node: "NodeHost") -> None:
        self.node = node
        self.disk = node.disk
        self._verified: set[Key] = set()
        self._now: _Wanted | None = None
        self._next: _Wanted | None = None
        self._coming: _Coming | None = None
        self._distrusted: Goal | None = None
        self.at: At | None = None

    # ---- what is held ----

    def expect(self, at: At, goal: Goal, steps: Sequence[TakenStep]) -> Held:
        self._next = None
        if self.holds(goal):
            self._settle(goal)
            return Held(NBYTES * len(keys_of(goal)))
        missed = self._missed(goal, steps)
        self._next = _Wanted(at, goal, missed)
        held = 0
        for key in keys_of(goal):
            held += self._held_bytes(key)
            if not self._whole(key):
                break
        of_sum = self._held_bytes(("sum", missed[0].total)) if missed else 0
        return Held(held, len(missed), of_sum)

    def _missed(self, goal: Goal, steps: Sequence[TakenStep]) -> tuple[TakenStep, ...]:
        if goal == self._distrusted:
            return ()
        for count in range(1, len(steps) + 1):
            if self.holds(start_of(steps[-count])):
                return tuple(steps[-count:])
        return ()

    def holds(self, goal: Goal) -> bool:
        return all(self._whole(key) for key in keys_of(goal))

    def content(self, key: Key) -> Digest | None:
        """Digest of what really lies there."""
        found: Digest | None = self.disk.read(("global", *key))
        return found

    def _whole(self, key: Key) -> bool:
        if key in self._verified:
            return True
        content = self.content(key)
        if content == key[1]:
            self._verified.add(key)
            return True
        if content is not None:
            self.disk.remove(("global", *key))
        return False

    def _held_bytes(self, key: Key) -> int:
        if self._whole(key):
            return NBYTES
        part = self.disk.read(("part", *key), 0)
        return int(min(part.was if isinstance(part, Torn) else part, NBYTES - 4))

    # ---- what comes in ----

    def reset(self) -> None:
        self._coming = self._now = self._next = None

    @property
    def progress(self) -> tuple[int, int]:
        wanted, coming = self._now, self._coming
        if wanted is None or coming is None:
            return 0, 0
        total = NBYTES * len(keys_of(wanted.goal))
        if coming.step is not None:
            done = len(wanted.steps) - len(wanted.due) + coming.position / NBYTES
            return int(total * done / len(wanted.steps)), total
        return coming.position + (NBYTES if coming.key[0] == "momentum" else 0), total

    def feed(self, chunk: tuple[Any, ...]) -> Digest | None:
        """The digest of the state that is whole with this chunk, if it is."""
        if self._coming is None:
            self._open(chunk)
            return None
        coming = self._coming
        match chunk:
            case ("data", start, length) if start == coming.position:
                coming.position += length
                if coming.keep:
                    self._write(coming, start, length)
                return None
            case ("tail", found) if (coming.position, found) == (NBYTES, coming.key[1]):
                return self._finish(coming)
            case _:
                self._forget(coming)
                raise FrameError(f"{chunk} at {coming.position} of {coming.key}")

    def _open(self, chunk: tuple[Any, ...]) -> None:
        kind = chunk[1] if chunk[0] == "head" else ""
        if self._now is None or not self._now.due:
            self._now, self._next = self._next, None
            if self._now is None:
                raise FrameError("a chunk on the state edge that no state was asked for")
            self._now.due = self._way(self._now, kind)
        wanted = self._now
        key, step = wanted.due[0]
        self.at = wanted.at
        if chunk[:4] != ("head", key[0], wanted.at, key[1]):
            raise FrameError(f"{chunk} is not {key} for {wanted.at}")
        here = self.holds(wanted.goal) or self._whole(key)
        here = here or (step is not None and self.holds(end_of(step)))
        assert here or chunk[4] <= self._held_bytes(key), "more is left out than is held"
        self._coming = _Coming(key, step, chunk[4], not here)

    def _way(self, wanted: _Wanted, kind: str) -> deque[tuple[Key, TakenStep | None]]:
        if kind == "sum" and wanted.steps:
            return deque((("sum", step.total), step) for step in wanted.steps)
        parts: deque[tuple[Key, TakenStep | None]] = deque((k, None) for k in keys_of(wanted.goal))
        if kind == "momentum":
            parts.popleft()
        return parts

    def _results(self, coming: _Coming) -> tuple[Key, ...]:
        return () if coming.step is None else keys_of(end_of(coming.step))

    def _write(self, coming: _Coming, start: int, length: int) -> None:
        for key in (coming.key, *self._results(coming)):
            part, size = self.disk.read(("part", *key), 0), start + length
            # What a step comes to is computed anew from its start, from the sum that lies here.
            torn = isinstance(part, Torn) and start and key == coming.key
            self.disk.write(("part", *key), Torn(size) if torn else size)

    def _finish(self, coming: _Coming) -> Digest | None:
        wanted, self._coming = self._now, None
        assert wanted is not None
        if not coming.keep:
            wanted.due.popleft()
            return None
        if isinstance(self.disk.read(("part", *coming.key)), Torn):
            # The prefix is not what was sent: the digest over all of it shows it.
            self._forget(coming)
            raise FrameError(f"{coming.key} does not have its digest")
        if coming.step is None:
            self._name(coming.key, coming.key[1])
        else:
            self._take(coming, coming.step)
        wanted.due.popleft()
        if not self.holds(wanted.goal):
            return None
        self._settle(wanted.goal)
        return wanted.goal.state

    def _take(self, coming: _Coming, step: TakenStep) -> None:
        came_to = self.computed(step)
        if not self.agrees(came_to, step):
            self.node.world.note(self.node, "refuses", f"the step to {step.end[:6]}")
            self._forget(coming)
            self._distrusted = end_of(step) if self._now is None else self._now.goal
            raise CheckpointIntegrityError(f"the step does not come to {step.end[:6]}")
        for key, content in zip(keys_of(end_of(step)), came_to, strict=True):
            assert content is not None
            self._name(key, content)
        self._settle(end_of(step))

    def computed(self, step: TakenStep) -> Goal:
        """What the step really comes to, from what really lies here."""
        start = start_of(step)
        contents = [self.content(key) for key in keys_of(start)]
        assert contents[0] is not None
        momentum = contents[1] if len(contents) > 1 else None
        came_to = stepped(Goal(contents[0], momentum), step.total, step.contributors)
        if self.node.happens("miscomputes"):
            came_to = came_to._replace(momentum=digest_of("a bit is wrong"))
        return came_to

    def agrees(self, came_to: Goal, step: TakenStep) -> bool:
        return came_to == end_of(step)

    def _name(self, key: Key, content: Digest) -> None:
        self.disk.write(("global", *key), content)
        self.disk.remove(("part", *key))
        self._verified.add(key)

    def _forget(self, coming: _Coming) -> None:
        for key in (coming.key, *self._results(coming)):
            self.disk.remove(("part", *key))
        self._coming = None

    def _settle(self, goal: Goal) -> None:
        keep = {("global", *key) for key in keys_of(goal)}
        for key in (*self.disk.keys("part"), *self.disk.keys("global")):
            if key not in keep:
                self.disk.remove(key)
        self._verified &= set(keys_of(goal))
