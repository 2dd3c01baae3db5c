"""What many runs leave behind in the coordinator, wherever each broke off: nothing."""

import gc
import os
import random
import threading
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from lensemble.ctl import requests
from lensemble.ctl.replies import Answered
from lensemble.wire import stages
from tests.coord.test_model_runs import WORDS, Rig, rig

MAX_GROWTH_BYTES = 8 << 20
"""Of this process, the scripted nodes with it, after the first fifth of the cycles."""

ENDS = (
    "left",
    "stopped early",
    "refused",
    "cancelled",
    "answered",
    "faulted",
    "replaced",
    "torn down",
)


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


def held() -> tuple[int, int]:
    """Descriptors and threads of this process, without the pool of idle ones."""
    threads = [each for each in threading.enumerate() if not each.name.startswith("Trio thread")]
    return len(os.listdir("/proc/self/fd")), len(threads)


async def held_at_rest(here: Rig, threads: int) -> tuple[int, int]:
    """What is held once what the last run left to threads is done."""
    await here.at_rest()
    with trio.fail_after(10):
        while held()[1] > threads:
            await trio.testing.wait_all_tasks_blocked(0.01)
    return held()


async def cycle(here: Rig, how: str) -> str:
    """One run that ends so; its outcome."""
    wish = {"model": str(here.model), "split": "0:2,2:4", "ctx": 64, "rows": 4, "sessions": 2}
    for each in here.stages[1:]:
        each.refuse = "engine" if how == "refused" else ""
    if how in {"left", "refused"}:
        async with aclosing(here.answers.answer(requests.ProvisionModel(**wish))) as given:
            run = (await anext(given)).run
            if how == "refused":
                await here.until_over(run)
    elif how == "stopped early":
        run = (await here.last(requests.ProvisionModel(**wish, detach=True))).run
        await here.last(requests.StopRun(run=run))
    else:
        on_fault = "replace" if how == "replaced" else "fail"
        run = (await here.provision(**wish, on_fault=on_fault)).run
        await _use(here, run, how)
    over = await here.until_over(run)
    assert over.teardown == "clean"
    return over.outcome


async def _use(here: Rig, run: str, how: str) -> None:
    if how in {"cancelled", "faulted", "replaced"}:
        prompt = requests.Prompt(run=run, text=WORDS, max_tokens=40)
        async with aclosing(here.answers.answer(prompt)) as given:
            await anext(given)
            if how in {"faulted", "replaced"}:
                of, order = next(
                    (each, order)
                    for each in here.stages
                    for order in each.orders
                    if order.run == run
                )
                reason = {"code": "worker_fault", "reason": "killed", "stderr": ("x" * 100,)}
                await of.say(stages.StageFault, order, **reason)
            if how == "faulted":
                await here.until_over(run)
            if how == "replaced":
                assert [type(each) for each in [each async for each in given]][-1] is Answered
                assert (await here.status(run)).run_epoch == 2
    elif how == "answered":
        await here.prompt(run=run)
    if how != "faulted":
        await here.last(requests.TeardownRun(run=run))


@pytest.mark.parametrize(
    "cycles", [14, pytest.param(210, marks=pytest.mark.soak)], ids=["some", "many"]
)
async def test_runs_leave_memory_descriptors_threads_and_leases_flat(
    tmp_path: Path, cycles: int
) -> None:
    draw = random.Random(5)
    _, threads = held()
    async with rig(tmp_path, nodes=3) as here:
        outcomes: list[str] = []
        settled: Any = None
        for number in range(cycles):
            how = ENDS[number % len(ENDS)] if number < len(ENDS) else draw.choice(ENDS)
            outcomes.append(await cycle(here, how))
            for each in here.stages:
                each.node.heard.clear()
                each.orders.clear()
            if number == max(len(ENDS), cycles // 5):
                gc.collect()
                settled = (*await held_at_rest(here, threads), rss_bytes())
        gc.collect()
        assert set(outcomes) == {"completed", "faulted", "stopped"}
        assert await held_at_rest(here, threads) == settled[:2]
        grown = rss_bytes() - settled[2]
        print(f"{cycles} cycles: {grown / 1e6:.1f} MB more, {held()} descriptors and threads")
        assert grown < MAX_GROWTH_BYTES
        assert not here.orchestrator.runs
