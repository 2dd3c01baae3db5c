"""How far nodes are from each other comes to the coordinator that plans with it."""

from pathlib import Path

import trio
from trio.testing import MockClock

from lensemble.ids import NodeId
from lensemble_node.link_figures import LOOK_EVERY_S
from tests.local.circle import Circle


async def test_nodes_tell_how_far_others_are_once_they_have_links(
    tmp_path: Path, nursery: trio.Nursery, mock_clock: MockClock
) -> None:
    circle = Circle(tmp_path, nursery, mock_clock)
    await circle.start(3)

    def told() -> dict[str, set[NodeId]]:
        return {
            peer.name: set(peer.inventory.linked)
            for peer in circle.hub.members._peers.here.values()
            if peer.inventory is not None
            and len(peer.inventory.linked) == len(peer.inventory.rtts_us)
        }

    everyone = {name: circle.node(name) for name in ("n0", "n1", "n2")}
    wanted = {name: set(everyone.values()) - {node} for name, node in everyone.items()}
    took = await circle.until(lambda: told() == wanted)
    assert took <= 4 * LOOK_EVERY_S
    circle.kill("n1")
    wanted = {"n0": {everyone["n2"]}, "n2": {everyone["n0"]}}
    await circle.until(lambda: told() == wanted)
    circle.end()
