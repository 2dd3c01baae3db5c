"""One plan of one run at the coordinator, in a world: its ``staging`` machine and its own ends."""

from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from lensemble.edge.spec import EdgeSpec
from lensemble.ids import NodeId, SlotIndex
from lensemble.machine import ArmTimer, CancelTimer, TimerExpired
from lensemble.wire import stages
from lensemble_coord.inference import sequence, staging
from lensemble_node import stage
from tests.node.stage_play import COORDINATOR, provision
from tests.sim.edges import Region, TxEnd
from tests.sim.stage_node import Inbound
from tests.sim.world import Actor, Timers

if TYPE_CHECKING:
    from tests.sim.model_course import Course
    from tests.sim.model_life import ModelCoordinator

STEP_S = 60.0
"""By when a chunk that does not come back counts as stalled."""

SLOTS = 2


class Run:
    """One plan of one run at the coordinator, as ``deployment``."""

    def __init__(
        self,
        coord: "ModelCoordinator",
        key: tuple[str, int],
        nodes: tuple[NodeId, ...],
        course: "Course | None" = None,
    ) -> None:
        self.coord, self.key, self.nodes, self.course = coord, key, nodes, course
        self.world = coord.world
        self.over = False
        places = tuple(staging.Place(node) for node in nodes)
        self.machine = Actor(
            coord,
            coord.life.parts.staging,
            staging.Planned(staging.Rules(), places),
            self.perform,
            self.moved,
        )
        self.timers = Timers(self.machine, TimerExpired)
        ends = (COORDINATOR, *nodes, COORDINATOR)
        self.ring = tuple(EdgeSpec(coord.draw_edge(), a, b, 4096, SLOTS) for a, b in pairwise(ends))
        self.regions: list[Region] = []
        self.lease: Callable[[Region], None] | None = None
        self.ending = False
        self.tx: TxEnd | None = None
        self.rx: Inbound | None = None
        self.free: deque[int] = deque()
        self.steps: dict[int, bool] = {}
        """Chunks under way, and whether each is of a request."""

        self.waiting: deque[tuple[sequence.SendChunk, Any, Any]] = deque()
        self.awaited: dict[int, Callable[[int, int], None]] = {}
        """Of a course: chunks that wait for a place, and who hears of which result."""

        self.machine.post(staging.Begin())

    def hear(self, event: staging.Event) -> None:
        if not self.over:
            self.machine.post(event)

    def moved(self, before: Any, event: Any, actions: Any) -> None:
        del actions
        name = f"{self.key} {type(event).__name__}"
        self.world.note(self.coord, name, type(self.machine.state).__name__)
        self.coord.life.checks.moved(self, before)
        if self.course is not None:
            self.course.plan_moved(self, before)

    def perform(self, action: Any) -> None:  # noqa: C901 - one arm an action
        match action:
            case ArmTimer(timer=timer, seconds=seconds):
                self.timers.arm(timer, seconds)
            case CancelTimer(timer=timer):
                self.timers.cancel(timer)
            case staging.TakeEdges():
                self._take_edges()
            case staging.ProvisionStages() | staging.OpenEdges() | staging.TearDown():
                self._tell_all(action)
            case staging.SendProbe():
                self._send(of_request=False)
            case staging.EndSequences():
                for step in [step for step, asked in self.steps.items() if asked]:
                    self._ended(step)
            case staging.GiveEdges():
                self._give_edges()
            case staging.Close():
                assert not self.over, f"{self.key} is closed twice"
                self.over = True
            case _:
                pass

    def _tell_all(self, action: Any) -> None:
        for number, node in enumerate(self.nodes):
            peer = self.coord.sessions.get(node)
            if peer is None:
                self.hear(staging.NodeLost(node, "it is not here"))
            else:
                order = self._order(number, peer.epoch, action)
                self.coord.say(peer, order)
                if self.course is not None and not isinstance(action, staging.TearDown):
                    self.coord.past.append((node, order))
        if isinstance(action, staging.OpenEdges):
            self.world.after(self.coord, 0.02, self._open)

    def _order(self, number: int, epoch: int, action: Any) -> stages.StageOrder:
        ends = (COORDINATOR, *self.nodes, COORDINATOR)
        order = provision(
            self.key[1],
            run=self.key[0],
            epoch=epoch,
            stage=number,
            stages=len(self.nodes),
            node=self.nodes[number],
            upstream=stages.Address(node=ends[number]),
            downstream=stages.Address(node=ends[number + 2]),
            inbound=self.ring[number],
            outbound=self.ring[number + 1],
        )
        match action:
            case staging.ProvisionStages():
                return order
            case staging.OpenEdges():
                return stages.StageOpen(**stage.fence(order))
            case _:
                return stages.StageTeardown(**stage.fence(order), reason="over")

    # ---- the coordinator's own ends ----

    def _take_edges(self) -> None:
        self.lease = self._leased
        self.coord.arena.lease(SLOTS, self.lease)

    def _leased(self, region: Region) -> None:
        self.regions.append(region)
        if len(self.regions) < 2:
            assert self.lease is not None
            self.coord.arena.lease(SLOTS, self.lease)
            return
        self.lease = None
        link: Any = None
        self.rx = Inbound(
            self.coord, link, self.ring[-1], region, ready=self._came, faulted=self._torn
        )
        self.rx.register()
        self.hear(staging.EdgesTaken())

    def _torn(self, reason: str) -> None:
        self.hear(staging.Failed(staging.Fault("edge_fault", reason, 0)))

    def _open(self) -> None:
        if self.ending:
            return
        peer = self.coord.sessions.get(self.nodes[0])
        if peer is None:
            self._torn("there is no link")
            return
        region = self.regions[0]
        self.tx = TxEnd(
            self.coord, peer.link, self.ring[0], region, released=self._released,
            faulted=self._torn,
        )  # fmt: skip
        self.tx.open()
        self.hear(staging.OwnOpened())

    def _released(self, slot: SlotIndex) -> None:
        self.free.append(slot)
        self._flush()

    def send_chunk(self, chunk: sequence.SendChunk, accepted: Any, heard: Any) -> None:
        """Of a course: ``accepted`` hears the step once there is room, ``heard`` the result."""
        self.waiting.append((chunk, accepted, heard))
        self._flush()

    def _flush(self) -> None:
        while self.waiting and self.free and self.tx is not None and not self.tx.over:
            chunk, accepted, heard = self.waiting.popleft()
            slot, step = self.free.popleft(), self.coord.draw_edge()
            if chunk.sampling is not None:
                self.awaited[step] = heard
            self.tx.region.slots[slot] = (step, chunk)
            self.tx.filled(SlotIndex(slot), 1)
            accepted(step)

    def stuck(self) -> int | None:
        """Which stage does nothing more, as looking at all of them would tell."""
        for number, node in enumerate(self.nodes):
            held = self.coord.life.node_of(node).held.get(self.key[0])
            if held is not None and held.worker is not None and held.worker.stands_still:
                return number
        return None

    def _send(self, *, of_request: bool) -> None:
        if self.tx is None or self.tx.over or not self.free:
            if of_request:
                self.hear(staging.SequenceEnded())
            return
        slot = self.free.popleft()
        step = self.coord.draw_edge()
        self.steps[step] = of_request
        self.tx.region.slots[slot] = step
        self.tx.filled(SlotIndex(slot), 1)

        def stalled() -> None:
            if step in self.steps and not self.ending:
                self.hear(staging.Failed(staging.Fault("stage_stalled", "no result")))

        self.world.after(self.coord, STEP_S, stalled)

    def _came(self, slot: SlotIndex, _: int) -> None:
        assert self.rx is not None
        step = self.rx.region.slots[slot]
        self.rx.consumed(slot)
        if isinstance(step, tuple):
            number, token = step
            if (heard := self.awaited.pop(number, None)) is not None:
                heard(number, token)
        elif step in self.steps:
            self._ended(step)

    def _ended(self, step: int) -> None:
        of_request = self.steps.pop(step)
        self.hear(staging.SequenceEnded() if of_request else staging.Probed())

    def ask(self) -> None:
        """A request of one chunk."""
        if staging.takes_requests(self.machine.state) and not self.machine.busy:
            self.machine.feed(staging.SequenceBegan())
            self._send(of_request=True)

    def _give_edges(self) -> None:
        self.ending = True
        if self.lease is not None:
            self.coord.arena.forget(self.lease)

        def given() -> None:
            for end in (self.tx, self.rx):
                if end is not None:
                    end.cancel()
            for region in self.regions:
                self.coord.arena.give_back(region)
            self.hear(staging.EdgesGiven())

        self.world.after(self.coord, 0.02, given)
