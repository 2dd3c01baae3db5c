"""A node's part in membership: the list it is told, whom it believes, which way it speaks."""

from collections import Counter
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import MockClock

from lensemble.ids import FederationId, NodeId
from lensemble.transport.endpoint import EndpointDriver
from lensemble.transport.memory_driver import MemoryNetwork
from lensemble.wire import circle, letters, membership
from lensemble_node.config import MembershipSection
from lensemble_node.detector import Ground, NodeDetector
from lensemble_node.peer_links import PeerLinks

FEDERATION = FederationId("f" * 32)
HUB, ME, B, C = (NodeId(f"{index:02x}" * 32) for index in range(1, 5))
FIGURES = circle.Figures(
    name="wan",
    interval_s=2.0,
    probe_s=1.5,
    probe_rtts=4.0,
    helpers=2,
    suspicion_s=10.0,
    revive_intervals=4,
)


def page(*nodes: NodeId, **terms: Any) -> circle.Circle:
    fields = {"federation": FEDERATION, "epoch": 1, "figures": FIGURES, **terms}
    members = tuple(
        circle.Acquaintance(node=n, name=n[:4], addresses=MemoryNetwork.address(n).addresses)
        for n in nodes
    )
    return circle.Circle(**fields, members=members)


def probe(**fields: Any) -> bytes:
    said = {"boot": "b" * 16, "incarnation": 1, "updates": (), "sequence": 5, **fields}
    return membership.encode(membership.Probe(**said))


