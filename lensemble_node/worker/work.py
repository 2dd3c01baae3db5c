"""The loop of a worker: one command at a time, and between two steps of long work whatever is due.

Slot signals, attaching, binding and abandoning are answered at once, in the middle of training or
sending too; anything else waits its turn.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec
from pydantic import ValidationError

from lensemble import blob, files
from lensemble.crash_points import reached
from lensemble.edge.arena import Arena
from lensemble.errors import (
    ArtifactError,
    ContractViolation,
    LensembleError,
    ProbeError,
    StorageError,
    WorkerFault,
)
from lensemble.ids import Digest, FederationId
from lensemble.params import ParamLayout
from lensemble.secagg.field import bound
from lensemble.secagg.masks import Term
from lensemble.secagg.plan import WORD_BYTES
from lensemble.version import BUILD
from lensemble.workload import NoopTask, Workload, layout
from lensemble_node import signals
from lensemble_node.worker.blinded import Blinded
from lensemble_node.worker.download import Inbound
from lensemble_node.worker.pace import Pace
from lensemble_node.worker.port import Port
from lensemble_node.worker.rest import Rest
from lensemble_node.worker.rings import Ring, Rings
from lensemble_node.worker.seat import ALONE, Begin, Seat
from lensemble_node.worker.state_store import Goal, StateStore
from lensemble_node.worker.training.local_round import Release, Trainer
from lensemble_node.worker.training.source import source_of
from lensemble_node.worker.training.stops import Stopped

MAX_BACKLOG = 64
RENDEZVOUS = "group-rendezvous"
"""In the state directory: where the processes of a group find each other."""
_PIECE_BYTES = 1 << 20

_Phase: TypeAlias = Literal["fetching", "training", "sending"]
Work: TypeAlias = signals.Train | signals.Mask | signals.Send
"""What an attempt asks for, and what is given up with it."""

Job: TypeAlias = Work | signals.Spend | signals.Close | signals.Stop


@dataclass(frozen=True)
class _Ready:
    """A release of ``round``, and its digest if it may be sent as it is."""

    round: int
    released: Release
    digest: Digest | None


@dataclass(frozen=True)
class _Outgoing:
    """What goes into the slots: the bytes that ``blinded`` gives, or ``raw``."""

    digest: Digest
    raw: memoryview
    blinded: Blinded | None = None

    def read_into(self, start: int, into: memoryview) -> None:
        if self.blinded is None:
            into[:] = self.raw[start : start + len(into)]
        else:
            self.blinded.read_into(start, into)


class _Halted(Exception):
    """The work in hand was abandoned, or its edge is gone."""


class Desk:
    """Everything a configured worker works with; ``seat`` is its place among several.

    Raises:
        ContractViolation: not a workload of this build.
        LensembleError: data or probe that cannot be used; see ``Trainer``.
    """

    def __init__(self, configure: signals.Configure, seat: Seat = ALONE) -> None:
        try:
            workload = Workload.model_validate_json(configure.workload)
        except ValidationError as error:
            raise ContractViolation(f"not a workload of this build: {error}") from error
        state_dir = Path(configure.state_dir)
        self.federation = FederationId(configure.federation)
        self.workload = workload
        self.layout: ParamLayout = layout(workload)
        self.steps = workload.inner.steps
        self.largest = bound(workload.room)
        self.masked = configure.masked
        self.trainer = Trainer(
            workload,
            source_of(configure, workload),
            state_dir,
            configure.node,
            configure.threads,
        )
        self._take_place(configure, seat)
        if workload.objective.probe_hash:
            _pin(self.trainer, workload, configure.probe)
        self.trainer.account(configure.federation)
        self.trainer.ready()
        self.states = StateStore(state_dir / "global", self.layout)
        self.rest = Rest(self.states)
        self.inbound = Inbound(self.states, configure.federation, workload, self.layout)

    def _take_place(self, configure: signals.Configure, seat: Seat) -> None:
        if seat.ranks == 1 or isinstance(self.workload.task, NoopTask):
            self.trainer.place(configure.device)
            return
        rendezvous = Path(configure.state_dir) / RENDEZVOUS
        with files.storage(rendezvous):
            rendezvous.unlink(missing_ok=True)
        seat.order(Begin(configure=configure, rendezvous=str(rendezvous)))
        self.trainer.lead(seat, rendezvous, configure.device)


def _goal(command: signals.Bind) -> Goal:
    momentum = command.prior_momentum
    return Goal(Digest(command.prior_digest), None if momentum is None else Digest(momentum))


def _pin(trainer: Trainer, workload: Workload, probe: str) -> None:
    if not probe:
        raise ProbeError(
            f"workload {workload.name!r} anchors to the probe {workload.objective.probe_hash[:16]} "
            "and this node has none",
            "Get the probe file from the federation's operator and name it in `data.probe`.",
        )
    trainer.pin(Path(probe), Digest(workload.objective.probe_hash))


def _budget(trainer: Trainer) -> signals.Budget | None:
    now = trainer.standing
    if now is None:
        return None
    return signals.Budget(
        spent=now.epsilon,
        epsilon=now.budget,
        delta=now.delta,
        releases=now.releases,
        rounds_left=now.rounds_left,
        unit=now.unit,
    )


def _drift(released: Release) -> signals.Drift | None:
    if released.drift is None:
        return None
    return msgspec.convert(released.drift, signals.Drift, from_attributes=True)


class Worker:
    """Obeys ``port`` with the slots of ``arena`` until told to stop."""

    def __init__(self, port: Port[signals.Command], arena: Arena, seat: Seat = ALONE) -> None:
        self._port, self._seat = port, seat
        self._rings = Rings(arena)
        self._backlog: deque[Job] = deque()
        self._desk: Desk | None = None
        self._release: _Ready | None = None
        self._masked: tuple[tuple[int, int], _Outgoing] | None = None
        self._fetched = Pace()
        self._refused: set[int] = set()
        self._in_hand: Work | None = None
        self._halt = False
        """The work in hand is to be given up."""

    def run(self) -> None:
        """Work until ``Stop``.

        Raises:
            DaemonGone: the pipes are closed.
            WorkerFault: something came that is not the protocol.
        """
        while True:
            job = self._backlog.popleft() if self._backlog else self._take(self._next())
            match job:
                case None:
                    continue
                case signals.Stop():
                    self._leave()
                    return
                case _:
                    self._carry_out(job)

    def _next(self) -> signals.Command:
        """The next command; what is owed to the disk is put down when none comes for a while."""
        while self._desk is not None and self._desk.rest.is_due:
            if (command := self._port.look(self._desk.rest.patience_s)) is not None:
                return command
            if not self._put_down(self._desk.rest, self._port.is_quiet):
                break
        return self._port.wait()

    def _leave(self) -> None:
        """Put down what would be lost with this process; the daemon waits for that a little."""
        if self._desk is not None:
            self._put_down(self._desk.rest, lambda: True)

    def _put_down(self, rest: Rest, may_go_on: Callable[[], bool]) -> bool:
        """Whether the disk took it, as far as there was time; else it is tried again later."""
        try:
            rest.put_down(may_go_on)
        except StorageError as error:
            self._fail(error, None)
            return False
        return True

    # ---- commands ----

    def _take(self, command: signals.Command) -> Job | None:
        """Do what is done at once; what is not is handed back."""
        match command:
            case signals.Train() | signals.Mask() | signals.Send():
                return command
            case signals.Spend() | signals.Close() | signals.Stop():
                return command
            case signals.Configure():
                self._configure(command)
            case signals.Bind():
                self._bind(command)
            case signals.Abandon():
                self._abandon(command)
            case _:
                self._serve_edge(command)
        return None

    def _serve_edge(
        self, command: signals.Attach | signals.Detach | signals.Ready | signals.Released
    ) -> None:
        match command:
            case signals.Attach():
                self._rings.attach(command)
                self._port.say(signals.Attached(edge=command.edge))
            case signals.Detach(edge=edge):
                self._detach(edge)
            case signals.Ready():
                self._read(command)
            case signals.Released():
                self._released(command)

    def _look(self) -> None:
        """Take what has come meanwhile; called between two steps of long work."""
        while (command := self._port.look()) is not None:
            self._queue(command)

    def _queue(self, command: signals.Command) -> None:
        job = self._take(command)
        if job is None:
            return
        if len(self._backlog) >= MAX_BACKLOG:
            raise WorkerFault(f"more than {MAX_BACKLOG} commands wait for the work in hand")
        if isinstance(job, signals.Stop):
            self._backlog.clear()
        self._halt = self._halt or self._supersedes(job)
        self._backlog.append(job)

    def _supersedes(self, command: Job | signals.Bind) -> bool:
        """Whether the work in hand has become pointless with ``command``."""
        now = self._in_hand
        match command:
            case signals.Stop():
                return True
            case _ if now is None:
                return False
            case signals.Close(round=closed):
                return closed >= now.round
            case signals.Train(prior_digest=prior) | signals.Bind(prior_digest=prior):
                other = command.round != now.round
                return other or (isinstance(now, signals.Train) and prior != now.prior_digest)
            case _:
                return False

    def _configure(self, command: signals.Configure) -> None:
        try:
            self._desk = Desk(command, self._seat)
            facts = self._desk.trainer.facts
        except LensembleError as error:
            self._port.say(
                signals.Failed(
                    code=error.code,
                    message=error.message,
                    remediation=error.remediation,
                    fatal=True,
                )
            )
            raise
        self._port.say(
            signals.Configured(
                build=BUILD,
                dataset_root=facts.root,
                episodes=facts.episodes,
                steps=facts.steps,
                layout_digest=self._desk.layout.digest,
                budget=_budget(self._desk.trainer),
            )
        )

    def _detach(self, edge: int) -> None:
        ring = self._rings.ring(edge)
        if ring is not None and ring.direction == "rx" and self._desk is not None:
            self._desk.inbound.reset()
        self._refused.discard(edge)
        self._rings.detach(edge)
        self._port.say(signals.Detached(edge=edge))

    def _abandon(self, command: signals.Abandon) -> None:
        at = (command.round, command.attempt)
        now = self._in_hand
        self._halt = self._halt or (now is not None and (now.round, now.attempt) <= at)
        self._backlog = deque(
            job
            for job in self._backlog
            if not isinstance(job, Work) or (job.round, job.attempt) > at
        )
        if self._masked is not None and self._masked[0] <= at:
            self._forget_masks()

    def _bind(self, command: signals.Bind) -> None:
        desk = self._known_desk()
        self._halt = self._halt or self._supersedes(command)
        self._forget_masks()
        at, goal = (command.round, command.attempt), _goal(command)
        try:
            held = desk.inbound.expect(at, goal, command.steps)
        except LensembleError as error:
            self._fail(error, at)
            return
        self._fetched = Pace()
        self._port.say(
            signals.Bound(
                round=at[0],
                attempt=at[1],
                holds_bytes=held.nbytes,
                follows=held.follows,
                holds_of_sum=held.of_sum,
            )
        )
        if held.nbytes == desk.states.goal_bytes(goal):
            self._port.say(signals.StateHeld(digest=goal.state, by="nothing"))

    # ---- slots ----

    def _released(self, command: signals.Released) -> None:
        ring = self._rings.ring(command.edge)
        if ring is not None:
            ring.released(command.slot)

    def _read(self, command: signals.Ready) -> None:
        ring = self._rings.ring(command.edge)
        if ring is None:
            # Detached; the signal was on its way.
            return
        if ring.edge not in self._refused:
            self._feed(ring, ring.slot(command.slot)[: command.extent])
        self._port.say(signals.Consumed(edge=command.edge, slot=command.slot))

    def _feed(self, ring: Ring, chunk: memoryview) -> None:
        desk = self._known_desk()
        inbound = desk.inbound
        try:
            completed = inbound.feed(chunk)
        except LensembleError as error:
            # The edge says nothing that can be trusted until it is replaced.
            self._refused.add(ring.edge)
            self._fail(error, inbound.at)
            # Also where no attempt is in hand any more that the failure could end.
            self._port.say(signals.Spoiled(edge=ring.edge, reason=error.code))
            return
        if completed is not None:
            self._port.say(signals.StateHeld(digest=completed, by=inbound.by))
        elif inbound.at is not None and self._fetched.due():
            self._tell(inbound.at, "fetching", *inbound.progress)

    def _empty_slot(self, ring: Ring) -> int:
        """A slot of ``ring`` to fill, waiting for one if need be."""
        while True:
            self._look()
            if self._halt or self._rings.ring(ring.edge) is not ring:
                raise _Halted
            if ring.free:
                return ring.free.popleft()
            self._queue(self._port.wait())

    # ---- jobs ----

    def _carry_out(self, job: Work | signals.Spend | signals.Close) -> None:
        at = None if isinstance(job, signals.Close) else (job.round, job.attempt)
        self._in_hand, self._halt = (job if isinstance(job, Work) else None), False
        try:
            match job:
                case signals.Train():
                    self._train(job)
                case signals.Mask():
                    self._mask(job)
                case signals.Send():
                    self._send(job)
                case signals.Spend():
                    self._spend(job)
                case signals.Close():
                    self._close(job)
        except (Stopped, _Halted):
            self._forget_masks()
        except LensembleError as error:
            self._forget_masks()
            self._fail(error, at)
        finally:
            self._in_hand = None

    def _train(self, job: signals.Train) -> None:
        desk, at, pace = self._known_desk(), (job.round, job.attempt), Pace()
        self._release = None
        self._forget_masks()

        def progress(done: int, _: float) -> None:
            if pace.due():
                self._tell(at, "training", done, desk.steps)

        def should_stop() -> bool:
            self._look()
            return self._halt

        if job.spent_before:
            desk.trainer.spend_before(job.round, job.spent_before)
        prior = Digest(job.prior_digest)
        released = desk.trainer.train(
            desk.states.read(prior),
            round_index=job.round,
            attempt=job.attempt,
            sketch_seed=job.sketch_seed,
            global_step=job.global_step,
            progress=progress,
            should_stop=should_stop,
            prior_digest=prior,
            prior_known=desk.states.remembers(prior),
            plan=job.plan,
        )
        digest = None
        if not desk.masked:
            digest = blob.update_digest(released.plan, _pieces(_raw(released)))
        self._release = _Ready(job.round, released, digest)
        self._port.say(
            signals.Trained(
                round=job.round,
                attempt=job.attempt,
                digest=digest,
                nbytes=released.plan.nbytes,
                reused=released.reused,
                l2_norm=released.l2_norm,
                loss_first=released.loss_first,
                loss_last=released.loss_last,
                budget=_budget(desk.trainer),
                clip_factor=released.clip_factor,
                field_use=released.max_abs / desk.largest if released.plan.all_wide else None,
                drift=_drift(released),
            )
        )

    def _mask(self, job: signals.Mask) -> None:
        ready = self._at_hand(job.round)
        terms = (Term(bytes.fromhex(term.key), term.negative) for term in job.terms)
        plan = ready.released.plan
        blinded = Blinded(ready.released.vector, terms, plan)
        running = blob.UpdateDigest(plan)
        for piece in blinded.pieces():
            running.update(piece)
            self._look()
            if self._halt:
                raise _Halted
        outgoing = _Outgoing(running.hexdigest(), _raw(ready.released), blinded)
        self._masked = (job.round, job.attempt), outgoing
        self._port.say(signals.Masked(round=job.round, attempt=job.attempt, digest=outgoing.digest))

    def _send(self, job: signals.Send) -> None:
        desk, ring = self._known_desk(), self._rings.ring(job.edge)
        if ring is None:
            raise _Halted
        outgoing = self._outgoing(desk, job)
        pace, at, total = Pace(), (job.round, job.attempt), len(outgoing.raw)
        header = blob.BlobHeader(
            kind="update",
            federation=desk.federation,
            round=job.round,
            attempt=job.attempt,
            total_bytes=total,
            chunk_bytes=ring.capacity_bytes - ring.capacity_bytes % WORD_BYTES,
            layout_digest=self._at_hand(job.round).released.plan.digest,
            digest_hint=outgoing.digest,
        )
        slot = self._empty_slot(ring)
        self._filled(ring, slot, blob.header_chunk(header, ring.slot(slot)))
        reached("update.sent", "header")
        for start, length in blob.data_ranges(header):
            slot = self._empty_slot(ring)
            outgoing.read_into(start, ring.slot(slot)[:length])
            self._filled(ring, slot, length)
            reached("update.sent", "data")
            if pace.due():
                self._tell(at, "sending", start + length, total)
        slot = self._empty_slot(ring)
        signature = bytes.fromhex(job.signature)
        self._filled(ring, slot, blob.trailer_chunk(outgoing.digest, signature, ring.slot(slot)))
        reached("update.sent", "trailer")
        self._forget_masks()
        self._port.say(signals.Sent(round=job.round, attempt=job.attempt))

    def _outgoing(self, desk: Desk, job: signals.Send) -> _Outgoing:
        ready = self._at_hand(job.round)
        if not desk.masked and ready.digest is not None:
            return _Outgoing(ready.digest, _raw(ready.released))
        if self._masked is None or self._masked[0] != (job.round, job.attempt):
            raise ArtifactError(
                f"no masks of round {job.round} attempt {job.attempt} are at hand, and nothing is "
                "sent without"
            )
        return self._masked[1]

    def _at_hand(self, round_index: int) -> _Ready:
        if self._release is None or self._release.round != round_index:
            raise ArtifactError(f"no release of round {round_index} is at hand to be sent")
        return self._release

    def _forget_masks(self) -> None:
        self._masked = None

    def _spend(self, job: signals.Spend) -> None:
        desk = self._known_desk()
        self._release = None
        self._forget_masks()
        desk.trainer.spend(job.round)
        self._port.say(signals.Spent(round=job.round, attempt=job.attempt))

    def _filled(self, ring: Ring, slot: int, extent: int) -> None:
        self._port.say(signals.Filled(edge=ring.edge, slot=slot, extent=extent))

    def _close(self, job: signals.Close) -> None:
        desk = self._known_desk()
        self._release = None
        self._forget_masks()
        adopted = desk.trainer.adopt(job.round) if job.adopt else False
        if not job.adopt:
            desk.trainer.discard(job.round)
        self._port.say(signals.Closed(round=job.round, adopted=adopted))

    # ---- words ----

    def _known_desk(self) -> Desk:
        if self._desk is None:
            raise WorkerFault("the first command must be Configure")
        return self._desk

    def _tell(self, at: tuple[int, int], phase: _Phase, done: int, total: int) -> None:
        self._port.say(
            signals.Worked(round=at[0], attempt=at[1], phase=phase, done=done, total=total)
        )

    def _fail(self, error: LensembleError, at: tuple[int, int] | None) -> None:
        self._port.say(
            signals.Failed(
                code=error.code,
                message=error.message,
                remediation=error.remediation,
                round=None if at is None else at[0],
                attempt=None if at is None else at[1],
            )
        )


def _raw(released: Release) -> memoryview:
    return released.vector.data.cast("B")


def _pieces(raw: memoryview) -> list[memoryview]:
    return [raw[start : start + _PIECE_BYTES] for start in range(0, len(raw), _PIECE_BYTES)]
