from pathlib import Path

import numpy as np
import pytest

from lensemble.errors import AggregationError
from lensemble.ids import Digest, NodeId
from lensemble.secagg.field import reach
from lensemble.secagg.plan import BIAS, FieldPlan
from lensemble.workload import NoopTask, Workload
from lensemble_coord.config import CoordinatorConfig
from lensemble_coord.training.store import Store

TERMS = Workload(name="noop", task=NoopTask(parameters=100))


def opened(root: Path) -> Store:
    return Store(CoordinatorConfig(state_dir=root, workload=root / "workload.toml"), TERMS)


def test_a_run_whose_last_round_was_committed_is_over_after_a_crash(tmp_path: Path) -> None:
    """Its end was not written; nothing of it is left to do, and another may begin."""
    store = opened(tmp_path)
    run = store.begin_run(1)
    tables = store.ledger._tables
    row = tables.row("runs", run.run)
    assert row is not None
    tables.put("runs", {**row, "done": 1})
    store.close()
    again = opened(tmp_path)
    assert again.run is None
    assert [each.state for each in again.ledger.runs()] == ["completed"]
    assert again.begin_run(1).requested == 1
    again.close()


def test_a_run_with_rounds_left_goes_on_after_a_crash(tmp_path: Path) -> None:
    store = opened(tmp_path)
    run = store.begin_run(2)
    store.close()
    again = opened(tmp_path)
    assert again.run == run
    assert again.unfinished_rounds == 2
    again.close()


@pytest.mark.parametrize(("code", "k"), [(b"", 24), (bytes([BIAS + 9]), 9)])
def test_a_diagnosis_says_how_large_the_mean_is_and_how_full_the_field(
    tmp_path: Path, code: bytes, k: int
) -> None:
    store = opened(tmp_path)
    plan = store.plan = FieldPlan(store.layout, TERMS.room, code)
    kind = np.int16 if code else np.int32
    tail = np.array([1, 0] if code else [], dtype=np.uint32).tobytes()
    updates = []
    for index, value in enumerate((3, -15)):
        update = store.open_update(NodeId(f"{index:064x}"))
        update.pwrite(0, np.full(100, value, dtype=kind).tobytes() + tail)
        updates.append(update)
    found = store.diagnose(store.derive_sum(updates), 2)
    assert found.mean_update_l2 == pytest.approx(6 * 2.0**-k * 10)
    assert found.field_use == 12 / (2 * plan.limit if code else reach(TERMS.room, 2))
    with pytest.raises(AggregationError, match="derived last"):
        store.diagnose(Digest("0" * 64), 2)
    store.close()
