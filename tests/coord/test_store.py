from pathlib import Path

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
