"""A node that hosts stages of models, in a world: its real machine for each, simulated parts.

It follows ``lensemble_node.stage_host``: rings are leased, then what receives is registered and a
worker started, then the outbound stream is opened over a link to whoever comes next.
"""

from collections import deque
from collections.abc import Callable, Hashable
from functools import partial
from typing import TYPE_CHECKING, Any

from lensemble.edge.spec import EdgeSpec
from lensemble.ids import EdgeId, NodeId, SlotIndex
from lensemble.wire import stages
from lensemble.wire.fence import OfRun
from lensemble_node import signals, stage, stage_signals
from tests.sim.edges import Arena, Region, RxEnd, TxEnd
from tests.sim.model_course import model
from tests.sim.world import Host, Link

if TYPE_CHECKING:
    from tests.sim.model_life import ModelLife

KILLED_AFTER_S = 5.0
"""What a worker that was asked to stop is given."""

REDIAL_S = 1.0
PHASES = ("fetching", "verifying", "loading", "compiling")


class Inbound(RxEnd):
    """A receiving end that is registered before anybody has opened a stream to it."""

    def _say_stop(self) -> None:
        if self.link is not None:
            super()._say_stop()


class StageWorker:
    """One process: it gets ready in steps, then passes on what lands, chunk by chunk."""

    def __init__(self, node: "StageNode", held: "Held") -> None:
        self.node, self.held = node, held
        self.alive = True
        self.stands_still = False
        self.landed: deque[int] = deque()
        self.caches: dict[int, list[int]] = {}
        self.free = deque(range(held.order.outbound.slots))
        self.name = f"worker of {held.order.run} {held.order.run_epoch}"
        for region in held.regions.values():
            region.users.add(self.name)
        world = node.world
        chance, at = world.random, 0.1
        for edge in stage.edges(held.order):
            at += chance.random() * 0.1
            attached = signals.Attached(edge=edge)
            world.after(node, at, partial(self.say, attached))
        for phase in PHASES:
            at += chance.uniform(0.1, 2.0) * (chance.random() < 0.9 or 20.0)
            self._later(at, stage_signals.Advanced(phase=phase, done=1, total=1))
        at += 0.1
        hosted = stage_signals.Hosted(
            weights_bytes=1, resident_bytes=1, fetched_bytes=0, seconds=at
        )
        self._later(at, hosted)

    def _later(self, seconds: float, signal: Any) -> None:
        self.node.world.after(self.node, seconds, partial(self.say, signal))

    def say(self, signal: Any) -> None:
        if self.alive and not self.stands_still:
            self.node.feed(self.held, stage.Said(self.held.order.run_epoch, signal))

    def take(self, slot: int) -> None:
        self.landed.append(slot)
        self.go_on()

    def go_on(self) -> None:
        while self.alive and not self.stands_still and self.landed and self.free:
            slot = self.landed.popleft()
            edges = self.held.order.inbound.edge, self.held.order.outbound.edge
            into, onward = (self.held.regions[edge] for edge in edges)
            assert into.leased, "a stage reads a ring that was given back"
            assert onward.leased, "a stage fills a ring that was given back"
            answer, out = self._compute(into.slots[slot]), None
            if answer is not None:
                out = self.free.popleft()
                onward.slots[out] = answer
            self.node.world.after(self.node, 0.05, partial(self._computed, slot, out))

    def _compute(self, value: Any) -> Any:
        """What is passed on of a chunk; a probe goes on as it is."""
        if not isinstance(value, tuple):
            return value
        step, chunk = value
        cache = self.caches.setdefault(chunk.slot, [])
        assert chunk.start <= len(cache), "a hole in the cache"
        cache[chunk.start :] = chunk.tokens
        if self.held.order.stage < self.held.order.stages - 1:
            return value
        if chunk.sampling is None:
            return None
        return step, model(tuple(cache), chunk.sampling)

    def _computed(self, slot: int, out: int | None) -> None:
        if self.alive and self.held.inbound is not None:
            self.held.inbound.consumed(SlotIndex(slot))
            outbound = self.held.outbound
            if out is not None and outbound is not None and not outbound.over:
                outbound.filled(SlotIndex(out), 1)

    def die(self, reason: str, complaint: str = "") -> None:
        if not self.alive:
            return
        self.alive = False
        for region in self.held.regions.values():
            region.users.discard(self.name)
        epoch = self.held.order.run_epoch
        ended = stage.WorkerEnded(epoch, "worker_fault", reason, complaint=complaint)
        self.node.world.after(self.node, 0.02, partial(self.node.feed, self.held, ended))

    def ask(self) -> None:
        """Stop in order; killed if it does not."""
        if self.alive and not self.stands_still:
            self.node.world.after(self.node, 0.1, partial(self.die, "asked to"))
        kill = partial(self.die, "killed", "it did not stop when it was asked to")
        self.node.world.after(self.node, KILLED_AFTER_S, kill)


