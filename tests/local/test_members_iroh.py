"""Membership over real datagrams: a coordinator and two nodes in this process, over QUIC."""

from functools import partial
from pathlib import Path

import pytest
import trio

from lensemble import identity
from lensemble.config import load, validate
from lensemble.ctl import replies
from lensemble.home import Asked
from lensemble.ticket import Membership
from lensemble.transport.iroh_driver import IrohDriver
from lensemble_coord import daemon as coord_daemon
from lensemble_coord import home as coord_home
from lensemble_coord.config import CoordinatorConfig
from lensemble_coord.config import MembershipSection as Figures
from lensemble_node import daemon as node_daemon
from lensemble_node.config import NodeConfig
from lensemble_node.stage_process import Engine
from tests.library.driver_suite import eventually

pytestmark = pytest.mark.iroh

FAST = Figures(profile="lan", interval_s=0.2, probe_timeout_s=0.5, suspicion_s=4.0)
LOOPBACK = ("127.0.0.1:0",)


async def test_nodes_probe_each_other_over_links_of_their_own(tmp_path: Path) -> None:
    made = coord_home.create(Asked(tmp_path / "hub", "hub"), None, trains=False)
    config = load(Path(made["config"]), CoordinatorConfig).model_copy(update={"membership": FAST})
    lead = identity.load_or_create(config.state_dir / "identity.key")
    driver = IrohDriver(lead, LOOPBACK)
    nodes: list[node_daemon.Serving] = []
    async with trio.open_nursery() as nursery:
        hub = await nursery.start(coord_daemon.serve, config, driver)
        belongs = Membership(lead.node, driver.addresses(), hub.federation)
        for name in ("a", "b"):
            tree = {"name": name, "inference": {"memory_bytes": 1 << 20}}
            mine = validate(tree, NodeConfig, path=tmp_path / name / "node.toml")
            mine.state_dir.mkdir(parents=True)
            who = identity.load_or_create(mine.state_dir / "identity.key")
            await hub.admit(who.node, name)
            serve = partial(node_daemon.serve, engine=Engine("scripted", {}))
            nodes.append(await nursery.start(serve, mine, IrohDriver(who, LOOPBACK), belongs))

        def rows() -> list[replies.MemberStatus]:
            lists = [node.member.others.listing(node.config.name, "hub") for node in nodes]
            return [row for each in [hub.members.listing("hub"), *lists] for row in each.members]

        def well() -> bool:
            seen = rows()
            return len(seen) == 6 and all(
                (row.state, row.path) == ("alive", "direct") and row.rtt_ms is not None
                for row in seen
            )

        await eventually(well)
        await trio.sleep(2)
        assert well(), rows()
        assert all(row.rtt_ms is not None and row.rtt_ms < 500 for row in rows())
        assert not hub.members.refused
        assert not driver.refused()
        assert all(not node.member.refused for node in nodes)
        nursery.cancel_scope.cancel()
