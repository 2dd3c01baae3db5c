from collections import Counter

import pytest
import trio
from trio.testing import MockClock

from lensemble.errors import LinkLost
from lensemble.ids import NodeId
from lensemble.transport.driver import PeerAddress
from lensemble.transport.endpoint import EndpointDriver
from lensemble.transport.memory_driver import MemoryNetwork
from lensemble_node import peer_links
from lensemble_node.peer_links import PeerLinks, reachable

NODES = [NodeId(f"{index:02x}" * 32) for index in (1, 2, 3)]


class World:
    def __init__(self, nursery: trio.Nursery) -> None:
        self.network = MemoryNetwork()
        self.nursery = nursery
        self.refused: list[Counter[str]] = []

    async def node(self, index: int) -> tuple[EndpointDriver, PeerLinks]:
        driver = self.network.driver(NODES[index])
        await self.nursery.start(driver.run)
        self.refused.append(Counter())
        links = PeerLinks(driver, self.refused[-1])
        await self.nursery.start(links.run)
        return driver, links

    def address(self, index: int) -> PeerAddress:
        return self.network.address(NODES[index])


@pytest.fixture
def world(nursery: trio.Nursery) -> World:
    return World(nursery)


async def test_a_link_is_kept_while_it_is_needed_and_a_while_longer(
    world: World, autojump_clock: MockClock
) -> None:
    (near, one), (far, other) = await world.node(0), await world.node(1)
    one.need(far.node)
    other.need(near.node)
    await one.reach(world.address(1))
    await other.reach(world.address(0))
    assert [link.peer for link in one.links()] == [far.node]
    one.release(far.node)
    await trio.sleep(peer_links.LINGER_S / 2)
    one.need(far.node)
    await trio.sleep(peer_links.LINGER_S)
    assert one.links()
    one.release(far.node)
    other.release(near.node)
    await trio.sleep(peer_links.LINGER_S + 1)
    assert not one.links()
    assert not other.links()
    assert not near.links()


async def test_both_may_dial_each_other_at_once(world: World, autojump_clock: MockClock) -> None:
    (near, one), (far, other) = await world.node(0), await world.node(1)
    one.need(far.node)
    other.need(near.node)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.reach, world.address(1))
        nursery.start_soon(other.reach, world.address(0))
    await trio.sleep(5)
    assert len(one.links()) == len(other.links()) == 1


async def test_a_node_that_is_not_expected_yet_is_dialled_again(
    world: World, autojump_clock: MockClock
) -> None:
    (near, one), (far, other) = await world.node(0), await world.node(1)
    one.need(far.node)
    with pytest.raises(LinkLost):
        # Turned away at once, each time.
        await _stays(one, world.address(1))
    other.need(near.node)
    await one.reach(world.address(1))
    await trio.sleep(5)
    assert one.links()
    assert world.refused[1]["uninvited"] >= 1


async def _stays(links: PeerLinks, address: PeerAddress) -> None:
    await links.reach(address)
    await trio.sleep(1)
    if not links.links():
        raise LinkLost("gone again")


async def test_a_stranger_is_turned_away_and_whoever_speaks_too(
    world: World, autojump_clock: MockClock
) -> None:
    (near, one), (far, other) = await world.node(0), await world.node(1)
    stranger = await near.dial(world.address(1))
    await stranger.lost.wait()
    assert "takes calls only from nodes" in stranger.lost_reason()
    one.need(far.node)
    other.need(near.node)
    await one.reach(world.address(1))
    [link] = one.links()
    await link.send(b"hello")
    await link.lost.wait()
    assert world.refused[1] == {"uninvited": 1, "peer_spoke": 1}


async def test_nobody_there_names_both_addresses_and_the_keys(
    world: World, autojump_clock: MockClock
) -> None:
    _, one = await world.node(0)
    one.need(NODES[2])
    with pytest.raises(LinkLost) as caught:
        await one.reach(world.address(2))
    assert world.address(0).addresses[0] in caught.value.message
    assert world.address(2).addresses[0] in caught.value.message
    assert "`listen.addresses`" in caught.value.remediation
    assert "`listen.advertise`" in caught.value.remediation


