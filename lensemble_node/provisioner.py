"""The rim of ``provision``: leases rings, opens the ends, and passes slot signals on.

One task owns a pair from its lease to its end; cancelling it resets what is sent and refuses what
comes.  Slot signals between worker and ends bypass the machine: they are the hot path.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol

import trio

from lensemble.actor import run_machine
from lensemble.edge.arena import Region
from lensemble.errors import ArenaExhausted, InvariantError, WorkerFault
from lensemble.ids import EdgeId, SlotIndex
from lensemble.logs import logger
from lensemble.transport.driver import Driver
from lensemble.transport.ends import ArenaLeases, RxEnd, TxEnd
from lensemble_node import participation, provision, signals
from lensemble_node.provision import Pair

INBOX_EVENTS = 1024
DRAIN_TIMEOUT_S = 60.0
"""A worker that has not let go of its edges by then is wedged."""

Tell = Callable[[participation.Event], Awaitable[None]]


class Worker(Protocol):
    """What is needed of the worker's supervisor."""

    def command(self, command: signals.Command) -> bool: ...

    def end(self, reason: str) -> None: ...


class _Holding:
    """What one pair has of this process."""

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.open = trio.Event()
        self.regions: list[Region] = []
        self.rx: RxEnd | None = None
        self.tx: TxEnd | None = None
        self.moved = {"rx": 0, "tx": 0}
        """Payload bytes that came in and went out, by direction."""


