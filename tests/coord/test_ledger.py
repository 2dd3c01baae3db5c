import hashlib
import json
import sqlite3
import threading
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lensemble.errors import (
    ArtifactError,
    LedgerIntegrityError,
    SchemaVersionMismatch,
    StorageError,
)
from lensemble.ids import Digest, FederationId, NodeId
from lensemble.params import layout_of
from lensemble.workload import Workload
from lensemble_coord.training import ledger as ledgers
from lensemble_coord.training import record as records
from lensemble_coord.training.ledger import Ledger
from lensemble_coord.training.record import ContributionRecord, Contributor, genesis, record_hash

FEDERATION = FederationId("f" * 32)
WORKLOAD = Workload()
LAYOUT = layout_of({"encoder.weight": (5, 7)})
GENESIS = genesis(FEDERATION, WORKLOAD, LAYOUT, Digest("a" * 64))


def hex64(number: int) -> Digest:
    return Digest(f"{number:064x}")


def contributor(number: int) -> Contributor:
    return Contributor(
        node=NodeId(hex64(number)),
        dataset_root=hex64(100 + number),
        update_digest=hex64(200 + number),
        commitment_signature="c" * 128,
        update_signature="d" * 128,
    )


def successor(prior: ContributionRecord, **changes: object) -> ContributionRecord:
    number = prior.round + 1
    sound = ContributionRecord(
        federation=FEDERATION,
        round=number,
        attempt=0,
        contributors=(contributor(1), contributor(2)),
        c_t=2,
        prior_digest=prior.next_digest,
        next_digest=hex64(1000 + number),
        prior_momentum_digest=prior.momentum_digest,
        momentum_digest=hex64(2000 + number),
        field_sum_digest=hex64(3000 + number),
        config_hash=WORKLOAD.digest,
        layout_digest=LAYOUT.digest,
        sketch_seed=number,
        prev_record_hash=record_hash(prior),
    )
    return msgspec.structs.replace(sound, **changes)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger.create(tmp_path / "ledger.sqlite", FEDERATION, WORKLOAD, GENESIS)


def test_a_new_ledger_pins_the_start(ledger: Ledger) -> None:
    assert ledger.tail() == GENESIS
    assert ledger.present("weights") == {-1: GENESIS.next_digest}
    assert ledger.present("momentum") == {}
    assert (ledger.federation, ledger.workload) == (FEDERATION, WORKLOAD)
    assert ledger.damage() == []
    with pytest.raises(StorageError, match="exists"):
        Ledger.create(ledger.path, FEDERATION, WORKLOAD, GENESIS)
    assert [p.name for p in ledger.path.parent.glob("*.sqlite")] == ["ledger.sqlite"]


def test_what_is_committed_is_there_after_a_kill(ledger: Ledger) -> None:
    record = successor(GENESIS)
    ledger.begin_run("r1", 5, hex64(9))
    ledger.begin_attempt(0, 0, "r1")
    ledger.append(record, "r1")
    ledger.begin_attempt(1, 0, "r1")
    again = Ledger(ledger.path)
    assert again.tail() == record
    assert again.verify_chain() == record
    run = again.unfinished_run()
    assert run is not None
    assert (run.requested, run.done, run.state) == (5, 1, "running")
    assert [a.state for a in again.attempts()] == ["closed", "open"]
    assert again.next_attempt(1) == 1
    assert [a.round for a in again.interrupt_attempts()] == [1]
    assert again.attempts(1)[0].code == "interrupted"
    assert again.interrupt_attempts() == []
    again.end_run("r1", "stopped", "code", "why")
    assert again.unfinished_run() is None
    assert again.runs()[0].reason == "why"


def test_only_the_next_record_is_appended(ledger: Ledger) -> None:
    first = successor(GENESIS)
    wrong: dict[str, ContributionRecord] = {
        "round": successor(GENESIS, round=1),
        "prior_digest": successor(GENESIS, prior_digest=hex64(7)),
        "prior_momentum_digest": successor(GENESIS, prior_momentum_digest=hex64(7)),
        "prev_record_hash": successor(GENESIS, prev_record_hash=None),
        "config_hash": successor(GENESIS, config_hash=hex64(7)),
        "federation": successor(GENESIS, federation=FederationId("e" * 32)),
        "layout_digest": successor(GENESIS, layout_digest=hex64(7)),
        "C_t": successor(GENESIS, c_t=3),
        "sorted": successor(GENESIS, contributors=(contributor(2), contributor(1))),
        "distinct": successor(GENESIS, contributors=(contributor(1), contributor(1))),
        "without contributors": successor(GENESIS, contributors=(), c_t=0),
        "schema": successor(GENESIS, schema=2),
    }
    for word, record in wrong.items():
        with pytest.raises(LedgerIntegrityError, match=word):
            ledger.append(record)
    assert ledger.tail() == GENESIS
    assert ledger.present("sum") == {}
    ledger.append(first)
    with pytest.raises(LedgerIntegrityError, match="round"):
        ledger.append(first)


