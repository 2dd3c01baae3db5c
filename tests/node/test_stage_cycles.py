"""What 200 runs leave behind on the nodes that hosted them, wherever each broke off: nothing."""

import gc
import os
import random
import threading
from pathlib import Path

import pytest
import trio

from lensemble.wire import stages
from tests.node.stage_play import opening
from tests.node.staged import Floor
from tests.node.test_stage_host import gone, leased, memory_floor, pid_of, vacant

CYCLES = 200
MAX_GROWTH_BYTES = 8 << 20
"""Of this process with its coordinator and both daemons, after the first tenth of the cycles."""


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


def held() -> tuple[int, int]:
    """Descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), threading.active_count()


async def cycle(f: Floor, number: int, how: str) -> None:
    one, other = f.nodes
    run = await f.run(*((one, other) if number % 2 else (other, one)), number=number)
    await run.say(lambda order: order)
    pids: list[int] = []
    if how != "at once":
        await run.hear(stages.StageReady)
        pids = [pid_of(node, run) for node in run.nodes]
    if how in {"opened", "asked", "killed"}:
        await run.say(opening)
        await run.hear(stages.StageOpened)
        await f.nursery.start(run.tx.serve)
    if how in {"asked", "killed"}:
        assert await run.ask(number, 1) == number + 1
    if how == "killed":
        os.kill(pids[0], 9)
        await run.nodes[0].hear(stages.StageFault, run=run.run)
    await run.tear_down()
    for end in (run.tx, run.rx):
        run.floor.leases.give_back(end.region)
    for node in f.nodes:
        await vacant(node)
        node.session.heard.clear()
    assert all(map(gone, pids))


@pytest.mark.soak
async def test_200_runs_leave_memory_descriptors_threads_and_leases_flat(tmp_path: Path) -> None:
    draw = random.Random(7)
    async with memory_floor(tmp_path) as f:
        await f.node()
        await f.node()
        before, first = 0, (0, 0)
        for number in range(1, CYCLES + 1):
            how = draw.choice(["at once", "ready", "opened", "asked", "killed"])
            await cycle(f, number, how)
            if number == CYCLES // 10:
                gc.collect()
                before, first = rss_bytes(), held()
        await trio.sleep(0.5)
        gc.collect()
        grown, last = rss_bytes() - before, held()
        print(f"grown {grown} bytes; descriptors, threads {first} -> {last}")
        assert grown < MAX_GROWTH_BYTES
        assert last[0] <= first[0] + 4
        assert last[1] <= first[1] + 2
        assert [leased(node) for node in f.nodes] == [0, 0]
        assert len(f.nodes[0].host._newest) <= 256