class Provisioner:
    """Keeps the pair of edges that the coordinator asked for.

    Args:
        driver: opens and receives streams.
        leases: rings come from here.
        worker: attaches to the rings.
        tell: awaited with what becomes of a pair.
    """

    def __init__(self, driver: Driver, leases: ArenaLeases, worker: Worker, tell: Tell) -> None:
        self._driver = driver
        self._leases = leases
        self._worker = worker
        self._tell = tell
        self._held: dict[tuple[EdgeId, EdgeId], _Holding] = {}
        self._inbox, self._events = trio.open_memory_channel[provision.Event](INBOX_EVENTS)
        self._nursery: trio.Nursery | None = None
        self._log = logger("provisioner")
        self.state: provision.State = provision.Bare()

    @property
    def leased_bytes(self) -> int:
        """Address space of the arena that edges hold now."""
        return self._leases.arena.leased_bytes()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            await run_machine(
                self.state, provision.transition, self._events, self._perform, self._moved
            )

    def feed(self, event: provision.Event) -> None:
        """Give the machine an event.

        Raises:
            InvariantError: it does not keep up.
        """
        try:
            self._inbox.send_nowait(event)
        except trio.WouldBlock:
            raise InvariantError(f"{INBOX_EVENTS} events wait for the provisioner") from None

    def backlog(self) -> int:
        """How many events wait for the machine."""
        return self._inbox.statistics().current_buffer_used

    def signal(self, signal: signals.Filled | signals.Consumed) -> None:
        """Pass a slot that the worker is done with to its end.

        Raises:
            WorkerFault: the slot is not the worker's.
        """
        slot = SlotIndex(signal.slot)
        for held in self._held.values():
            for end in (held.rx, held.tx):
                if end is None or end.spec.edge != signal.edge or end.over.is_set():
                    continue
                match end, signal:
                    case RxEnd(), signals.Consumed() if slot in end.lent:
                        end.consumed(slot)
                    case TxEnd(), signals.Filled(extent=extent) if slot in end.lent:
                        held.moved["tx"] += extent
                        end.filled(slot, extent)
                    case _:
                        raise WorkerFault(f"slot {slot} of edge {signal.edge} is not the worker's")

    def edges(self) -> tuple[EdgeId, ...]:
        """Those that end on this node."""
        return tuple(edge for pair in self._held for edge in pair)

    def ends(self) -> tuple[tuple[RxEnd | TxEnd, int], ...]:
        """The ends there are, each with the payload bytes it has moved, for status."""
        return tuple(
            (end, held.moved[way])
            for held in self._held.values()
            for way, end in (("rx", held.rx), ("tx", held.tx))
            if end is not None
        )

    def _moved(self, state: provision.State) -> None:
        self.state = state

    async def _perform(self, action: provision.Action) -> None:  # noqa: C901 - one arm an action
        match action:
            case provision.Lease(pair):
                self._begin(pair)
            case provision.Open(pair):
                self._held[pair.edges].open.set()
            case provision.Attach(pair):
                self._attach(pair)
            case provision.Detach(edge):
                self._worker.command(signals.Detach(edge=edge))
            case provision.Stop(pair):
                self._stop(pair)
            case provision.GiveBack(pair):
                self._give_back(pair)
            case provision.Acknowledge(pair):
                self._log.info("edges.live", edges=pair.edges)
                await self._tell(participation.EdgesLive(pair))
            case provision.AcknowledgeTeardown(edges=edges):
                await self._tell(participation.EdgesTornDown(edges))
            case provision.ReportLost(pair=pair, edge=edge, reason=reason):
                self._log.warning("edges.lost", edge=edge, reason=reason)
                await self._tell(participation.EdgesGone(pair, reason, edge))
            case provision.Unusable(pair=pair, reason=reason):
                self._log.info("edges.gone", edges=pair.edges, reason=reason)
                await self._tell(participation.EdgesGone(pair, reason))

    def _begin(self, pair: Pair) -> None:
        if self._nursery is None:
            raise InvariantError("the provisioner is not running")
        held = self._held[pair.edges] = _Holding()
        self._nursery.start_soon(self._serve, pair, held)

    def _stop(self, pair: Pair) -> None:
        self._held[pair.edges].scope.cancel()
        if self._nursery is not None:
            self._nursery.start_soon(self._insist, pair)

    async def _insist(self, pair: Pair) -> None:
        await trio.sleep(DRAIN_TIMEOUT_S)
        if pair.edges in self._held:
            self._worker.end(f"it did not let go of its edges within {DRAIN_TIMEOUT_S:g} s")

    def _give_back(self, pair: Pair) -> None:
        for region in self._held.pop(pair.edges).regions:
            self._leases.give_back(region)

    def _attach(self, pair: Pair) -> None:
        state, update = self._held[pair.edges].regions
        for spec, region, direction in ((pair.state, state, "rx"), (pair.update, update, "tx")):
            self._worker.command(
                signals.Attach(
                    edge=spec.edge,
                    direction="rx" if direction == "rx" else "tx",
                    offset=region.offset,
                    capacity_bytes=spec.capacity_bytes,
                    slots=spec.slots,
                )
            )

    async def _serve(self, pair: Pair, held: _Holding) -> None:
        with held.scope:
            try:
                held.regions += await self._leases.lease_all((pair.state, pair.update))
            except ArenaExhausted as error:
                self.feed(provision.EndFaulted(pair.state.edge, error.message))
                await trio.sleep_forever()
            self.feed(provision.Leased(pair))
            await held.open.wait()
            await self._serve_ends(pair, held)
        self.feed(provision.Stopped(pair))

    async def _serve_ends(self, pair: Pair, held: _Holding) -> None:
        state, update = held.regions
        ready = partial(self._ready, held, pair.state.edge)
        released = partial(self._released, pair.update.edge)
        held.rx = RxEnd(pair.state, state, self._driver, ready)
        held.tx = TxEnd(pair.update, update, self._driver, released)
        async with trio.open_nursery() as nursery:
            await nursery.start(held.rx.serve)
            await nursery.start(held.tx.serve)
            if not held.tx.over.is_set():
                self.feed(provision.Opened(pair))
            nursery.start_soon(self._watch, held.rx)
            nursery.start_soon(self._watch, held.tx)

    async def _watch(self, end: RxEnd | TxEnd) -> None:
        await end.over.wait()
        reason = end.fault or f"edge {end.spec.edge} was ended by its producer"
        self.feed(provision.EndFaulted(end.spec.edge, reason))
        await trio.sleep_forever()

    def _ready(self, held: _Holding, edge: EdgeId, slot: SlotIndex, extent: int) -> None:
        held.moved["rx"] += extent
        self._worker.command(signals.Ready(edge=edge, slot=slot, extent=extent))

    def _released(self, edge: EdgeId, slot: SlotIndex) -> None:
        self._worker.command(signals.Released(edge=edge, slot=slot))
