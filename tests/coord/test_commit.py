import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lensemble.checkpoint import HEADER_NAME, WEIGHTS_NAME, open_checkpoint
from lensemble.errors import AggregationError, CheckpointIntegrityError, StorageError
from lensemble.ids import Digest
from lensemble.params import FlatParameters
from lensemble.workload import FieldTerms, NoopTask, Outer, Workload, initial_parameters, layout
from lensemble_coord.training.commit import (
    Retention,
    StepInputs,
    apply_outer_step,
    kept_rounds,
    orphans,
    retire,
    sweep,
)
from lensemble_coord.training.ledger import Ledger
from lensemble_coord.training.record import record_hash
from tests.coord.history import KEEP_ALL, NODES, WORKLOAD, History, words


@pytest.fixture
def history(tmp_path: Path) -> History:
    return History(tmp_path / "state")


def stored(history: History) -> tuple[FlatParameters, FlatParameters]:
    tail = history.ledger.tail()
    assert tail.momentum_digest is not None
    return (
        open_checkpoint(history.directory.checkpoint(tail.next_digest)).read(),
        open_checkpoint(history.directory.momentum_of(tail.momentum_digest)).read(),
    )


@pytest.mark.parametrize("bits", [32, "auto"])
def test_rounds_move_the_state_as_plain_numpy_says(tmp_path: Path, bits: int | str) -> None:
    history = History(
        tmp_path / "state", WORKLOAD.model_copy(update={"field": FieldTerms(bits=bits)})
    )
    w = initial_parameters(WORKLOAD)
    v = np.zeros_like(w)
    for round_index in range(3):
        narrow = bool(history.ledger.tail().following)
        assert narrow == (bits == "auto" and round_index > 0)
        history.advance()
        each = [words(WORKLOAD, round_index, n).view(np.int32).astype(np.int64) for n in range(3)]
        unit = 2.0**-24
        if narrow:
            # The mean of three has a root mean square of 2**-4 / 3, and 32 times that are to fit
            # into 511 steps.
            each, unit = [np.rint(one * 2.0**-15).astype(np.int64) for one in each], 2.0**-9
        total = np.sum(each, axis=0)
        m = (total * unit / 3).astype(np.float32)
        v = np.float32(0.9) * v + m
        w = w + np.float32(0.7) * (m + np.float32(0.9) * v)
        found = stored(history)
        assert np.array_equal(found[0], w)
        assert np.array_equal(found[1], v)
    header = open_checkpoint(history.directory.checkpoint(history.ledger.tail().next_digest)).header
    assert (header.round_index, header.kind) == (2, "weights")
    assert header.parent_digest == history.ledger.tail().prior_digest


def test_the_same_inputs_give_the_same_digests_elsewhere(tmp_path: Path) -> None:
    one, two = History(tmp_path / "one"), History(tmp_path / "two")
    assert one.advance(2) == two.advance(2)


def test_a_double_precision_step_differs_in_bits_only(tmp_path: Path) -> None:
    fine = WORKLOAD.model_copy(update={"outer": Outer(dtype="fp64")})
    one, two = History(tmp_path / "one"), History(tmp_path / "two", fine)
    one.advance(3)
    two.advance(3)
    assert one.ledger.tail().next_digest != two.ledger.tail().next_digest
    assert np.allclose(stored(one)[0], stored(two)[0], atol=1e-6)


def test_a_crash_before_the_record_leaves_orphans_and_the_old_state(history: History) -> None:
    tail = history.advance()
    record = history.prepare()
    again = Ledger(history.directory.ledger)
    assert again.tail() == tail
    assert set(orphans(history.directory, again)) == {
        f"checkpoints/{record.next_digest}",
        f"momentum/{record.momentum_digest}",
        f"sums/{record.field_sum_digest}.u32",
    }
    assert set(sweep(history.directory, again)) == {
        f"checkpoints/{record.next_digest}",
        f"momentum/{record.momentum_digest}",
        f"sums/{record.field_sum_digest}.u32",
    }
    assert orphans(history.directory, again) == ()
    again.interrupt_attempts()
    again.close()
    history.advance()
    assert history.ledger.tail().next_digest == record.next_digest
    assert history.ledger.tail().attempt == record.attempt + 1