class Held:
    """What the stage of one plan has of this process."""

    def __init__(self, order: stages.StageProvision) -> None:
        self.order = order
        self.regions: dict[EdgeId, Region] = {}
        self.lease: Callable[[Region], None] | None = None
        self.inbound: Inbound | None = None
        self.outbound: TxEnd | None = None
        self.worker: StageWorker | None = None
        self.stopped = False

    @property
    def ends(self) -> list[RxEnd | TxEnd]:
        return [end for end in (self.inbound, self.outbound) if end is not None]


class StageNode(Host):
    def __init__(self, life: "ModelLife", node: NodeId, rings: int) -> None:
        super().__init__(life.world, f"stage-{node[0]}")
        self.life, self.node, self.rings = life, node, rings

    # ---- life and link ----

    def start(self) -> None:
        self.arena = Arena(self.rings)
        self.link: Link | None = None
        self.epoch = 0
        self.states: dict[str, stage.State] = {}
        self.newest: dict[str, int] = {}
        self.highest: dict[str, int] = {}
        self.held: dict[str, Held] = {}
        self.peers: set[Link] = set()
        self._events: deque[tuple[str, stage.Event]] = deque()
        self._stepping = False
        self._dial()

    def stopped(self, *, power: bool) -> None:
        for held in self.held.values():
            if held.worker is not None:
                held.worker.alive = False

    def _dial(self) -> None:
        def answered(link: Link | None) -> None:
            if link is None:
                self.world.after(self, REDIAL_S, self._dial)
            else:
                self.link = link
                self.world.send(link, self, "ctl", ("join", self.node))

        self.world.dial(self, self.life.coord, answered)

    def connected(self, link: Link) -> None:
        self.peers.add(link)

    def heard(self, link: Link, lane: Hashable, payload: Any) -> None:
        if isinstance(lane, tuple):
            self._heard_stream(link, lane, payload)
        elif link is not self.link:
            pass
        elif isinstance(payload, int):
            self.epoch = payload
        elif payload.epoch == self.epoch:
            self._obey(payload)

    def _obey(self, order: stages.StageOrder) -> None:
        match order:
            case stages.StageProvision():
                self._feed(order.run, stage.Provide(order))
            case stages.StageOpen():
                self._feed(order.run, stage.Open(order))
            case stages.StageTeardown():
                self.life.checks.told_to_end(self, order)
                self._feed(order.run, stage.Withdraw(order))

    def lost(self, link: Link) -> None:
        self.peers.discard(link)
        for held in list(self.held.values()):
            for end in held.ends:
                if end.link is link:
                    end.lose("the link is gone")
        if link is self.link:
            self.link, self.epoch = None, 0
            for run in list(self.states):
                self._feed(run, stage.LinkGone())
            self.world.after(self, REDIAL_S, self._dial)

    # ---- the machine of each run ----

    def state(self, run: str) -> stage.State:
        return self.states.get(run) or stage.Vacant(self.newest.get(run, -1))

    def feed(self, held: Held, event: stage.OfStage) -> None:
        self._feed(held.order.run, event)

    def _feed(self, run: str, event: stage.Event) -> None:
        self._events.append((run, event))
        if self._stepping:
            return
        self._stepping = True
        while self._events:
            name, now = self._events.popleft()
            before = self.state(name)
            after, actions = self.life.parts.stage(before, now)
            self.world.note(self, f"{name} {type(now).__name__}", type(after).__name__)
            if isinstance(after, stage.Vacant):
                self.states.pop(name, None)
                self.newest[name] = after.newest
            else:
                self.states[name] = after
            for action in actions:
                self._perform(action)
        self._stepping = False

    def _perform(self, action: stage.Action) -> None:
        match action:
            case stage.Lease(order):
                self._lease(order)
            case stage.Host(order):
                self._host(self.held[order.run])
            case stage.OpenEdge(order):
                self._open(self.held[order.run])
            case stage.Stop(order, kill):
                self._stop(self.held[order.run], kill=kill)
            case stage.GiveBack(order):
                self._give_back(order)
            case stage.Say(message):
                self.say(message)

    def say(self, message: stages.StageAnswer) -> None:
        assert isinstance(message, OfRun)
        if self.link is not None and message.epoch == self.epoch:
            self.life.checks.said(self, message)
            self.world.send(self.link, self, "ctl", message, about=message)

    # ---- from its lease to its end ----

    def _lease(self, order: stages.StageProvision) -> None:
        assert order.run_epoch > self.highest.get(order.run, -1), f"an old plan of {order.run}"
        self.highest[order.run] = order.run_epoch
        assert order.run not in self.held, f"two stages of run {order.run} on one node"
        held = self.held[order.run] = Held(order)
        specs = deque((order.inbound, order.outbound))

        def leased(region: Region) -> None:
            held.regions[specs.popleft().edge] = region
            if specs:
                self.arena.lease(specs[0].slots, leased)
            else:
                held.lease = None
                self.feed(held, stage.Leased(order.run_epoch))

        def give_up() -> None:
            if held.lease is not None and not held.stopped:
                full = stage.Faulted(order.run_epoch, "arena_exhausted", "no room for its rings")
                self.feed(held, full)

        held.lease = leased
        self.arena.lease(specs[0].slots, leased)
        self.world.after(self, 30.0, give_up)

    def _host(self, held: Held) -> None:
        order = held.order

        def hosted() -> None:
            if held.stopped:
                return
            self._register(held)
            held.worker = StageWorker(self, held)
            self.feed(held, stage.Registered(order.run_epoch))

        self.world.after(self, 0.01, hosted)

    def _register(self, held: Held) -> None:
        order = held.order

        def ready(slot: SlotIndex, _: int) -> None:
            if held.worker is not None:
                held.worker.take(slot)

        fault = partial(self._faulted, held, "upstream_lost")
        region = held.regions[order.inbound.edge]
        link: Any = None
        held.inbound = Inbound(self, link, order.inbound, region, ready=ready, faulted=fault)
        held.inbound.register()

    def _faulted(self, held: Held, code: str, reason: str) -> None:
        self.feed(held, stage.Faulted(held.order.run_epoch, code, reason))

    def _open(self, held: Held) -> None:
        order = held.order

        def reached(link: Link | None) -> None:
            if held.stopped:
                return
            if link is None or not link.alive:
                self._faulted(held, "unreachable", "nobody answers")
                return
            held.outbound = self._stream(held, link, order.outbound)
            self.world.after(self, 0.02, opened)

        def opened() -> None:
            if held.outbound is not None and not held.outbound.over and not held.stopped:
                self.feed(held, stage.Opened(order.run_epoch))

        if order.stage == order.stages - 1:
            reached(self.link)
        else:
            self.world.dial(self, self.life.node_of(order.downstream.node), reached)

    def _stream(self, held: Held, link: Link, spec: EdgeSpec) -> TxEnd:
        def released(slot: SlotIndex) -> None:
            # All slots are the worker's from the start: only later ones are told.
            if held.outbound is not None and held.worker is not None:
                held.worker.free.append(slot)
                held.worker.go_on()

        fault = partial(self._faulted, held, "downstream_lost")
        region = held.regions[spec.edge]
        end = TxEnd(self, link, spec, region, released=released, faulted=fault)
        end.open()
        return end

    def _stop(self, held: Held, *, kill: bool) -> None:
        first, held.stopped = not held.stopped, True
        if held.worker is not None:
            if kill:
                self.world.after(self, 0.02, partial(held.worker.die, "its stage ends"))
            else:
                held.worker.ask()
        if not first:
            return
        if held.lease is not None:
            self.arena.forget(held.lease)

        def stopped() -> None:
            epoch = held.order.run_epoch
            for end in held.ends:
                end.cancel()
            if held.worker is None:
                self.feed(held, stage.WorkerEnded(epoch, "worker_fault", "it was not started"))
            self.feed(held, stage.Stopped(epoch))

        self.world.after(self, self.world.random.random() * 0.05, stopped)

    def _give_back(self, order: stages.StageProvision) -> None:
        held = self.held.pop(order.run)
        assert held.worker is None or not held.worker.alive, "a worker outlives its stage"
        for region in held.regions.values():
            self.arena.give_back(region)

    # ---- streams ----

    def _heard_stream(self, link: Link, lane: tuple[Any, ...], payload: Any) -> None:
        way, edge = lane
        what, chunk = payload
        for held in self.held.values():
            if way == "to_rx" and held.inbound is not None and held.inbound.spec.edge == edge:
                held.inbound.link = link
                held.inbound.hear(what, chunk)
                return
            if way == "to_tx" and held.outbound is not None and held.outbound.spec.edge == edge:
                held.outbound.lose("refused by the peer")
                return
        if way == "to_rx" and what == "chunk":
            self.world.send(link, self, ("to_tx", edge), ("stop", None))
