"""How much a link to another node carries, measured when the coordinator asks: one small burst.

The one that expects it times what comes, from the moment its stream is here until it has ended;
the other one sends bytes that mean nothing.  It goes over a stream of its own, on the link that
stages would use.  Nothing is measured while anybody is served: not beside a stage, not in a round,
not twice within ``BURST_REST_S`` with one node, and never with one that is no member.
"""

import os
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from typing import Any

import msgspec
import trio

from lensemble.errors import EdgeFault, LinkLost
from lensemble.ids import EdgeId, NodeId
from lensemble.logs import logger
from lensemble.transport.driver import Driver, EdgeReceiver, EdgeSender, PeerAddress
from lensemble.wire import stages
from lensemble.wire.fence import sentence
from lensemble_node.peer_links import OPEN_WITHIN_S, PeerLinks

WITHIN_S = OPEN_WITHIN_S + 2 * stages.BURST_S
"""From an order to its answer, with the dial."""

OUTBOX_MESSAGES = 16
FRAMES = stages.MAX_BURST_BYTES // stages.BURST_FRAME_BYTES

Tell = Callable[[stages.BurstAnswer], Awaitable[None]]


class Ground(msgspec.Struct, frozen=True):
    """What measuring stands on.

    ``belongs`` knows members; ``busy`` says why nothing may be measured now, if so; ``edges`` are
    the ids that are in use on this node.
    """

    driver: Driver
    links: PeerLinks
    belongs: Callable[[NodeId], bool]
    busy: Callable[[], str]
    edges: Callable[[], Collection[EdgeId]]
    refused: Counter[str]


class _Broken(Exception):
    """A burst that came to nothing, and why."""


