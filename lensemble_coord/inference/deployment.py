"""The rim of one plan of a run: its messages to nodes, the coordinator's own ends of the ring.

A plan lives in one task tree.  Whatever it holds is given back when that tree ends, and it ends
through its machine.
"""

from collections.abc import Callable

import msgspec
import trio

from lensemble.actor import Timers, run_machine
from lensemble.errors import ArenaExhausted, EdgeFault, LensembleError, WeightsError
from lensemble.ids import EdgeId, FederationId, NodeId
from lensemble.logs import logger
from lensemble.machine import ArmTimer, CancelTimer
from lensemble.stage_chunk import Sampling
from lensemble.transport.driver import Driver
from lensemble.transport.ends import ArenaLeases
from lensemble.wire import fence, stages
from lensemble.wire.stages import Address, StageAnswer
from lensemble_coord.inference import heard, staging
from lensemble_coord.inference.chain import COORDINATOR
from lensemble_coord.inference.paths import PathBook, Paths
from lensemble_coord.inference.placement import Plan
from lensemble_coord.inference.ring import Ring
from lensemble_coord.inference.staging import Fault
from lensemble_coord.inference.standstill import Counts, Watch
from lensemble_coord.inference.tally import Tally
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
    tally: Tally = msgspec.field(default_factory=Tally)
    book: PathBook = msgspec.field(default_factory=PathBook)

    @property
    def paths(self) -> Paths:
        """Between the nodes that are here."""
        return Paths(self.peers, self.book)


class Task(msgspec.Struct, frozen=True):
    """What is to be carried out: the plan of ``run_epoch`` of ``run``."""

    run: str
    run_epoch: int
    model: Material
    plan: Plan
    rules: staging.Rules


Moved = Callable[["Deployment", staging.State], None]
"""Takes the plan that moved and its state before; returns at once."""


class Deployment:
    """One plan, from its first order to its teardown; ``moved`` sees each step."""

    def __init__(self, task: Task, around: Surroundings, moved: Moved) -> None:
        self.run = task.run
        self.model = task.model
        self.plan = task.plan
        self.since = trio.current_time()
        self.state: staging.State = staging.Planned(
            task.rules, tuple(staging.Place(stage.node) for stage in task.plan.stages)
        )
        self.sent: dict[int, Sent] = {}
        self._around = around
        self._moved = moved
        self._log = logger("run").bind(run=task.run, plan=task.run_epoch)
        self._over = False
        me = Address(node=around.driver.node, addresses=around.driver.addresses())
        origin = Origin(task.run, around.federation, me, task.run_epoch)
        self.wiring = Wiring(origin, task.model, task.plan, around.draw_edge)
        ends = (self.wiring.ring[0], self.wiring.ring[-1])
        self.ring = Ring(around.driver, around.leases, ends, task.model.facts.vocabulary)
        self.ring.observed = around.tally.trips.observe
        self.watch = Watch(len(task.plan.stages), self._ask_stages)
        self._edges_scope = trio.CancelScope()
        self._edges_over = trio.Event()
        self._inbox, self._events = trio.open_memory_channel[staging.Event](INBOX_EVENTS)
        self._nursery: trio.Nursery
        self._ring_nursery: trio.Nursery
        self._timers: Timers

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Carry the plan out, until everything is torn down."""
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
                self._step,
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

    def node_said(self, node: NodeId, message: StageAnswer) -> None:
        """Something about a stage of this plan; what its fence says is of another is passed by."""
        if not self.wiring.is_of(node, message):
            return
        if isinstance(message, stages.StageSeen):
            self.watch.seen(message)
        elif (event := heard.event_of(message)) is not None:
            self.hear(event)

    def node_lost(self, node: NodeId, reason: str) -> None:
        self.hear(staging.NodeLost(node, reason))

    async def look(self, phase: str, before: Counts | None) -> Counts | None:
        """How far the stages are; None, and the plan ends, if that is where they were before."""
        looked = await self.watch.look(phase, before)
        if isinstance(looked, Fault):
            self.hear(staging.Failed(looked))
            return None
        return looked

    # ---- the machine's actions ----

    def _step(self, state: staging.State) -> None:
        before, self.state = self.state, state
        if type(before) is not type(state):
            self._log.info("run.state", state=staging.public_state(state))
        self._moved(self, before)

    async def _hear_timer(self, event: staging.Event) -> None:
        self.hear(event)

    async def _perform(self, action: staging.Action) -> None:
        match action:
            case ArmTimer():
                self._timers.arm(action)
            case CancelTimer():
                self._timers.cancel(action)
            case staging.EndSequences():
                # Requests belong to the run: it hears of the end, and decides.
                pass
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

    def ask_for_timelines(self) -> None:
        """Ask every stage when its latest chunks came and went."""
        self._ask_stages(timeline=True)

    def _ask_stages(self, *, timeline: bool = False) -> None:
        for stage in range(len(self.wiring.nodes)):
            self._tell(stage, stages.StageLook(**self.wiring.fenced(stage), timeline=timeline))

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
            if (rate := self.sent[stage].busy.bytes_per_s) is not None:
                self._around.book.seen((COORDINATOR, self.wiring.nodes[stage]), rate)
        except (EdgeFault, WeightsError) as fault:
            self._fail(fault, stage)
        except LensembleError as error:
            self._fail(error)

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
            if not back.is_set() and (counts := await self.look("probing", counts)) is None:
                return
        self._log.info("run.probed", step=step, microseconds=self.ring.trips[-1].microseconds)
        self.hear(staging.Probed())

    def _torn(self, reason: str, from_last: bool) -> None:
        stage = len(self.wiring.nodes) - 1 if from_last else 0
        self.hear(staging.Failed(Fault("edge_fault", reason, stage)))

    def _fail(self, error: BaseException, stage: int | None = None) -> None:
        """Our own part failed: the plan ends with that."""
        code = error.code if isinstance(error, LensembleError) else "invariant"
        way_out = error.remediation if isinstance(error, LensembleError) else ""
        self.hear(staging.Failed(Fault(code, str(error), stage, way_out)))
