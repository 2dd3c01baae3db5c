import json
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lensemble.checkpoint import HEADER_NAME, WEIGHTS_NAME
from lensemble.workload import FieldTerms, NoopTask, Workload
from lensemble_coord.training import record as records
from lensemble_coord.training.commit import Retention, sweep
from lensemble_coord.training.ledger import Ledger
from lensemble_coord.training.ledger_copy import WAL_SUFFIX, check_wal
from lensemble_coord.training.record import record_hash
from lensemble_coord.training.report import Report
from lensemble_coord.training.verify import main, verify_state
from tests.coord.history import FEDERATION, NODES, History

SMALL = Workload(root_seed=3, task=NoopTask(parameters=500))
ROUNDS = 4


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state directory with a little of everything, at rest."""
    history = History(tmp_path_factory.mktemp("sound") / "state", SMALL)
    ledger = history.ledger
    ledger.admit(NODES[0].node, "alice", "config")
    ledger.add_invite("a" * 64, 5.0)
    ledger.note([{"event": "node.joined", "node": NODES[0].node}])
    history.advance(ROUNDS)
    ledger.begin_attempt(ROUNDS, 0)
    ledger.end_attempt(ROUNDS, 0, "aborted", "fault_tolerance_exceeded", "1 of 2")
    ledger.end_run(history.run, "completed")
    ledger.close()
    return history.directory.root


@pytest.fixture
def state(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "copy"))


def problems(report: Report) -> str:
    return "\n".join(f"{p.where} | round {p.round} | {p.what}" for p in report.problems)


def flip(path: Path, at: int, bit: int = 1) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= bit
    path.write_bytes(content)


def test_a_copy_of_a_sound_directory_is_sound(state: Path) -> None:
    before = {path: path.read_bytes() for path in state.rglob("*") if path.is_file()}
    seen: list[tuple[str, int, int]] = []
    report = verify_state(state, lambda *step: seen.append(step))
    assert report.sound, problems(report)
    assert report.notes == []
    assert (report.records, report.newest_round) == (ROUNDS + 1, ROUNDS - 1)
    assert (report.signatures, report.manifests) == (2 * 3 * ROUNDS, 1)
    assert (report.checkpoints, report.sums, report.recomputed) == (2 * ROUNDS + 1, ROUNDS, ROUNDS)
    assert {what for what, _, _ in seen} == {
        "signatures", "weights", "momentum", "sum", "outer steps",
    }  # fmt: skip
    assert {path: path.read_bytes() for path in state.rglob("*") if path.is_file()} == before


FILES = (
    f"checkpoints/*/{WEIGHTS_NAME}",
    f"checkpoints/*/{HEADER_NAME}",
    f"momentum/*/{WEIGHTS_NAME}",
    f"momentum/*/{HEADER_NAME}",
    "sums/*.u32",
    "manifests/*.json",
)


@pytest.mark.parametrize("pattern", FILES)
def test_one_flipped_byte_of_any_file_is_named(state: Path, pattern: str) -> None:
    generator = np.random.default_rng(len(pattern))
    paths = sorted(state.glob(pattern))
    assert paths
    for path in paths:
        size = path.stat().st_size
        for at in {0, 7, 8, size // 3, size - 1, *generator.integers(0, size, 3).tolist()}:
            flip(path, at)
            report = verify_state(state)
            flip(path, at)
            named = str(path.relative_to(state))
            assert not report.sound, (named, at)
            assert all(named.startswith(p.where) for p in report.problems), problems(report)
            if not pattern.startswith("manifests"):
                assert all(p.round is not None for p in report.problems)
    assert verify_state(state).sound


@pytest.mark.parametrize("pattern", FILES)
def test_a_missing_and_a_short_file_are_named(state: Path, pattern: str) -> None:
    path = max(state.glob(pattern))
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    assert str(path.relative_to(state)).startswith(verify_state(state).problems[0].where)
    path.unlink()
    assert str(path.relative_to(state)).startswith(verify_state(state).problems[0].where)


def test_a_damaged_sum_leaves_the_other_steps_verified(state: Path) -> None:
    ledger = Ledger(state / "ledger.sqlite")
    digest = ledger.present("sum")[1]
    ledger.close()
    flip(state / "sums" / f"{digest}.u32", 17)
    report = verify_state(state)
    assert [p.round for p in report.problems] == [1]
    assert report.recomputed == ROUNDS - 1


def rows_of(path: Path) -> list[str]:
    connection = sqlite3.connect(path)
    try:
        return list(connection.iterdump())
    finally:
        connection.close()


@pytest.mark.parametrize(
    "places", [150, pytest.param(2_000, marks=pytest.mark.soak)], ids=["some", "many"]
)
def test_one_flipped_byte_of_the_ledger_is_named_or_means_nothing(
    state: Path, tmp_path: Path, places: int
) -> None:
    """A flip is reported, or not one stored value has changed by it."""
    path, copy = state / "ledger.sqlite", tmp_path / "read.sqlite"
    content = path.read_bytes()
    whole = rows_of(path)
    generator = np.random.default_rng(5)
    used = [at for at in range(100, len(content)) if content[at]]
    chosen = generator.permutation(used)[:places].tolist()
    silent = 0
    for at in [*range(100), *chosen]:
        bit = 1 << int(generator.integers(8))
        path.write_bytes(content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :])
        report = verify_state(state)
        if report.sound:
            silent += 1
            shutil.copyfile(path, copy)
            assert rows_of(copy) == whole, at
        else:
            first = report.problems[0]
            assert first.where.startswith("ledger.sqlite"), (at, problems(report))
            assert "lensemble-verify" not in first.what
    assert silent < (100 + len(chosen)) // 3


def with_log(state: Path) -> Path:
    """Leave committed rows in the log, as a kill does."""
    script = (
        "import os, sys; from pathlib import Path;"
        "from lensemble_coord.training.ledger import Ledger;"
        "ledger = Ledger(Path(sys.argv[1]));"
        "[ledger.note([{'event': 'tick', 'n': n}]) for n in range(3)]; os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", script, str(state / "ledger.sqlite")], check=True)
    return state / f"ledger.sqlite{WAL_SUFFIX}"


def test_one_flipped_byte_of_the_log_is_named(state: Path) -> None:
    log = with_log(state)
    report = verify_state(state)
    assert report.sound, problems(report)
    content = log.read_bytes()
    generator = np.random.default_rng(6)
    for at in [*range(0, 64, 5), *generator.integers(0, len(content), 10).tolist()]:
        flip(log, at)
        report = verify_state(state)
        assert f"ledger.sqlite{WAL_SUFFIX}" in [p.where for p in report.problems], at
        flip(log, at)
    log.write_bytes(content[:-100])
    assert "unfinished write" in verify_state(state).notes[0]


def test_every_byte_of_a_log_is_under_its_checksum(state: Path) -> None:
    content = bytearray(with_log(state).read_bytes())
    assert check_wal(bytes(content)) == ([], [])
    for at in range(0, len(content), 37):
        content[at] ^= 16
        assert check_wal(bytes(content))[0], at
        content[at] ^= 16


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_log_or_not(content: bytes) -> None:
    check_wal(content)
    check_wal(b"\x37\x7f\x06\x82" + content)


def forge(state: Path, round_index: int, **changes: object) -> None:
    """Rewrite one record and everything that depends on it, as one who knows the format would."""
    ledger = Ledger(state / "ledger.sqlite")
    prior = None
    for each in list(ledger.committed()):
        record = each.record
        if prior is not None:
            record = msgspec.structs.replace(record, prev_record_hash=record_hash(prior))
        if record.round == round_index:
            record = msgspec.structs.replace(record, **changes)
        row = ledger._tables.row("records", record.round)
        assert row is not None
        text = records.canonical(record).decode()
        ledger._tables.put("records", {**row, "record": text, "record_hash": record_hash(record)})
        prior = record
    ledger.close()


def test_a_forged_contributor_has_no_signature(state: Path) -> None:
    ledger = Ledger(state / "ledger.sqlite")
    first = next(ledger.committed(1)).record.contributors
    ledger.close()
    other = msgspec.structs.replace(first[1], dataset_root=first[2].dataset_root)
    forge(state, 1, contributors=(first[0], other, first[2]))
    report = verify_state(state)
    assert [p.round for p in report.problems] == [1, 1]
    assert {p.what for p in report.problems} == {
        f"the {name} signature of {first[1].node} is not that node's"
        for name in ("commitment", "update")
    }


def test_a_forged_denominator_shows_in_the_step(state: Path) -> None:
    ledger = Ledger(state / "ledger.sqlite")
    first = next(ledger.committed(2)).record.contributors
    ledger.close()
    forge(state, 2, contributors=first[:2], c_t=2)
    found = verify_state(state).problems
    assert {(p.where, p.round) for p in found} == {("outer step", 2)}


def test_a_rejected_step_is_recomputed_and_said_to_be(tmp_path: Path) -> None:
    history = History(tmp_path / "state", SMALL)
    history.advance()
    refused = records.rejected(history.prepare(), "std 9 is outside 0.3 to 2 \u03c3")
    history.ledger.append(refused, history.run)
    sweep(history.directory, history.ledger)
    history.advance()
    last = history.ledger.tail()
    history.ledger.close()
    report = verify_state(history.directory.root)
    assert report.sound, problems(report)
    assert (report.recomputed, report.checkpoints) == (3, 5)
    assert report.notes == ["the step of round 1 was rejected: std 9 is outside 0.3 to 2 ?"]
    assert last.prior_digest == refused.prior_digest
    candidate = msgspec.structs.replace(refused.rejected, candidate_digest=last.next_digest)
    forge(history.directory.root, 1, rejected=candidate)
    (found,) = verify_state(history.directory.root).problems[:1]
    assert (found.where, found.round) == ("outer step", 1)
    assert "parameters" in found.what
    # That the state moved all the same is no record at all.
    assert "was rejected, and yet" in " ".join(
        records.faults(msgspec.structs.replace(refused, next_digest=last.next_digest), None)
    )


def _with_plan(tmp_path: Path, workload: Workload, plan: bytes) -> str:
    """What is wrong with a history whose last record names ``plan`` for the round that follows."""
    history = History(tmp_path / "state", workload)
    history.advance(2)
    due = history.prepare()
    history.ledger.append(msgspec.structs.replace(due, next_plan=plan.hex()), history.run)
    history.ledger.close()
    return problems(verify_state(history.directory.root))


def test_the_plan_of_the_next_words_is_derived_again(tmp_path: Path) -> None:
    history = History(tmp_path / "sound", SMALL)
    following = history.advance(2).following
    assert any(following)
    assert _with_plan(tmp_path / "same", SMALL, following) == ""
    found = _with_plan(tmp_path / "other", SMALL, bytes(each and each + 1 for each in following))
    assert "outer step | round 2 | recomputed field plan" in found


def test_a_plan_that_is_none_of_this_workload_is_named(tmp_path: Path) -> None:
    wide = SMALL.model_copy(update={"field": FieldTerms(bits=32)})
    assert "next_plan has words of 16 bits, and field.bits is 32" in _with_plan(
        tmp_path / "wide", wide, bytes([64 + 12])
    )
    assert "a field plan for 3 tensors" in _with_plan(tmp_path / "more", SMALL, bytes([70] * 3))


def test_a_forged_seed_and_attempt_are_named(state: Path) -> None:
    forge(state, 0, sketch_seed=1, attempt=5)
    found = verify_state(state).problems
    assert all(p.round == 0 for p in found)
    assert "sketch_seed is 1" in found[0].what
    assert len(found) == 1 + 6


def test_what_the_ledger_does_not_name_is_noted_only(state: Path) -> None:
    (state / "checkpoints" / ".part-x").mkdir()
    report = verify_state(state)
    assert report.sound
    assert report.notes == ["checkpoints/.part-x is named by no record"]


def test_retired_rounds_verify_by_chain_and_kept_ones_by_step(tmp_path: Path) -> None:
    history = History(tmp_path / "state", SMALL)
    history.advance(12, Retention(keep_last=2, keep_every=4, verify_keep_rounds=3))
    report = verify_state(history.directory.root)
    assert report.sound, problems(report)
    assert (report.records, report.recomputed) == (13, 3)
    history.ledger.close()


def test_a_running_ledger_is_verified_beside_its_owner(tmp_path: Path) -> None:
    history = History(tmp_path / "state", SMALL)
    history.advance(2)
    history.ledger.note([{"event": "x"}])
    assert verify_state(history.directory.root).sound
    history.advance(1)
    assert verify_state(history.directory.root).newest_round == 2
    history.ledger.close()


def test_a_directory_without_a_ledger_is_said_so(tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "absent"):
        report = verify_state(root)
        assert [p.where for p in report.problems] == ["ledger.sqlite"]
        assert not list(tmp_path.iterdir())


def test_the_program_prints_and_exits(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(state)]) == 0
    assert capsys.readouterr().out.endswith("sound\n")
    flip(next(state.glob("sums/*")), 3)
    assert main([str(state)]) == 1
    assert "PROBLEM: sums/" in capsys.readouterr().out
    assert main([str(state), "--json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed["federation"] == FEDERATION
    assert printed["problems"][0]["where"].startswith("sums/")
