"""The coordinator's ``serve`` over the memory driver, with scripted nodes; time is a mock clock's."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import trio

from lensemble import identity
from lensemble.checkpoint import open_checkpoint
from lensemble.transport.memory_driver import MemoryNetwork
from lensemble.workload import NoopTask, Outer, Workload
from lensemble_coord import daemon
from lensemble_coord.config import CoordinatorConfig, EdgesSection, RoundsSection
from lensemble_coord.training import outer_round
from tests.coord.scripted_node import ScriptedNode

TERMS = Workload(name="noop", task=NoopTask(parameters=5000), outer=Outer(lr=1.0, momentum=0.0))
SMALL = EdgesSection(capacity_bytes=4096, slots=2, arena_bytes=1 << 24)


class Bench:
    """A coordinator on a memory network, and as many scripted nodes as a test wants."""

    def __init__(self, serving: daemon.Serving, network: MemoryNetwork, hub: str) -> None:
        self.serving, self.network, self.hub = serving, network, hub
        self.rounds = serving.rounds

    @asynccontextmanager
    async def node(self, name: str) -> AsyncIterator[ScriptedNode]:
        me = identity.generate()
        await self.serving.admit(me.node, name)
        driver = self.network.driver(me.node)
        async with trio.open_nursery() as nursery:
            await nursery.start(driver.run)
            node = ScriptedNode(driver, me, TERMS, name)
            async with node.joined(self.network.address(self.hub)):
                yield node
            nursery.cancel_scope.cancel()

    async def state(self, kind: type[outer_round.State]) -> outer_round.State:
        while not isinstance(self.rounds.state, kind):
            await self.rounds.changed.wait()
        return self.rounds.state


@asynccontextmanager
async def bench(tmp_path: Path, **rules: object) -> AsyncIterator[Bench]:
    (tmp_path / "workload.toml").write_text(
        'name = "noop"\n[task]\nkind = "noop"\nparameters = 5000\n[outer]\nlr = 1.0\nmomentum = 0.0\n'
    )
    config = CoordinatorConfig(
        state_dir=tmp_path / "state",
        workload=tmp_path / "workload.toml",
        edges=SMALL,
        rounds=RoundsSection(**rules),
    )
    me = identity.generate()
    network = MemoryNetwork()
    async with trio.open_nursery() as nursery:
        serving = await nursery.start(daemon.serve, config, network.driver(me.node))
        yield Bench(serving, network, me.node)
        nursery.cancel_scope.cancel()


async def test_rounds_close_and_the_state_moves_by_the_mean(tmp_path: Path) -> None:
    async with (
        bench(tmp_path) as coordinator,
        coordinator.node("a") as a,
        coordinator.node("b") as b,
    ):
        await coordinator.serving.wait_for_nodes(2)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(coordinator.serving.run_rounds, 2)
            for value in (1 << 20, 1 << 21):
                nursery.start_soon(b.take_part, 3 * value)
                close = await a.take_part(value)
                assert close.outcome == "closed"
                assert sorted(close.contributors) == sorted([a.me.node, b.me.node])
        store = coordinator.serving.store
        final = open_checkpoint(store.directory.checkpoint(store.tail().next_digest)).read()
        expected = (2 * (1 << 20) + 2 * (1 << 21)) / (1 << 24)
        assert np.array_equal(final, np.full(5000, expected, dtype=np.float32))
        assert [len(each.contributors) for each in coordinator.serving.closed_rounds] == [2, 2]
        status = coordinator.serving.answers.observer.status()
        assert status.round.state == "closed"
        assert [each.contributions for each in status.participants] == [2, 2]
        assert len(a.states) == 2
