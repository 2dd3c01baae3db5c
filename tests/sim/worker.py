"""A worker process as the daemon sees it: the commands of ``signals`` in, its events out.

It obeys as ``lensemble_node.worker.work`` does: slots, binding and abandoning at once, the rest one
after the other, long work in steps between which it looks up.  What it writes goes to the node's
disk entry by entry, so that it can die, or the power go, between any two.
"""

from collections import deque
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, ClassVar

from lensemble.errors import (
    ArtifactError,
    LensembleError,
    PrivacyBudgetExceeded,
    StorageError,
)
from lensemble.ids import Digest
from lensemble_node import signals
from lensemble_node.worker.state_store import Goal
from tests.sim.disk import Torn
from tests.sim.edges import Region
from tests.sim.mask_side import At, digest_of
from tests.sim.states import DATA_CHUNKS, SimStates

if TYPE_CHECKING:
    from tests.sim.node_host import NodeHost

STEPS = 2
Job = Generator[float, None, None]


class _Halted(Exception):
    """The work in hand was abandoned, or its edge is gone."""


class Ring:
    def __init__(self, attach: signals.Attach, region: Region) -> None:
        self.edge = attach.edge
        self.direction = attach.direction
        self.region = region
        self.free = deque(range(attach.slots)) if attach.direction == "tx" else deque[int]()


