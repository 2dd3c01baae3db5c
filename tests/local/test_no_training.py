"""A federation that trains nothing: one coordinator, one node without data, in this process."""

from pathlib import Path

import pytest
import trio

from lensemble import identity
from lensemble.config import load, validate
from lensemble.errors import OperatorError
from lensemble.home import Asked
from lensemble.ticket import Membership
from lensemble.transport.memory_driver import MemoryNetwork
from lensemble_coord import daemon as coord_daemon
from lensemble_coord import home as coord_home
from lensemble_coord.config import CoordinatorConfig
from lensemble_node import daemon as node_daemon
from lensemble_node import participation
from lensemble_node.config import NodeConfig
from lensemble_node.stage_process import Engine


def coordinator(directory: Path) -> CoordinatorConfig:
    made = coord_home.create(Asked(directory, "lab"), None, trains=False)
    assert made["workload"] == ""
    assert not (directory / "workload.toml").exists()
    return load(Path(made["config"]), CoordinatorConfig)


def node(directory: Path) -> NodeConfig:
    tree = {"name": "n", "inference": {"memory_bytes": 1 << 20}}
    return validate(tree, NodeConfig, path=directory / "node.toml")


async def test_nodes_join_without_data_or_worker_and_rounds_are_refused(tmp_path: Path) -> None:
    config, mine = coordinator(tmp_path / "coord"), node(tmp_path / "node")
    mine.state_dir.mkdir(parents=True)
    network = MemoryNetwork()
    lead = identity.load_or_create(config.state_dir / "identity.key")
    who = identity.load_or_create(mine.state_dir / "identity.key")
    driver = network.driver(lead.node)
    async with trio.open_nursery() as nursery:
        serving = await nursery.start(coord_daemon.serve, config, driver)
        await serving.admit(who.node, "n")
        belongs = Membership(lead.node, driver.addresses(), serving.federation)
        here = await nursery.start(
            lambda task_status: node_daemon.serve(
                mine,
                network.driver(who.node),
                belongs,
                engine=Engine("scripted", {}),
                task_status=task_status,
            )
        )
        with trio.fail_after(10):
            while not isinstance(here.member.state.membership, participation.Joined):
                await here.member.changed.wait()
            peers = serving.rounds.sessions[who.node].ground.peers
            while who.node not in peers.here or peers.here[who.node].inventory is None:
                await peers.changed.wait()
        assert peers.here[who.node].inventory.memory_bytes == 1 << 20
        status = here.answers.status()
        assert status.worker.reason == "this federation trains nothing"
        assert status.worker.pid is None
        assert status.edges == ()
        assert status.dataset is None
        assert status.alerts == ()
        seen = serving.answers.observer.status()
        assert seen.round.reason == "this federation trains nothing"
        assert seen.alerts == ()
        assert [each.activity for each in seen.participants] == ["idle"]
        with pytest.raises(OperatorError, match="trains nothing"):
            await serving.rounds.ask(1)
        nursery.cancel_scope.cancel()