def test_an_attempt_number_is_never_used_twice(ledger: Ledger) -> None:
    assert ledger.next_attempt(0) == 0
    ledger.begin_attempt(0, 0)
    ledger.end_attempt(0, 0, "aborted", "fault_tolerance_exceeded", "1 of 2")
    ledger.end_attempt(0, 0, "closed")
    assert ledger.attempts()[0].state == "aborted"
    assert ledger.next_attempt(0) == 1
    with pytest.raises(LedgerIntegrityError, match="already has round 0, attempt 0"):
        ledger.begin_attempt(0, 0)
    with pytest.raises(LedgerIntegrityError, match="never began"):
        ledger.end_attempt(0, 7, "closed")


def test_a_run_whose_end_was_not_written_does_not_come_back(ledger: Ledger) -> None:
    ledger.begin_run("r1", 5, hex64(9))
    ledger.begin_run("r2", 1, hex64(9))
    ended = ledger.runs()[0]
    assert (ended.run, ended.state, ended.code) == ("r1", "stopped", "superseded")
    ledger.end_run("r2", "completed")
    assert ledger.unfinished_run() is None


def test_committed_yields_a_range(ledger: Ledger) -> None:
    tail = GENESIS
    for _ in range(4):
        tail = successor(tail)
        ledger.append(tail, "r")
    assert [c.record.round for c in ledger.committed()] == [-1, 0, 1, 2, 3]
    assert [c.record.round for c in ledger.committed(1, 3)] == [1, 2]
    assert list(ledger.committed(9)) == []
    assert next(ledger.committed(2)).run == "r"


def test_retired_artifacts_are_no_longer_expected(ledger: Ledger) -> None:
    ledger.append(successor(GENESIS))
    ledger.retire("sum", [0, 5])
    assert ledger.present("sum") == {}
    assert ledger.present("weights") == {-1: GENESIS.next_digest, 0: hex64(1000)}


def test_an_invite_admits_once_and_the_roster_remembers(ledger: Ledger) -> None:
    alice, bob = NodeId(hex64(1)), NodeId(hex64(2))
    ledger.add_invite("s" * 64, 12.5)
    assert ledger.admit(alice, "alice", "invite", "s" * 64)
    assert ledger.admit(alice, "alice", "invite", "s" * 64)
    assert not ledger.admit(bob, "bob", "invite", "s" * 64)
    assert not ledger.admit(bob, "bob", "invite", "unknown")
    assert set(ledger.roster()) == {alice}
    invite = ledger.invite("s" * 64)
    assert invite is not None
    assert (invite.uses_left, json.loads(invite.used_by), invite.expires) == (0, [alice], 12.5)
    assert ledger.invite("none") is None
    assert len(ledger.invites()) == 1
    ledger.admit(alice, "renamed", "config")
    member = ledger.roster()[alice]
    assert (member.name, member.admitted_by) == ("renamed", "invite")


def test_events_are_numbered_and_bounded(ledger: Ledger) -> None:
    many = [{"event": "tick", "n": n} for n in range(ledgers.MAX_EVENTS // 2)]
    for _ in range(3):
        ledger.note(many)
    newest = 3 * len(many)
    assert [e.seq for e in ledger.events(newest - 2)] == [newest - 1, newest]
    assert ledger.events(0, 1)[0].seq > newest - ledgers.MAX_EVENTS - 1
    with pytest.raises(LedgerIntegrityError, match="over"):
        ledger.note([{"event": "x" * ledgers.MAX_EVENT_BYTES}])
    assert ledger.events(newest) == []


def test_many_threads_share_a_ledger(ledger: Ledger) -> None:
    def work(index: int) -> None:
        for attempt in range(10):
            ledger.begin_attempt(index, attempt)
            ledger.note([{"event": "began", "round": index}])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ledger.attempts()) == 40
    assert [e.seq for e in ledger.events()] == list(range(1, 41))


def rewrite(path: Path, statement: str) -> None:
    connection = sqlite3.connect(path)
    with connection:
        connection.execute(statement)
    connection.close()


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        ("UPDATE records SET record = replace(record, '\"C_t\":2', '\"C_t\":3') WHERE round = 0",
         "records, round 0"),
        ("UPDATE records SET committed_at = 'x' WHERE round = 0", "records, round 0"),
        ("UPDATE attempts SET code = 'x'", "attempts, round 0, attempt 0"),
        ("UPDATE roster SET name = 'x'", "roster, node"),
        ("UPDATE runs SET done = 9", "runs, run r1"),
        ("UPDATE meta SET value = '7' WHERE key = 'root_seed'", "meta, key root_seed"),
        ("UPDATE artifacts SET digest = 'x' WHERE kind = 'sum'", "artifacts, kind sum"),
        ("UPDATE events SET event = '{}'", "events, seq 1"),
        ("UPDATE invites SET uses_left = 9", "invites, secret_hash"),
    ],
)  # fmt: skip
def test_an_edited_row_is_named(ledger: Ledger, statement: str, named: str) -> None:
    ledger.begin_run("r1", 1, hex64(1))
    ledger.begin_attempt(0, 0)
    ledger.append(successor(GENESIS))
    ledger.admit(NodeId(hex64(1)), "alice", "config")
    ledger.add_invite("s" * 64, 1.0)
    ledger.note([{"event": "x"}])
    ledger.close()
    rewrite(ledger.path, statement)
    with pytest.raises(LedgerIntegrityError, match=named):
        read_everything(ledger.path)
    if not named.startswith("meta"):
        again = Ledger(ledger.path, check=False)
        assert [named in sentence for sentence in again.damage()] == [True]


