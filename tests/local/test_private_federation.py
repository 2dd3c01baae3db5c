"""Federations that keep a privacy budget, in this process: masked, noised, stopped when spent."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import trio

from lensemble import identity
from lensemble.checkpoint import open_checkpoint
from lensemble.config import load
from lensemble.errors import ConfigError, PrivacyBudgetExceeded
from lensemble.ids import Digest
from lensemble.state_dir import CHARGES, IDENTITY_NAME
from lensemble.transport.memory_driver import MemoryNetwork
from lensemble.workload import Workload
from lensemble_coord.config import CoordinatorConfig, RoundsSection
from lensemble_coord.training.ledger import Ledger
from lensemble_local.simulate import Simulated, simulate
from lensemble_node.config import NodeConfig
from lensemble_node.worker.training.charges import Account, Charges
from lensemble_node.worker.training.local_round import Trainer

NODES = 3
PARAMETERS = 20_000
WORKLOAD = """
name = "noop"
[task]
kind = "noop"
parameters = {parameters}
[inner]
steps = 1
batch = 1
[outer]
lr = 1.0
momentum = 0.0
[field]
k = 22
[privacy]
enabled = true
clip_norm = 0.01
placement = "distributed"
cohort = {cohort}
"""


def federate(place: Path, rounds: int, cohort: int = NODES) -> Simulated:
    for name in ("hub", *(f"node-{index}" for index in range(NODES))):
        (place / name).mkdir(mode=0o700, exist_ok=True)
        identity.load_or_create(place / name / IDENTITY_NAME)
    text = WORKLOAD.format(parameters=PARAMETERS, cohort=cohort)
    (place / "workload.toml").write_text(text)
    hub = CoordinatorConfig(
        state_dir=place / "hub",
        workload=place / "workload.toml",
        rounds=RoundsSection(
            aggregation="masked", min_participants=NODES, secure_agg_threshold=NODES
        ),
    )
    nodes = [
        NodeConfig(name=f"node-{index}", state_dir=place / f"node-{index}")
        for index in range(NODES)
    ]
    return trio.run(simulate, hub, nodes, rounds, MemoryNetwork(seed=0))


def charges(place: Path, index: int) -> list[dict[str, object]]:
    text = (place / f"node-{index}" / CHARGES[0]).read_text()
    return [json.loads(line.rsplit(" ", 1)[0]) for line in text.splitlines()]


def test_what_is_revealed_carries_the_noise_and_every_node_is_charged(tmp_path: Path) -> None:
    ended = federate(tmp_path, 2)
    assert (ended.completed, ended.contributors_per_round) == (True, (NODES, NODES))
    events = Ledger(tmp_path / "hub" / "ledger.sqlite").events(0, 1000)
    told = [each for row in events if (each := json.loads(row.event))["event"] == "privacy.spent"]
    assert [(each["round"], each["nodes"]) for each in told] == [(0, NODES), (1, NODES)]
    assert [round(float(each["epsilon"]), 2) for each in told] == [4.38, 6.57]
    state = open_checkpoint(tmp_path / "hub" / "checkpoints" / ended.digest).read()
    # Each adds sigma C / sqrt(3); the mean of the sum carries sigma C / 3, and two rounds add up.
    wanted = 0.01 / NODES * np.sqrt(2)
    assert state.std() == pytest.approx(wanted, rel=0.05)
    for index in range(NODES):
        kept = charges(tmp_path, index)
        assert [each["round"] for each in kept] == [0, 1]
        assert {(each["sigma"], each["rate"], each["steps"]) for each in kept} == {(1.0, 1.0, 1)}


def test_a_run_over_the_budget_is_refused_before_it_begins(tmp_path: Path) -> None:
    with pytest.RaisesGroup(
        pytest.RaisesExc(PrivacyBudgetExceeded, match="3 rounds at noise_multiplier 1 spend")
    ):
        federate(tmp_path, 3)
    assert not list((tmp_path / "hub" / "sums").glob("*"))
    assert not list(tmp_path.glob(f"node-*/{CHARGES[0]}"))


def test_sums_of_fewer_than_the_noise_is_sized_for_are_refused(tmp_path: Path) -> None:
    with pytest.RaisesGroup(pytest.RaisesExc(ConfigError, match="cohort of 4")):
        federate(tmp_path, 1, cohort=4)


def test_a_node_that_has_spent_its_budget_stops_the_federation(tmp_path: Path) -> None:
    """It has released once elsewhere, on the same data: of two rounds it can afford one."""
    first = tmp_path / "first"
    first.mkdir()
    federate(first, 1)
    workload = load(first / "workload.toml", Workload)
    spender = first / "node-1"
    root = Trainer(workload, None, spender, _node(spender), 1).facts.root
    account = Account("6" * 32, root, workload)
    Charges(spender, account).charge(Digest("7" * 64), 40, 0)
    shutil.copytree(first, again := tmp_path / "again")
    ended = federate(again, 1)
    assert (ended.completed, ended.rounds_closed) == (False, 0)
    assert "no room for another release" in ended.reason
    first_node, spent, last_node = (len(charges(again, index)) for index in range(NODES))
    assert spent == 2
    # The others had one charge, and one more if they were done before the stop reached them.
    assert {first_node, last_node} <= {1, 2}


def _node(state: Path) -> str:
    return identity.load(state / IDENTITY_NAME).node
