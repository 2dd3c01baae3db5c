"""The rim of ``stage``: every stage on this node, its rings, its ends, its worker, its links.

Stages of several runs are here at once, one of each run.  What the coordinator asks for and what
becomes of it goes through the machine of its run; slots that pass between ends and worker do not:
they are the hot path, and every chunk of a token waits for them.
"""

from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Literal

import msgspec
import trio

from lensemble.edge.arena import Region
from lensemble.edge.spec import EdgeSpec
from lensemble.errors import ArenaExhausted, InvariantError, LinkLost, WorkerFault
from lensemble.ids import EdgeId, FederationId, NodeId, SlotIndex
from lensemble.logs import logger
from lensemble.transport.driver import Driver, PeerAddress
from lensemble.transport.ends import ArenaLeases, RxEnd, TxEnd
from lensemble.version import BUILD
from lensemble.wire import stages
from lensemble.wire.fence import sentence
from lensemble_node import memory, signals, stage, stage_signals, stage_terms
from lensemble_node.config import NodeConfig
from lensemble_node.link_figures import LOOK_EVERY_S, LinkFigures
from lensemble_node.peer_links import PeerLinks, reachable
from lensemble_node.stage_process import Engine, Launch, StageProcess
from lensemble_node.timeline import Timeline

LEASE_WITHIN_S = 30.0
PROGRESS_S = 0.2
"""Between two words on the same phase of getting ready."""

MAX_RUNS = 64
MAX_REMEMBERED = 256
"""Runs that are over and whose newest plan is still known."""

OUTBOX_MESSAGES = 4096
UPSTREAM_LOST, DOWNSTREAM_LOST, EDGE_FAULT = "upstream_lost", "downstream_lost", "edge_fault"

Tell = Callable[[stages.StageAnswer], Awaitable[None]]


class Session(msgspec.Struct, frozen=True):
    """With the coordinator, in which stages are hosted; ``path`` is where its link leads."""

    federation: FederationId
    epoch: int
    coordinator: NodeId
    path: str = ""


class Ground(msgspec.Struct, frozen=True):
    """What all stages stand on; ``engine`` computes them, ``links`` lead to other nodes."""

    config: NodeConfig
    driver: Driver
    leases: ArenaLeases
    links: PeerLinks
    engine: Engine
    edges_elsewhere: Callable[[], Iterable[EdgeId]]
    """Those that end on this node and are no stage's."""


class Hosted:
    """What the stage of one plan has of this process."""

    def __init__(self, order: stages.StageProvision) -> None:
        self.order = order
        self.facts = stage_terms.facts_of(order)
        self.needed_bytes = stage_terms.needed_bytes(order, self.facts)
        self.scope = trio.CancelScope()
        self.host = trio.Event()
        self.open = trio.Event()
        self.regions: dict[EdgeId, Region] = {}
        self.receiving: dict[EdgeId, RxEnd] = {}
        self.outbound: TxEnd | None = None
        self.process: StageProcess | None = None
        self.untold: list[SlotIndex] = []
        """Slots that are the worker's to fill and of which it need not know yet."""

        self.loaded: stage_signals.Hosted | None = None
        self.progress: stage_signals.Advanced | None = None
        self.said_at = -PROGRESS_S
        self.since = trio.current_time()
        self.computed = self.refused = 0
        self.recent: deque[tuple[int, int]] = deque(maxlen=stages.MAX_TIMES)
        self.timeline = Timeline()

    def tell_released(self) -> None:
        """Tell the worker of every slot that it may fill."""
        if self.process is not None:
            for slot in self.untold:
                released = signals.Released(edge=self.order.outbound.edge, slot=slot)
                self.process.command(released)
        self.untold.clear()

    @property
    def is_short(self) -> bool:
        """Whether the worker knows of no slot to fill, though there is one."""
        end = self.outbound
        return bool(self.untold) and end is not None and len(end.lent) <= len(self.untold)

    @property
    def taken_bytes(self) -> int:
        """As planned, or as it turned out where that is more."""
        return max(self.needed_bytes, 0 if self.loaded is None else self.loaded.resident_bytes)

    @property
    def waiting(self) -> int:
        """Chunks that have landed and are not consumed."""
        inbound = self.receiving.get(self.order.inbound.edge)
        return 0 if inbound is None else len(inbound.lent)