def test_a_retry_with_others_does_not_trip_over_what_is_there(history: History) -> None:
    discarded = history.prepare(NODES[:2])
    committed = history.advance()
    assert committed.next_digest != discarded.next_digest
    assert committed.attempt == 1
    assert len(list(history.directory.checkpoints.iterdir())) == 3
    retire(history.directory, history.ledger, Retention(1, 0, 1))
    sweep(history.directory, history.ledger)
    assert len(list(history.directory.checkpoints.iterdir())) == 2


def test_rounds_that_change_nothing_are_rounds(tmp_path: Path) -> None:
    def nothing(workload: Workload, _: int, __: int) -> NDArray[np.uint32]:
        return np.zeros(layout(workload).size, dtype=np.uint32)

    history = History(tmp_path / "state", Workload(task=NoopTask(parameters=10)), nothing)
    first = history.ledger.tail()
    tail = history.advance(4, Retention(keep_last=1, keep_every=0, verify_keep_rounds=1))
    assert tail.next_digest == first.next_digest
    assert history.ledger.verify_chain() == tail
    open_checkpoint(history.directory.checkpoint(tail.next_digest)).verify()
    assert len(list(history.directory.checkpoints.iterdir())) == 1
    assert len(list(history.directory.sums.iterdir())) == 1


def test_a_missing_sum_is_named(history: History) -> None:
    tail = history.advance()
    inputs = StepInputs(1, tail.next_digest, tail.momentum_digest, Digest("0" * 64), 3)
    with pytest.raises(StorageError, match="0000"):
        apply_outer_step(history.directory, history.workload, history.layout, inputs)


@pytest.mark.parametrize("place", ["weights", "momentum", "sum"])
def test_a_damaged_input_is_named_and_nothing_is_written(history: History, place: str) -> None:
    before_it, tail = history.advance(), history.advance()
    assert tail.momentum_digest is not None
    assert tail.field_sum_digest is not None
    paths = {
        "weights": history.directory.checkpoint(tail.next_digest) / WEIGHTS_NAME,
        "momentum": history.directory.momentum_of(tail.momentum_digest) / WEIGHTS_NAME,
        "sum": history.directory.sum(tail.field_sum_digest),
    }
    content = bytearray(paths[place].read_bytes())
    content[-5] ^= 1
    paths[place].write_bytes(content)
    before = len(list(history.directory.root.rglob("*")))
    inputs = StepInputs(
        2, tail.next_digest, tail.momentum_digest, tail.field_sum_digest, 3, before_it.following
    )
    name = {"weights": "parameters", "momentum": "momentum", "sum": "field sum"}[place]
    with pytest.raises(CheckpointIntegrityError, match=f"{name} of round 2"):
        apply_outer_step(history.directory, history.workload, history.layout, inputs)
    assert len(list(history.directory.root.rglob("*"))) == before


def test_a_damaged_header_and_a_short_sum_are_named(history: History) -> None:
    history.advance()
    tail = history.ledger.tail()
    assert tail.field_sum_digest is not None
    inputs = StepInputs(1, tail.next_digest, tail.momentum_digest, tail.field_sum_digest, 3)
    with history.directory.sum(tail.field_sum_digest).open("ab") as file:
        file.write(b"x")
    with pytest.raises(AggregationError, match="bytes instead of"):
        apply_outer_step(history.directory, history.workload, history.layout, inputs)
    (history.directory.checkpoint(tail.next_digest) / HEADER_NAME).write_text("{}")
    with pytest.raises(CheckpointIntegrityError, match=HEADER_NAME):
        apply_outer_step(history.directory, history.workload, history.layout, inputs)


