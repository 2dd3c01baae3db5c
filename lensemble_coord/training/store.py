"""Everything the rounds keep on disk, behind one door; all methods block, call them in a thread.

Opening a state directory is recovery: the tail of the ledger says what the global state is, and
what the ledger does not name is removed.
"""

import math
import secrets
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from lensemble import checkpoint, seeds, workload
from lensemble.checkpoint import Checkpoint, Lineage
from lensemble.errors import (
    AggregationError,
    ConfigError,
    LedgerIntegrityError,
    OperatorError,
    StorageError,
)
from lensemble.ids import Digest, FederationId, NodeId
from lensemble.logs import logger
from lensemble.outer_step import PIECE_WORDS
from lensemble.params import ParamLayout
from lensemble.secagg.field import reach
from lensemble.secagg.plan import FieldPlan, signed_words
from lensemble.wire.steps import MAX_STEPS, TakenStep
from lensemble.workload import Workload
from lensemble_coord.config import CoordinatorConfig
from lensemble_coord.roster import Invitation
from lensemble_coord.training import aggregate, commit, manifest, record
from lensemble_coord.training.directory import StateDirectory
from lensemble_coord.training.downlink import Origin
from lensemble_coord.training.ledger import Ledger
from lensemble_coord.training.outer_round import Contribution
from lensemble_coord.training.rows import Event, Run, RunState
from lensemble_coord.training.spool import Spool, SpoolFile

STEPS_BACK = 16
"""Rounds that are looked through for steps that a node may have missed."""


class Position(msgspec.Struct, frozen=True):
    """Where the federation stands: the next round, its next attempt, the state it starts from."""

    round: int
    attempt: int
    digest: Digest


class Diagnosis(msgspec.Struct, frozen=True):
    """What a revealed sum shows: the L2 norm of the mean update, and how full the field was.

    ``field_use`` is the largest coordinate over the most that so many updates can reach.
    """

    mean_update_l2: float
    field_use: float


class Candidate(msgspec.Struct, frozen=True):
    """A step that is taken and durable, after the round of ``tail``, and not adopted yet."""

    tail: record.ContributionRecord
    inputs: commit.StepInputs
    prepared: commit.Prepared

    @property
    def digest(self) -> Digest:
        """Of the parameters that it would make the global state."""
        return self.prepared.next_digest

    @property
    def prior(self) -> Digest:
        return self.inputs.prior_digest


