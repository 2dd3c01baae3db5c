"""Lives of models over nodes: provisioned, opened, probed, asked, torn down, in a bad world.

The coordinator is the real ``staging`` machine for each plan; the nodes are ``stage_node``.
"""

from collections import Counter, deque
from collections.abc import Callable, Hashable
from functools import partial
from itertools import pairwise
from typing import Any

import msgspec

from lensemble.edge.spec import EdgeSpec
from lensemble.ids import EdgeId, NodeId, SlotIndex
from lensemble.machine import ArmTimer, CancelTimer, TimerExpired
from lensemble.wire import stages
from lensemble_coord.inference import heard, staging
from lensemble_node import stage
from tests.node.stage_play import COORDINATOR, provision
from tests.sim.edges import Arena, Region, TxEnd
from tests.sim.parts import Transition
from tests.sim.stage_node import Inbound, StageNode
from tests.sim.world import Actor, Host, Link, Timers, World

TROUBLED_S = 60.0
BLOCKED_S = 10.0
LOOK_S = 2.0
QUIET_S = 300.0
STEP_S = 60.0
"""By when a chunk that does not come back counts as stalled."""

SLOTS = 2


class StageParts(msgspec.Struct, frozen=True):
    stage: Transition = stage.transition
    staging: Transition = staging.transition


class StageChecks:
    """What must hold of all runs and stages together."""

    def __init__(self) -> None:
        self.told: Counter[tuple[str, int, str, int, int]] = Counter()
        self.answered: Counter[tuple[str, int, str, int, int]] = Counter()
        self.endings: dict[tuple[str, int], staging.Ending] = {}

    def told_to_end(self, node: StageNode, order: stages.StageTeardown) -> None:
        self.told[node.name, order.epoch, order.run, order.run_epoch, order.stage] += 1

    def said(self, node: StageNode, message: stages.StageAnswer) -> None:
        """A teardown is answered once each time that it is asked for, when nothing is held."""
        if isinstance(message, stages.StageTornDown):
            what = (node.name, message.epoch, message.run, message.run_epoch, message.stage)
            self.answered[what] += 1
            assert self.answered[what] <= self.told[what], f"{what} is answered twice"
            held = node.held.get(message.run)
            assert (
                held is None
                or held.order.run_epoch > message.run_epoch
                or (held.order.stage != message.stage)
            ), f"{what} is answered and still there"

    def moved(self, run: "Run", before: staging.State) -> None:
        """A run has one outcome, from its first to its last moment."""
        after = run.machine.state
        if isinstance(after, staging.Leaving | staging.TornDown):
            known = self.endings.setdefault(run.key, after.ending)
            assert known == after.ending, f"run {run.key} ends as {known} and as {after.ending}"
        over = isinstance(before, staging.Leaving | staging.TornDown)
        assert not over or isinstance(after, staging.Leaving | staging.TornDown)

    def look(self, life: "ModelLife") -> None:
        """Every now and then: whoever waits has a deadline."""
        unready = staging.Provisioning | staging.Opening | staging.Probing
        for run in life.coord.runs.values():
            state, waits = run.machine.state, run.timers.running
            if isinstance(state, unready) and not run.machine.busy:
                assert waits, f"run {run.key} waits without a deadline: {state}"
            if isinstance(state, staging.Leaving) and not state.edges_held:
                assert staging.TEARDOWN in waits, f"run {run.key} waits for ever to be torn down"
        life.world.at(life.world.now + LOOK_S, partial(self.look, life))

    def end(self, life: "ModelLife") -> None:
        """At rest: every teardown of a session that is there was answered, nothing is held."""
        for what, times in self.told.items():
            node = next(each for each in life.nodes if each.name == what[0])
            if node.epoch == what[1]:
                assert self.answered[what] == times, f"{what}: {times} told, {self.answered[what]}"


class Run:
    """One plan of one run at the coordinator, as ``model_run``."""

    def __init__(
        self, coord: "ModelCoordinator", key: tuple[str, int], nodes: tuple[NodeId, ...]
    ) -> None:
        self.coord, self.key, self.nodes = coord, key, nodes
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
        self.machine.post(staging.Begin())

    def hear(self, event: staging.Event) -> None:
        if not self.over:
            self.machine.post(event)

    def moved(self, before: Any, event: Any, actions: Any) -> None:
        del actions
        name = f"{self.key} {type(event).__name__}"
        self.world.note(self.coord, name, type(self.machine.state).__name__)
        self.coord.life.checks.moved(self, before)

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
                self.coord.say(peer, self._order(number, peer.epoch, action))
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
        if step in self.steps:
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


