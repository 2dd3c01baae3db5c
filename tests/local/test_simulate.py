"""Whole federations in this process: the daemons' own code over a network in memory."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
import trio

from lensemble import identity
from lensemble.state_dir import IDENTITY_NAME
from lensemble.transport.memory_driver import MemoryNetwork
from lensemble_coord.config import CoordinatorConfig, RoundsSection
from lensemble_coord.training.ledger import Ledger
from lensemble_coord.training.verify import verify_state
from lensemble_local.simulate import Simulated, simulate
from lensemble_node.config import NodeConfig, ShareSection

NODES = 4
ROUNDS = 2
STAGGER_S = 0.06
"""Between the arrivals of two updates."""


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The identities of a coordinator and its nodes; a node's updates depend on who it is."""
    made = tmp_path_factory.mktemp("keys")
    for name in ("coordinator", *(f"node-{index}" for index in range(NODES))):
        (made / name).mkdir(mode=0o700)
        identity.load_or_create(made / name / IDENTITY_NAME)
    return made


def _federate(
    place: Path,
    keys: Path,
    order: list[int],
    jitter_s: float = 0.0,
    *,
    aggregation: Literal["plain", "masked"] = "plain",
    bits: str = "32",
) -> Simulated:
    """A federation in which node ``order[0]`` is nearest and its updates come first."""
    shutil.copytree(keys, place)
    (place / "workload.toml").write_text(
        'name = "noop"\n[task]\nkind = "noop"\nparameters = 20000\n[inner]\nsteps = 2\nbatch = 1\n'
        f"[field]\nbits = {bits}\n"
    )
    hub = CoordinatorConfig(
        state_dir=place / "coordinator",
        workload=place / "workload.toml",
        rounds=RoundsSection(aggregation=aggregation, min_participants=3),
    )
    nodes = [
        NodeConfig(
            name=f"node-{index}",
            state_dir=place / f"node-{index}",
            share=ShareSection(plain=True),
        )
        for index in range(NODES)
    ]
    network = MemoryNetwork(seed=order[0])
    centre = identity.load(hub.state_dir / IDENTITY_NAME).node
    for distance, index in enumerate(order):
        me = identity.load(nodes[index].state_dir / IDENTITY_NAME).node
        weather = network.between(centre, me)
        weather.delay_s, weather.jitter_s = STAGGER_S * distance / 2, jitter_s
    return trio.run(simulate, hub, nodes, ROUNDS, network)


def test_the_order_of_arrival_leaves_no_trace(tmp_path: Path, keys: Path) -> None:
    orders = {"near": [0, 1, 2, 3], "far": [3, 2, 1, 0], "mixed": [2, 0, 3, 1]}
    ended = {
        name: _federate(tmp_path / name, keys, order, jitter_s=0.05 * (name == "mixed"))
        for name, order in orders.items()
    }
    assert all(each.contributors_per_round == (NODES,) * ROUNDS for each in ended.values())
    assert len({each.digest for each in ended.values()}) == 1, ended


def test_masked_rounds_send_two_bytes_a_parameter(tmp_path: Path, keys: Path) -> None:
    place = tmp_path / "narrow"
    ended = _federate(place, keys, [0, 1, 2, 3], aggregation="masked", bits='"auto"')
    assert ended.completed
    report = verify_state(place / "coordinator")
    assert report.sound, report.problems
    assert report.recomputed == ROUNDS
    ledger = Ledger(place / "coordinator" / "ledger.sqlite", check=False)
    try:
        assert any(ledger.tail().following)
        noted = [json.loads(each.event) for each in ledger.events_of("round.node", 100)]
    finally:
        ledger.close()
    up = [[each["bytes_up"] for each in noted if each["round"] == t] for t in range(ROUNDS)]
    assert [len(each) for each in up] == [NODES] * ROUNDS
    assert min(up[0]) >= 4 * 20_000
    for narrow in up[1:]:
        assert max(narrow) <= 2.1 * 20_000


def _command(*arguments: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "lensemble_local.simulate", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def test_simulate_runs_what_a_file_names(tmp_path: Path) -> None:
    (tmp_path / "workload.toml").write_text('[task]\nkind = "noop"\nparameters = 100\n')
    for name in ("coord", "a", "b"):
        (tmp_path / f"{name}.toml").write_text(f'name = "{name}"\nstate_dir = "{name}"\n')
    for name in ("a", "b"):
        with (tmp_path / f"{name}.toml").open("a") as config:
            config.write("[share]\nplain = true\n")
    with (tmp_path / "coord.toml").open("a") as config:
        config.write('[rounds]\naggregation = "plain"\nmin_participants = 2\n')
    (tmp_path / "sim.toml").write_text(
        'coordinator = "coord.toml"\nnodes = ["a.toml", "b.toml"]\nrounds = 2\n'
        "[network]\ndelay_ms = 20.0\njitter_ms = 10.0\n"
    )
    done = _command("--json", tmp_path / "sim.toml")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["rounds_closed"], told["contributors_per_round"]) == (2, [2, 2])
    # Ask, answer, go-ahead and update: no round can be faster than four ways across.
    assert min(told["seconds_per_round"]) > 4 * 0.02


def test_simulate_ends_when_a_node_cannot_take_part(tmp_path: Path) -> None:
    (tmp_path / "workload.toml").write_text('name = "arm"\n')
    (tmp_path / "coord.toml").write_text("")
    (tmp_path / "a.toml").write_text('name = "alice"\nstate_dir = "a"\n')
    (tmp_path / "sim.toml").write_text('coordinator = "coord.toml"\nnodes = ["a.toml"]\n')
    done = _command(tmp_path / "sim.toml")
    said = done.stderr.splitlines()
    assert done.returncode == 2
    assert said[-2] == f"Error: alice: dataset {tmp_path / 'data.hdf5'} does not exist"
    assert said[-1].startswith("Try: ")
