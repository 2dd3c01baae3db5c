"""The coordinator's part in membership: the list it tells, the notes it passes on."""

from typing import Any

import pytest
import trio
from trio.testing import MockClock

from lensemble.ids import FederationId, NodeId
from lensemble.membership.profiles import PROFILES
from lensemble.transport.endpoint import EndpointDriver
from lensemble.transport.memory_driver import MemoryNetwork
from lensemble.wire import circle, letters, membership
from lensemble_coord.members import LEFT_KEPT_S, SWEEP_S, Members, Surroundings
from lensemble_coord.peers import Peer, Peers, Reach
from lensemble_coord.postage import BURST, RATE_PER_S, Postage

FEDERATION = FederationId("f" * 32)
HUB, A, B, C = (NodeId(f"{index:02x}" * 32) for index in range(1, 5))


class Hub:
    """A coordinator without sessions; ``told`` are its messages to each node."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.network = MemoryNetwork()
        self.driver = self.network.driver(HUB)
        self.peers = Peers()
        self.told: dict[NodeId, list[Any]] = {}
        self.noted: list[tuple[str, dict[str, Any]]] = []
        around = Surroundings(FEDERATION, PROFILES["wan"], self.driver, self.peers, self._note)
        self.members = Members(around, "0" * 16, 7)
        self._nursery = nursery

    def _note(self, event: str, *, warn: bool = False, **fields: Any) -> None:
        self.noted.append((event, fields))

    async def start(self) -> None:
        await self._nursery.start(self.driver.run)
        await self._nursery.start(self.members.run)

    def arrive(self, node: NodeId, *addresses: str, epoch: int = 1, gossips: bool = True) -> None:
        told = self.told.setdefault(node, [])
        peer = Peer(node, node[:4], epoch, told.append, lambda: None)
        peer.reach = Reach(gossips, addresses)
        self.peers.arrive(peer)

    def pages(self, node: NodeId) -> list[circle.Circle]:
        return [each for each in self.told[node] if isinstance(each, circle.Circle)]

    async def linked(self, node: NodeId) -> EndpointDriver:
        """The driver of a node that is here and linked."""
        driver = self.network.driver(node)
        await self._nursery.start(driver.run)
        await driver.dial(self.network.address(HUB))
        self.arrive(node)
        return driver


@pytest.fixture
def hub(nursery: trio.Nursery) -> Hub:
    return Hub(nursery)


def probe(incarnation: int = 1) -> bytes:
    return membership.encode(
        membership.Probe(boot="a" * 16, incarnation=incarnation, updates=(), sequence=5)
    )


async def test_who_comes_learns_of_all_and_all_learn_of_it_once(hub: Hub) -> None:
    hub.arrive(A, "192.0.2.1:7")
    hub.arrive(B)
    hub.arrive(C, gossips=False)
    (first, second), (whole,) = hub.pages(A), hub.pages(B)
    assert [first.fresh, first.more, [m.node for m in first.members]] == [True, False, [A]]
    assert [second.fresh, [m.node for m in second.members]] == [False, [B]]
    assert [whole.fresh, [m.node for m in whole.members]] == [True, [A, B]]
    assert whole.members[0].addresses == ("192.0.2.1:7",)
    assert whole.figures.interval_s == 2.0
    assert not hub.pages(C)
    assert {row.node for row in hub.members.listing("hub").members} == {A, B}
    hub.arrive(A, "192.0.2.1:7", epoch=2)
    assert len(hub.pages(B)) == 1
    hub.arrive(A, "192.0.2.9:7", epoch=3)
    assert [m.addresses for m in hub.pages(B)[1].members] == [("192.0.2.9:7",)]
    assert hub.pages(A)[-1].epoch == 3


async def test_a_long_list_comes_in_pages(hub: Hub) -> None:
    nodes = [NodeId(f"{index:064x}") for index in range(600)]
    for node in nodes:
        hub.arrive(node)
    pages = hub.pages(nodes[-1])
    assert [(p.fresh, p.more, len(p.members)) for p in pages] == [
        (True, True, 256),
        (False, True, 256),
        (False, False, 88),
    ]
    assert {m.node for page in pages for m in page.members} == set(nodes)


async def test_a_note_is_passed_on_between_members_that_are_here(
    hub: Hub, autojump_clock: MockClock
) -> None:
    await hub.start()
    a, b = await hub.linked(A), await hub.linked(B)
    assert a.send_note(HUB, letters.pass_on(B, b"hello"))
    neighbour, note = await b.receive_note()
    while letters.unseal(note).way is not letters.Way.PASSED_ON:
        neighbour, note = await b.receive_note()
    assert neighbour == HUB
    assert letters.unseal(note) == letters.Letter(letters.Way.PASSED_ON, A, b"hello")
    assert a.send_note(HUB, letters.pass_on(C, b"hello"))
    assert a.send_note(HUB, letters.passed_on(B, b"in the name of another"))
    assert a.send_note(HUB, b"\xffnonsense")
    assert a.send_note(HUB, letters.seal(b"nonsense"))
    await trio.sleep(0.1)
    assert hub.members.refused == {
        "note_to_stranger": 1,
        "note_forged": 1,
        "note": 1,
        "note_contract_violation": 1,
    }


async def test_nothing_is_taken_from_who_is_no_member_or_not_here(
    hub: Hub, autojump_clock: MockClock
) -> None:
    await hub.start()
    a = await hub.linked(A)
    stranger = hub.network.driver(C)
    hub._nursery.start_soon(stranger.run)
    await trio.sleep(0.1)
    await stranger.dial(hub.network.address(HUB))
    assert stranger.send_note(HUB, letters.pass_on(A, b"hello"))
    assert stranger.send_note(HUB, letters.seal(probe()))
    await trio.sleep(0.1)
    assert hub.members.refused == {"note_of_stranger": 2}
    hub.peers.leave(A, "gone")
    assert a.send_note(HUB, letters.seal(probe()))
    await trio.sleep(0.1)
    assert hub.members.refused == {"note_of_stranger": 3}


async def test_who_has_too_much_passed_on_is_cut_short_and_nobody_else(
    hub: Hub, autojump_clock: MockClock
) -> None:
    await hub.start()
    await hub.linked(A)
    await hub.linked(B)
    await hub.linked(C)
    for _ in range(BURST + 3):
        hub.members.noted(A, letters.pass_on(B, b"again"))
    assert hub.members.refused == {"note_too_often": 3}
    hub.members.noted(C, letters.pass_on(B, b"once"))
    await trio.sleep(1.01)
    for _ in range(round(RATE_PER_S) + 1):
        hub.members.noted(A, letters.pass_on(B, b"again"))
    assert hub.members.refused == {"note_too_often": 4}


def test_postage_fills_up_to_its_burst() -> None:
    postage = Postage()
    assert all(postage.admits(A, 0.0) for _ in range(BURST))
    assert not postage.admits(A, 0.0)
    assert postage.admits(B, 0.0)
    assert sum(postage.admits(A, 1e6) for _ in range(2 * BURST)) == BURST
    assert not postage.admits(A, 0.0)
    postage.forget(A)
    assert postage.admits(A, 0.0)


async def test_what_no_datagram_carries_goes_on_the_control_way(
    hub: Hub, autojump_clock: MockClock
) -> None:
    await hub.start()
    await hub.linked(A)
    await hub.linked(B)
    hub.network.between(HUB, B).datagram_bytes = 500
    before = len(hub.told[B])
    hub.members.noted(A, letters.pass_on(B, bytes(1000)))
    (said,) = hub.told[B][before:]
    assert isinstance(said, circle.MemberNote)
    assert (said.federation, said.epoch) == (FEDERATION, 1)
    assert letters.unseal(said.note) == letters.Letter(letters.Way.PASSED_ON, A, bytes(1000))


async def test_who_has_left_is_forgotten_in_the_end(hub: Hub, autojump_clock: MockClock) -> None:
    await hub.start()
    await hub.linked(A)
    await hub.linked(B)
    left = membership.Update(B, membership.Standing.LEFT, 1, "b" * 16)
    bye = membership.Gossip(boot="b" * 16, incarnation=1, updates=(left,))
    hub.members.noted(B, letters.seal(membership.encode(bye)))
    hub.peers.leave(B, "left")
    assert ("member.left", B) in [(event, fields["node"]) for event, fields in hub.noted]
    assert hub.peers.unfit(B).startswith("left for")
    assert [each.node for each in hub.peers.absent()] == [B]
    await trio.sleep(LEFT_KEPT_S - SWEEP_S)
    assert [each.node for each in hub.peers.absent()] == [B]
    await trio.sleep(3 * SWEEP_S)
    assert hub.peers.absent() == ()
    assert hub.told[A][-1].gone == (B,)
    assert [row.node for row in hub.members.listing("hub").members] == [A]


async def test_who_comes_is_probed_at_once(hub: Hub, autojump_clock: MockClock) -> None:
    await hub.start()
    a = await hub.linked(A)
    with trio.fail_after(0.1):
        _, note = await a.receive_note()
    assert isinstance(membership.decode(letters.unseal(note).message), membership.Probe)
