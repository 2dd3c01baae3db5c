"""Runs that outlive a stage, through the whole coordinator, on scripted stages."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from lensemble.ctl import replies, requests
from lensemble.ids import NodeId
from lensemble.stage_chunk import Sampling
from lensemble.wire import stages
from lensemble_coord.inference.model_run import ModelRun
from lensemble_coord.inference.request import INBOX_EVENTS, Pause
from lensemble_coord.peers import Member, Peer
from tests.coord.scripted_stage import ScriptedStages, answer
from tests.coord.test_model_runs import WORDS, Rig, rig

SPLIT = "0:1@node-0,1:2@node-1,2:4@node-2"


class Asking:
    """A request under way; ``replies`` grows."""

    def __init__(self, here: Rig, run: str, most: int, text: str = WORDS) -> None:
        self.replies: list[Any] = []
        self.news = trio.Event()
        self.scope = trio.CancelScope()
        self._request = requests.Prompt(run=run, text=text, max_tokens=most)
        self._here = here

    async def run(self) -> None:
        with self.scope:
            async for reply in self._here.answers.answer(self._request):
                self.replies.append(reply)
                self.news.set()
                self.news = trio.Event()

    @property
    def tokens(self) -> list[int]:
        return [each.token for each in self.replies if isinstance(each, replies.TokenText)]

    @property
    def pauses(self) -> list[replies.Paused]:
        return [each for each in self.replies if isinstance(each, replies.Paused)]

    async def until(self, count: int) -> None:
        with trio.fail_after(10):
            while len(self.tokens) < count:
                await self.news.wait()


async def seen(here: Rig, holds: Callable[[ModelRun], bool]) -> None:
    """Wait until that holds of the only run."""
    (run,) = here.orchestrator.runs.values()
    with trio.fail_after(10):
        while not holds(run):
            await run.changed.wait()


async def replacing(here: Rig, **terms: Any) -> replies.ModelRunStatus:
    return await here.provision(split=SPLIT, on_fault="replace", **terms)


def slow(here: Rig, seconds: float = 0.005) -> None:
    for each in here.stages:
        each.slow_s = seconds


async def die(each: ScriptedStages) -> None:
    """Its worker is killed; its daemon says so."""
    order = each.orders[-1]
    each.scopes[order.run].cancel()
    await each.say(stages.StageFault, order, code="worker_fault", reason="killed by SIGKILL")


async def vanish(each: ScriptedStages) -> None:
    await each.node.link.close("killed")


async def stand_still(each: ScriptedStages) -> None:
    each.moving = trio.Event()


@pytest.mark.parametrize("loss", [die, vanish, stand_still])
async def test_answers_go_on_as_if_nothing_had_happened(
    tmp_path: Path, loss: Callable[[ScriptedStages], Any]
) -> None:
    async with rig(tmp_path, nodes=4, step_deadline_s=0.6) as here:
        run = await replacing(here, sessions=2)
        slow(here)
        asked = [Asking(here, run.run, 30, f"{WORDS} {index}") for index in range(4)]
        async with trio.open_nursery() as nursery:
            for each in asked:
                nursery.start_soon(each.run)
            await asked[0].until(10)
            await loss(here.stages[1])
        for index, each in enumerate(asked):
            assert each.tokens == answer(here.tokens(f"{WORDS} {index}"), 30)
            assert each.replies[-1].fault is None
        assert [each.name for each in asked[0].pauses] == ["node-1"]
        status = await here.status()
        assert (status.run_epoch, status.state) == (2, "provisioned")
        assert [each.name for each in status.stages] == ["node-0", "node-3", "node-2"]
        (left,) = status.replacements
        assert (left.run_epoch, left.dropped_name) == (1, "node-1")
        assert left.fault is not None
        assert left.fault.name == "node-1"
        assert left.cleared_s is not None
        assert left.planned_s is not None
        assert left.ready_s is not None
        assert 0 <= left.cleared_s <= left.planned_s <= left.ready_s
        edges = [
            {order.inbound.edge, order.outbound.edge}
            for each in here.stages
            for order in each.orders
        ]
        assert len(set.union(*edges)) == 8, "edge ids come once"
        here.stages[1].moving.set()
        await here.last(requests.StopRun())
        await here.at_rest()


async def test_nothing_to_replace_it_with_is_one_fault_with_the_arithmetic(tmp_path: Path) -> None:
    async with rig(tmp_path, nodes=3) as here:
        run = await replacing(here)
        slow(here)
        asked = Asking(here, run.run, 60)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(asked.run)
            await asked.until(5)
            await vanish(here.stages[1])
        end = asked.replies[-1]
        assert (end.finish, end.fault.code) == ("faulted", "plan_infeasible")
        for part in ("its node is gone", "3 stages by hand", "2 can hold one", "node-0 needs"):
            assert part in end.fault.reason
        over = await here.until_over(run.run)
        assert (over.outcome, over.teardown, over.fault) == ("faulted", "clean", end.fault)
        ready = await here.provision(split="0:2@node-0,2:4@node-2")
        assert ready.takes_requests
        *tokens, _ = await here.prompt()
        assert [each.token for each in tokens] == answer(here.tokens(), 5)


class Doubts:
    """Holds some nodes for suspect until it is told otherwise."""

    def __init__(self, *nodes: NodeId) -> None:
        self.nodes = nodes

    def came(self, peer: Peer) -> None:
        del peer

    def noted(self, node: NodeId, note: bytes) -> None:
        del node, note

    def unfit(self, node: NodeId) -> str:
        return "it is suspect" if node in self.nodes else ""

    def members(self) -> tuple[Member, ...]:
        return ()


async def test_a_doubt_that_comes_with_a_loss_is_waited_for(tmp_path: Path) -> None:
    async with rig(tmp_path, nodes=4) as here:
        run = await replacing(here)
        slow(here)
        doubts = Doubts(here.stages[0].node.me.node)
        here.coordinator.serving.reception.peers.watch(doubts)
        asked = Asking(here, run.run, 20)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(asked.run)
            await asked.until(5)
            await vanish(here.stages[1])
            await seen(here, lambda each: each.replacing)
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert len(asked.tokens) < 20
            doubts.nodes = ()
        assert asked.tokens == answer(here.tokens(), 20)


async def test_a_run_that_fails_on_a_fault_is_not_replaced(tmp_path: Path) -> None:
    async with rig(tmp_path, nodes=4) as here:
        run = await here.provision(split=SPLIT)
        assert run.on_fault == "fail"
        await die(here.stages[1])
        over = await here.until_over(run.run)
        assert (over.fault.code, over.replacements) == ("worker_fault", ())


async def test_the_configured_policy_is_that_of_a_run_that_does_not_say(tmp_path: Path) -> None:
    async with rig(tmp_path, nodes=4, on_fault="replace", max_replacements=0) as here:
        run = await here.provision(split=SPLIT)
        assert run.on_fault == "replace"
        await die(here.stages[1])
        over = await here.until_over(run.run)
        assert (over.fault.code, over.replacements) == ("worker_fault", ())
        assert "replaced 0 times" in over.reason


async def test_a_plan_that_fails_while_it_replaces_is_replaced_again(tmp_path: Path) -> None:
    async with rig(tmp_path, nodes=5) as here:
        run = await replacing(here)
        slow(here)
        here.stages[3].refuse = "memory"
        here.stages[4].refuse = ""
        asked = Asking(here, run.run, 30)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(asked.run)
            await asked.until(5)
            await die(here.stages[1])
        assert asked.tokens == answer(here.tokens(), 30)
        status = await here.status()
        assert status.run_epoch in {2, 3}
        assert all(each.ready_s is not None for each in status.replacements)
        assert status.stages[1].name == "node-4"


async def test_cancel_and_stop_while_a_stage_is_replaced(tmp_path: Path) -> None:
    async with rig(tmp_path, nodes=4) as here:
        run = await replacing(here, sessions=2)
        slow(here)
        leaves, stays = Asking(here, run.run, 60), Asking(here, run.run, 60)
        here.stages[3].never_ready = True
        async with trio.open_nursery() as nursery:
            nursery.start_soon(leaves.run)
            nursery.start_soon(stays.run)
            await stays.until(5)
            await die(here.stages[1])
            await seen(here, lambda each: each.replacing)
            while not leaves.pauses:
                await leaves.news.wait()
            assert (await here.status()).takes_requests
            leaves.scope.cancel()
            await seen(here, lambda each: len(each.requests) == 1)
            late = Asking(here, run.run, 60)
            nursery.start_soon(late.run)
            await trio.testing.wait_all_tasks_blocked(0.02)
            assert len((await here.status()).requests) == 2
            over = await here.last(requests.StopRun())
        assert (over.outcome, over.teardown) == ("stopped", "clean")
        assert [each.replies[-1].finish for each in (stays, late)] == ["cancelled", "cancelled"]
        assert over.finished["cancelled"] == 3
        await here.at_rest()


async def test_teardown_while_a_stage_is_replaced_lets_answers_end(tmp_path: Path) -> None:
    async with rig(tmp_path, nodes=4) as here:
        run = await replacing(here)
        slow(here)
        asked = Asking(here, run.run, 30)
        over: list[replies.ModelRunStatus] = []
        prompt = ()

        async def tear_down() -> None:
            over.append(await here.last(requests.TeardownRun()))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(asked.run)
            await asked.until(5)
            prompt = here.tokens()
            await die(here.stages[1])
            await seen(here, lambda each: each.replacing)
            nursery.start_soon(tear_down)
        assert asked.tokens == answer(prompt, 30)
        assert (over[0].outcome, over[0].teardown) == ("completed", "clean")
        await here.at_rest()


async def test_whoever_takes_nothing_does_not_hold_up_plans(tmp_path: Path) -> None:
    async with rig(tmp_path, nodes=3) as here:
        await replacing(here)
        (run,) = here.orchestrator.runs.values()
        stuck = run.begin(here.tokens(), Sampling(), 40)
        for _ in range(INBOX_EVENTS + 1):
            stuck.interrupt(Pause("a plan is left"))
        await seen(here, lambda each: not each.requests)
        assert run.finished["cancelled"] == 1
        *tokens, _ = await here.prompt()
        assert [each.token for each in tokens] == answer(here.tokens(), 5)


async def test_words_of_the_plan_before_are_not_heard(tmp_path: Path) -> None:
    async with rig(tmp_path, nodes=4) as here:
        await replacing(here)
        slow(here)
        await die(here.stages[1])
        await seen(here, lambda each: len(each.left) == 1 and each.left[0].ready_s is not None)
        for each in (here.stages[0], here.stages[1], here.stages[2]):
            old = each.orders[0]
            assert old.run_epoch == 1
            await each.say(stages.StageFault, old, code="worker_fault", reason="long ago")
        *tokens, end = await here.prompt()
        assert [each.token for each in tokens] == answer(here.tokens(), 5)
        assert (await here.status()).run_epoch == 2
        assert end.fault is None