class Node:
    """A node and its coordinator's driver; ``said`` are notes on the control way."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.network = MemoryNetwork()
        self.hub = self.network.driver(HUB)
        self.driver = self.network.driver(ME)
        self.refused: Counter[str] = Counter()
        self.said: list[bytes] = []
        self.links = PeerLinks(self.driver, self.refused)
        self._nursery = nursery

    async def start(self, **config: Any) -> NodeDetector:
        section = MembershipSection(**config)
        ground = Ground(section, self.driver, self.links, self.said.append)
        others = NodeDetector(ground, self.refused)
        for run in (self.hub.run, self.driver.run, self.links.run, others.run):
            await self._nursery.start(run)
        await self.driver.dial(self.network.address(HUB))
        return others

    async def neighbour(self, node: NodeId) -> EndpointDriver:
        driver = self.network.driver(node)
        await self._nursery.start(driver.run)
        return driver


@pytest.fixture
def node(nursery: trio.Nursery) -> Node:
    return Node(nursery)


def names(others: NodeDetector) -> set[str]:
    return {row.node for row in others.listing("me", "hub").members}


async def test_the_list_is_taken_whole_and_corrected_after(
    node: Node, autojump_clock: MockClock
) -> None:
    others = await node.start()
    assert others.listing("me", "hub").profile == ""
    others.take(HUB, page(ME, B, fresh=True, more=True))
    assert names(others) == {HUB}
    others.take(HUB, page(C))
    assert names(others) == {HUB, B, C}
    others.take(HUB, page(gone=(B,)))
    assert names(others) == {HUB, C}
    others.take(HUB, page(B, fresh=True))
    assert names(others) == {HUB, B}
    (lead,) = [row for row in others.listing("me", "hub").members if row.coordinator]
    assert (lead.name, lead.path) == ("hub", "direct")


async def test_another_federation_or_other_figures_begin_anew(
    node: Node, autojump_clock: MockClock
) -> None:
    others = await node.start()
    others.take(HUB, page(B, fresh=True))
    slower = msgspec.structs.replace(FIGURES, interval_s=9.0)
    others.take(HUB, page(B, fresh=True, figures=slower))
    assert others.listing("me", "hub").interval_s == 9.0
    others.take(C, page(fresh=True, federation="e" * 32))
    assert names(others) == {C}
    others.leave()
    assert others.listing("me", "hub").profile == ""


async def test_only_the_coordinator_speaks_for_others(
    node: Node, autojump_clock: MockClock
) -> None:
    others = await node.start()
    others.take(HUB, page(B, C, fresh=True))
    b = await node.neighbour(B)
    await b.dial(node.network.address(ME))
    await trio.sleep(0.1)
    assert b.send_note(ME, letters.passed_on(C, probe()))
    assert b.send_note(ME, letters.pass_on(C, probe()))
    assert b.send_note(ME, b"")
    assert b.send_note(ME, letters.seal(b"nonsense"))
    await trio.sleep(0.1)
    assert node.refused == {"note_forged": 2, "note": 1, "note_contract_violation": 1}
    heard = {row.node: row.heard_s for row in others.listing("me", "hub").members}
    assert heard[B] is heard[C] is None
    assert node.hub.send_note(ME, letters.passed_on(C, probe()))
    assert b.send_note(ME, letters.seal(probe()))
    await trio.sleep(0.1)
    heard = {row.node: row.heard_s for row in others.listing("me", "hub").members}
    assert heard[B] is not None
    assert heard[C] is not None


async def test_a_member_is_reached_by_the_coordinator_until_a_link_to_it_is_there(
    node: Node, autojump_clock: MockClock
) -> None:
    others = await node.start()
    b = await node.neighbour(B)
    others.take(HUB, page(B, fresh=True))
    for _ in range(2):
        _, note = await node.hub.receive_note()
        letter = letters.unseal(note)
        if letter.way is letters.Way.PASS_ON:
            assert letter.node == B
            break
    with trio.fail_after(30):
        sender, note = await b.receive_note()
    assert sender == ME
    assert isinstance(membership.decode(letters.unseal(note).message), membership.Probe)
    assert [row.path for row in others.listing("me", "hub").members] == ["direct", "direct"]


async def test_a_node_that_takes_no_calls_makes_none(node: Node, autojump_clock: MockClock) -> None:
    others = await node.start(direct=False)
    assert not others.callable
    b = await node.neighbour(B)
    others.take(HUB, page(B, fresh=True))
    link = await b.dial(node.network.address(ME))
    await link.lost.wait()
    assert "takes calls only from nodes" in link.lost_reason()
    await trio.sleep(5)
    assert node.driver.link_to(B) is None
    assert {row.path for row in others.listing("me", "hub").members} == {"direct", "relayed"}


async def test_what_no_datagram_carries_goes_on_the_control_way(
    node: Node, autojump_clock: MockClock
) -> None:
    node.network.between(HUB, ME).datagram_bytes = 30
    others = await node.start(direct=False)
    others.take(HUB, page(B, fresh=True))
    await trio.sleep(10)
    assert {letters.unseal(note).way for note in node.said} == {
        letters.Way.NEIGHBOUR,
        letters.Way.PASS_ON,
    }
    before = len(node.said)
    others.take(
        HUB,
        circle.MemberNote(
            federation=FEDERATION, epoch=1, note=letters.passed_on(B, probe(sequence=77))
        ),
    )
    answers = [letters.unseal(note) for note in node.said[before:]]
    assert [membership.decode(a.message).sequence for a in answers if a.node == B] == [77]


async def test_a_node_that_goes_away_tells_the_others(
    node: Node, autojump_clock: MockClock
) -> None:
    others = await node.start()
    others.take(HUB, page(fresh=True))
    others.leave()
    with trio.fail_after(5):
        while True:
            _, note = await node.hub.receive_note()
            said = membership.decode(letters.unseal(note).message)
            if any(
                update.node == ME and update.standing is membership.Standing.LEFT
                for update in said.updates
            ):
                return


async def test_a_node_that_has_joined_probes_its_coordinator_at_once(
    node: Node, autojump_clock: MockClock
) -> None:
    others = await node.start()
    for _ in range(2):
        others.take(HUB, page(fresh=True))
        with trio.fail_after(0.1):
            _, note = await node.hub.receive_note()
        assert isinstance(membership.decode(letters.unseal(note).message), membership.Probe)