class Bursts:
    """One measurement at a time; ``tell`` is awaited with what is to be said of it."""

    def __init__(self, ground: Ground, tell: Tell) -> None:
        self._ground = ground
        self._tell = tell
        self._under_way: stages.BurstOrder | None = None
        self._scope = trio.CancelScope()
        self._last: dict[NodeId, float] = {}
        """When bytes last went to or came from a node; forgotten after ``BURST_REST_S``."""

        self._outbox, self._letters = trio.open_memory_channel[stages.BurstAnswer](OUTBOX_MESSAGES)
        self._nursery: trio.Nursery | None = None
        self._log = logger("bursts")

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Measure when asked, until cancelled."""
        try:
            async with trio.open_nursery() as self._nursery:
                task_status.started()
                async for message in self._letters:
                    await self._tell(message)
        finally:
            self._nursery = None

    def take(self, order: stages.BurstOrder) -> None:
        """Measure, or say why not."""
        against = self._objection(order)
        if against or self._nursery is None:
            self._refuse(order, against or "this node is shutting down")
            return
        self._under_way, self._scope = order, trio.CancelScope()
        self._nursery.start_soon(self._serve, order, self._scope)

    def end(self) -> None:
        """The session is over: break off what is under way and say nothing more of it."""
        self._scope.cancel()

    # ---- whether ----

    def _objection(self, order: stages.BurstOrder) -> str:
        """Why ``order`` is not carried out, as a phrase; empty: it is."""
        ground, far, spec = self._ground, order.far.node, order.edge
        ends = (spec.producer, spec.consumer)
        sends = isinstance(order, stages.BurstSend)
        mine = (ground.driver.node, far) if sends else (far, ground.driver.node)
        if ends != mine or spec.capacity_bytes != stages.BURST_FRAME_BYTES:
            return f"edge {spec.edge} is not one for a burst between this node and {far[:12]}"
        if not ground.belongs(far):
            return f"{far[:12]} is no member of this federation, as far as this node was told"
        if self._under_way is not None:
            return "another measurement is under way here"
        if why := ground.busy():
            return why
        if spec.edge in ground.edges():
            return f"edge {spec.edge} ends here already"
        return self._rested(far)

    def _rested(self, far: NodeId) -> str:
        now, rest = trio.current_time(), stages.BURST_REST_S
        self._last = {node: at for node, at in self._last.items() if now - at < rest}
        if far not in self._last:
            return ""
        ago = now - self._last[far]
        return f"measured {ago:.0f} s ago, and at most every {rest:g} s"

    # ---- a burst ----

    async def _serve(self, order: stages.BurstOrder, ended: trio.CancelScope) -> None:
        far = order.far.node
        self._ground.links.need(far)
        try:
            with ended, trio.move_on_after(WITHIN_S) as limit:
                await self._measure(order)
            if limit.cancelled_caught:
                self._refuse(order, f"nothing came of it within {WITHIN_S:g} s")
        finally:
            self._ground.links.release(far)
            self._under_way = None

    async def _measure(self, order: stages.BurstOrder) -> None:
        try:
            if isinstance(order, stages.BurstExpect):
                self._say(await self._receive(order))
            else:
                await self._send(order)
        except (EdgeFault, LinkLost) as lost:
            self._refuse(order, lost.message)
        except _Broken as broken:
            self._refuse(order, str(broken))

    async def _send(self, order: stages.BurstSend) -> None:
        ground, far = self._ground, order.far
        await ground.links.reach(PeerAddress(far.node, far.addresses))
        sender = await ground.driver.open_edge(far.node, order.edge.edge)
        self._last[far.node] = trio.current_time()
        done = False
        try:
            with trio.move_on_after(stages.BURST_S):
                await self._pour(sender)
                done = True
        finally:
            if not done:
                await sender.reset()
        self._log.info("burst.sent", peer=far.node, whole=done)

    async def _pour(self, sender: EdgeSender) -> None:
        # Drawn by chance, so that nothing on the way can make it shorter.
        content = memoryview(os.urandom(stages.BURST_FRAME_BYTES))
        for _ in range(FRAMES):
            self._check()
            await sender.send_frame(content)
        await sender.finish()

    async def _receive(self, order: stages.BurstExpect) -> stages.BurstTaken:
        ground, far = self._ground, order.far.node
        inbound = ground.driver.expect_edge(far, order.edge.edge, ahead=True)
        try:
            self._say(stages.BurstReady(**_fence(order)))
            receiver = await inbound.accept()
            self._last[far] = trio.current_time()
            # Before it fills the queues on its way.
            link = ground.driver.link_to(far)
            rtt_ms = None if link is None else link.facts().rtt_ms
            try:
                landed, seconds = await self._time(receiver)
            finally:
                await receiver.stop()
        finally:
            inbound.close()
        self._log.info("burst.taken", peer=far, landed_bytes=landed, seconds=round(seconds, 6))
        return stages.BurstTaken(
            **_fence(order),
            landed_bytes=landed,
            microseconds=round(seconds * 1e6),
            rtt_us=None if rtt_ms is None else round(rtt_ms * 1e3),
        )

    async def _time(self, receiver: EdgeReceiver) -> tuple[int, float]:
        """Bytes and seconds until the last of them, or of the whole time if that ran out."""
        began = last = trio.current_time()
        landed, into = 0, memoryview(bytearray(stages.BURST_FRAME_BYTES))
        ended = False
        with trio.move_on_after(stages.BURST_S):
            try:
                while landed <= stages.MAX_BURST_BYTES:
                    extent = await receiver.receive_frame(into)
                    self._check()
                    if extent is None:
                        break
                    landed += extent
                    last = trio.current_time()
                ended = True
            except EdgeFault:
                if not landed:
                    raise
        if ended and not landed:
            raise _Broken("the burst ended without a byte")
        end = last if ended else trio.current_time()
        return min(landed, stages.MAX_BURST_BYTES), end - began

    def _check(self) -> None:
        if why := self._ground.busy():
            raise _Broken(f"broken off: {why}")

    # ---- what is said ----

    def _refuse(self, order: stages.BurstOrder, reason: str) -> None:
        self._log.info("burst.refused", peer=order.far.node, reason=reason)
        self._say(stages.BurstRefused(**_fence(order), reason=sentence(reason)))

    def _say(self, message: stages.BurstAnswer) -> None:
        try:
            self._outbox.send_nowait(message)
        except trio.WouldBlock:
            self._ground.refused["bursts_too_fast"] += 1


def _fence(order: stages.BurstOrder) -> dict[str, Any]:
    return {"federation": order.federation, "epoch": order.epoch, "burst": order.burst}
