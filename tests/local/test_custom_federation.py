"""A masked federation of daemons that trains a task of the nodes' own, one of which fails."""

from pathlib import Path

import pytest
import trio

from lensemble import identity
from lensemble.state_dir import IDENTITY_NAME
from lensemble.transport.memory_driver import MemoryNetwork
from lensemble.workload import FieldTerms, initial_parameters
from lensemble_coord.config import CoordinatorConfig, RoundsSection
from lensemble_coord.training.verify import verify_state
from lensemble_local.rounds import Federation
from lensemble_local.simulate import simulate
from lensemble_node.config import DataSection, NodeConfig, TaskSection
from lensemble_node.worker.training.local_round import Trainer
from lensemble_node.worker.training.source import TaskCode
from tests.node import texts

GOOD, ROUNDS = 3, 2
CODE = """
from lensemble_local.letters import Letters
class Mine(Letters):
    def __init__(self, setting):
        super().__init__(setting)
        self.trips = (setting.data / "trip").exists()
    def loss(self, parameters, examples):
        if self.trips:
            raise RuntimeError(self.texts[0])
        return super().loss(parameters, examples)
"""
ENTRY = "tripping:Mine"


@pytest.mark.soak
def test_a_node_whose_task_fails_declines_and_the_others_go_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tripping.py").write_text(CODE)
    task = texts.workload().task.model_copy(update={"entry": ENTRY})
    exact = FieldTerms(bits=32)
    workload = texts.workload().model_copy(update={"task": task, "field": exact})
    (tmp_path / "workload.toml").write_text(texts.toml(workload))
    hub = CoordinatorConfig(
        state_dir=tmp_path / "hub",
        workload=tmp_path / "workload.toml",
        rounds=RoundsSection(aggregation="masked", min_participants=GOOD),
    )
    nodes, ids = [], []
    for index in range(GOOD + 1):
        data, state = texts.folder(tmp_path / f"texts-{index}", index), tmp_path / f"node-{index}"
        state.mkdir(mode=0o700)
        ids.append(identity.load_or_create(state / IDENTITY_NAME).node)
        nodes.append(
            NodeConfig(
                name=f"node-{index}",
                state_dir=state,
                data=DataSection(path=data),
                task=TaskSection(entry=ENTRY, folder=tmp_path),
            )
        )
    (tmp_path / f"texts-{GOOD}" / "trip").touch()
    ended = trio.run(simulate, hub, nodes, ROUNDS, MemoryNetwork(seed=0))
    assert (ended.completed, ended.contributors_per_round) == (True, (GOOD,) * ROUNDS)
    report = verify_state(tmp_path / "hub")
    assert report.sound, report.problems
    made = Federation(
        workload,
        [
            Trainer(
                workload,
                TaskCode(ENTRY, node.data.path, tmp_path),
                tmp_path / "alone" / name,
                name,
                1,
            )
            for name, node in zip(ids[:GOOD], nodes, strict=False)
        ],
        initial_parameters(workload),
    )
    for _ in range(ROUNDS):
        made.round()
    assert made.digest == ended.digest
    logged = capfd.readouterr()
    assert "raised RuntimeError at tripping.py:9" in logged.out + logged.err