class Session(msgspec.Struct):
    node: NodeId
    link: Any
    epoch: int


class ModelCoordinator(Host):
    def __init__(self, life: "ModelLife") -> None:
        super().__init__(life.world, "coord")
        self.life = life
        self.epochs = 1
        self.runs: dict[tuple[str, int], Run] = {}
        self.named = 0

    def start(self) -> None:
        self.arena = Arena(self.life.coord_rings)
        self.sessions: dict[NodeId, Session] = {}
        self.by_link: dict[Link, Session] = {}
        self.runs = {}

    def draw_edge(self) -> EdgeId:
        self.life.edges += 1
        return EdgeId(self.life.edges)

    def say(self, session: Session, order: stages.StageOrder) -> None:
        self.world.send(session.link, self, "ctl", order, about=order)

    def heard(self, link: Link, lane: Hashable, payload: Any) -> None:
        session = self.by_link.get(link)
        if isinstance(lane, tuple):
            self._heard_stream(link, lane, payload)
        elif session is None:
            self._welcome(link, payload[1])
        elif payload.epoch == session.epoch:
            self._take(session, payload)

    def _welcome(self, link: Link, node: NodeId) -> None:
        older = self.sessions.get(node)
        if older is not None:
            # A newer session of this identity begins once the older one is known to be lost.
            self.world.after(self, 0.1, lambda: link.alive and self._welcome(link, node))  # type: ignore[arg-type, func-returns-value]
            return
        self.epochs += 1
        session = Session(node, link, self.epochs)
        self.sessions[node] = self.by_link[link] = session
        self.world.send(link, self, "ctl", session.epoch)

    def _take(self, session: Session, message: Any) -> None:
        run = self.runs.get((message.run, message.run_epoch))
        if run is None or message.stage >= len(run.nodes):
            return
        if run.nodes[message.stage] == session.node:
            event = heard.event_of(message)
            if event is not None:
                run.hear(event)

    def lost(self, link: Link) -> None:
        session = self.by_link.pop(link, None)
        if session is not None:
            del self.sessions[session.node]
            for run in self.runs.values():
                run.hear(staging.NodeLost(session.node, "its link is gone"))
        for run in self.runs.values():
            for end in (run.tx, run.rx):
                if end is not None and end.link is link:
                    end.lose("the link is gone")

    def _heard_stream(self, link: Link, lane: tuple[Any, ...], payload: Any) -> None:
        way, edge = lane
        what, chunk = payload
        for run in self.runs.values():
            if way == "to_rx" and run.rx is not None and run.ring[-1].edge == edge:
                run.rx.link = link
                run.rx.hear(what, chunk)
            if way == "to_tx" and run.tx is not None and run.ring[0].edge == edge:
                run.tx.lose("refused by the peer")

    # ---- what an operator does ----

    def plan(self) -> None:
        """A new run, or a newer plan of one that is not over yet."""
        if not self.up or len(self.sessions) == 0:
            return
        chance = self.world.random
        most = min(3, len(self.sessions))
        nodes = tuple(chance.sample(sorted(self.sessions), chance.randint(1, most)))
        names = sorted({run for run, _ in self.runs})
        if names and chance.random() < 0.4:
            name = chance.choice(names)
            number = max(epoch for run, epoch in self.runs if run == name) + 1
        else:
            self.named += 1
            name, number = f"{self.named:016x}", 0
        self.runs[name, number] = Run(self, (name, number), nodes)

    def end(self, *, now: bool) -> None:
        """End every run there is."""
        for run in self.runs.values():
            run.hear(staging.StopAsked("asked to") if now else staging.DrainAsked("asked to"))

    def ask(self) -> None:
        if self.up and self.runs:
            self.world.random.choice(list(self.runs.values())).ask()


