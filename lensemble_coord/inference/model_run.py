"""The rim of one run: its messages to nodes, its own ends of the ring, its requests.

A run lives in one task tree.  Whatever it holds is given back when that tree ends, and it ends
through its machine.
"""

from collections import Counter
from collections.abc import Callable

import msgspec
import trio

from lensemble.actor import Timers, run_machine
from lensemble.errors import (
    ArenaExhausted,
    EdgeFault,
    LensembleError,
    OperatorError,
    QueueFull,
)
from lensemble.ids import EdgeId, FederationId, NodeId
from lensemble.logs import logger
from lensemble.machine import ArmTimer, CancelTimer
from lensemble.stage_chunk import Sampling
from lensemble.transport.driver import Driver
from lensemble.transport.ends import ArenaLeases
from lensemble.wire import fence, stages
from lensemble.wire.stages import Address, StageAnswer
from lensemble_coord.inference import heard, sequence, staging
from lensemble_coord.inference.placement import Plan
from lensemble_coord.inference.request import Request
from lensemble_coord.inference.ring import Ring
from lensemble_coord.inference.staging import Fault
from lensemble_coord.inference.standstill import Counts, Watch
from lensemble_coord.inference.tokens import TextStream
from lensemble_coord.inference.weights_out import Sent, WeightsOut
from lensemble_coord.inference.wiring import Material, Origin, Wiring
from lensemble_coord.peers import Peers

INBOX_EVENTS = 4096
PROBE_TOKEN = 0


class Surroundings(msgspec.Struct, frozen=True):
    """What all runs of a coordinator share."""

    federation: FederationId
    driver: Driver
    leases: ArenaLeases
    peers: Peers
    draw_edge: Callable[[], EdgeId]
    note: Callable[..., None]
    """Records an event for people: its name, ``warn`` if it is one, and its fields."""

    step_deadline_s: float
    max_waiting: int


class KvSlots:
    """KV slots, first come first served."""

    def __init__(self, count: int) -> None:
        self._free, self._had = trio.open_memory_channel[int](count)
        for slot in range(count):
            self._free.send_nowait(slot)

    async def take(self) -> int:
        return await self._had.receive()

    def give(self, slot: int) -> None:
        self._free.send_nowait(slot)