class StageHost:
    """The stages on this node; ``tell`` is awaited with what is to be said of them, in order."""

    def __init__(self, ground: Ground, tell: Tell) -> None:
        config, arena = ground.config, ground.leases.arena
        self.engine = ground.engine
        self.links = ground.links
        self.memory_bytes = 0
        self.changed = trio.Event()
        self.hosted: dict[str, Hosted] = {}
        self._config = config
        self._driver = ground.driver
        self._leases = ground.leases
        self._edges_elsewhere = ground.edges_elsewhere
        self._tell = tell
        settings = config.inference
        self._launch = Launch(
            self.engine, arena.fd, arena.nbytes, settings.address_space_bytes, settings.niceness
        )
        self._states: dict[str, stage.State] = {}
        self._newest: OrderedDict[str, int] = OrderedDict()
        self._session: Session | None = None
        self._said: stages.Inventory | None = None
        self._figures = LinkFigures()
        self._events: deque[tuple[str, stage.Event]] = deque()
        self._stepping = False
        self._outbox, self._letters = trio.open_memory_channel[stages.StageAnswer](OUTBOX_MESSAGES)
        self._nursery: trio.Nursery | None = None
        self._log = logger("stages")

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; no worker is left on the way out."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._look_at_links)
                task_status.started()
                async for message in self._letters:
                    await self._tell(message)
        finally:
            self._nursery = None

    # ---- what the member asks for ----

    def begin(self, session: Session) -> None:
        """A session has begun: say what this node can hold."""
        self._session, self._said = session, None
        asked = self._config.inference.memory_bytes
        self.memory_bytes = 0 if self.engine.reason else asked or memory.to_spare()
        self._offer()

    def end(self) -> None:
        """The session is over: free every stage and say nothing more."""
        self._session = None
        for run in list(self._states):
            self._feed(run, stage.LinkGone())

    def carry_out(self, order: stages.StageOrder) -> None:
        """What the coordinator asks of a stage, in the session there is."""
        match order:
            case stages.StageProvision():
                self._consider(order)
            case stages.StageOpen():
                self._feed(order.run, stage.Open(order))
            case stages.StageTeardown():
                self._feed(order.run, stage.Withdraw(order))
            case stages.StageLook():
                self._look(order)

    def state(self, run: str) -> stage.State:
        """Where the stage of ``run`` is."""
        return self._states.get(run) or stage.Vacant(self._newest.get(run, -1))

    def inventory(self, session: Session) -> stages.Inventory:
        """What this node can hold, and holds."""
        own = self._config.listen.advertise or reachable(self._driver.addresses(), session.path)
        hosts = self.memory_bytes > 0
        measured = self._figures.read(self.links.links())
        return stages.Inventory(
            federation=session.federation,
            epoch=session.epoch,
            memory_bytes=self.memory_bytes,
            taken_bytes=self.taken_bytes(),
            device=self._config.inference.device,
            engine=self.engine.name,
            weights="float32",
            addresses=own[: stages.MAX_ADDRESSES],
            reason="" if hosts else sentence(self.engine.reason or "no memory is free"),
            linked=tuple(node for node, _ in measured),
            rtts_us=tuple(rtt_us for _, rtt_us in measured),
        )

    # ---- orders ----

    def _consider(self, order: stages.StageProvision) -> None:
        session = self._session
        if session is None:
            return
        offer = stage_terms.Offer(
            self._driver.node,
            session.coordinator,
            BUILD,
            self.engine.name,
            self.memory_bytes,
            self.taken_bytes(but=order.run),
            reason=self.engine.reason,
            sources=self._config.inference.prefixes,
        )
        against = stage_terms.objection(order, offer) or self._occupied(order)
        if len(self._states) >= MAX_RUNS and order.run not in self._states:
            against = stage_terms.Difference("runs", f"{MAX_RUNS} are here", "one more")
        if against is None:
            self._feed(order.run, stage.Provide(order))
        else:
            self._log.warning("stage.refused", run=order.run, field=against.field)
            self._say(stage_terms.refusal(order, against))

    def edges(self) -> set[EdgeId]:
        """Those that end in a stage here."""
        return {spec.edge for held in self.hosted.values() for spec in _specs(held.order)}

    def _occupied(self, order: stages.StageProvision) -> stage_terms.Difference | None:
        """Edge ids are used once: two ends of one id could not be told apart."""
        here = self.edges() | set(self._edges_elsewhere())
        for spec in _specs(order):
            if spec.edge in here:
                return stage_terms.Difference("edges", f"edge {spec.edge} ends here", "a new id")
        return None

    def _look(self, order: stages.StageLook) -> None:
        held = self.hosted.get(order.run)
        if held is None or not stage.concerns(order, held.order):
            self._feed(order.run, stage.Look(order))
            return
        self._say(
            stages.StageSeen(
                **stage.fence(order),
                computed=held.computed,
                held=held.waiting,
                recent=tuple(held.recent),
                timeline=held.timeline.told() if order.timeline else (),
            )
        )

    # ---- the machine ----

    def _feed(self, run: str, event: stage.Event) -> None:
        """Step the machine of ``run``; what its actions feed is stepped after them, in order."""
        self._events.append((run, event))
        if self._stepping:
            return
        self._stepping = True
        try:
            while self._events:
                self._step(*self._events.popleft())
        finally:
            self._stepping = False

    def _step(self, run: str, event: stage.Event) -> None:
        before = self.state(run)
        after, actions = stage.transition(before, event)
        if isinstance(after, stage.Vacant):
            self._states.pop(run, None)
            if after.newest >= 0:
                self._newest[run] = after.newest
                self._newest.move_to_end(run)
            if len(self._newest) > MAX_REMEMBERED:
                self._newest.popitem(last=False)
        else:
            self._states[run] = after
        if type(before) is not type(after):
            self._note(run, after)
        for action in actions:
            self._perform(action)

    def _note(self, run: str, after: stage.State) -> None:
        self._log.info(f"stage.{type(after).__name__.lower()}", run=run)
        if (held := self.hosted.get(run)) is not None:
            held.since = trio.current_time()
        self.changed.set()
        self.changed = trio.Event()

    def _perform(self, action: stage.Action) -> None:
        match action:
            case stage.Lease(order):
                self._lease(order)
            case stage.Host(order):
                self.hosted[order.run].host.set()
            case stage.OpenEdge(order):
                self.hosted[order.run].open.set()
            case stage.Stop(order, kill):
                self._stop(order, kill=kill)
            case stage.GiveBack(order):
                self._give_back(order)
            case stage.Say(message):
                self._say(message)

    def _say(self, message: stages.StageAnswer) -> None:
        if isinstance(message, stages.StageFault):
            self._log.error(
                "stage.faulted", run=message.run, code=message.code, reason=message.reason
            )
        try:
            self._outbox.send_nowait(message)
        except trio.WouldBlock:
            raise InvariantError(f"{OUTBOX_MESSAGES} words on stages wait to be said") from None

    # ---- a stage from its lease to its end ----

    def _lease(self, order: stages.StageProvision) -> None:
        held = self.hosted[order.run] = Hosted(order)
        for node in self._neighbours(order):
            self.links.need(node)
        self._offer()
        # A plan that waited for an older one to end begins no more when this daemon ends.
        if self._nursery is not None:
            self._nursery.start_soon(self._serve, held, self._nursery)

    def _neighbours(self, order: stages.StageProvision) -> tuple[NodeId, ...]:
        """The nodes, other than the coordinator, at the far ends of its edges."""
        ends = []
        if order.stage > 0:
            ends.append(order.upstream.node)
        if order.stage < order.stages - 1:
            ends.append(order.downstream.node)
        return tuple(ends)

    def _stop(self, order: stages.StageProvision, *, kill: bool) -> None:
        held = self.hosted[order.run]
        held.scope.cancel()
        if held.process is None:
            return
        if kill:
            held.process.end("its stage ends")
        else:
            held.process.ask()

    def _give_back(self, order: stages.StageProvision) -> None:
        held = self.hosted.pop(order.run)
        for region in held.regions.values():
            self._leases.give_back(region)
        for node in self._neighbours(order):
            self.links.release(node)
        self._offer()

    async def _serve(self, held: Hosted, nursery: trio.Nursery) -> None:
        """Everything with rings and streams; when this returns no pump touches a ring."""
        order = held.order
        with held.scope:
            try:
                with trio.fail_after(LEASE_WITHIN_S):
                    specs = _specs(order)
                    regions = await self._leases.lease_all(specs)
                held.regions = {
                    spec.edge: region for spec, region in zip(specs, regions, strict=True)
                }
            except (ArenaExhausted, trio.TooSlowError) as error:
                self._fault(held, ArenaExhausted.code, *_no_room(error))
                await trio.sleep_forever()
            self._hear(held, stage.Leased(order.run_epoch))
            await held.host.wait()
            await self._serve_ends(held, nursery)
        if held.process is None:
            unused = stage.WorkerEnded(order.run_epoch, WorkerFault.code, "it was not started")
            self._hear(held, unused)
        self._hear(held, stage.Stopped(order.run_epoch))

    async def _serve_ends(self, held: Hosted, outer: trio.Nursery) -> None:
        order = held.order
        async with trio.open_nursery() as nursery:
            for spec in _specs(order):
                if spec is order.outbound:
                    continue
                ahead = spec is order.inbound and order.stage > 0
                ready = partial(self._ready, held, spec.edge)
                region = held.regions[spec.edge]
                end = RxEnd(spec, region, self._driver, ready, ahead=ahead)
                held.receiving[spec.edge] = end
                await nursery.start(end.serve)
                nursery.start_soon(self._watch, held, end)
            # A stage that was stopped meanwhile gets no worker that nobody would end.
            await trio.lowlevel.checkpoint()
            self._hear(held, stage.Registered(order.run_epoch))
            held.process = StageProcess(self._launch, partial(self._heard, held))
            # Outside of this scope: a worker may take longer to end than the streams.
            outer.start_soon(self._work, held, held.process)
            await held.open.wait()
            await self._open(held, nursery)

    async def _open(self, held: Hosted, nursery: trio.Nursery) -> None:
        order, spec = held.order, held.order.outbound
        if order.stage < order.stages - 1:
            try:
                await self.links.reach(
                    PeerAddress(order.downstream.node, order.downstream.addresses)
                )
            except LinkLost as lost:
                self._fault(held, "unreachable", lost.message, lost.remediation)
                await trio.sleep_forever()
        released = partial(self._released, held)
        held.outbound = TxEnd(spec, held.regions[spec.edge], self._driver, released)
        await nursery.start(held.outbound.serve)
        if not held.outbound.over.is_set():
            self._hear(held, stage.Opened(order.run_epoch))
        nursery.start_soon(self._watch, held, held.outbound)

    async def _watch(self, held: Hosted, end: RxEnd | TxEnd) -> None:
        await end.over.wait()
        order, edge = held.order, end.spec.edge
        if edge == order.outbound.edge:
            self._fault(held, DOWNSTREAM_LOST, end.fault or f"edge {edge} has ended")
        elif edge == order.inbound.edge:
            reason = end.fault or f"edge {edge} was ended by its producer"
            self._fault(held, UPSTREAM_LOST, reason)
        elif end.fault:
            self._fault(held, EDGE_FAULT, f"the weights did not all come: {end.fault}")

    async def _work(self, held: Hosted, process: StageProcess) -> None:
        order = held.order
        process.command(self._host_command(order))
        for spec in _specs(order):
            process.command(
                signals.Attach(
                    edge=spec.edge,
                    direction="tx" if spec is order.outbound else "rx",
                    offset=held.regions[spec.edge].offset,
                    capacity_bytes=spec.capacity_bytes,
                    slots=spec.slots,
                )
            )
        ending = await process.run()
        self._log.info("stage.worker_ended", run=order.run, reason=ending.reason)
        self._hear(
            held,
            stage.WorkerEnded(
                order.run_epoch,
                ending.code,
                ending.reason,
                ending.remediation,
                ending.stderr,
                ending.complaint,
            ),
        )

    def _host_command(self, order: stages.StageProvision) -> stage_signals.Host:
        source, settings = order.source, self._config.inference
        return stage_signals.Host(
            model=order.model.decode(),
            manifest_digest=order.manifest_digest,
            tensors=order.tensors,
            first=order.first,
            last=order.last,
            stage=order.stage,
            stages=order.stages,
            source=_SOURCES[type(source)],
            place=_place(source),
            cache_dir=str(self._config.models_dir),
            cache_bytes=settings.cache_bytes,
            inbound=order.inbound.edge,
            outbound=order.outbound.edge,
            weights=source.edge.edge if isinstance(source, stages.FromEdge) else 0,
            ctx=order.ctx,
            sessions=order.sessions,
            rows=order.rows,
            device=settings.device,
        )

    # ---- what becomes of it ----

    def _hear(self, held: Hosted, event: stage.OfStage) -> None:
        self._feed(held.order.run, event)

    def _fault(self, held: Hosted, code: str, reason: str, remediation: str = "") -> None:
        self._hear(held, stage.Faulted(held.order.run_epoch, code, reason, remediation))

    def _heard(self, held: Hosted, signal: stage_signals.Event) -> None:
        """From the worker; the two slot signals first, for they come with every chunk."""
        match signal:
            case signals.Consumed(edge=edge, slot=slot):
                self._consumed(held, EdgeId(edge), SlotIndex(slot))
            case signals.Filled(edge=edge, slot=slot, extent=extent):
                self._filled(held, EdgeId(edge), SlotIndex(slot), extent)
            case stage_signals.Computed(step=step, began_ns=began, ended_ns=ended):
                held.recent.append((step, max(0, ended - began) // 1000))
                held.timeline.computed(signal)
            case stage_signals.RefusedChunk(step=step, code=code, message=message):
                # Its coordinator would wait for it until the stage counts as stalled.
                held.refused += 1
                self._fault(held, code, f"chunk {step} was refused: {message}")
            case stage_signals.Advanced():
                self._advanced(held, signal)
            case stage_signals.Hosted():
                held.loaded = signal
                self._hear(held, stage.Said(held.order.run_epoch, signal))
                self._offer()
            case signals.Attached() | stage_signals.Wants():
                self._hear(held, stage.Said(held.order.run_epoch, signal))
            case _:
                return

    def _advanced(self, held: Hosted, signal: stage_signals.Advanced) -> None:
        before, held.progress = held.progress, signal
        now = trio.current_time()
        news = before is None or before.phase != signal.phase or signal.done == signal.total
        if news or now - held.said_at >= PROGRESS_S:
            held.said_at = now
            self._hear(held, stage.Said(held.order.run_epoch, signal))

    def _consumed(self, held: Hosted, edge: EdgeId, slot: SlotIndex) -> None:
        end = held.receiving.get(edge)
        if end is None or (slot not in end.lent and not end.over.is_set()):
            self._fault(held, WorkerFault.code, f"slot {slot} of edge {edge} is not the worker's")
            return
        if edge == held.order.inbound.edge:
            held.computed += 1
        if slot in end.lent:
            end.consumed(slot)

    def _filled(self, held: Hosted, edge: EdgeId, slot: SlotIndex, extent: int) -> None:
        end = held.outbound
        if end is not None and edge == end.spec.edge:
            if end.over.is_set():
                return
            if slot in end.lent and extent <= end.spec.capacity_bytes:
                end.filled(slot, extent)
                held.timeline.left()
                if held.is_short:
                    held.tell_released()
                return
        what = f"slot {slot} of edge {edge} with {extent} bytes"
        self._fault(held, WorkerFault.code, f"{what} is not the worker's to send")

    def _ready(self, held: Hosted, edge: EdgeId, slot: SlotIndex, extent: int) -> None:
        if held.process is not None:
            if edge == held.order.inbound.edge:
                held.timeline.landed()
            held.tell_released()
            held.process.command(signals.Ready(edge=edge, slot=slot, extent=extent))

    def _released(self, held: Hosted, slot: SlotIndex) -> None:
        """While it has another slot to fill, waking the worker for this one can wait."""
        held.untold.append(slot)
        if held.is_short:
            held.tell_released()

    # ---- what is offered ----

    def taken_bytes(self, but: str = "") -> int:
        """By the stages here, except that of the run ``but``."""
        return sum(held.taken_bytes for run, held in self.hosted.items() if run != but)

    async def _look_at_links(self) -> None:
        """Say again what is offered when links have come, gone or become slower or faster."""
        while True:
            await trio.sleep(LOOK_EVERY_S)
            self._offer()

    def _offer(self) -> None:
        if self._session is None:
            return
        inventory = self.inventory(self._session)
        if inventory != self._said:
            self._said = inventory
            self._say(inventory)


_SOURCES: dict[type, Literal["edge", "path", "url"]] = {
    stages.FromEdge: "edge",
    stages.FromPath: "path",
    stages.FromUrl: "url",
}


def _place(source: stages.Source) -> str:
    match source:
        case stages.FromPath(path=path):
            return path
        case stages.FromUrl(url=url):
            return url
        case stages.FromEdge():
            return ""


def _specs(order: stages.StageProvision) -> tuple[EdgeSpec, ...]:
    weights = (order.source.edge,) if isinstance(order.source, stages.FromEdge) else ()
    return (order.inbound, order.outbound, *weights)


def _no_room(error: ArenaExhausted | trio.TooSlowError) -> tuple[str, str]:
    if isinstance(error, ArenaExhausted):
        return error.message, error.remediation
    return (
        f"no room for its rings in the arena within {LEASE_WITHIN_S:g} s",
        "Raise `edges.arena_bytes` of that node, or end a run on it.",
    )
