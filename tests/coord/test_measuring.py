"""What is measured of the links of a plan, whom that asks, and what is made of the answers."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import trio
from msgspec.structs import replace
from trio.testing import MockClock

from lensemble.ids import EdgeId, NodeId
from lensemble.transport.driver import LinkFacts
from lensemble.wire import stages
from lensemble_coord.inference import measuring, placement
from lensemble_coord.inference.chain import Segment, Task
from lensemble_coord.inference.footprint import Wanted
from lensemble_coord.inference.measuring import Measuring
from lensemble_coord.inference.paths import PathBook, Paths
from lensemble_coord.peers import Peer, Peers
from tests.coord import planning

FEDERATION: Any = "f" * 32
Reply = Callable[[NodeId, Any], Any]


def node(number: int) -> NodeId:
    return NodeId(f"{number:064x}")


class Board:
    """Nodes that answer as ``reply`` says; by default each pair carries ``rates``, or much."""

    def __init__(self, count: int, rates: dict[tuple[int, int], int] | None = None) -> None:
        self.rates = rates or {}
        self.orders: list[tuple[int, Any]] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.reply: Reply = self.behave
        self.peers, self.book = Peers(), PathBook()
        ids = itertools.count(7)
        self.measuring = Measuring(
            FEDERATION, self.peers, self.book, lambda: EdgeId(next(ids)), self._note
        )
        self.count = count
        for number in range(1, count + 1):
            self._arrive(number)

    def _arrive(self, number: int) -> None:
        me = node(number)
        facts = LinkFacts("memory", "", 1.0, 0, 0)
        peer = Peer(
            me, f"n{number}", 40 + number, lambda order: self._told(me, order), lambda: facts
        )
        peer.inventory = planning.offer(number, 1 << 30).inventory
        self.peers.arrive(peer)

    def _note(self, event: str, *, warn: bool = False, **fields: Any) -> None:
        self.events.append((event, fields))

    def _told(self, me: NodeId, order: Any) -> None:
        assert order.federation == FEDERATION
        assert order.epoch == self.peers.here[me].epoch
        self.orders.append((int(me, 16), order))
        for who, answer in self.reply(me, order):
            self.measuring.heard(who, answer)

    def behave(self, me: NodeId, order: Any) -> Any:
        fence = {"federation": FEDERATION, "epoch": order.epoch, "burst": order.burst}
        if isinstance(order, stages.BurstExpect):
            return [(me, stages.BurstReady(**fence))]
        pair = int(me, 16), int(order.far.node, 16)
        rate = self.rates.get(pair, 100_000_000)
        landed = min(stages.MAX_BURST_BYTES, rate * 2)
        fence["epoch"] = self.peers.here[order.far.node].epoch
        taken = stages.BurstTaken(
            **fence, landed_bytes=landed, microseconds=landed * 1_000_000 // rate, rtt_us=2_000
        )
        return [(order.far.node, taken)]

    async def plan(self, stages_wanted: int = 2) -> placement.Plan:
        await trio.lowlevel.checkpoint()
        model, tensors = planning.model()
        cuts = [*range(stages_wanted), model.layers]
        split = tuple(Segment(a, b) for a, b in itertools.pairwise(cuts))
        task = Task(model, tensors, Wanted(ctx=64, sessions=1, rows=8), split)
        offers = [planning.offer(number, 1 << 30) for number in range(1, self.count + 1)]
        links = Paths(self.peers, self.book).links()
        return placement.plan(task, offers, links)

    async def refine(self) -> tuple[list[int], tuple[str, ...]]:
        with trio.fail_after(120):
            plan, unmeasured = await self.measuring.refine(await self.plan(), self.plan)
        return [int(stage.node, 16) for stage in plan.stages], unmeasured

    @property
    def sent(self) -> list[tuple[int, int]]:
        """Pairs over which a burst was asked for."""
        orders = [each for each in self.orders if isinstance(each[1], stages.BurstSend)]
        return [(number, int(order.far.node, 16)) for number, order in orders]


async def test_the_chain_of_good_links_is_found_and_no_more_is_measured_than_that_takes(
    autojump_clock: MockClock,
) -> None:
    slow = 50_000
    pairs = itertools.permutations((1, 2, 3), 2)
    here = Board(3, {pair: slow for pair in pairs if set(pair) != {2, 3}})
    first = [int(stage.node, 16) for stage in (await here.plan()).stages]
    assert set(first) != {2, 3}, "else there would be nothing to find"
    chain, unmeasured = await here.refine()
    assert (set(chain), unmeasured) == ({2, 3}, ())
    assert len({frozenset(pair) for pair in here.sent}) == len(here.sent), "each pair once"
    rates = here.book.rates()
    assert rates[node(here.sent[0][0]), node(here.sent[0][1])].bytes_per_s == slow
    assert [event for event, _ in here.events] == ["link.measured"] * len(here.sent)
    asked = len(here.orders)
    assert (await here.refine())[0] == chain
    assert len(here.orders) == asked, "what is known is not measured again"
    await trio.sleep(stages.BURST_REST_S + 1)
    assert (await here.refine())[0] == chain
    assert here.sent[-1] == tuple(chain)


async def test_who_sends_is_asked_once_the_other_one_is_ready(autojump_clock: MockClock) -> None:
    here = Board(2)
    (a, b), _ = await here.refine()
    (expecting, expect), (sending, send) = here.orders
    assert (expecting, sending) == (b, a)
    assert isinstance(expect, stages.BurstExpect)
    assert isinstance(send, stages.BurstSend)
    assert expect.edge == send.edge
    assert (send.edge.producer, send.edge.consumer) == (node(a), node(b))
    assert send.edge.capacity_bytes == stages.BURST_FRAME_BYTES
    assert (expect.far.node, send.far.node) == (node(a), node(b))


@pytest.mark.parametrize("kind", [stages.BurstExpect, stages.BurstSend])
async def test_what_a_node_refuses_is_said_and_assumed(
    kind: type[Any], autojump_clock: MockClock
) -> None:
    here = Board(2)

    def refuse(me: NodeId, order: Any) -> Any:
        if not isinstance(order, kind):
            return here.behave(me, order)
        fence = {"federation": FEDERATION, "epoch": order.epoch, "burst": order.burst}
        return [(me, stages.BurstRefused(**fence, reason="it is in a round"))]

    here.reply = refuse
    (a, b), unmeasured = await here.refine()
    who = b if kind is stages.BurstExpect else a
    assert unmeasured == (f"n{a} to n{b}: n{who} says: it is in a round",)
    assert not here.book.rates()
    assert here.events == [("link.unmeasured", {"reason": unmeasured[0]})]


async def test_nodes_that_say_nothing_or_go_are_not_waited_for_long(
    autojump_clock: MockClock,
) -> None:
    here = Board(2)
    here.reply = lambda me, order: []
    began = trio.current_time()
    _, (why,) = await here.refine()
    assert "no answer within 12 s" in why
    assert trio.current_time() - began == pytest.approx(measuring.BURST_WITHIN_S, abs=0.1)

    def go(me: NodeId, order: Any) -> Any:
        here.measuring.lost(me)
        return []

    here.reply = go
    began = trio.current_time()
    (a, b), (why,) = await here.refine()
    assert why == f"n{a} to n{b}: n{b} is gone"
    assert trio.current_time() - began < 1


async def test_a_stage_on_either_end_is_known_here_already(autojump_clock: MockClock) -> None:
    here = Board(2)
    offered = here.peers.here[node(2)].inventory
    assert offered is not None
    here.peers.here[node(2)].inventory = replace(offered, taken_bytes=5)
    _, (why,) = await here.refine()
    assert why.endswith("a stage is live on n2")
    assert not here.orders, "nobody is asked"


async def test_words_of_others_and_of_other_bursts_are_passed_by(
    autojump_clock: MockClock,
) -> None:
    here = Board(3)

    def lie(me: NodeId, order: Any) -> Any:
        right = here.behave(me, order)
        fence = {"federation": FEDERATION, "epoch": 1}
        much: dict[str, Any] = {**fence, "landed_bytes": 9, "microseconds": 9_000_000}
        others = set(map(node, (1, 2, 3))) - {me, order.far.node}
        return [
            (me, stages.BurstRefused(**fence, burst=order.burst + 1, reason="another")),
            (others.pop(), stages.BurstRefused(**fence, burst=order.burst, reason="a stranger")),
            # Before it said that it is ready, and by the one that sends.
            (me, stages.BurstTaken(**much, burst=order.burst)),
            *right,
        ]

    here.reply = lie
    (a, b), unmeasured = await here.refine()
    assert unmeasured == ()
    assert here.book.rates()[node(a), node(b)].bytes_per_s == pytest.approx(100_000_000, rel=0.01)
    here.measuring.heard(node(1), stages.BurstReady(federation=FEDERATION, epoch=1, burst=7))


async def test_there_is_an_end_to_measuring(autojump_clock: MockClock) -> None:
    many = Board(9, dict.fromkeys(itertools.permutations(range(1, 10), 2), 50_000))
    _, unmeasured = await many.refine()
    assert len(many.sent) == measuring.MOST_PAIRS
    assert unmeasured == ("16 links were enough for once",)
    silent = Board(9)
    silent.reply = lambda me, order: []
    # Nothing is found, so that each round would be as the one before: a pair is asked for once.
    _, unmeasured = await silent.refine()
    assert len(unmeasured) == 1