class ModelLife:
    def __init__(self, seed: int, parts: StageParts | None = None) -> None:
        self.seed = seed
        self.parts = parts or StageParts()
        self.world = World(seed)
        self.edges = 0
        self.coord_rings = 4 if seed % 3 else 12
        self.checks = StageChecks()
        self.coord = ModelCoordinator(self)
        rings = 4 if seed % 2 else 16
        keys = [NodeId(letter * 64) for letter in "abde"[: 2 + seed % 3]]
        self.nodes = [StageNode(self, key, rings) for key in keys]
        self._by_key = {node.node: node for node in self.nodes}
        for host in self.hosts:
            self.world.boot(host)
        self.checks.look(self)

    @property
    def hosts(self) -> tuple[Host, ...]:
        return (self.coord, *self.nodes)

    def node_of(self, node: NodeId) -> StageNode:
        return self._by_key[node]

    def _sometime(self, call: Any) -> None:
        self.world.at(self.world.now + self.world.random.uniform(0.5, TROUBLED_S), call)

    def make_trouble(self) -> None:
        chance, world = self.world.random, self.world
        world.conditions.jitter_s = chance.choice([0.0, 0.05, 1.0])
        world.conditions.breaks = chance.choice([0.0, 0.0, 0.002, 0.01])
        for _ in range(chance.randint(1, 6)):
            self._sometime(self.coord.plan)
        for _ in range(chance.randint(0, 10)):
            self._sometime(self.coord.ask)
        for _ in range(chance.choice([0, 0, 1, 2])):
            self._sometime(partial(self.coord.end, now=chance.random() < 0.5))
        self._troubles_of_hosts()

    def _troubles_of_hosts(self) -> None:
        chance, world = self.world.random, self.world
        for host in self.hosts:
            for _ in range(chance.choice([0, 0, 0, 1])):
                self._sometime(partial(self._restart, host))
        for node in self.nodes:
            for _ in range(chance.choice([0, 0, 1])):
                self._sometime(partial(self._hurt, node))
            for _ in range(chance.choice([0, 0, 1])):
                seconds = chance.choice([1.0, BLOCKED_S])
                other = chance.choice([each for each in self.hosts if each is not node])
                self._sometime(partial(world.block, node, other, seconds))

    def _restart(self, host: Host) -> None:
        self.world.crash(host)
        when = self.world.now + self.world.random.uniform(0.0, 10.0)
        self.world.at(when, lambda: self.world.boot(host))

    def _hurt(self, node: StageNode) -> None:
        """A worker dies, or does nothing more."""
        if node.up:
            for held in node.held.values():
                if held.worker is not None:
                    self.world.note(node, "worker", "is hurt")
                    if self.world.random.random() < 0.5:
                        held.worker.stands_still = True
                    else:
                        held.worker.die("was killed by SIGKILL")

    # ---- a life ----

    def live(self) -> None:
        """Trouble, then an end of everything that must leave nothing behind.

        Raises:
            AssertionError: a promise is broken; it says which.
        """
        world, coord = self.world, self.coord
        self.make_trouble()
        world.run(lambda: False, TROUBLED_S)
        world.conditions.breaks, world.conditions.jitter_s = 0.0, 0.05
        for host in self.hosts:
            world.boot(host)
        world.run(lambda: False, BLOCKED_S)
        assert world.run(self._all_here, QUIET_S), "a node does not come back"
        coord.end(now=True)
        assert world.run(self._at_rest, QUIET_S), f"not everything ended: {self._kept()}"
        coord.plan()
        (fresh,) = [run for run in coord.runs.values() if not run.over]
        ready = world.run(
            lambda: isinstance(fresh.machine.state, staging.Provisioned) or fresh.over, QUIET_S
        )
        assert ready, f"{fresh.machine.state}"
        assert isinstance(fresh.machine.state, staging.Provisioned), f"{fresh.machine.state}"
        fresh.hear(staging.DrainAsked("done"))
        assert world.run(self._at_rest, QUIET_S), f"not everything ended: {self._kept()}"
        assert self.checks.endings[fresh.key].outcome == "completed"
        self.checks.end(self)

    def _all_here(self) -> bool:
        return len(self.coord.sessions) == len(self.nodes)

    def _at_rest(self) -> bool:
        return not self._kept()

    def _kept(self) -> str:
        runs = [f"{run.key} {run.machine.state}" for run in self.coord.runs.values()]
        kept = [text for text, run in zip(runs, self.coord.runs.values(), strict=True)
                if not run.over]  # fmt: skip
        if self.coord.arena.leased:
            kept.append(f"coord holds {len(self.coord.arena.leased)} rings")
        kept += [
            f"{node.name} holds {len(node.arena.leased)} rings, {node.states}"
            for node in self.nodes
            if node.arena.leased or node.held or node.states
        ]
        return "; ".join(each[:300] for each in kept)
