"""What a coordinator keeps, as ``store`` does: ledger, attempts, runs, roster, checkpoints."""

import random

import msgspec

from lensemble.errors import CheckpointIntegrityError, LedgerIntegrityError
from lensemble.ids import Digest, NodeId
from lensemble.wire.steps import MAX_STEPS, TakenStep
from lensemble_coord.roster import Invitation
from lensemble_coord.training import outer_round as r
from lensemble_coord.training import record as records
from lensemble_coord.training.downlink import Origin
from tests.coord.round_play import PRIOR
from tests.sim.disk import Disk
from tests.sim.mask_side import At
from tests.sim.terms import FEDERATION, LAYOUT, WORKLOAD

KEEP_LAST = 2
KEEP_SUMS = 2


class Position(msgspec.Struct, frozen=True):
    round: int
    attempt: int
    digest: Digest


class Run(msgspec.Struct, frozen=True):
    number: int
    requested: int
    done: int = 0
    outcome: str = ""


class Ledger(msgspec.Struct, frozen=True):
    """One database: each value of it is one transaction, whole or not there."""

    records: tuple[records.ContributionRecord, ...]
    begun: tuple[At, ...] = ()
    open: tuple[At, ...] = ()
    runs: tuple[Run, ...] = ()
    roster: tuple[NodeId, ...] = ()
    used: tuple[NodeId, ...] = ()


class Books:
    def __init__(self, chance: random.Random) -> None:
        self.disk = Disk(chance)
        genesis = records.genesis(FEDERATION, WORKLOAD, LAYOUT, PRIOR)
        self.disk.put("ledger", Ledger((genesis,)))
        self.disk.put(("weights", PRIOR), True)
        self.spool: dict[NodeId, tuple[At, Digest]] = {}
        self.run: Run | None = None
        self.invites: dict[bytes, Invitation] = {}
        self.outcomes: dict[int, list[str]] = {}
        """By run: every outcome that was ever told to anyone."""

    @property
    def ledger(self) -> Ledger:
        ledger: Ledger = self.disk.read("ledger")
        return ledger

    def _write(self, **changes: object) -> None:
        self.disk.put("ledger", msgspec.structs.replace(self.ledger, **changes))

    # ---- opening ----

    def open(self) -> None:
        """Recover: what was open is aborted, what the ledger does not name is removed."""
        self.spool.clear()
        full, self.disk.full = self.disk.full, False
        self.run = next((run for run in reversed(self.ledger.runs) if not run.outcome), None)
        self._end_done_run()
        if self.ledger.open:
            self._write(open=())
        named = {record.next_digest for record in self.ledger.records[-KEEP_LAST:]}
        for key in self.disk.keys("weights"):
            if key[1] not in named:
                self.disk.remove(key)
                self.disk.flush(key)
        self.require_weights(self.tail().next_digest)
        self.disk.full = full

    def _end_done_run(self) -> None:
        """A run whose last round is committed is over, even if nobody could write that down."""
        if self.run is not None and self.run.done >= self.run.requested:
            self._end(self.run, "completed")
            self.run = None

    def require_weights(self, digest: Digest) -> None:
        if not self.disk.read(("weights", digest)):
            raise CheckpointIntegrityError(f"the state {digest} is not on disk")

    # ---- where it stands ----

    def has_sum(self, digest: str) -> bool:
        return bool(self.disk.read(("sum", digest)))

    def origin(self) -> Origin:
        """What the next round starts from, and the last steps of which sums are kept."""
        steps: list[TakenStep] = []
        for record in reversed(self.ledger.records[1:]):
            total = record.field_sum_digest or Digest("")
            if len(steps) == MAX_STEPS or not self.has_sum(total):
                break
            step = TakenStep(
                start=record.prior_digest or PRIOR,
                start_momentum=record.prior_momentum_digest,
                end=record.next_digest,
                end_momentum=record.momentum_digest,
                total=total,
                contributors=record.c_t,
            )
            steps.append(step)
        tail = self.tail()
        nbytes = LAYOUT.nbytes * (1 if tail.momentum_digest is None else 2)
        return Origin(tail.next_digest, tail.momentum_digest, tuple(reversed(steps)), nbytes)

    def tail(self) -> records.ContributionRecord:
        return self.ledger.records[-1]

    @property
    def begun(self) -> tuple[At, ...]:
        return self.ledger.begun

    @property
    def roster(self) -> tuple[NodeId, ...]:
        return self.ledger.roster

    @property
    def position(self) -> Position:
        tail = self.tail()
        here = tail.round + 1
        attempt = max((a + 1 for t, a in self.begun if t == here), default=0)
        return Position(here, attempt, tail.next_digest)

    @property
    def unfinished_rounds(self) -> int:
        return 0 if self.run is None else max(0, self.run.requested - self.run.done)

    # ---- runs and attempts ----

    def begin_run(self, rounds: int) -> None:
        runs = tuple(
            run if run.outcome else msgspec.structs.replace(run, outcome="superseded")
            for run in self.ledger.runs
        )
        run = Run(len(runs), rounds)
        self._write(runs=(*runs, run))
        self.run = run

    def _end(self, run: Run, outcome: str) -> None:
        stored = self.ledger.runs[run.number]
        ended = msgspec.structs.replace(stored, outcome=outcome)
        runs = self.ledger.runs
        self._write(runs=(*runs[: run.number], ended, *runs[run.number + 1 :]))
        self.outcomes.setdefault(run.number, []).append(outcome)

    def finish_run(self, run: Run, action: r.FinishRun) -> None:
        if not self.ledger.runs[run.number].outcome:
            self._end(run, "completed" if action.completed else "stopped")

    def begin_attempt(self, round_index: int, attempt: int) -> None:
        at = (round_index, attempt)
        if at in self.begun:
            raise LedgerIntegrityError(f"attempt {at} was begun before")
        self._write(begun=(*self.ledger.begun, at), open=(*self.ledger.open, at))

    def abort_attempt(self, at: At) -> None:
        self._write(open=tuple(each for each in self.ledger.open if each != at))

    # ---- records ----

    def append(self, record: records.ContributionRecord) -> None:
        ledger = self.ledger
        found = records.faults(record, ledger.records[-1])
        if found:
            raise LedgerIntegrityError("; ".join(found))
        at = (record.round, record.attempt)
        changes: dict[str, object] = {"records": (*ledger.records, record)}
        changes["open"] = tuple(each for each in ledger.open if each != at)
        if self.run is not None:
            run = msgspec.structs.replace(self.run, done=self.run.done + 1)
            changes["runs"] = (*ledger.runs[: run.number], run, *ledger.runs[run.number + 1 :])
        self._write(**changes)
        if self.run is not None:
            self.run = run
        for old in ledger.records[: 1 - KEEP_LAST]:
            self.disk.remove(("weights", old.next_digest))
        for old in ledger.records[: 1 - KEEP_SUMS]:
            self.disk.remove(("sum", old.field_sum_digest))

    # ---- roster ----

    def invitation(self, secret: bytes) -> Invitation | None:
        invite = self.invites.get(secret)
        if invite is None:
            return None
        left = invite.uses_left - len(self.ledger.used)
        return msgspec.structs.replace(invite, uses_left=left)

    def admit(self, node: NodeId, invite: bytes) -> None:
        used = (*self.ledger.used, node) if invite else self.ledger.used
        if node not in self.roster or used != self.ledger.used:
            self._write(roster=tuple(sorted({*self.roster, node})), used=used)
