"""The coordinator's memory: records, attempts, runs, roster, invites and events in one database.

Appending a record is the commit of a round; whatever is on disk and not named by the ledger is an
orphan.  All methods block (a commit flushes the disk); call them in a thread.  Every method may
raise ``LedgerIntegrityError`` on a damaged database and ``StorageError`` on a full or failing disk.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from pydantic import ValidationError

from lensemble import files
from lensemble.crash_points import reached
from lensemble.errors import LedgerIntegrityError, StorageError
from lensemble.ids import Digest, FederationId, NodeId
from lensemble.workload import Workload
from lensemble_coord.training import record as records
from lensemble_coord.training.record import GENESIS_ROUND, ContributionRecord, record_hash
from lensemble_coord.training.rows import (
    ArtifactKind,
    Attempt,
    AttemptState,
    Committed,
    Event,
    Invite,
    Member,
    Run,
    RunState,
)
from lensemble_coord.training.tables import Row, SealedTables, Value

MAX_EVENTS = 50_000
MAX_EVENT_BYTES = 1 << 14
MAX_INVITE_USERS = 4096
_TRIM_EVENTS = 1_000


def utc_now() -> str:
    return datetime.now(tz=UTC).isoformat(timespec="milliseconds")


class Ledger:
    """Opens the ledger at ``path``; see ``create`` for the first time.

    Unless ``check`` is false, the file and every row are checked first, for what is built on a
    damaged ledger, down to the sweeping of what it does not name, would be damage too.

    Raises:
        LedgerIntegrityError: damaged, or not a ledger.
        SchemaVersionMismatch: written by a newer version.
        StorageError: missing or unusable.
    """

    def __init__(self, path: Path, *, check: bool = True, now: Callable[[], str] = utc_now) -> None:
        self.path = path
        self.now = now
        self._tables = SealedTables(path, create=False)
        try:
            self._read_meta()
            if check:
                self._require_sound()
        except BaseException:
            self._tables.close()
            raise

    @classmethod
    def create(
        cls, path: Path, federation: FederationId, workload: Workload, first: ContributionRecord
    ) -> "Ledger":
        """Make a new ledger that begins with the genesis record ``first``.

        Raises:
            StorageError: ``path`` exists, or the disk refuses.
        """
        if path.exists():
            raise StorageError(f"{path} exists", "Use it, or name another state directory.")
        part = path.with_name(f".part-{path.name}")
        part.unlink(missing_ok=True)
        tables = SealedTables(part, create=True)
        with tables.transaction():
            for key, value in (
                ("federation", federation),
                ("workload", workload.canonical().decode()),
                ("config_hash", workload.digest),
                ("root_seed", str(workload.root_seed)),
            ):
                tables.insert("meta", {"key": key, "value": value})
        tables.close()
        made = cls(part)
        made.append(first)
        made.close()
        with files.storage(path):
            reached("ledger.made")
            part.rename(path)
            reached("ledger.named")
            files.flush_directory(path.parent)
            reached("ledger.listed")
        return cls(path)

    def _read_meta(self) -> None:
        meta = {str(row["key"]): str(row["value"]) for row in self._tables.rows("meta")}
        try:
            self.federation = FederationId(meta["federation"])
            self.config_hash = Digest(meta["config_hash"])
            self.workload_text = meta["workload"]
            self.workload = Workload.model_validate_json(self.workload_text)
        except (KeyError, ValidationError) as error:
            raise LedgerIntegrityError(f"{self.path}: meta is not whole: {error}") from error
        # Of the text as it was written: a later version may know more keys and their defaults.
        found = hashlib.sha256(self.workload_text.encode()).hexdigest()
        due = (found, str(self.workload.root_seed))
        if (self.config_hash, meta.get("root_seed")) != due:
            raise LedgerIntegrityError(f"{self.path}: meta does not agree with its workload")

    def _require_sound(self) -> None:
        found = self.damage()
        if found:
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            raise LedgerIntegrityError(f"{self.path}: {found[0]}{more}")

    def close(self) -> None:
        self._tables.close()

    def settle(self) -> None:
        """Leave everything in the one file, so that a plain copy of it is whole."""
        self._tables.settle()

    def damage(self) -> list[str]:
        """What is wrong with the file or with the seal of any row; empty when all is sound."""
        return [*self._tables.damage(), *self._tables.broken_seals()]

    # ---- records ----

    def append(self, record: ContributionRecord, run: str = "") -> Digest:
        """Commit a round: record, artifacts, attempt and progress of ``run`` in one transaction.

        Raises:
            LedgerIntegrityError: ``record`` does not continue the chain.
        """
        with self._tables.transaction():
            tail = self._tail()
            found = records.faults(record, tail)
            if (record.federation, record.config_hash) != (self.federation, self.config_hash):
                found.append("federation or config_hash is another ledger's")
            if found:
                raise LedgerIntegrityError(f"record of round {record.round}: {'; '.join(found)}")
            digest = record_hash(record)
            self._tables.insert(
                "records",
                {
                    "round": record.round,
                    "attempt": record.attempt,
                    "run": run,
                    "committed_at": self.now(),
                    "record": records.canonical(record).decode(),
                    "record_hash": digest,
                },
            )
            self._name_artifacts(record)
            self._count_round(record, run)
        self._tables.tidy()
        return digest

    def _name_artifacts(self, record: ContributionRecord) -> None:
        named: tuple[tuple[ArtifactKind, str | None], ...] = (
            ("weights", record.next_digest),
            ("momentum", record.momentum_digest),
            ("sum", record.field_sum_digest),
        )
        for kind, digest in named:
            if digest is not None:
                row: Row = {"kind": kind, "round": record.round, "digest": digest}
                self._tables.insert("artifacts", row)

    def _count_round(self, record: ContributionRecord, run: str) -> None:
        if self._tables.row("attempts", record.round, record.attempt) is not None:
            self.end_attempt(record.round, record.attempt, "closed")
        row = self._tables.row("runs", run)
        if row is not None:
            self._tables.put("runs", {**row, "done": int(row["done"] or 0) + 1})

    def _tail(self) -> ContributionRecord | None:
        rows = self._tables.rows("records", "ORDER BY round DESC LIMIT 1")
        return records.decode(str(rows[0]["record"])) if rows else None

    def tail(self) -> ContributionRecord:
        """The newest record; what it names is the global state."""
        tail = self._tail()
        if tail is None:
            raise LedgerIntegrityError(f"{self.path} has no genesis record")
        return tail

    def committed(self, start: int = GENESIS_ROUND, stop: int | None = None) -> Iterator[Committed]:
        """The records of rounds ``start`` to before ``stop``, in order."""
        at = start
        while stop is None or at < stop:
            rows = self._tables.rows("records", "WHERE round >= ? ORDER BY round LIMIT 1", (at,))
            if not rows or (stop is not None and int(rows[0]["round"] or 0) >= stop):
                return
            row = rows[0]
            yield Committed(
                records.decode(str(row["record"])),
                Digest(str(row["record_hash"])),
                str(row["run"]),
                str(row["committed_at"]),
            )
            at = int(row["round"] or 0) + 1

    def verify_chain(self) -> ContributionRecord:
        """Check every record against its predecessor; returns the newest.

        Raises:
            LedgerIntegrityError: names the first round that does not fit.
        """
        prior: ContributionRecord | None = None
        for each in self.committed():
            found = records.faults(each.record, prior)
            if each.record_hash != record_hash(each.record):
                found.append("the stored hash is not the record's")
            if found:
                raise LedgerIntegrityError(
                    f"{self.path}: round {each.record.round}: {'; '.join(found)}"
                )
            prior = each.record
        return self.tail()

    # ---- artifacts ----

    def present(self, kind: ArtifactKind) -> dict[int, Digest]:
        """Round to digest of every artifact of ``kind`` that must be on disk."""
        rows = self._tables.rows("artifacts", "WHERE kind = ? ORDER BY round", (kind,))
        return {int(row["round"] or 0): Digest(str(row["digest"])) for row in rows}

    def retire(self, kind: ArtifactKind, rounds: Sequence[int]) -> None:
        """Name the artifacts of ``rounds`` no longer; call before deleting them."""
        with self._tables.transaction():
            for each in rounds:
                self._tables.delete("artifacts", "WHERE kind = ? AND round = ?", (kind, each))

    # ---- attempts ----

    def begin_attempt(self, round_index: int, attempt: int, run: str = "") -> None:
        """Record an attempt before anyone hears of it, so that its number is never used again.

        Raises:
            LedgerIntegrityError: it was begun before.
        """
        self._tables.insert(
            "attempts",
            {
                "round": round_index,
                "attempt": attempt,
                "run": run,
                "state": "open",
                "code": "",
                "reason": "",
                "opened_at": self.now(),
                "closed_at": "",
            },
        )

    def end_attempt(
        self, round_index: int, attempt: int, state: AttemptState, code: str = "", reason: str = ""
    ) -> None:
        """Record how an attempt ended; one that ended already keeps its first outcome."""
        with self._tables.transaction():
            row = self._tables.row("attempts", round_index, attempt)
            if row is None:
                raise LedgerIntegrityError(f"attempt {attempt} of round {round_index} never began")
            if row["state"] == "open":
                ended = {"state": state, "code": code, "reason": reason, "closed_at": self.now()}
                self._tables.put("attempts", {**row, **ended})

    def next_attempt(self, round_index: int) -> int:
        """The lowest attempt number of ``round_index`` that was never used."""
        begun = self.attempts(round_index, round_index + 1)
        return max((each.attempt + 1 for each in begun), default=0)

    def attempts(self, start: int = 0, stop: int = 1 << 62) -> list[Attempt]:
        """The attempts of rounds ``start`` to before ``stop``, oldest first."""
        rest = "WHERE round >= ? AND round < ? ORDER BY round, attempt"
        return [
            msgspec.convert(row, Attempt)
            for row in self._tables.rows("attempts", rest, (start, stop))
        ]

    def interrupt_attempts(self) -> list[Attempt]:
        """Abort the attempts that a dead process left open; call once at start."""
        rows = self._tables.rows("attempts", "WHERE state = 'open' ORDER BY round, attempt")
        left = [msgspec.convert(row, Attempt) for row in rows]
        for each in left:
            reason = "the coordinator stopped while the round was open"
            self.end_attempt(each.round, each.attempt, "aborted", "interrupted", reason)
        return left

    # ---- runs ----

    def begin_run(self, run: str, requested: int, manifest_digest: Digest) -> None:
        """Record a request for ``requested`` rounds, whose manifest is written already.

        One whose end could not be written down ends here: it must not go on after a restart.
        """
        with self._tables.transaction():
            for left in self._tables.rows("runs", "WHERE state = 'running'"):
                self.end_run(str(left["run"]), "stopped", "superseded", "another run has begun")
            self._tables.insert(
                "runs",
                {
                    "run": run,
                    "requested": requested,
                    "done": 0,
                    "state": "running",
                    "code": "",
                    "reason": "",
                    "manifest_digest": manifest_digest,
                    "started_at": self.now(),
                    "ended_at": "",
                },
            )

    def end_run(self, run: str, state: RunState, code: str = "", reason: str = "") -> None:
        """Record that no further round of ``run`` will be tried."""
        with self._tables.transaction():
            row = self._tables.row("runs", run)
            if row is None:
                raise LedgerIntegrityError(f"run {run} never began")
            ended = {"state": state, "code": code, "reason": reason, "ended_at": self.now()}
            self._tables.put("runs", {**row, **ended})

    def unfinished_run(self) -> Run | None:
        """The run that is under way, or that a dead process left."""
        rest = "WHERE state = 'running' ORDER BY started_at DESC, rowid DESC LIMIT 1"
        rows = self._tables.rows("runs", rest)
        return msgspec.convert(rows[0], Run) if rows else None

    def runs(self) -> list[Run]:
        return [msgspec.convert(r, Run) for r in self._tables.rows("runs", "ORDER BY rowid")]

    # ---- roster and invites ----

    def roster(self) -> dict[NodeId, Member]:
        """Every node that was ever admitted."""
        rows = self._tables.rows("roster", "ORDER BY node")
        return {NodeId(str(row["node"])): msgspec.convert(row, Member) for row in rows}

    def admit(self, node: NodeId, name: str, by: str, invite: str = "") -> bool:
        """Put ``node`` on the roster, or note that it was seen; uses up one use of ``invite``.

        ``invite`` is the hash of a secret.  False, and nothing is written, if it has no use left.
        """
        with self._tables.transaction():
            if invite and not self._use(invite, node):
                return False
            now = self.now()
            known = self._tables.row("roster", node)
            first: dict[str, Value] = {"first_seen": now, "admitted_by": by}
            if known is not None:
                first = {key: known[key] for key in first}
            self._tables.put("roster", {"node": node, "name": name, "last_seen": now, **first})
        return True

    def add_invite(self, secret_hash: str, expires: float, uses: int = 1) -> None:
        """Remember an invite by the hash of its secret."""
        self._tables.insert(
            "invites",
            {"secret_hash": secret_hash, "expires": expires, "uses_left": uses, "used_by": "[]"},
        )

    def invite(self, secret_hash: str) -> Invite | None:
        row = self._tables.row("invites", secret_hash)
        return None if row is None else msgspec.convert(row, Invite)

    def invites(self) -> list[Invite]:
        return [msgspec.convert(row, Invite) for row in self._tables.rows("invites")]

    def _use(self, secret_hash: str, node: NodeId) -> bool:
        row = self._tables.row("invites", secret_hash)
        if row is None:
            return False
        users = json.loads(str(row["used_by"]))
        left = int(row["uses_left"] or 0)
        if node in users:
            return True
        if left < 1 or len(users) >= MAX_INVITE_USERS:
            return False
        used: dict[str, Value] = {"uses_left": left - 1, "used_by": json.dumps([*users, node])}
        self._tables.put("invites", {**row, **used})
        return True

    # ---- events ----

    def note(self, events: Sequence[Mapping[str, object]]) -> None:
        """Append events (JSON-native mappings); the oldest beyond ``MAX_EVENTS`` are dropped.

        Raises:
            LedgerIntegrityError: one is larger than ``MAX_EVENT_BYTES``.
        """
        with self._tables.transaction():
            before = self.newest_event()
            for seq, event in enumerate(events, before + 1):
                text = msgspec.json.encode(event).decode()
                if len(text) > MAX_EVENT_BYTES:
                    raise LedgerIntegrityError(
                        f"an event of {len(text)} bytes is over {MAX_EVENT_BYTES}"
                    )
                self._tables.insert("events", {"seq": seq, "at": self.now(), "event": text})
            last = before + len(events)
            if last % _TRIM_EVENTS < len(events):
                self._tables.delete("events", "WHERE seq <= ?", (last - MAX_EVENTS,))

    def newest_event(self) -> int:
        """Number of the latest event, 0 if there is none."""
        newest = self._tables.rows("events", "ORDER BY seq DESC LIMIT 1")
        return int(newest[0]["seq"] or 0) if newest else 0

    def events(self, after: int = 0, limit: int = 1000) -> list[Event]:
        """At most ``limit`` events that follow number ``after``, oldest first."""
        rest = "WHERE seq > ? ORDER BY seq LIMIT ?"
        return [
            msgspec.convert(row, Event) for row in self._tables.rows("events", rest, (after, limit))
        ]

    def events_of(self, event: str, limit: int) -> list[Event]:
        """The latest ``limit`` events of that name, oldest first."""
        rest = "WHERE substr(event, 1, ?) = ? ORDER BY seq DESC LIMIT ?"
        start = f'{{"event":"{event}",'
        rows = self._tables.rows("events", rest, (len(start), start, limit))
        return [msgspec.convert(row, Event) for row in reversed(rows)]
