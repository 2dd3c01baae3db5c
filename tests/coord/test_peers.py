"""The board of nodes that are here, fed by real sessions over the memory driver."""

from pathlib import Path

import trio

from lensemble.ids import NodeId
from lensemble.wire import messages
from lensemble.wire.stages import Inventory, StageAnswer, StageTeardown
from lensemble_coord.peers import Peers
from tests.coord.scripted_node import ScriptedNode
from tests.coord.test_coordinator import bench


class Heard:
    def __init__(self) -> None:
        self.said: list[tuple[NodeId, StageAnswer]] = []
        self.lost: list[tuple[NodeId, str]] = []

    def node_said(self, node: NodeId, message: StageAnswer) -> None:
        self.said.append((node, message))

    def node_lost(self, node: NodeId, reason: str) -> None:
        self.lost.append((node, reason))


async def _until(peers: Peers, found: object) -> None:
    with trio.fail_after(20):
        while not found():
            await peers.changed.wait()


def _inventory(node: ScriptedNode, epoch: int) -> Inventory:
    return Inventory(
        federation=node.welcome.federation,
        epoch=epoch,
        memory_bytes=1 << 30,
        taken_bytes=0,
        device="CPU",
        engine="test 1",
        weights="float32",
        addresses=("127.0.0.1:1",),
    )


async def test_a_node_is_on_the_board_from_its_welcome_to_its_loss(tmp_path: Path) -> None:
    async with bench(tmp_path) as coordinator:
        peers, heard = coordinator.serving.reception.peers, Heard()
        peers.listen(heard)
        async with coordinator.node("a") as a:
            await a.wait_for(messages.Provision)
            await a.say(_inventory(a, a.welcome.epoch + 1))
            await a.wait_for(messages.Refused, code="stale_epoch")
            await _until(peers, lambda: a.me.node in peers.here)
            assert peers.here[a.me.node].inventory is None
            await a.say(_inventory(a, a.welcome.epoch))
            await _until(peers, lambda: peers.here[a.me.node].inventory is not None)
            assert [node for node, _ in heard.said] == [a.me.node]
            peer = peers.here[a.me.node]
            assert (peer.name, peer.epoch) == ("a", a.welcome.epoch)
            assert peer.facts().path == "memory"
            order = StageTeardown(
                federation=a.welcome.federation,
                epoch=peer.epoch,
                run="0" * 16,
                run_epoch=1,
                stage=0,
                reason="test",
            )
            peer.tell(order)
            assert await a.wait_for(StageTeardown) == order
        await _until(peers, lambda: not peers.here)
        assert [node for node, _ in heard.lost] == [a.me.node]
