"""Lives of models over nodes: provisioned, opened, probed, asked, torn down, in a bad world.

The coordinator is the real ``staging`` machine for each plan, and for runs that replace what they
lose ``model_course``; the nodes are ``stage_node``.
"""

from collections import deque
from collections.abc import Hashable
from functools import partial
from typing import Any

import msgspec

from lensemble.ids import EdgeId, NodeId
from lensemble.wire import stages
from lensemble_coord.inference import heard, staging, survival
from lensemble_node import stage
from tests.sim import model_course
from tests.sim.edges import Arena
from tests.sim.model_checks import StageChecks, StageParts
from tests.sim.model_course import Course, Row
from tests.sim.model_plan import STEP_S, Run
from tests.sim.stage_node import StageNode
from tests.sim.world import Host, Link, World

TROUBLED_S = 60.0
BLOCKED_S = 10.0
QUIET_S = 300.0


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
        self.courses: dict[str, Course] = {}
        self.rows: dict[str, Row] = {}
        self.past: deque[tuple[NodeId, stages.StageOrder]] = deque(maxlen=64)
        self.named = 0

    def start(self) -> None:
        self.arena = Arena(self.life.coord_rings)
        self.sessions: dict[NodeId, Session] = {}
        self.by_link: dict[Link, Session] = {}
        self.runs, self.courses = {}, {}
        for name, row in self.rows.items():
            if row.over or not row.rules.replaces:
                row.over = True
            else:
                course = self.courses[name] = Course(self, name, row, STEP_S)
                self.world.after(self, 1.0, partial(self._revive, course, self.world.now))

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
        names = sorted({name for name, _ in self.runs} - set(self.courses))
        if names and chance.random() < 0.4:
            name = chance.choice(names)
            number = max(epoch for run, epoch in self.runs if run == name) + 1
        else:
            self.named += 1
            name, number = f"{self.named:016x}", 0
        self.runs[name, number] = Run(self, (name, number), nodes)

    # ---- runs that outlive their plans ----

    def choose(self, without: frozenset[NodeId] = frozenset()) -> tuple[NodeId, ...]:
        """Nodes for a plan; none if nobody is left."""
        able = sorted(set(self.sessions) - without)
        chance = self.world.random
        return tuple(chance.sample(able, chance.randint(1, min(3, len(able))))) if able else ()

    def begin(self) -> None:
        """A run over its plans."""
        if not self.up or not (nodes := self.choose()):
            return
        self.named += 1
        name = f"{self.named:016x}"
        rules = survival.Rules(self.world.random.random() < 0.85, model_course.MOST_REPLACED)
        row = self.rows[name] = Row(rules, 0)
        course = self.courses[name] = Course(self, name, row, STEP_S)
        course.hear(survival.Planned(nodes))

    def carry(self, course: Course, epoch: int, nodes: tuple[NodeId, ...]) -> Run:
        run = self.runs[course.name, epoch] = Run(self, (course.name, epoch), nodes, course)
        return run

    def _revive(self, course: Course, since: float) -> None:
        """Wait for its nodes, for so long; then take what is there."""
        if course.over:
            return
        row, late = course.row, self.world.now - since >= model_course.WAIT_S
        if set(row.nodes) - row.dropped <= set(self.sessions) or late:
            nodes = self.choose(row.dropped)
            none = survival.Unplanned(staging.Fault("plan_infeasible", "no node came back"))
            course.hear(survival.Planned(nodes) if nodes else none)
        else:
            self.world.after(self, 1.0, partial(self._revive, course, since))

    def ask_course(self) -> None:
        live = [each for each in self.courses.values() if not each.over]
        if self.up and live:
            course = self.world.random.choice(live)
            for _ in range(self.world.random.randint(1, 4)):
                course.ask()

    def bother_course(self) -> None:
        """Somebody leaves, a node is drained, or an old order comes once more."""
        live = [each for each in self.courses.values() if not each.over]
        if not self.up or not live:
            return
        course, chance = self.world.random.choice(live), self.world.random.random()
        if chance < 0.3:
            course.cancel()
        elif chance < 0.6 and course.machine.state.ground.nodes:
            node = course.machine.state.ground.nodes[0]
            course.hear(survival.MoveAsked(node, "drained"))
        else:
            self._say_again()

    def _say_again(self) -> None:
        for node, order in reversed(self.past):
            host, peer = self.life.node_of(node), self.sessions.get(node)
            newest = host.state(order.run)
            known = not isinstance(newest, stage.Vacant) or newest.newest > order.run_epoch
            if peer is not None and known and order.run_epoch < self.rows[order.run].epoch:
                self.world.note(self, "says again", f"{order.run} {order.run_epoch}")
                self.say(peer, msgspec.structs.replace(order, epoch=peer.epoch))
                return

    def end(self, *, now: bool) -> None:
        """End every run there is."""
        for course in self.courses.values():
            live = sum(each.ended is None for each in course.asked)
            course.hear(
                survival.StopAsked("asked to") if now else survival.DrainAsked("asked to", live)
            )
        for run in [each for each in self.runs.values() if each.course is None]:
            run.hear(staging.StopAsked("asked to") if now else staging.DrainAsked("asked to"))

    def ask(self) -> None:
        plain = [run for run in self.runs.values() if run.course is None]
        if self.up and plain:
            self.world.random.choice(plain).ask()


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
        for _ in range(chance.randint(0, 2)):
            self._sometime(self.coord.begin)
        for _ in range(chance.randint(0, 8)):
            self._sometime(self.coord.ask_course)
        for _ in range(chance.randint(0, 4)):
            self._sometime(self.coord.bother_course)
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
        settled = world.run(
            lambda: all(each.settled for each in coord.courses.values()), 3 * QUIET_S
        )
        assert settled, f"a run neither ends nor goes on: {self._kept()}"
        coord.end(now=True)
        assert world.run(self._at_rest, QUIET_S), f"not everything ended: {self._kept()}"
        coord.plan()
        (fresh,) = [run for run in coord.runs.values() if not run.over]
        assert fresh.course is None
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
        kept += [
            f"{each.name} {each.machine.state}"
            for each in self.coord.courses.values()
            if not each.over
        ]
        if self.coord.arena.leased:
            kept.append(f"coord holds {len(self.coord.arena.leased)} rings")
        kept += [
            f"{node.name} holds {len(node.arena.leased)} rings, {node.states}"
            for node in self.nodes
            if node.arena.leased or node.held or node.states
        ]
        return "; ".join(each[:300] for each in kept)
