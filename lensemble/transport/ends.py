"""The ends of an edge as tasks: each runs its machine over one stream and one leased ring.

An end is served in the nursery of whoever provisioned it.  A torn stream ends that end and nothing
around it: ``serve`` returns, ``fault`` says why, and whoever waits on the end gets ``EdgeFault``.
A process that is told by signals gets them through a callback; one that can wait uses ``acquire``
and ``receive``.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import trio

from lensemble.edge import rx, tx
from lensemble.edge.arena import Arena, Region
from lensemble.edge.spec import EdgeSpec
from lensemble.errors import EdgeFault
from lensemble.ids import SlotIndex
from lensemble.transport.driver import Driver, EdgeSender, InboundEdge
from lensemble.transport.pump import Chunk, receive_chunks, send_chunks

CLOSED_HERE = "closed by this side"


class TxEnd:
    """The sending end.

    With ``on_released`` every slot that the process may fill is announced by that callback, each of
    the ring once when the stream opens; without it the slots are had from ``acquire``.
    """

    def __init__(
        self,
        spec: EdgeSpec,
        region: Region,
        driver: Driver,
        on_released: Callable[[SlotIndex], None] | None = None,
    ) -> None:
        self.spec = spec
        self.region = region
        self.over = trio.Event()
        self._driver = driver
        self._state: tx.State = tx.Unbound(spec.slots, spec.capacity_bytes)
        self._work, self._todo = trio.open_memory_channel[Chunk](spec.slots)
        self._free, self._had = trio.open_memory_channel[SlotIndex](spec.slots)
        self._on_released = on_released or self._free.send_nowait
        self._scope = trio.CancelScope()

    @property
    def fault(self) -> str | None:
        """Why the edge is torn, or None."""
        return self._state.reason if isinstance(self._state, tx.Faulted) else None

    @property
    def lent(self) -> tuple[SlotIndex, ...]:
        """The slots that the process may fill now."""
        return self._state.lent if isinstance(self._state, tx.Ready) else ()

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Open the stream, report started whether or not that went well, and send until the end."""
        with self._scope:
            try:
                sender = await self._driver.open_edge(self.spec.consumer, self.spec.edge)
            except EdgeFault as fault:
                self._feed(tx.StreamLost(fault.message))
                task_status.started()
                return
            except trio.Cancelled:
                self._feed(tx.StreamLost(CLOSED_HERE))
                raise
            self._feed(tx.Opened())
            task_status.started()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch, sender, nursery.cancel_scope)
                await self._pump(sender)
                nursery.cancel_scope.cancel()

    async def acquire(self) -> SlotIndex:
        """An empty slot, as soon as there is one.

        Raises:
            EdgeFault: the edge is torn or finished.
        """
        try:
            slot = await self._had.receive()
        except trio.EndOfChannel:
            raise self._torn() from None
        if self.over.is_set():
            raise self._torn()
        return slot

    def acquire_now(self) -> SlotIndex | None:
        """An empty slot if there is one that nobody waits for; None also once the edge is over."""
        if self.over.is_set():
            return None
        try:
            return self._had.receive_nowait()
        except (trio.WouldBlock, trio.EndOfChannel):
            return None

    def filled(self, slot: SlotIndex, extent: int) -> None:
        """Hand back ``slot`` with ``extent`` bytes to send; on a torn edge this does nothing.

        Raises:
            InvalidTransition: the slot is not with the process.
        """
        self._feed(tx.Filled(slot, extent))

    async def finished(self) -> None:
        """Send nothing more; wait until the consumer's transport has everything.

        Raises:
            EdgeFault: the edge is torn.
        """
        if not isinstance(self._state, tx.Ending | tx.Ended):
            self._feed(tx.Done())
        await self.over.wait()
        if self.fault is not None:
            raise self._torn()

    def close(self) -> None:
        """Tear the edge now, unless it is over; ``serve`` returns soon after."""
        self._scope.cancel()

    async def _pump(self, sender: EdgeSender) -> None:
        reason = CLOSED_HERE
        try:
            await send_chunks(
                sender, self.region, self._todo, lambda slot: self._feed(tx.Sent(slot))
            )
            self._feed(tx.StreamEnded())
        except EdgeFault as fault:
            reason = fault.message
        finally:
            if not self.over.is_set() or self.fault is not None:
                self._feed(tx.StreamLost(reason))
                await sender.reset()

    async def _watch(self, sender: EdgeSender, scope: trio.CancelScope) -> None:
        reason = await sender.lost()
        self._feed(tx.StreamLost(f"edge {self.spec.edge} to {self.spec.consumer}: {reason}"))
        scope.cancel()

    def _feed(self, event: tx.Event) -> None:
        self._state, actions = tx.transition(self._state, event)
        for action in actions:
            self._perform(action)

    def _perform(self, action: tx.Action) -> None:
        match action:
            case tx.SignalReleased(slot):
                self._on_released(slot)
            case tx.SendSlot(slot, extent):
                self._work.send_nowait(Chunk(slot, extent))
            case tx.FinishStream():
                self._work.close()
            case tx.SignalEnd() | tx.Report(str()):
                self._work.close()
                self._free.close()
                self.over.set()
            case tx.Report():
                pass

    def _torn(self) -> EdgeFault:
        return EdgeFault(self.fault or f"edge {self.spec.edge} has no more slots: it is finished")


