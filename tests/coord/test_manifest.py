import platform
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lensemble.errors import ConfigError, LedgerIntegrityError, StorageError
from lensemble.ids import Digest
from lensemble.seeds import sketch
from lensemble.workload import NoopTask, Workload
from lensemble_coord.training.directory import StateDirectory
from lensemble_coord.training.manifest import (
    MAX_RUN_ROUNDS,
    RunManifest,
    begin_run,
    manifest_digest,
    plan_run,
    read_manifest,
)
from tests.coord.history import FEDERATION, History

SMALL = Workload(root_seed=9, task=NoopTask(parameters=50))


@pytest.fixture
def history(tmp_path: Path) -> History:
    return History(tmp_path / "state", SMALL)


def entered(history: History, run: str) -> Digest:
    return Digest(next(r.manifest_digest for r in history.ledger.runs() if r.run == run))


def test_a_manifest_says_what_is_settled_before_the_first_round(history: History) -> None:
    tail = history.advance(2)
    run = begin_run(history.directory, history.ledger, 3)
    found = read_manifest(history.directory, run, entered(history, run))
    assert (found.run, found.federation, found.rounds) == (run, FEDERATION, 3)
    assert found.first_round == 2
    assert found.sketch_seeds == tuple(sketch(9, t) for t in (2, 3, 4))
    assert found.config_hash == SMALL.digest
    assert found.config_resolved == SMALL.canonical().decode()
    assert (found.initial_digest, found.initial_momentum_digest) == (
        tail.next_digest,
        tail.momentum_digest,
    )
    assert (found.field_bits, found.field_k, found.field_n_max) == ("auto", 24, 64)
    assert found.aggregation == "plain"
    assert platform.python_version() in found.machine
    assert "numpy" in found.versions


def test_two_plans_differ_in_run_and_time_only(history: History) -> None:
    one, two = (plan_run(history.ledger, run, 3, "plain") for run in ("a", "b"))
    same = msgspec.structs.replace(two, run="a", created_at=one.created_at)
    assert one == same


@pytest.mark.parametrize("rounds", [0, -1, MAX_RUN_ROUNDS + 1])
def test_a_run_has_some_rounds_but_not_any_number(history: History, rounds: int) -> None:
    before = list(history.directory.manifests.iterdir())
    with pytest.raises(ConfigError, match=f"a run of {rounds} rounds"):
        begin_run(history.directory, history.ledger, rounds)
    assert list(history.directory.manifests.iterdir()) == before


def test_an_edited_or_missing_manifest_is_named(history: History) -> None:
    path = history.directory.manifest(history.run)
    digest = entered(history, history.run)
    path.write_bytes(path.read_bytes().replace(b'"rounds": 10', b'"rounds": 11'))
    with pytest.raises(LedgerIntegrityError, match=path.name):
        read_manifest(history.directory, history.run, digest)
    path.unlink()
    with pytest.raises(StorageError, match=path.name):
        read_manifest(history.directory, history.run, digest)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=100))
def test_any_content_is_a_manifest_or_refused(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    directory = StateDirectory(tmp_path_factory.mktemp("any"))
    directory.manifests.mkdir()
    directory.manifest("x").write_bytes(content)
    with pytest.raises(LedgerIntegrityError, match="run-x"):
        read_manifest(directory, "x", manifest_digest(content))


def test_a_manifest_encodes_and_decodes(history: History) -> None:
    plan = plan_run(history.ledger, "a", 2, "masked")
    assert msgspec.json.decode(msgspec.json.encode(plan), type=RunManifest) == plan
