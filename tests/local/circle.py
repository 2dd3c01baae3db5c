"""A coordinator and nodes as real daemons in this process, on a clock that the test moves."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from lensemble import identity
from lensemble.config import load, validate
from lensemble.ctl import replies
from lensemble.home import Asked
from lensemble.identity import Identity
from lensemble.ids import NodeId
from lensemble.ticket import Membership
from lensemble.transport.memory_driver import MemoryNetwork
from lensemble_coord import daemon as coord_daemon
from lensemble_coord import home as coord_home
from lensemble_coord.config import CoordinatorConfig
from lensemble_coord.training.journal import BATCH_PAUSE_S
from lensemble_node import daemon as node_daemon
from lensemble_node.config import NodeConfig
from lensemble_node.stage_process import Engine

STEP_S = 0.1
HUB = "hub"


class Circle:
    """``names`` are the nodes that were started, by name; the coordinator is ``HUB``."""

    def __init__(self, folder: Path, nursery: trio.Nursery, clock: MockClock) -> None:
        self.network = MemoryNetwork(seed=5)
        self.hub: coord_daemon.Serving
        self.nodes: dict[str, node_daemon.Serving] = {}
        self.scopes: dict[str, trio.CancelScope] = {}
        self._folder = folder
        self._nursery = nursery
        self._clock = clock

    async def start(self, count: int, **membership: object) -> None:
        """The coordinator and ``count`` nodes, all of whom know each other."""
        made = coord_home.create(Asked(self._folder / HUB, HUB), None, trains=False)
        config = load(Path(made["config"]), CoordinatorConfig)
        section = config.membership.model_copy(update=membership)
        config = config.model_copy(update={"membership": section})
        lead = self._identity(HUB)
        self._clock.rate = 1.0
        self.hub = await self._nursery.start(
            coord_daemon.serve, config, self.network.driver(lead.node)
        )
        for index in range(count):
            await self.begin(f"n{index}")
        await self.until(self._all_met)

    async def begin(self, name: str, **membership: object) -> node_daemon.Serving:
        """Start a node, for the first time or again."""
        self._clock.rate = 1.0
        who = self._identity(name)
        tree = {"name": name, "inference": {"memory_bytes": 1 << 30}, "membership": membership}
        config = validate(tree, NodeConfig, path=self._folder / name / "node.toml")
        await self.hub.admit(who.node, name)
        belongs = Membership(self.hub.driver.node, self.hub.driver.addresses(), self.hub.federation)
        serve = partial(node_daemon.serve, engine=Engine("scripted", {}))
        driver = self.network.driver(who.node)

        async def live(task_status: trio.TaskStatus[node_daemon.Serving]) -> None:
            with trio.CancelScope() as self.scopes[name]:
                await serve(config, driver, belongs, task_status=task_status)

        self.nodes[name] = await self._nursery.start(live)
        return self.nodes[name]

    def kill(self, name: str) -> None:
        """Let a node be gone without a word."""
        self.network.vanish(self.node(name))
        self.scopes[name].cancel()
        del self.nodes[name]

    def stop(self, name: str) -> None:
        """End a node in order."""
        self.scopes[name].cancel()
        del self.nodes[name]

    def isolate(self, name: str) -> None:
        """Let nothing through between a node and everybody else, and tell nobody."""
        for other in (HUB, *self.nodes):
            if other != name:
                self.network.partition(self.node(name), self.node(other))

    def rejoin(self, name: str) -> None:
        """End that."""
        for other in (HUB, *self.nodes):
            if other != name:
                self.network.heal(self.node(name), self.node(other))

    def end(self) -> None:
        """Let the daemons end in real time."""
        self._clock.rate = 1.0

    # ---- time ----

    async def wait(self, seconds: float) -> None:
        """Let so much time pass, without waiting for it."""
        self._clock.rate = 0.0
        for _ in range(round(seconds / STEP_S)):
            await wait_all_tasks_blocked(0.0005)
            self._clock.jump(STEP_S)
        await wait_all_tasks_blocked(0.0005)

    async def until(self, holds: Callable[[], bool], within_s: float = 60.0) -> float:
        """Wait until that holds; after how many seconds it did."""
        began = trio.current_time()
        while not holds():
            took = trio.current_time() - began
            assert took < within_s, f"not within {within_s} s; {self.told()}"
            await self.wait(STEP_S)
        return trio.current_time() - began

    # ---- what is known ----

    def node(self, name: str) -> NodeId:
        if name == HUB:
            return self.hub.driver.node
        return self._identity(name).node

    def view(self, of: str, name: str) -> replies.MemberStatus:
        """How the daemon ``of`` sees ``name``."""
        (row,) = [row for row in self.rows(of) if row.node == self.node(name)]
        return row

    def rows(self, of: str) -> tuple[replies.MemberStatus, ...]:
        if of == HUB:
            return self.hub.members.listing(HUB).members
        return self.nodes[of].member.others.listing(of, HUB).members

    def all_see(self, name: str, state: str) -> bool:
        """Whether everybody else that lives holds ``name`` for that."""
        others = [each for each in (HUB, *self.nodes) if each != name]
        return all(self.view(each, name).state == state for each in others)

    def all_alive(self) -> bool:
        rows = [row for each in (HUB, *self.nodes) for row in self.rows(each)]
        return all(row.state == "alive" for row in rows)

    def told(self) -> str:
        return "; ".join(
            f"{of}: " + ", ".join(f"{row.name} {row.state} {row.path}" for row in self.rows(of))
            for of in (HUB, *self.nodes)
        )

    async def events(self, kind: str) -> list[str]:
        """Who the recorded events of this kind are about, in order."""
        self._clock.rate = 1.0
        await trio.sleep(2 * BATCH_PAUSE_S)
        found = []
        for row in self.hub.store.events(0, 10_000):
            event = json.loads(row.event)
            if event["event"] == kind:
                found.append(str(event.get("peer", "")))
        return found

    def _all_met(self) -> bool:
        count = len(self.nodes)
        return self.all_alive() and all(
            len(self.rows(each)) == count
            and all(row.heard_s is not None for row in self.rows(each))
            for each in (HUB, *self.nodes)
        )

    def _identity(self, name: str) -> Identity:
        folder = self._folder / name / "state"
        folder.mkdir(parents=True, exist_ok=True)
        return identity.load_or_create(folder / "identity.key")
