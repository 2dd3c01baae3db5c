"""Stages over real QUIC connections on loopback: the coordinator's, and the nodes' among them."""

import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from lensemble import identity
from lensemble.transport.iroh_driver import IrohDriver
from lensemble.wire import stages
from tests.node.scripted import PATIENCE_S
from tests.node.stage_play import opening
from tests.node.staged import Floor, floor

pytestmark = pytest.mark.iroh
HOP_S = 0.02
"""Far above what a hop costs, for machines that do other things meanwhile."""


def driver(who: identity.Identity) -> IrohDriver:
    return IrohDriver(who, ("127.0.0.1:0",), heartbeat_s=0.5, heartbeat_timeout_s=10.0)


@asynccontextmanager
async def iroh_floor(directory: Path) -> AsyncIterator[Floor]:
    async with floor(directory, driver(identity.generate()), driver) as made:
        yield made


async def test_two_nodes_link_over_quic_in_both_directions_and_a_hop_is_quick(
    tmp_path: Path,
) -> None:
    async with iroh_floor(tmp_path) as f:
        one, other = await f.node(), await f.node()
        there, back = await f.run(one, other, number=1), await f.run(other, one, number=2)
        alone = await (await f.run(one, number=3)).start()
        await there.provision()
        await back.provision()
        for run in (there, back):
            await run.say(opening)
        for run in (there, back):
            await run.opened()
        assert await back.ask(1, 2) == 3
        trips: dict[int, list[float]] = {1: [], 2: []}
        for n in range(100):
            for run in (alone, there):
                began = time.perf_counter()
                assert await run.ask(n, 1) == n + 1
                trips[len(run.nodes)].append(time.perf_counter() - began)
        hop = statistics.median(trips[2]) - statistics.median(trips[1])
        print(f"trips {statistics.median(trips[1]):.6f} {statistics.median(trips[2]):.6f} s")
        assert hop < HOP_S
        for run in (there, back, alone):
            assert {answer.outcome for answer in await run.tear_down()} == {"clean"}


@pytest.mark.soak
async def test_a_node_that_cannot_be_reached_is_a_fault_with_both_addresses_and_the_way_out(
    tmp_path: Path,
) -> None:
    async with iroh_floor(tmp_path) as f:
        nowhere = ["127.0.0.1:9"]
        one, other = await f.node(), await f.node(listen={"advertise": nowhere})
        assert other.inventory.addresses == ("127.0.0.1:9",)
        run = await f.run(one, other)
        await run.provision()
        await run.say(opening)
        with trio.fail_after(PATIENCE_S):
            fault = await one.hear(stages.StageFault)
        assert fault.code == "unreachable"
        assert one.serving.driver.addresses()[0] in fault.reason
        assert "127.0.0.1:9" in fault.reason
        assert "listen.advertise" in fault.remediation
