"""A federation whose coordinator tests its states with the real program, from data to report."""

from pathlib import Path

import pytest
import trio

from lensemble.transport.memory_driver import MemoryNetwork
from lensemble_coord.config import CoordinatorConfig, GateSection, RoundsSection, StorageSection
from lensemble_coord.training.verify import verify_state
from lensemble_local.arm import Order, make
from lensemble_local.simulate import simulate
from lensemble_node.config import DataSection, NodeConfig, ShareSection
from lensemble_report.__main__ import main as report
from lensemble_report.history import read

ROUNDS = 3
WORKLOAD = (
    'name = "tiny"\n[task]\nkind = "world_model"\nobservation_dim = 6\nlatent_dim = 4\n'
    "hidden = 16\nhead_hidden = 8\n[inner]\nsteps = 20\nbatch = 32\n"
    "[outer]\nlr = {rate}\nmomentum = 0.0\n"
)


@pytest.mark.soak
@pytest.mark.parametrize(("mode", "rate"), [("alert", 1.0), ("reject", 10.0)])
def test_states_are_tested_from_end_to_end(tmp_path: Path, mode: str, rate: float) -> None:
    made = {path.name: path for path in make(tmp_path / "arm", Order(2, 4, "numpy", 0, False, 0))}
    # Ten times the mean update overshoots: what that makes is not to be adopted.
    (tmp_path / "workload.toml").write_text(WORKLOAD.format(rate=rate))
    hub = CoordinatorConfig(
        state_dir=tmp_path / "hub",
        workload=tmp_path / "workload.toml",
        rounds=RoundsSection(aggregation="plain", min_participants=2),
        gate=GateSection(data=made["public.h5"], mode=mode),
        storage=StorageSection(keep_last=ROUNDS + 1),
    )
    nodes = [
        NodeConfig(
            name=f"node-{index}",
            state_dir=tmp_path / f"node-{index}",
            data=DataSection(path=made[f"node{index}.h5"]),
            share=ShareSection(plain=True),
        )
        for index in range(2)
    ]
    ended = trio.run(simulate, hub, nodes, ROUNDS, MemoryNetwork(0))
    assert ended.completed
    history = read(tmp_path / "hub")
    assert history.start is not None
    assert [each.verdict is not None for each in history.rounds] == [True] * ROUNDS
    refused = [bool(each.record.refusal) for each in history.rounds]
    assert any(refused) == (mode == "reject")
    if mode == "alert":
        errors = [each.figures.state_error for each in history.rounds if each.figures]
        assert errors[-1] < history.start.figures.state_error
        assert all(each.figures and each.figures.drift_before for each in history.rounds)
    assert verify_state(tmp_path / "hub").sound
    assert report([f"--state-dir={tmp_path / 'hub'}", f"--out={tmp_path / 'r.html'}"]) == 0