def read_everything(path: Path) -> None:
    ledger = Ledger(path)
    try:
        ledger.verify_chain()
        ledger.attempts()
        ledger.runs()
        ledger.roster()
        ledger.invites()
        ledger.events()
        ledger.present("weights")
        ledger.present("momentum")
        ledger.present("sum")
    finally:
        ledger.close()


def test_a_rewritten_history_does_not_chain(ledger: Ledger) -> None:
    first = successor(GENESIS)
    ledger.append(first)
    ledger.append(successor(first))
    forged = successor(GENESIS, next_digest=first.next_digest, sketch_seed=77)
    row = ledger._tables.row("records", 0)
    assert row is not None
    text, digest = records.canonical(forged).decode(), record_hash(forged)
    ledger._tables.put("records", {**row, "record": text, "record_hash": digest})
    with pytest.raises(LedgerIntegrityError, match="round 1: prev_record_hash"):
        ledger.verify_chain()


def test_a_newer_schema_and_a_foreign_file_are_refused(ledger: Ledger, tmp_path: Path) -> None:
    ledger.close()
    rewrite(ledger.path, "PRAGMA user_version = 9")
    with pytest.raises(SchemaVersionMismatch, match="schema 9"):
        Ledger(ledger.path)
    (tmp_path / "text").write_text("no database " * 100)
    with pytest.raises(LedgerIntegrityError, match="text"):
        Ledger(tmp_path / "text")
    (tmp_path / "empty").write_text("")
    with pytest.raises(LedgerIntegrityError, match="empty"):
        Ledger(tmp_path / "empty")
    with pytest.raises(StorageError, match="absent"):
        Ledger(tmp_path / "absent")


def test_a_ledger_begun_before_a_key_of_the_workload_existed_opens(ledger: Ledger) -> None:
    terms = json.loads(WORKLOAD.canonical())
    del terms["outer"]["dtype"]
    text = json.dumps(terms, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    for key, value in (("workload", text), ("config_hash", digest)):
        ledger._tables.put("meta", {"key": key, "value": value})
    again = Ledger(ledger.path)
    assert again.workload == WORKLOAD
    assert again.config_hash == digest != WORKLOAD.digest


def test_a_table_defined_otherwise_is_named(ledger: Ledger) -> None:
    ledger.close()
    rewrite(ledger.path, "ALTER TABLE runs ADD COLUMN extra TEXT")
    with pytest.raises(LedgerIntegrityError, match="table runs"):
        Ledger(ledger.path)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=200) | st.just(records.canonical(GENESIS).decode() + " "))
def test_any_text_is_a_canonical_record_or_refused(text: str) -> None:
    with pytest.raises(LedgerIntegrityError):
        records.decode(text)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_damaged_file_is_opened_or_refused_in_order(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("ledger") / "ledger.sqlite"
    Ledger.create(path, FEDERATION, WORKLOAD, GENESIS).close()
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        read_everything(path)
    except (ArtifactError, StorageError):
        return


def test_a_full_disk_leaves_the_ledger_as_it_was(ledger: Ledger) -> None:
    first = successor(GENESIS)
    ledger.append(first)
    ledger.begin_attempt(1, 0)
    ledger._tables._connection.execute("PRAGMA max_page_count = 1")
    with pytest.raises(StorageError, match="full"):
        ledger.note([{"event": "x" * 10_000} for _ in range(40)])
    with pytest.raises(StorageError, match="full"):
        ledger.begin_run("r" * 10_000, 1, hex64(1))
    assert ledger.tail() == first
    assert ledger.events() == []
    ledger._tables._connection.execute("PRAGMA max_page_count = 1000000")
    ledger.append(successor(first))
    assert ledger.damage() == []
    assert ledger.verify_chain().round == 1