def test_retention_keeps_the_last_the_every_and_a_base(tmp_path: Path) -> None:
    history = History(tmp_path / "state", Workload(task=NoopTask(parameters=100)))
    policy = Retention(keep_last=2, keep_every=5, verify_keep_rounds=3)
    history.advance(14, policy)
    ledger = history.ledger
    assert set(ledger.present("weights")) == {0, 5, 10, 12, 13}
    assert set(ledger.present("momentum")) == {10, 12, 13}
    assert set(ledger.present("sum")) == {11, 12, 13}
    assert len(list(history.directory.checkpoints.iterdir())) == 5
    assert len(list(history.directory.sums.iterdir())) == 3
    assert orphans(history.directory, ledger) == ()


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.builds(Retention, st.integers(1, 7), st.integers(0, 6), st.integers(0, 9)),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 60),
)
def test_whatever_the_policy_what_it_promises_can_be_recomputed(
    policies: list[Retention], rounds: int
) -> None:
    weights, momentum, sums = {-1}, set[int](), set[int]()
    for newest in range(rounds):
        policy = policies[newest * len(policies) // rounds]
        weights.add(newest)
        momentum.add(newest)
        sums.add(newest)
        restorable = {each for each in weights if each in {-1, *momentum}}
        kept = kept_rounds(newest, policy, restorable)
        weights, momentum, sums = weights & kept.weights, momentum & kept.momentum, sums & kept.sums
        assert newest in weights
        assert newest in momentum
        assert set(range(max(0, newest - policy.keep_last + 1), newest + 1)) & weights
        bases = {each for each in weights if each in {-1, *momentum}}
        if len(policies) == 1:
            oldest = max(newest - policy.verify_keep_rounds, -1)
            base = max(each for each in bases if each <= oldest)
            assert set(range(base + 1, newest + 1)) <= sums
            slack = 2 * max(policy.keep_every, policy.verify_keep_rounds, 1)
            assert len(sums) <= policy.verify_keep_rounds + slack
            assert len(momentum) <= policy.keep_last + len(sums) + 1


def test_the_genesis_record_hash_is_fixed_by_its_content(history: History) -> None:
    first = next(history.ledger.committed())
    assert first.record_hash == record_hash(first.record)
    assert history.advance(1, KEEP_ALL).prev_record_hash == first.record_hash


def test_no_function_holds_a_model(tmp_path: Path) -> None:
    """A step over a 64 MB model may not cost the memory of one."""
    script = """
import resource, sys
from pathlib import Path
from lensemble.checkpoint import CheckpointWriter, Lineage
from lensemble.ids import Digest
from lensemble.secagg.plan import FieldPlan
from lensemble.workload import NoopTask, Workload, layout
from lensemble_coord.training.aggregate import derive_sum
from lensemble_coord.training.commit import StepInputs, apply_outer_step
from lensemble_coord.training.directory import StateDirectory
from lensemble_coord.training.spool import Spool

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

def run(parameters, root):
    workload = Workload(task=NoopTask(parameters=parameters))
    shape, directory = layout(workload), StateDirectory(Path(root))
    pieces = [(at, min(1 << 20, shape.nbytes - at)) for at in range(0, shape.nbytes, 1 << 20)]
    origin = Lineage("weights", -1, workload.digest)
    with CheckpointWriter(directory.checkpoints, shape, origin) as w:
        for at, size in pieces:
            w.write(at, bytes(size))
        first = w.commit()
    spool = Spool(directory.spool, 1 << 30, shape.nbytes)
    spools = [spool.open(str(n), shape.nbytes) for n in range(4)]
    for each in spools:
        for at, size in pieces:
            each.pwrite(at, bytes([1]) * size)
    facts = derive_sum(spools, FieldPlan(shape, workload.field), workload.field, directory.sums)
    inputs = StepInputs(0, first, None, facts.field_sum_digest, 4)
    apply_outer_step(directory, workload, shape, inputs)

run(1 << 18, sys.argv[1] + "/small")
before = peak()
run(1 << 24, sys.argv[1] + "/large")
print(peak() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], check=True, capture_output=True, text=True
    )
    assert int(done.stdout) < 24


def test_a_kill_at_any_call_loses_nothing_and_leaves_nothing_half_done() -> None:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as room:
        done = subprocess.run(
            [sys.executable, "-m", "tests.coord.crash_at_every_call", room],
            cwd=Path(__file__).parent.parent.parent,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 50
