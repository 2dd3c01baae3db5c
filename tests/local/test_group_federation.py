"""A federation in which one node trains with two processes and loses one in a round."""

from pathlib import Path

import pytest
import trio

from lensemble.transport.memory_driver import MemoryNetwork
from lensemble_coord.config import CoordinatorConfig, RoundsSection
from lensemble_local.simulate import simulate
from lensemble_node.config import DataSection, NodeConfig, TaskSection, WorkerSection
from tests.node import texts

NODES, ROUNDS = 3, 2
CODE = """
import os, signal
from lensemble_local.letters import Letters
class Mine(Letters):
    def __init__(self, setting):
        super().__init__(setting)
        self.trip = setting.data / "trip"
        self.told = setting.data / f"process-{os.environ.get('RANK', '')}"
    def loss(self, parameters, examples):
        self.told.write_text(str(os.getpid()))
        if os.environ.get("RANK") == "1" and self.trip.exists():
            self.trip.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(parameters, examples)
"""
ENTRY = "mortal:Mine"


@pytest.mark.soak
def test_a_lost_process_costs_an_attempt_and_no_more(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mortal.py").write_text(CODE)
    task = texts.workload().task.model_copy(update={"entry": ENTRY})
    workload = texts.workload().model_copy(update={"task": task})
    (tmp_path / "workload.toml").write_text(texts.toml(workload))
    hub = CoordinatorConfig(
        state_dir=tmp_path / "hub",
        workload=tmp_path / "workload.toml",
        rounds=RoundsSection(aggregation="masked", min_participants=NODES),
    )
    nodes = [
        NodeConfig(
            name=f"node-{index}",
            state_dir=tmp_path / f"node-{index}",
            data=DataSection(path=texts.folder(tmp_path / f"texts-{index}", index)),
            task=TaskSection(entry=ENTRY, folder=tmp_path),
            worker=WorkerSection(processes=2 if index == 0 else 1, restart_backoff_s=0.1),
        )
        for index in range(NODES)
    ]
    place = tmp_path / "texts-0"
    (place / "trip").touch()
    ended = trio.run(simulate, hub, nodes, ROUNDS, MemoryNetwork(seed=0))
    assert (ended.completed, ended.contributors_per_round) == (True, (NODES,) * ROUNDS)
    assert not (place / "trip").exists()
    logged = capfd.readouterr()
    told = logged.out + logged.err
    assert "lost one of its processes, or one hung" in told
    assert "was killed by SIGKILL" in told
    for rank in range(2):
        pid = int((place / f"process-{rank}").read_text())
        assert not Path(f"/proc/{pid}").exists()