class Store:
    """The coordinator's state directory, opened and recovered.

    Raises:
        ConfigError: the workload or the warm start is not the one the ledger was begun with.
        LedgerIntegrityError, CheckpointIntegrityError: what the ledger names is not sound.
        StorageError: the directory cannot be used.
    """

    def __init__(self, config: CoordinatorConfig, terms: Workload) -> None:
        self.config = config
        self.workload = terms
        self.layout: ParamLayout = workload.layout(terms)
        self.directory = StateDirectory(config.state_dir)
        storage = config.storage
        self._retention = commit.Retention(
            storage.keep_last, storage.keep_every, storage.verify_keep_rounds
        )
        self._lock = threading.RLock()
        self._steps: dict[int, TakenStep | None] = {}
        self._facts: aggregate.SumFacts | None = None
        self._ledger = self._open_ledger()
        self.federation: FederationId = self._ledger.federation
        self._members = self._ledger.roster()
        self._run: Run | None = self._ledger.unfinished_run()
        self._end_done_run()
        self._ledger.interrupt_attempts()
        commit.sweep(self.directory, self._ledger)
        self.spool = Spool(
            self.directory.spool, config.storage.spool_memory_bytes, self.layout.nbytes
        )
        self.plan = self._plan_after(self._check_tail())
        """Of the words of the round that comes next, or is under way."""
        self._kept = self._count_checkpoints()

    # ---- opening ----

    def _open_ledger(self) -> Ledger:
        path = self.directory.ledger
        if not path.exists():
            return self._begin(path)
        ledger = Ledger(path)
        if ledger.workload.digest != self.workload.digest:
            ledger.close()
            raise ConfigError(
                f"{self.config.workload} has the config hash {self.workload.digest[:16]}, the "
                f"federation in {self.directory.root} was begun with {ledger.workload.digest[:16]}",
                "Restore the workload file, or begin a new federation in another state_dir.",
            )
        return ledger

    def _begin(self, path: Path) -> Ledger:
        """Make the genesis: the warm start as a checkpoint, and a ledger that names it."""
        lineage = Lineage("weights", record.GENESIS_ROUND, self.workload.digest)
        root = self.directory.checkpoints
        if self.config.warm_start is None:
            flat = workload.initial_parameters(self.workload)
        else:
            flat = checkpoint.import_weights(self.config.warm_start, self.layout)
        first = checkpoint.write_flat(root, self.layout, lineage, flat)
        federation = FederationId(secrets.token_hex(16))
        genesis = record.genesis(federation, self.workload, self.layout, first.digest)
        return Ledger.create(path, federation, self.workload, genesis)

    @property
    def checkpoints_kept(self) -> int:
        return self._kept

    def _count_checkpoints(self) -> int:
        # The state after a rejected round is that before it.
        return len(set(self._ledger.present("weights").values()))

    def _check_tail(self) -> record.ContributionRecord:
        """Go on from sound files only: the chain, and every byte the next step starts from."""
        tail = self._ledger.verify_chain()
        self.checkpoint(tail.next_digest).verify()
        if tail.momentum_digest is not None:
            checkpoint.open_checkpoint(self.directory.momentum_of(tail.momentum_digest)).verify()
        return tail

    def _plan_after(self, tail: record.ContributionRecord) -> FieldPlan:
        return FieldPlan(self.layout, self.workload.room, tail.following)

    def close(self) -> None:
        with self._lock:
            self._ledger.close()

    # ---- where it stands ----

    @property
    def position(self) -> Position:
        with self._lock:
            tail = self._ledger.tail()
            return Position(
                tail.round + 1, self._ledger.next_attempt(tail.round + 1), tail.next_digest
            )

    def origin(self) -> Origin:
        """What the next round starts from, and the steps that led there of which sums are kept."""
        with self._lock:
            tail, sums = self._ledger.tail(), self._ledger.present("sum")
            steps: list[TakenStep] = []
            for index in range(tail.round, max(tail.round - STEPS_BACK, record.GENESIS_ROUND), -1):
                step = self._step_of(index)
                if step is None:
                    continue
                if len(steps) == MAX_STEPS or index not in sums:
                    break
                steps.append(step)
        momentum = self._needed(tail.momentum_digest)
        nbytes = self.layout.nbytes * (1 if momentum is None else 2)
        return Origin(tail.next_digest, momentum, tuple(reversed(steps)), nbytes)

    def _step_of(self, index: int) -> TakenStep | None:
        """The step of round ``index``; None if it was rejected.

        A record of many participants takes a while to read, so each is read for this once.
        """
        if index not in self._steps:
            before, taken = (each.record for each in self._ledger.committed(index - 1, index + 1))
            step = None if taken.refusal else self._taken(taken, before.following)
            self._steps = dict([*self._steps.items(), (index, step)][-STEPS_BACK:])
        return self._steps[index]

    def _taken(self, taken: record.ContributionRecord, plan: bytes) -> TakenStep:
        return TakenStep(
            start=taken.prior_digest or taken.next_digest,
            start_momentum=self._needed(taken.prior_momentum_digest),
            end=taken.next_digest,
            end_momentum=self._needed(taken.momentum_digest),
            total=taken.field_sum_digest or Digest(""),
            contributors=taken.c_t,
            plan=plan,
        )

    def _needed(self, momentum: Digest | None) -> Digest | None:
        """Without ``outer.momentum`` no step reads what the last one left."""
        return momentum if self.workload.outer.momentum else None

    def tail(self) -> record.ContributionRecord:
        with self._lock:
            return self._ledger.tail()

    @property
    def ledger(self) -> Ledger:
        """For reading, by what answers questions; hold ``reading`` meanwhile."""
        return self._ledger

    @property
    def reading(self) -> threading.RLock:
        return self._lock

    def checkpoint(self, digest: Digest) -> Checkpoint:
        return checkpoint.open_checkpoint(self.directory.checkpoint(digest))

    # ---- runs and attempts ----

    @property
    def unfinished_rounds(self) -> int:
        return 0 if self._run is None else max(0, self._run.requested - self._run.done)

    @property
    def run(self) -> Run | None:
        """The run that is under way."""
        return self._run

    def begin_run(self, rounds: int) -> Run:
        """Write the manifest, then record the run."""
        with self._lock:
            manifest.begin_run(self.directory, self._ledger, rounds, self.config.rounds.aggregation)
            run = self._ledger.unfinished_run()
            if run is None:
                raise LedgerIntegrityError(
                    f"{self.directory.ledger} does not hold a run just begun"
                )
            self._run = run
            return run

    def finish_run(self, run: Run, completed: bool, code: str, reason: str) -> None:
        """``run`` is over; called again if the disk did not take that, even beside a newer run."""
        with self._lock:
            if self._run is not None and self._run.run == run.run:
                self._run = None
            state: RunState = "completed" if completed else "stopped"
            self._ledger.end_run(run.run, state, code, reason)

    def _end_done_run(self) -> None:
        """A run whose last round is committed is over, though a crash kept that from the ledger."""
        run = self._run
        if run is not None and run.done >= run.requested:
            self.finish_run(run, completed=True, code="", reason="")

    def begin_attempt(self, round_index: int, attempt: int) -> None:
        with self._lock:
            self._ledger.begin_attempt(round_index, attempt, self._run.run if self._run else "")

    def abort_attempt(self, round_index: int, attempt: int, code: str, reason: str) -> None:
        with self._lock:
            # The disk may not have taken its beginning: then there is nothing to end.
            begun = self._ledger.attempts(round_index, round_index + 1)
            if any(each.attempt == attempt for each in begun):
                self._ledger.end_attempt(round_index, attempt, "aborted", code, reason)

    # ---- updates ----

    def open_update(self, node: NodeId) -> SpoolFile:
        """A spool for one update; see ``Spool.open``."""
        with self._lock:
            return self.spool.open(node, self.plan.nbytes)

    def check_update(self, update: SpoolFile) -> None:
        """Refuse one plain update that could make the sum wrap; see ``aggregate``."""
        aggregate.check_update(update, self.plan, self.workload.room)

    def derive_sum(self, updates: Sequence[aggregate.Addend]) -> Digest:
        """Sum twice and compare; the digest of the stored sum."""
        facts = aggregate.derive_sum(
            updates, self.plan, self.workload.room, self.directory.sums, _sums_differed
        )
        self._facts = facts
        return facts.field_sum_digest

    def diagnose(self, field_sum: Digest, contributors: int) -> Diagnosis:
        """Look at the revealed sum, for people; not part of the committed path.

        Raises:
            AggregationError: it is not the sum that was derived last.
            StorageError: it cannot be read.
        """
        plan, facts, square = self.plan, self._facts_of(field_sum), 0.0
        stored = self.directory.sum(field_sum)
        for part in aggregate.sum_parts(stored, plan, PIECE_WORDS):
            square += _square_sum(plan, part)
        use = max(
            facts.largest / reach(self.workload.room, contributors),
            facts.largest_narrow / (contributors * plan.limit),
        )
        return Diagnosis(math.sqrt(square) / contributors, use)

    def _facts_of(self, field_sum: Digest) -> aggregate.SumFacts:
        """What was seen of the sum while it was derived, which is the last that was."""
        if self._facts is None or self._facts.field_sum_digest != field_sum:
            raise AggregationError(f"the sum {field_sum} is not the one that was derived last")
        return self._facts

    def prepare(self, round_index: int, field_sum: Digest, contributors: int) -> "Candidate":
        """Take the outer step and make its result durable; the global state does not move."""
        with self._lock:
            tail = self._ledger.tail()
        inputs = commit.StepInputs(
            round_index,
            tail.next_digest,
            tail.momentum_digest,
            field_sum,
            contributors,
            tail.following,
        )
        prepared = commit.apply_outer_step(self.directory, self.workload, self.layout, inputs)
        return Candidate(tail, inputs, prepared)

    def commit(
        self,
        attempt: int,
        candidate: "Candidate",
        contributions: Sequence[Contribution],
        masking: record.Masking | None,
        refusal: str = "",
    ) -> Digest:
        """Append the record of a prepared step; the new global digest.

        With ``refusal``, why the candidate is not adopted, it is the prior's again.
        """
        contributors = tuple(
            record.Contributor(
                node=each.node,
                dataset_root=each.dataset_root,
                update_digest=each.digest,
                commitment_signature=each.commitment_signature.hex(),
                update_signature=each.update_signature.hex(),
            )
            for each in contributions
        )
        tail, inputs, prepared = candidate.tail, candidate.inputs, candidate.prepared
        committed = record.ContributionRecord(
            federation=self.federation,
            round=inputs.round_index,
            attempt=attempt,
            contributors=contributors,
            c_t=len(contributors),
            prior_digest=tail.next_digest,
            next_digest=prepared.next_digest,
            prior_momentum_digest=tail.momentum_digest,
            momentum_digest=prepared.momentum_digest,
            field_sum_digest=inputs.field_sum_digest,
            config_hash=self.workload.digest,
            layout_digest=self.layout.digest,
            sketch_seed=seeds.sketch(self.workload.root_seed, inputs.round_index),
            masking=masking,
            next_plan=prepared.next_plan.hex() or msgspec.UNSET,
            prev_record_hash=record.record_hash(tail),
        )
        if refusal:
            committed = record.rejected(committed, refusal)
        with self._lock:
            self._ledger.append(committed, self._run.run if self._run else "")
            self.plan = self._plan_after(committed)
            if self._run is not None:
                self._run = msgspec.structs.replace(self._run, done=self._run.done + 1)
            self._retire(sweep=bool(refusal))
        return Digest(committed.next_digest)

    def _retire(self, *, sweep: bool) -> None:
        """Let go of what need not be kept; a disk that refuses is asked again next round."""
        try:
            if not commit.retire(self.directory, self._ledger, self._retention) and sweep:
                commit.sweep(self.directory, self._ledger)
            self._kept = self._count_checkpoints()
        except StorageError as error:
            logger("store").warning("retire.refused", reason=error.message)

    # ---- roster ----

    def name(self, node: NodeId) -> str:
        member = self._members.get(node)
        return member.name if member is not None else node[:12]

    def members(self) -> dict[NodeId, str]:
        """The names of all nodes that were ever admitted."""
        return {node: member.name for node, member in self._members.items()}

    def find(self, wanted: str) -> NodeId:
        """The member that is called ``wanted``, or whose id begins with it.

        Raises:
            OperatorError: none, or more than one.
        """
        members = self.members()
        for found in (
            [node for node, name in members.items() if name == wanted],
            [node for node in members if node.startswith(wanted)],
        ):
            if len(found) == 1:
                return found[0]
            if found:
                ids = ", ".join(sorted(node[:12] for node in found)[:4])
                raise OperatorError(f"{wanted!r} is {len(found)} nodes: {ids}", "Give more of it.")
        raise OperatorError(
            f"no node {wanted!r} has ever joined", "List them with `lensemblectl status`."
        )

    def admitted_before(self, node: NodeId) -> bool:
        return node in self._members

    def invitation(self, secret_hash: str) -> Invitation | None:
        with self._lock:
            found = self._ledger.invite(secret_hash)
        return None if found is None else Invitation(found.expires, found.uses_left)

    def add_invite(self, secret_hash: str, expires: float, uses: int) -> None:
        with self._lock:
            self._ledger.add_invite(secret_hash, expires, uses)

    def admit(self, node: NodeId, name: str, by: str, secret_hash: str = "") -> bool:
        """Put ``node`` on the roster; False if its invite has no use left."""
        with self._lock:
            done = self._ledger.admit(node, name, by, secret_hash)
            self._members = self._ledger.roster()
            return done

    # ---- events and facts ----

    def note(self, events: Sequence[dict[str, object]]) -> None:
        with self._lock:
            self._ledger.note(events)

    def events(self, after: int, limit: int) -> list[Event]:
        with self._lock:
            return self._ledger.events(after, limit)

    def events_of(self, event: str, limit: int) -> list[Event]:
        """The latest ``limit`` events of that name, oldest first."""
        with self._lock:
            return self._ledger.events_of(event, limit)

    def newest_event(self) -> int:
        """Number of the latest event, 0 if there is none."""
        with self._lock:
            return self._ledger.newest_event()

    def free_bytes(self) -> int:
        return shutil.disk_usage(self.directory.root).free


def _square_sum(plan: FieldPlan, part: aggregate.Part) -> float:
    """Of what the words of ``part`` stand for, in single precision: for people to look at."""
    base, found = plan.byte_of(part.first), 0.0
    for segment, lo, hi in plan.parts(part.first, part.first + part.coordinates):
        words = signed_words(part.raw, segment.byte_of(lo) - base, hi - lo, segment.bits)
        near = words.astype(np.float32)
        found += float(np.dot(near, near)) * 4.0**-segment.k
    return found


def _sums_differed(byte: int) -> None:
    """Memory or a disk that fails now and then: the round goes on if it does not fail again."""
    logger("store").warning("sum.differed", byte=byte)


def unix_now() -> float:
    """Seconds since the epoch, for dates that people and invites carry; never for timers."""
    return time.time_ns() / 1e9