class SimWorker:
    """One process; ``say`` puts an event on the pipe to its daemon."""

    holder: ClassVar[type[SimStates]] = SimStates

    def __init__(self, node: "NodeHost", say: Callable[[signals.Event], None]) -> None:
        self.node = node
        self.disk = node.disk
        self.say = say
        self.alive = True
        self.wedged = False
        self.suspended = False
        self._missed = False
        self.configured: signals.Configure | None = None
        self.rings: dict[int, Ring] = {}
        self._stdin: deque[signals.Command] = deque()
        self._backlog: deque[Any] = deque()
        self._in_hand: Any = None
        self._halt = False
        self._job: Job | None = None
        self._waits_for_slot = False
        self._release: tuple[int, Digest] | None = None
        self._masked: tuple[At, Digest, Digest] | None = None
        self.states = self.holder(node)
        self._refused: set[int] = set()

    # ---- life ----

    def die(self) -> None:
        self.alive = False
        for ring in self.rings.values():
            ring.region.users.discard(f"worker {id(self)}")
        self.rings.clear()

    def _stand_still(self, seconds: float) -> None:
        """As a process that is swapped out does, for a while."""
        self.node.world.note(self.node, "worker", f"stands still for {seconds:.0f} s")
        self.suspended = True
        self.node.world.after(self.node, seconds, self.resume)

    def resume(self) -> None:
        """Go on after it was suspended."""
        self.suspended = False
        if self._missed:
            self._missed = False
            self._go_on()

    def take(self, command: signals.Command) -> None:
        self._stdin.append(command)
        if self._job is None or self._waits_for_slot:
            self._go_on()

    def _go_on(self) -> None:
        """Work until there is nothing to do but to wait."""
        if self.suspended:
            self._missed = True
            return
        if not self.alive or self.wedged:
            return
        while True:
            if self._job is None and not self._begin():
                return
            assert self._job is not None
            try:
                seconds = next(self._job)
            except StopIteration:
                self._job = self._in_hand = None
                continue
            if seconds < 0:
                if self._stdin:
                    continue
                self._waits_for_slot = True
                return
            self._waits_for_slot = False
            self.node.world.after(self.node, seconds, self._go_on)
            return

    def _begin(self) -> bool:
        while not self._backlog and self._stdin:
            job = self._at_once(self._stdin.popleft())
            if job is not None:
                self._backlog.append(job)
        if not self._backlog:
            return False
        job = self._backlog.popleft()
        work = isinstance(job, signals.Train | signals.Mask | signals.Send)
        self._in_hand, self._halt = (job if work else None), False
        self._job = self._carry_out(job)
        return True

    def _carry_out(self, job: Any) -> Job:
        at = None if isinstance(job, signals.Close) else (job.round, job.attempt)
        steps = {
            signals.Train: self._train,
            signals.Mask: self._mask,
            signals.Send: self._send,
            signals.Spend: self._spend,
            signals.Close: self._close,
        }[type(job)]
        try:
            yield from steps(job)
        except _Halted:
            self._masked = None
        except LensembleError as error:
            self._masked = None
            self._fail(error, at)

    def _look(self) -> None:
        while self._stdin:
            job = self._at_once(self._stdin.popleft())
            if job is not None:
                self._halt = self._halt or self._supersedes(job)
                self._backlog.append(job)
        if self._halt:
            raise _Halted

    def _supersedes(self, command: Any) -> bool:
        now = self._in_hand
        match command:
            case _ if now is None:
                return False
            case signals.Close(round=closed):
                return closed >= now.round
            case signals.Train(prior_digest=prior) | signals.Bind(prior_digest=prior):
                other = command.round != now.round
                return other or (isinstance(now, signals.Train) and prior != now.prior_digest)
            case _:
                return False

    # ---- what is done at once ----

    def _at_once(self, command: signals.Command) -> Any:
        """Do it, unless it is work that waits its turn: that is handed back."""
        match command:
            case signals.Configure():
                self._configure(command)
            case signals.Bind():
                self._bind(command)
            case signals.Abandon():
                self._abandon((command.round, command.attempt))
            case signals.Attach() | signals.Detach() | signals.Ready() | signals.Released():
                self._serve_edge(command)
            case _:
                return command
        return None

    def _serve_edge(self, command: Any) -> None:
        match command:
            case signals.Attach():
                region = self.node.arena.region(command.offset)
                region.users.add(f"worker {id(self)}")
                self.rings[command.edge] = Ring(command, region)
                self.say(signals.Attached(edge=command.edge))
            case signals.Detach(edge=edge):
                self._detach(edge)
            case signals.Ready():
                self._read(command)
            case signals.Released(edge=edge, slot=slot):
                if (ring := self.rings.get(edge)) is not None and slot not in ring.free:
                    ring.free.append(slot)

    def _configure(self, command: signals.Configure) -> None:
        try:
            self.node.recover_local()
        except StorageError as error:
            self.say(signals.Failed(code=error.code, message=error.message, fatal=True))
            self.wedged = True
            world = self.node.world
            world.after(self.node, 0.01, lambda: self.alive and self.node.kill_worker("exited"))
            return
        self.configured = command
        self.say(
            signals.Configured(
                build="sim",
                dataset_root=self.node.dataset_root,
                episodes=1,
                steps=1,
                layout_digest=self.node.layout_digest,
            )
        )

    def _abandon(self, at: At) -> None:
        now = self._in_hand
        self._halt = self._halt or (now is not None and (now.round, now.attempt) <= at)
        work = signals.Train | signals.Mask | signals.Send
        self._backlog = deque(
            job
            for job in self._backlog
            if not isinstance(job, work) or (job.round, job.attempt) > at
        )
        if self._masked is not None and self._masked[0] <= at:
            self._masked = None

    def _detach(self, edge: int) -> None:
        ring = self.rings.pop(edge, None)
        if ring is not None:
            if ring.direction == "rx":
                self.states.reset()
            if all(other.region is not ring.region for other in self.rings.values()):
                ring.region.users.discard(f"worker {id(self)}")
        self._refused.discard(edge)
        self.say(signals.Detached(edge=edge))

    # ---- the state ----

    def _bind(self, command: signals.Bind) -> None:
        self._halt = self._halt or self._supersedes(command)
        self._masked = None
        at = (command.round, command.attempt)
        goal = Goal(Digest(command.prior_digest), command.prior_momentum)
        if self.node.happens("declines"):
            self.say(signals.Failed(code="dataset", message="gone", round=at[0], attempt=at[1]))
            return
        held = self.states.expect(at, goal, command.steps)
        self.say(
            signals.Bound(
                round=at[0],
                attempt=at[1],
                holds_bytes=held.nbytes,
                follows=held.follows,
                holds_of_sum=held.of_sum,
            )
        )
        if self.states.holds(goal):
            self.say(signals.StateHeld(digest=goal.state))

    def _read(self, command: signals.Ready) -> None:
        ring = self.rings.get(command.edge)
        if ring is None:
            return
        assert ring.region.leased, "a worker reads a ring that was given back"
        if ring.edge not in self._refused:
            try:
                self._feed(ring.region.slots[command.slot])
            except LensembleError as error:
                self._refused.add(ring.edge)
                self._fail(error, self.states.at)
                self.say(signals.Spoiled(edge=ring.edge, reason=error.code))
        self.say(signals.Consumed(edge=command.edge, slot=command.slot))

    def _feed(self, chunk: tuple[Any, ...]) -> None:
        completed = self.states.feed(chunk)
        if completed is not None:
            self.say(signals.StateHeld(digest=completed))
        elif self.states.at is not None:
            at, (done, total) = self.states.at, self.states.progress
            self.say(
                signals.Worked(round=at[0], attempt=at[1], phase="fetching", done=done, total=total)
            )

    # ---- training ----

    def _write(self, key: Any, value: Any) -> Job:
        """Two steps: it may end before, or between being written and being known to be."""
        world = self.node.world
        yield world.random.random() * 0.02 * self.disk.slow
        self.disk.put(key, value)
        if key[0] == "sidecar":
            self.node.made(value[0])
        yield world.random.random() * 0.02 * self.disk.slow

    def _trained(self, at: int) -> tuple[Digest, Digest] | None:
        """Vector and prior of what was trained for round ``at``, if all of it is there."""
        sidecar = self.disk.read(("sidecar", at))
        vector = self.disk.read(("vector", at))
        if sidecar is None or isinstance(sidecar, Torn) or vector != sidecar[0]:
            return None
        pending = self.disk.read(("pending", at))
        if pending is None or isinstance(pending, Torn):
            return None
        return sidecar[0], sidecar[1]

    def _train(self, job: signals.Train) -> Job:
        node, disk = self.node, self.disk
        self._release = self._masked = None
        prior = Digest(job.prior_digest)
        yield from self._spend_before(job)
        if self.states.content(("state", prior)) is None:
            raise ArtifactError(f"the state {prior[:6]} is not on this node")
        node.federation.checks.node_trains(node, job.round, self.states)
        known, spent = self._trained(job.round), disk.read(("spent", job.round))
        if known is not None and known[1] == prior and spent != known[0]:
            vector = known[0]
            yield from self._charge(vector, job)
            self._ready(job, vector, reused=True)
            return
        self._require_room()
        self._clear(job.round)
        slow = node.world.random.uniform(4.0, 14.0) if node.happens("slow") else 1.0
        for step in range(1, STEPS + 1):
            yield node.world.random.uniform(0.1, 1.5) * slow
            self._look()
            if node.happens("stands_still"):
                self._stand_still(node.world.random.uniform(5.0, 45.0))
                yield 0.0
            self._tell(job, "training", step, STEPS)
        node.vectors += 1
        vector = digest_of(node.node, "vector", node.vectors)
        yield from self._write(("pending", job.round), vector)
        yield from self._write(("vector", job.round), vector)
        yield from self._write(("sidecar", job.round), (vector, prior, job.attempt))
        yield from self._charge(vector, job)
        self._ready(job, vector, reused=False)

    def _spend_before(self, job: signals.Train) -> Job:
        """What may be in a sum that an earlier life of the coordinator asked for."""
        sidecar = self.disk.read(("sidecar", job.round))
        known = self._trained(job.round)
        if known is not None and sidecar[2] < job.spent_before:
            yield from self._write(("spent", job.round), sidecar[0])

    def _ready(self, job: signals.Train, vector: Digest, *, reused: bool) -> None:
        masked = self.configured is not None and self.configured.masked
        self._release = (job.round, vector)
        self.node.has_trained(vector)
        self.say(
            signals.Trained(
                round=job.round,
                attempt=job.attempt,
                digest=None if masked else digest_of("blob", vector),
                nbytes=self.node.state_bytes,
                reused=reused,
                l2_norm=1.0,
                loss_first=None,
                loss_last=None,
            )
        )

    def _clear(self, round_index: int) -> None:
        for kind in ("pending", "vector", "sidecar", "spent"):
            for key in self.disk.keys(kind):
                if key != ("spent", round_index):
                    self.disk.remove(key)

    def _require_room(self) -> None:
        if len(self.disk.read("charges a", ())) >= self.node.budget:
            raise PrivacyBudgetExceeded("there is no room for one more release")

    def _charge(self, vector: Digest, job: signals.Train) -> Job:
        del job
        both = [self.disk.read(place, ()) for place in ("charges a", "charges b")]
        charges = max(both, key=len)
        if vector not in charges:
            self._require_room()
            charges = (*charges, vector)
        for place in ("charges a", "charges b"):
            if self.disk.read(place, ()) != charges:
                yield from self._write(place, charges)

    # ---- sending ----

    def _at_hand(self, round_index: int) -> Digest:
        if self._release is None or self._release[0] != round_index:
            raise ArtifactError(f"no release of round {round_index} is at hand to be sent")
        return self._release[1]

    def _mask(self, job: signals.Mask) -> Job:
        vector = self._at_hand(job.round)
        yield self.node.world.random.random() * 0.2
        self._look()
        digest = digest_of("masked", vector, job.terms[0].key)
        self._masked = (job.round, job.attempt), digest, vector
        self.say(signals.Masked(round=job.round, attempt=job.attempt, digest=digest))

    def _send(self, job: signals.Send) -> Job:
        node, ring = self.node, self.rings.get(job.edge)
        if ring is None:
            raise _Halted
        at, vector = (job.round, job.attempt), self._at_hand(job.round)
        digest = digest_of("blob", vector)
        if self.configured is not None and self.configured.masked:
            if self._masked is None or self._masked[0] != at:
                raise ArtifactError(f"no masks of {at} are at hand")
            digest = self._masked[1]
        node.leaves(at, vector, digest)
        size = node.state_bytes // DATA_CHUNKS
        data = [("data", i * size, size) for i in range(DATA_CHUNKS)]
        signature = bytes.fromhex(job.signature)
        chunks = [("head", "update", at, digest, 0), *data, ("tail", digest, signature)]
        for index, chunk in enumerate(chunks):
            while not ring.free:
                yield -1.0
                self._look_at(ring)
            self._look_at(ring)
            slot = ring.free.popleft()
            assert ring.region.leased, "a worker fills a ring that was given back"
            ring.region.slots[slot] = chunk
            self.say(signals.Filled(edge=ring.edge, slot=slot, extent=1))
            if 0 < index <= DATA_CHUNKS:
                self._tell(job, "sending", index * size, node.state_bytes)
            yield node.world.random.random() * 0.05
        self._masked = None
        self.say(signals.Sent(round=job.round, attempt=job.attempt))

    def _look_at(self, ring: Ring) -> None:
        self._look()
        if self.rings.get(ring.edge) is not ring:
            raise _Halted

    def _spend(self, job: signals.Spend) -> Job:
        self._release = self._masked = None
        sidecar = self.disk.read(("sidecar", job.round))
        torn = sidecar is None or isinstance(sidecar, Torn)
        yield from self._write(("spent", job.round), None if torn else sidecar[0])
        self.node.spends(job.round, job.attempt)
        self.say(signals.Spent(round=job.round, attempt=job.attempt))

    def _close(self, job: signals.Close) -> Job:
        self._release = self._masked = None
        pending = self.disk.read(("pending", job.round))
        if job.adopt and pending is not None:
            yield from self._write(("adopting", job.round), pending)
            yield from self._write("adopted", (job.round, pending))
            self.disk.remove(("adopting", job.round))
        kinds = ("pending", "vector", "sidecar", *(("spent",) if job.adopt else ()))
        for kind in kinds:
            for key in self.disk.keys(kind):
                if key[1] <= job.round if job.adopt else key[1] == job.round:
                    self.disk.remove(key)
        adopted = self.disk.read("adopted", (-1, None))[0] == job.round
        self.node.closes(job.round, adopt=job.adopt, adopted=adopted)
        self.say(signals.Closed(round=job.round, adopted=adopted))

    # ---- words ----

    def _tell(self, job: Any, phase: Any, done: int, total: int) -> None:
        self.say(
            signals.Worked(
                round=job.round, attempt=job.attempt, phase=phase, done=done, total=total
            )
        )

    def _fail(self, error: LensembleError, at: At | None) -> None:
        code = error.code if not isinstance(error, StorageError) else "storage"
        self.say(
            signals.Failed(
                code=code,
                message=error.message,
                round=None if at is None else at[0],
                attempt=None if at is None else at[1],
            )
        )