def test_a_wildcard_is_offered_as_the_address_towards_the_coordinator() -> None:
    bound = ("0.0.0.0:4711", "192.0.2.1:5", "toy.memory:1")
    assert reachable(bound, "127.0.0.1:7707") == ("127.0.0.1:4711", *bound[1:])
    assert reachable(bound, "") == bound[1:]


# ---- links for gossip ----


class Gossips:
    """As many nodes as wanted, each of whom may gossip with all others."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.network = MemoryNetwork()
        self.nursery = nursery
        self.nodes: dict[NodeId, PeerLinks] = {}
        self.drivers: dict[NodeId, EndpointDriver] = {}

    async def start(self, count: int, most: int) -> list[NodeId]:
        ids = [NodeId(f"{index:02x}" * 32) for index in range(count)]
        addresses = {node: self.network.address(node).addresses for node in ids}
        for node in ids:
            driver = self.drivers[node] = self.network.driver(node)
            await self.nursery.start(driver.run)
            links = self.nodes[node] = PeerLinks(driver, Counter())
            await self.nursery.start(links.run)
            links.open_to(addresses, most)
        return ids

    def linked(self, node: NodeId) -> set[NodeId]:
        return {link.peer for link in self.nodes[node].links()}


@pytest.fixture
def gossips(nursery: trio.Nursery) -> Gossips:
    return Gossips(nursery)


async def test_a_wish_for_a_member_is_a_link_that_stays(
    gossips: Gossips, autojump_clock: MockClock
) -> None:
    a, b = await gossips.start(2, most=4)
    gossips.nodes[a].wish(b)
    gossips.nodes[a].wish(b)
    await trio.sleep(20 * peer_links.LINGER_S)
    assert gossips.linked(a) == {b}
    assert gossips.linked(b) == {a}
    gossips.nodes[a].open_to({}, 0)
    await trio.sleep(peer_links.LINGER_S + 1)
    assert gossips.linked(a) == gossips.linked(b) == set()


async def test_the_link_unused_for_longest_makes_room_and_no_other(
    gossips: Gossips, autojump_clock: MockClock
) -> None:
    a, *others = await gossips.start(6, most=3)
    links = gossips.nodes[a]
    links.need(others[0])
    for node in others[:4]:
        links.wish(node)
        await trio.sleep(1)
    assert gossips.linked(a) == set(others[:4])
    links.wish(others[4])
    await trio.sleep(1)
    assert gossips.linked(a) == set(others[:4]), "all were used a moment ago"
    await trio.sleep(peer_links.REST_S)
    links.used(others[1])
    links.used(others[3])
    links.wish(others[4])
    await trio.sleep(1)
    assert gossips.linked(a) == {others[0], others[1], others[3], others[4]}
    assert gossips.linked(others[2]) == set()
    links.release(others[0])


async def test_a_full_node_takes_no_further_calls(
    gossips: Gossips, autojump_clock: MockClock
) -> None:
    a, b, c, d = await gossips.start(4, most=2)
    for node in (b, c):
        gossips.nodes[node].wish(a)
        await trio.sleep(1)
    gossips.nodes[d].wish(a)
    await trio.sleep(1)
    assert gossips.linked(a) == {b, c}
    assert gossips.linked(d) == set()


async def test_who_cannot_be_reached_is_left_alone_for_longer_each_time(
    gossips: Gossips, autojump_clock: MockClock
) -> None:
    a, b = await gossips.start(2, most=4)
    gossips.network.partition(a, b)
    dials = 0
    for _ in range(300):
        gossips.nodes[a].wish(b)
        dials += b in gossips.nodes[a]._dialling
        await trio.sleep(1)
    # Each dial lasts 5 s and is followed by pauses of 10, 20, 40, 80, 160 s.
    assert 15 <= dials <= 35
    gossips.network.heal(a, b)
    gossips.nodes[b].wish(a)
    await trio.sleep(6)
    assert gossips.linked(a) == {b}


async def test_a_link_that_is_lost_can_be_had_again(
    gossips: Gossips, autojump_clock: MockClock
) -> None:
    a, b = await gossips.start(2, most=4)
    gossips.nodes[a].wish(b)
    await trio.sleep(1)
    gossips.network.cut(a, b)
    await trio.sleep(1)
    assert gossips.linked(a) == gossips.linked(b) == set()
    gossips.nodes[b].wish(a)
    await trio.sleep(1)
    assert gossips.linked(a) == {b}