class ModelRun:
    """One model over several nodes, from its plan to its teardown.

    ``changed`` is set, and replaced, whenever something moves.
    """

    def __init__(
        self, run: str, around: Surroundings, model: Material, plan: Plan, rules: staging.Rules
    ) -> None:
        self.run = run
        self.model = model
        self.plan = plan
        self.since = trio.current_time()
        self.ended_at: float | None = None
        self.changed = trio.Event()
        self.state: staging.State = staging.Planned(
            rules, tuple(staging.Place(stage.node) for stage in plan.stages)
        )
        self.requests: dict[int, Request] = {}
        self.finished: Counter[str] = Counter()
        self.tokens = 0
        self.sent: dict[int, Sent] = {}
        self._around = around
        self._log = logger("run").bind(run=run)
        self._slots = KvSlots(plan.sessions)
        self._taken_on = 0
        self._over = False
        me = Address(node=around.driver.node, addresses=around.driver.addresses())
        origin = Origin(run, around.federation, me)
        self.wiring = Wiring(origin, model, plan, around.draw_edge)
        ends = (self.wiring.ring[0], self.wiring.ring[-1])
        self.ring = Ring(around.driver, around.leases, ends, model.facts.vocabulary)
        self.watch = Watch(len(plan.stages), self._ask_stages)
        self._edges_scope = trio.CancelScope()
        self._edges_over = trio.Event()
        self._inbox, self._events = trio.open_memory_channel[staging.Event](INBOX_EVENTS)
        self._nursery: trio.Nursery
        self._ring_nursery: trio.Nursery
        self._timers: Timers

    # ---- what others see and ask ----

    @property
    def over(self) -> bool:
        """Whether everything is torn down."""
        return isinstance(self.state, staging.TornDown)

    @property
    def waiting(self) -> int:
        """Requests that wait for a KV slot."""
        return sum(isinstance(each.state, sequence.Queued) for each in self.requests.values())

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Carry the plan out and serve requests, until everything is torn down."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self._timers = Timers(nursery, self._hear_timer)
            task_status.started()
            self.hear(staging.Begin())
            await run_machine(
                self.state,
                staging.transition,
                self._timers.sift(self._events),
                self._perform,
                self._moved,
            )
            nursery.cancel_scope.cancel()

    def hear(self, event: staging.Event) -> None:
        """Give the machine an event; after its end nothing counts any more."""
        if self._over:
            return
        try:
            self._inbox.send_nowait(event)
        except trio.WouldBlock:
            self._log.warning("run.inbox_full", dropped=type(event).__name__)

    def begin(
        self, prompt: tuple[int, ...], sampling: Sampling, most: int, stops: tuple[str, ...] = ()
    ) -> Request:
        """Take a request on; it waits for a KV slot and runs by itself.

        Raises:
            OperatorError: the run is not ready.
            QueueFull: too many requests wait.
            ContextLengthExceeded: the prompt does not fit.
        """
        if not staging.takes_requests(self.state):
            raise OperatorError(
                f"run {self.run} is {staging.public_state(self.state)}",
                "Wait until it is provisioned, or provision the model again.",
            )
        sequence.check(len(prompt), self.plan.ctx)
        if self.waiting >= max(1, self._around.max_waiting):
            raise QueueFull(
                f"{self.waiting} requests wait for one of {self.plan.sessions} sessions"
            )
        ask = sequence.Ask(
            prompt=prompt,
            sampling=sampling,
            ctx=self.plan.ctx,
            rows=self.plan.rows,
            eos=frozenset(self.model.facts.eos),
            max_tokens=most,
            # Two looks with nothing moved between them make one deadline.
            step_s=self._around.step_deadline_s / 2,
        )
        text = TextStream(self.model.tokenizer, stops)
        request = Request(self.ring, self._slots, ask, text, self._look)
        self._taken_on += 1
        self.requests[self._taken_on] = request
        self.hear(staging.SequenceBegan())
        self._nursery.start_soon(self._attend, self._taken_on, request)
        return request

    async def _attend(self, number: int, request: Request) -> None:
        try:
            await request.serve()
        finally:
            del self.requests[number]
            self.tokens += request.drawn
            if isinstance(request.state, sequence.Ended):
                self.finished[request.state.finish] += 1
            self.hear(staging.SequenceEnded())
            self._announce()

    # ---- what nodes say ----

    def node_said(self, node: NodeId, message: StageAnswer) -> None:
        """Something about a stage of this run; what its fence says is of another is passed by."""
        if not self.wiring.is_of(node, message):
            return
        if isinstance(message, stages.StageSeen):
            self.watch.seen(message)
        elif (event := heard.event_of(message)) is not None:
            self.hear(event)

    def node_lost(self, node: NodeId, reason: str) -> None:
        self.hear(staging.NodeLost(node, reason))

    # ---- the machine's actions ----

    def _moved(self, state: staging.State) -> None:
        before, self.state = self.state, state
        if type(before) is not type(state):
            self._log.info("run.state", state=staging.public_state(state))
            self._note(before, state)
        if isinstance(state, staging.TornDown):
            self.ended_at = trio.current_time()
        self._announce()

    def _note(self, before: staging.State, state: staging.State) -> None:
        """Record what an operator will look for later."""
        note, run = self._around.note, self.run
        match state:
            case staging.Provisioning():
                note("model.provisioning", run=run, model=self.model.facts.name)
            case staging.Provisioned() if isinstance(before, staging.Probing):
                took = round(trio.current_time() - self.since, 3)
                note("model.provisioned", run=run, model=self.model.facts.name, seconds=took)
            case staging.Leaving(ending=ending) if ending.fault is not None:
                fault = ending.fault
                node = "" if fault.stage is None else self.plan.stages[fault.stage].name
                note(
                    "model.faulted",
                    warn=True,
                    run=run,
                    code=fault.code,
                    stage=fault.stage,
                    peer=node,
                    reason=fault.reason,
                )
            case staging.TornDown(ending=ending, teardown=teardown):
                note("model.over", run=run, outcome=ending.outcome, teardown=teardown)
            case _:
                pass

    def _announce(self) -> None:
        self.changed.set()
        self.changed = trio.Event()

    async def _hear_timer(self, event: staging.Event) -> None:
        self.hear(event)

    async def _perform(self, action: staging.Action) -> None:
        match action:
            case ArmTimer():
                self._timers.arm(action)
            case CancelTimer():
                self._timers.cancel(action)
            case staging.EndSequences(fault=fault):
                for request in self.requests.values():
                    request.fail(fault)
            case staging.ProvisionStages() | staging.OpenEdges() | staging.TearDown():
                self._tell_all(action)
            case staging.Close():
                self._over = True
                self._inbox.close()
            case _:
                self._handle_edges(action)

    def _tell_all(
        self, action: staging.ProvisionStages | staging.OpenEdges | staging.TearDown
    ) -> None:
        for stage in range(len(self.wiring.nodes)):
            match action:
                case staging.ProvisionStages():
                    self._tell(stage, self.wiring.order(stage, self._addresses()))
                case staging.OpenEdges():
                    self._tell(stage, stages.StageOpen(**self.wiring.fenced(stage)))
                case staging.TearDown(reason):
                    said = fence.sentence(reason or "the run is over")
                    fenced = self.wiring.fenced(stage)
                    self._tell(stage, stages.StageTeardown(**fenced, reason=said))
        if isinstance(action, staging.OpenEdges):
            self._ring_nursery.start_soon(self._open_ring)

    def _addresses(self) -> dict[NodeId, tuple[str, ...]]:
        here = self._around.peers.here.values()
        return {each.node: each.inventory.addresses for each in here if each.inventory}

    def _ask_stages(self) -> None:
        for stage in range(len(self.wiring.nodes)):
            self._tell(stage, stages.StageLook(**self.wiring.fenced(stage)))

    def _tell(self, stage: int, order: stages.StageOrder) -> None:
        node = self.wiring.nodes[stage]
        peer = self._around.peers.here.get(node)
        if peer is None:
            self.hear(staging.NodeLost(node, "it is not here"))
        else:
            peer.tell(msgspec.structs.replace(order, epoch=peer.epoch))

    # ---- edges ----

    def _handle_edges(
        self,
        action: staging.TakeEdges | staging.SendWeights | staging.SendProbe | staging.GiveEdges,
    ) -> None:
        match action:
            case staging.TakeEdges():
                self._nursery.start_soon(self._hold_ring)
            case staging.SendWeights(stage, ranges):
                self._ring_nursery.start_soon(self._send_weights, stage, ranges)
            case staging.SendProbe():
                self._ring_nursery.start_soon(self._probe)
            case staging.GiveEdges():
                self._edges_scope.cancel()
                self._nursery.start_soon(self._give_edges)

    async def _hold_ring(self) -> None:
        try:
            with self._edges_scope:
                async with trio.open_nursery() as nursery:
                    self._ring_nursery = nursery
                    await nursery.start(self.ring.hold, self._torn)
                    self.hear(staging.EdgesTaken())
        except* ArenaExhausted as refused:
            self._fail(refused.exceptions[0])
        finally:
            self._edges_over.set()

    async def _give_edges(self) -> None:
        await self._edges_over.wait()
        self.hear(staging.EdgesGiven())

    async def _open_ring(self) -> None:
        try:
            await self.ring.open(self._ring_nursery, self._torn)
        except EdgeFault as fault:
            self._torn(fault.message, False)
        else:
            self.hear(staging.OwnOpened())

    async def _send_weights(self, stage: int, ranges: tuple[tuple[int, int], ...]) -> None:
        if self.model.file is None:
            reason = "it asks for weights on an edge, and was told to get them elsewhere"
            self.hear(staging.Failed(Fault("contract_violation", reason, stage)))
            return
        out = WeightsOut(self.model.file, self._around.driver, self._around.leases)
        self.sent[stage] = Sent()
        try:
            await out.send(self.wiring.weights[stage], ranges, self.sent[stage])
        except LensembleError as error:
            self._fail(error, stage)

    async def _probe(self) -> None:
        back = trio.Event()
        try:
            await self.ring.send(0, 0, (PROBE_TOKEN,), None)
            step = await self.ring.send(
                0, 1 % self.plan.ctx, (PROBE_TOKEN,), Sampling(), lambda *_: back.set()
            )
        except EdgeFault:
            return
        counts: Counts | None = None
        while not back.is_set():
            with trio.move_on_after(self._around.step_deadline_s / 2):
                await back.wait()
            if not back.is_set() and (counts := await self._look("probing", counts)) is None:
                return
        self._log.info("run.probed", step=step, microseconds=self.ring.trips[-1].microseconds)
        self.hear(staging.Probed())

    def _torn(self, reason: str, from_last: bool) -> None:
        stage = len(self.wiring.nodes) - 1 if from_last else 0
        self.hear(staging.Failed(Fault("edge_fault", reason, stage)))

    def _fail(self, error: BaseException, stage: int | None = None) -> None:
        """Our own part failed: the run ends with that."""
        code = error.code if isinstance(error, LensembleError) else "invariant"
        way_out = error.remediation if isinstance(error, LensembleError) else ""
        self.hear(staging.Failed(Fault(code, str(error), stage, way_out)))

    async def _look(self, phase: str, before: Counts | None) -> Counts | None:
        """How far the stages are; None, and the run ends, if that is where they were before."""
        looked = await self.watch.look(phase, before)
        if isinstance(looked, Fault):
            self.hear(staging.Failed(looked))
            return None
        return looked
