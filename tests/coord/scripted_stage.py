"""Stages from a script: they speak the wire and the edges, and compute next to nothing.

The last stage's token is a function of all tokens that its KV slot was given, so that whatever gets
lost, doubled or mixed up on the way changes the answer.
"""

import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import trio

from lensemble import stage_chunk
from lensemble.edge.spec import EdgeSpec
from lensemble.errors import EdgeFault, LinkLost
from lensemble.stage_chunk import Chunk, Kind
from lensemble.transport.driver import PeerAddress
from lensemble.transport.ends import RxEnd, TxEnd
from lensemble.wire import stages
from tests.coord.scripted_node import ScriptedNode

ENGINE = "scripted 1"
VOCABULARY = 288
EOS = 2


def model(tokens: list[int]) -> int:
    """The next token after ``tokens``; never an end of text by itself."""
    state = 17
    for token in tokens:
        state = (state * 31 + token + 1) % 999_983
    return 3 + state % (VOCABULARY - 3)


def answer(prompt: tuple[int, ...], count: int) -> list[int]:
    """What a model of these stages answers."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(model(tokens))
    return tokens[len(prompt) :]


class ScriptedStages:
    """The stages of one scripted node.

    ``moving`` is set while stages compute; without it they stand still.  ``computed`` counts
    chunks, ``fetched`` the bytes of weights.
    """

    def __init__(self, node: ScriptedNode, memory_bytes: int = 1 << 30) -> None:
        self.node = node
        self.memory_bytes = memory_bytes
        self.moving = trio.Event()
        self.moving.set()
        self.refuse: str = ""
        self.slow_s = 0.0
        self.idle_bytes = 0
        self.never_ready = False
        self.in_one_range = False
        """Whether it asks for all bytes from its first tensor to its last one."""
        self.mute = False
        self.fetched: dict[int, bytes] = {}
        self.computed = 0
        self.landed = 0
        self.orders: list[stages.StageProvision] = []
        self.scopes: dict[str, trio.CancelScope] = {}
        self.times: list[tuple[int, int, float, float, float, float]] = []
        """Of each chunk: step, rows, landed, begun, ended, left."""

        self._opens: dict[str, trio.Event] = {}

    async def say(self, kind: type[Any], of: Any, **fields: Any) -> None:
        fenced = {
            "federation": of.federation,
            "epoch": of.epoch,
            "run": of.run,
            "run_epoch": of.run_epoch,
            "stage": of.stage,
        }
        with suppress(LinkLost):
            await self.node.say(kind(**fenced, **fields))

    async def offer(self) -> None:
        while not hasattr(self.node, "welcome"):
            await self.node.news.wait()
        await self.node.say(
            stages.Inventory(
                federation=self.node.welcome.federation,
                epoch=self.node.welcome.epoch,
                memory_bytes=self.memory_bytes,
                taken_bytes=0,
                device="none",
                engine=ENGINE,
                weights="float32",
                addresses=self.node.driver.addresses(),
            )
        )

    async def serve(self) -> None:
        await self.offer()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._accept)
            while True:
                order = await self._order()
                match order:
                    case stages.StageProvision():
                        self.orders.append(order)
                        self._opens[order.run] = trio.Event()
                        nursery.start_soon(self._stage, order)
                    case stages.StageOpen():
                        self._opens[order.run].set()
                    case stages.StageLook() if not self.mute:
                        held = self.landed - self.computed
                        await self.say(
                            stages.StageSeen,
                            order,
                            computed=self.computed,
                            held=held,
                            timeline=self._told() if order.timeline else (),
                        )
                    case stages.StageTeardown() if not self.mute:
                        if order.run in self.scopes:
                            self.scopes[order.run].cancel()
                        await self.say(stages.StageTornDown, order, outcome="clean")

    def _told(self) -> tuple[stages.Times, ...]:
        now = trio.current_time()
        spans = [
            (step, rows, now - landed, began - landed, ended - began, left - ended)
            for step, rows, landed, began, ended, left in self.times[-stages.MAX_TIMELINE :]
        ]
        return tuple((s, r, *(round(each * 1e6) for each in four)) for s, r, *four in spans)

    async def _order(self) -> stages.StageOrder:
        order = await self.node.wait_for_one(*stages.StageOrder.__args__)
        self.node.heard.remove(order)
        return order

    async def _accept(self) -> None:
        while True:
            await self.node.driver.accept()

    async def _stage(self, order: stages.StageProvision) -> None:
        if self.refuse:
            await self.say(stages.StageRefused, order, field=self.refuse, have="other", want="this")
            return
        with trio.CancelScope() as self.scopes[order.run]:
            async with AsyncExitStack() as leases, trio.open_nursery() as nursery:
                try:
                    await self._live(order, leases, nursery)
                except EdgeFault as fault:
                    await self.say(
                        stages.StageFault, order, code="edge_fault", reason=fault.message
                    )
                nursery.cancel_scope.cancel()

    async def _live(
        self, order: stages.StageProvision, leases: AsyncExitStack, nursery: trio.Nursery
    ) -> None:
        me, driver = self.node, self.node.driver
        rx = RxEnd(order.inbound, await self._region(order.inbound, leases), driver, ahead=True)
        await nursery.start(rx.serve)
        if isinstance(order.source, stages.FromEdge):
            await self._fetch(order, leases, nursery)
        if self.never_ready:
            await trio.sleep_forever()
        await self.say(
            stages.StageReady,
            order,
            weights_bytes=sum(each.nbytes for each in order.tensors),
            resident_bytes=1 << 20,
            fetched_bytes=len(self.fetched),
            seconds=0.1,
        )
        await self._opens[order.run].wait()
        down = order.downstream
        if down.node != me.link.peer:
            with suppress(LinkLost):  # there is one already
                await driver.dial(PeerAddress(down.node, down.addresses))
        tx = TxEnd(order.outbound, await self._region(order.outbound, leases), driver)
        await nursery.start(tx.serve)
        await self.say(stages.StageOpened, order)
        await self._compute(order, rx, tx)

    async def _region(self, spec: EdgeSpec, leases: AsyncExitStack) -> Any:
        region = self.node.arena.lease(spec)
        assert region is not None
        leases.callback(self.node.arena.give_back, region)
        return region

    async def _fetch(
        self, order: stages.StageProvision, leases: AsyncExitStack, nursery: trio.Nursery
    ) -> None:
        assert isinstance(order.source, stages.FromEdge)
        spec = order.source.edge
        rx = RxEnd(spec, await self._region(spec, leases), self.node.driver)
        await nursery.start(rx.serve)
        ranges = tuple((each.offset, each.nbytes) for each in order.tensors)
        if self.in_one_range:
            ranges = ((ranges[0][0], sum(ranges[-1]) - ranges[0][0]),)
        await self.say(stages.StageWants, order, ranges=ranges)
        while (landed := await rx.receive()) is not None:
            slot, extent = landed
            raw = bytes(rx.region.slot(slot)[:extent])
            rx.consumed(slot)
            (offset,) = struct.unpack_from("<Q", raw)
            self.fetched[offset] = raw[8:]

    async def _compute(self, order: stages.StageProvision, rx: RxEnd, tx: TxEnd) -> None:
        caches: dict[int, list[int]] = {}
        last = order.stage == order.stages - 1
        while (landed := await rx.receive()) is not None:
            slot, extent = landed
            self.landed += 1
            landed_at = trio.current_time()
            await self.moving.wait()
            began_at = trio.current_time()
            await trio.sleep(self.slow_s)
            ended_at = trio.current_time()
            chunk, payload = stage_chunk.read(rx.region.slot(slot)[:extent])
            tokens = list(struct.unpack_from(f"<{chunk.rows}I", payload))
            rx.consumed(slot)
            self.computed += 1
            cache = caches.setdefault(chunk.session, [])
            assert chunk.session < order.sessions
            assert chunk.start <= len(cache), "a hole in the cache"
            assert chunk.start + chunk.rows <= order.ctx
            cache[chunk.start :] = tokens
            if not last:
                await self._pass_on(
                    tx, chunk, Kind.ACTIVATIONS, struct.pack(f"<{len(tokens)}I", *tokens)
                )
            elif chunk.sampling is not None:
                await self._pass_on(
                    tx, chunk, Kind.RESULT, stage_chunk.RESULT.pack(model(cache), -0.5)
                )
            times = landed_at, began_at, ended_at, trio.current_time()
            self.times.append((chunk.step, chunk.rows, *times))

    async def _pass_on(self, tx: TxEnd, chunk: Chunk, kind: Kind, payload: bytes) -> None:
        slot = await tx.acquire()
        view = tx.region.slot(slot)
        header = Chunk(kind, chunk.session, chunk.rows, chunk.start, chunk.step, chunk.sampling)
        begin = stage_chunk.write(header, view)
        view[begin : begin + len(payload)] = payload
        tx.filled(slot, begin + len(payload))


@asynccontextmanager
async def hosting(node: ScriptedNode, **terms: Any) -> AsyncIterator[ScriptedStages]:
    """``node`` with stages from a script."""
    made = ScriptedStages(node, **terms)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.serve)
        yield made
        nursery.cancel_scope.cancel()