class RxEnd:
    """The receiving end.

    With ``on_ready`` each chunk is announced by that callback; without it chunks are had from
    ``receive``.  A sender that gives up before its first bytes are here cannot be told from one
    that has not begun: this end then waits until it is closed or its link is lost.  With ``ahead``
    no link is needed until the stream arrives, and none that is lost before ends the wait.
    """

    def __init__(
        self,
        spec: EdgeSpec,
        region: Region,
        driver: Driver,
        on_ready: Callable[[SlotIndex, int], None] | None = None,
        *,
        ahead: bool = False,
    ) -> None:
        self.spec = spec
        self.region = region
        self.over = trio.Event()
        self._driver = driver
        self._state: rx.State = rx.Unbound(spec.slots, spec.capacity_bytes)
        self._offer, self._offered = trio.open_memory_channel[SlotIndex](spec.slots)
        self._ready, self._landed = trio.open_memory_channel[Chunk](spec.slots)
        self._on_ready = on_ready or self._keep
        self._ahead = ahead
        self._scope = trio.CancelScope()

    @property
    def fault(self) -> str | None:
        """Why the edge is torn, or None."""
        return self._state.reason if isinstance(self._state, rx.Faulted) else None

    @property
    def lent(self) -> tuple[SlotIndex, ...]:
        """The slots that hold chunks the process has not consumed yet, oldest first."""
        return self._state.lent if isinstance(self._state, rx.Ready | rx.Ended) else ()

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Register with the demux, report started, and receive until the end."""
        with self._scope:
            inbound = self._driver.expect_edge(
                self.spec.producer, self.spec.edge, ahead=self._ahead
            )
            self._feed(rx.Registered())
            task_status.started()
            try:
                await self._pump(inbound)
            finally:
                inbound.close()

    async def receive(self) -> tuple[SlotIndex, int] | None:
        """The next chunk as its slot and its extent in bytes; None after the last.

        Raises:
            EdgeFault: the edge is torn.
        """
        if self.fault is None:
            try:
                chunk = await self._landed.receive()
            except trio.EndOfChannel:
                chunk = None
            if self.fault is None:
                return None if chunk is None else (chunk.slot, chunk.extent)
        raise EdgeFault(self.fault or "")

    def consumed(self, slot: SlotIndex) -> None:
        """Give ``slot`` back to the stream; on a torn edge this does nothing.

        Raises:
            InvalidTransition: the slot is not with the process.
        """
        self._feed(rx.Consumed(slot))

    def close(self) -> None:
        """Refuse the rest of the stream, unless it is over; ``serve`` returns soon after."""
        self._scope.cancel()

    async def _pump(self, inbound: InboundEdge) -> None:
        reason = CLOSED_HERE
        receiver = None
        try:
            receiver = await inbound.accept()
            await receive_chunks(receiver, self.region, self._offered, self._land)
            if self.fault is None:
                self._feed(rx.StreamEnded())
        except EdgeFault as fault:
            reason = fault.message
        finally:
            if not self.over.is_set() or self.fault is not None:
                self._feed(rx.StreamLost(reason))
                if receiver is not None:
                    await receiver.stop()

    def _land(self, chunk: Chunk) -> None:
        self._feed(rx.Landed(chunk.slot, chunk.extent))

    def _keep(self, slot: SlotIndex, extent: int) -> None:
        self._ready.send_nowait(Chunk(slot, extent))

    def _feed(self, event: rx.Event) -> None:
        self._state, actions = rx.transition(self._state, event)
        for action in actions:
            self._perform(action)

    def _perform(self, action: rx.Action) -> None:
        match action:
            case rx.OfferSlot(slot):
                self._offer.send_nowait(slot)
            case rx.SignalReady(slot, extent):
                self._on_ready(slot, extent)
            case rx.SignalEnd() | rx.Report(str()):
                self._ready.close()
                self._offer.close()
                self.over.set()
            case rx.Report():
                pass


class ArenaLeases:
    """Leases that wait for room, first come first served."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._turn = trio.Lock()
        self._room = trio.Event()

    async def lease(self, spec: EdgeSpec) -> Region:
        """The ring of one end of ``spec``, once there is room for it.

        Raises:
            ArenaExhausted: it can never fit.
        """
        (region,) = await self.lease_all((spec,))
        return region

    async def lease_all(self, specs: Sequence[EdgeSpec]) -> list[Region]:
        """The rings of one end of each of ``specs``, once there is room for all of them.

        Only who is first in line holds some and waits for others, so no two wait for each other.

        Raises:
            ArenaExhausted: one of them can never fit.
        """
        for spec in specs:
            self.arena.check_fits(spec)
        regions: list[Region] = []
        async with self._turn:
            with ExitStack() as taken:
                for spec in specs:
                    region = await self._wait_for_room(spec)
                    taken.callback(self.give_back, region)
                    regions.append(region)
                taken.pop_all()
        return regions

    async def _wait_for_room(self, spec: EdgeSpec) -> Region:
        while (region := self.arena.lease(spec)) is None:
            self._room = trio.Event()
            await self._room.wait()
        return region

    def give_back(self, region: Region) -> None:
        """End a lease: the pump on it has stopped and the worker has let go of it."""
        self.arena.give_back(region)
        self._room.set()
