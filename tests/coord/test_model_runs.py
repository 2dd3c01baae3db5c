"""Runs of models through the whole coordinator, on scripted stages over the memory driver."""

import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import trio.testing

from lensemble import identity
from lensemble.ctl import replies, requests
from lensemble.errors import ContextLengthExceeded, OperatorError, PlanInfeasible
from lensemble.wire import stages
from tests.coord.scripted_stage import ScriptedStages, answer, hosting
from tests.coord.test_coordinator import Bench, bench
from tests.tiny_gguf import write_tiny

WORDS = "hello there"


class Rig:
    """A coordinator with two scripted nodes and a tiny model."""

    def __init__(self, coordinator: Bench, stages: list[ScriptedStages], model: Path) -> None:
        self.coordinator, self.stages, self.model = coordinator, stages, model
        self.orchestrator = coordinator.serving.orchestrator
        self.answers = coordinator.serving.models

    async def all(self, request: requests.OfModels) -> list[Any]:
        async with aclosing(self.answers.answer(request)) as given:
            return [reply async for reply in given]

    async def last(self, request: requests.OfModels) -> Any:
        with trio.fail_after(20):
            return (await self.all(request))[-1]

    async def provision(self, split: str = "0:2,2:4", **terms: Any) -> replies.ModelRunStatus:
        wish = {"model": str(self.model), "split": split, "ctx": 64, "rows": 4, **terms}
        return await self.last(requests.ProvisionModel(**wish))

    async def prompt(self, text: str = WORDS, most: int = 5, **terms: Any) -> list[Any]:
        with trio.fail_after(20):
            return await self.all(requests.Prompt(text=text, max_tokens=most, **terms))

    def tokens(self, text: str = WORDS) -> tuple[int, ...]:
        (run, *_) = self.orchestrator.runs.values()
        return run.model.tokenizer.encode(text)

    async def status(self, run: str = "") -> replies.ModelRunStatus:
        return await self.last(requests.InspectRun(run=run))

    async def until_over(self, run: str) -> replies.ModelRunStatus:
        with trio.fail_after(20):
            while (status := await self.status(run)).state != "torn down":
                with trio.move_on_after(0.1):
                    await self.orchestrator.changed.wait()
        return status

    async def at_rest(self) -> None:
        """Nothing is held any more, here and on the nodes."""
        with trio.fail_after(20):
            while self.orchestrator.runs:
                await self.orchestrator.changed.wait()
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert [e.node.arena.leased_bytes() for e in self.stages] == [
            e.idle_bytes for e in self.stages
        ]
        assert self.orchestrator.around.leases.arena.leased_bytes() == 0


@asynccontextmanager
async def rig(
    tmp_path: Path,
    nodes: int = 2,
    who: tuple[identity.Identity, ...] = (),
    http: dict[str, Any] | None = None,
    **terms: Any,
) -> AsyncIterator[Rig]:
    """``who`` are the first nodes; whoever is not given is made for the occasion."""
    model = tmp_path / "tiny.gguf"
    if not model.exists():
        write_tiny(model, layers=4)
    known = (*who, *(identity.generate() for _ in range(nodes - len(who))))
    async with (
        bench(tmp_path, inference=terms, http=http) as coordinator,
        trio.open_nursery() as nursery,
    ):
        made: list[ScriptedStages] = [
            await nursery.start(_node, coordinator, f"node-{index}", me)
            for index, me in enumerate(known)
        ]
        peers = coordinator.serving.reception.peers
        with trio.fail_after(10):
            while len([e for e in peers.here.values() if e.inventory]) < nodes:
                await peers.changed.wait()
        await coordinator.serving.wait_for_nodes(nodes)
        for each in made:
            each.idle_bytes = each.node.arena.leased_bytes()
        yield Rig(coordinator, made, model)
        # With its nodes: one that left before it would be a loss, which it has time to write down.
        coordinator.scope.cancel()


async def _node(
    coordinator: Bench,
    name: str,
    me: identity.Identity,
    *,
    task_status: trio.TaskStatus[ScriptedStages],
) -> None:
    async with coordinator.node(name, me=me) as node, hosting(node) as stages:
        task_status.started(stages)
        await trio.sleep_forever()


async def test_a_model_answers_through_two_nodes(tmp_path: Path) -> None:
    async with rig(tmp_path) as here:
        statuses = await here.all(
            requests.ProvisionModel(model=str(here.model), split="0:2,2:4", ctx=64, rows=4)
        )
        ready = statuses[-1]
        assert ready.state == "provisioned"
        assert [(each.first, each.last) for each in ready.stages] == [(0, 2), (2, 4)]
        raw = here.model.read_bytes()
        for each in here.stages:
            for offset, piece in each.fetched.items():
                assert raw[offset : offset + len(piece)] == piece
        *tokens, end = await here.prompt()
        assert [each.token for each in tokens] == answer(here.tokens(), 5)
        assert (end.finish, end.completion_tokens) == ("length", 5)
        assert end.prompt_tokens == len(here.tokens())
        status = await here.status()
        assert (status.tokens, status.finished) == (5, {"length": 1})
        assert sum(each.chunks for each in status.stages) == 2 * sum(
            each.computed for each in here.stages[:1]
        )
        over = await here.last(requests.TeardownRun())
        assert (over.outcome, over.teardown, over.fault) == ("completed", "clean", None)
        await here.at_rest()


async def test_requests_share_slots_and_a_fifth_queues(tmp_path: Path) -> None:
    async with rig(tmp_path) as here:
        await here.provision(sessions=4)
        texts = [f"{WORDS} {index}" for index in range(6)]
        got: dict[str, list[int]] = {}

        async def ask(text: str) -> None:
            *tokens, _ = await here.prompt(text, most=8)
            got[text] = [each.token for each in tokens]

        for each in here.stages:
            each.slow_s = 0.005
        most_waiting = 0
        async with trio.open_nursery() as nursery:
            for text in texts:
                nursery.start_soon(ask, text)
            while len(got) < len(texts):
                (run,) = here.orchestrator.runs.values()
                most_waiting = max(most_waiting, run.waiting)
                assert len([e for e in run.requests.values() if e.slot is not None]) <= 4
                await trio.sleep(0.002)
        assert most_waiting >= 1
        for text in texts:
            assert got[text] == answer(here.tokens(text), 8)


async def test_who_leaves_frees_the_slot_at_once(tmp_path: Path) -> None:
    async with rig(tmp_path) as here:
        await here.provision(sessions=1)
        async with aclosing(
            here.answers.answer(requests.Prompt(text=WORDS, max_tokens=50))
        ) as given:
            assert (await anext(given)).token == answer(here.tokens(), 1)[0]
        (run,) = here.orchestrator.runs.values()
        with trio.fail_after(10):
            while run.requests:
                await run.changed.wait()
        *tokens, _ = await here.prompt(f"{WORDS}!", most=6)
        assert [each.token for each in tokens] == answer(here.tokens(f"{WORDS}!"), 6)
        assert run.finished["cancelled"] == 1


async def test_too_long_a_prompt_reaches_no_edge(tmp_path: Path) -> None:
    async with rig(tmp_path) as here:
        await here.provision(ctx=20)
        before = [each.landed for each in here.stages]
        with pytest.raises(ContextLengthExceeded) as caught:
            await here.prompt("x" * 21)
        assert (caught.value.have, caught.value.most) == (21, 20)
        assert [each.landed for each in here.stages] == before
        *tokens, end = await here.prompt("x" * 20)
        assert (len(tokens), end.finish) == (1, "length")


async def test_a_lost_node_is_named_and_the_other_run_goes_on(tmp_path: Path) -> None:
    async with rig(tmp_path, nodes=3) as here:
        lost = here.stages[2]
        mine = f"0:2@node-0,2:4@{lost.node.name}"
        doomed = await here.provision(split=mine)
        other = await here.provision(split="0:2@node-0,2:4@node-1")
        for each in here.stages:
            each.slow_s = 0.01
        ends: list[Any] = []

        async def ask() -> None:
            ends.append((await here.prompt(run=doomed.run, most=60))[-1])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.sleep(0.1)
            await lost.node.link.close("killed")
            over = await here.until_over(doomed.run)
        assert over.outcome == "faulted"
        assert (over.fault.code, over.fault.stage, over.fault.name) == ("link_lost", 1, "node-2")
        assert (ends[0].finish, ends[0].fault) == ("faulted", over.fault)
        assert (await here.status(other.run)).state == "provisioned"
        *tokens, _ = await here.prompt(run=other.run)
        assert [each.token for each in tokens] == answer(here.tokens(), 5)


async def test_a_stage_that_stands_still_is_named(tmp_path: Path) -> None:
    async with rig(tmp_path, step_deadline_s=0.4) as here:
        ready = await here.provision()
        here.stages[1].moving = trio.Event()
        names = [each.name for each in ready.stages]
        stuck = names.index("node-1")
        *_, end = await here.prompt()
        assert end.finish == "faulted"
        assert (end.fault.code, end.fault.stage) == ("stage_stalled", stuck)
        assert end.fault.name == "node-1"
        here.stages[1].moving.set()
        await here.until_over(ready.run)
        await here.provision()
        *tokens, _ = await here.prompt()
        assert [each.token for each in tokens] == answer(here.tokens(), 5)


async def test_a_slow_ring_is_waited_for(tmp_path: Path) -> None:
    async with rig(tmp_path, step_deadline_s=0.4) as here:
        await here.provision()
        here.stages[0].slow_s = 0.1
        *tokens, end = await here.prompt("a long prompt of many chunks, which are slow", most=3)
        assert end.finish == "length"
        assert len(tokens) == 3


async def test_a_refusal_names_stage_and_field(tmp_path: Path) -> None:
    async with rig(tmp_path) as here:
        here.stages[1].refuse = "tokenizer_digest"
        over = await here.provision()
        over = await here.until_over(over.run)
        assert (over.outcome, over.fault.code) == ("faulted", "stage_refused")
        assert "tokenizer_digest" in over.fault.reason
        assert over.fault.name == "node-1"
        await here.at_rest()


async def test_stop_in_the_midst_of_provisioning(tmp_path: Path) -> None:
    async with rig(tmp_path) as here:
        here.stages[0].never_ready = True
        async with aclosing(
            here.answers.answer(
                requests.ProvisionModel(model=str(here.model), split="0:2,2:4", ctx=64)
            )
        ) as given:
            run = (await anext(given)).run
        over = await here.until_over(run)
        assert (over.outcome, over.teardown) == ("stopped", "clean")
        await here.at_rest()


async def test_a_node_that_answers_no_teardown_is_reported(tmp_path: Path) -> None:
    async with rig(tmp_path, teardown_timeout_s=0.2) as here:
        await here.provision()
        here.stages[1].mute = True
        over = await here.last(requests.StopRun())
        assert (over.outcome, over.teardown) == ("stopped", "timed out")
        assert "stage" in over.complaints[0]


async def test_what_cannot_be_planned_fetches_nothing(tmp_path: Path) -> None:
    async with rig(tmp_path) as here:
        with pytest.raises(PlanInfeasible):
            await here.provision(split="", ctx=1 << 19)
        plan = await here.last(requests.PlanModel(model=str(here.model), ctx=64))
        assert len(plan.stages) == 1
        assert not any(each.orders for each in here.stages)
        with pytest.raises(OperatorError, match="no model is provisioned"):
            await here.prompt()


async def test_a_probe_that_does_not_come_back_names_the_stage(tmp_path: Path) -> None:
    async with rig(tmp_path, step_deadline_s=0.4) as here:
        here.stages[1].moving = trio.Event()
        over = await here.until_over((await here.provision()).run)
        assert (over.fault.code, over.fault.name) == ("stage_stalled", "node-1")
        assert "probing" in over.fault.reason
        await here.at_rest()


async def test_what_becomes_of_a_run_is_recorded(tmp_path: Path) -> None:
    async with rig(tmp_path) as here:
        await here.provision()
        await here.last(requests.TeardownRun())
        journal = here.coordinator.serving.rounds.journal
        with trio.fail_after(20):
            while True:
                written = journal.written
                events = here.coordinator.serving.store.events(0, 100)
                names = [json.loads(each.event)["event"] for each in events]
                if "model.over" in names:
                    break
                await written.wait()
        assert [each for each in names if each.startswith("model.")] == [
            "model.provisioning",
            "model.provisioned",
            "model.over",
        ]


async def test_a_node_speaks_for_its_own_stage_only(tmp_path: Path) -> None:
    async with rig(tmp_path) as here:
        await here.provision()
        theirs = here.stages[0].orders[-1]
        for change in ({}, {"run_epoch": theirs.run_epoch + 1}, {"stage": 9}, {"run": "f" * 16}):
            liar = here.stages[1] if not change else here.stages[0]
            epoch = liar.node.welcome.epoch
            order = msgspec.structs.replace(theirs, epoch=epoch, **change)
            await liar.say(stages.StageFault, order, code="worker_fault", reason="a lie")
        *tokens, end = await here.prompt()
        assert [each.token for each in tokens] == answer(here.tokens(), 5)
        assert end.fault is None


@pytest.mark.parametrize("how", ["asked", "configured"])
async def test_links_are_measured_where_that_is_asked_for(tmp_path: Path, how: str) -> None:
    terms = {"measure_links": True} if how == "configured" else {}
    asks = {"measure": True} if how == "asked" else {}
    async with rig(tmp_path, **terms) as here, trio.open_nursery() as nursery:
        wish = {"model": str(here.model), "split": "0:2,2:4", "ctx": 64, "rows": 4}
        if how == "asked":
            plan = await here.last(requests.PlanModel(**wish))
            assert (plan.unmeasured, [hop.rate for hop in plan.hops]) == ((), ["assumed"] * 3)
            assert not any(
                isinstance(e, stages.BurstExpect) for s in here.stages for e in s.node.heard
            )
        asked: list[int] = []
        for each in here.stages:
            nursery.start_soon(_refuse_bursts, each, asked)
        plan = await here.last(requests.PlanModel(**wish, **asks))
        names = [stage.name for stage in plan.stages]
        refused = f"{names[0]} to {names[1]}: {names[1]} says: not now"
        assert (plan.unmeasured, len(asked)) == ((refused,), 1)
        ready = await here.last(requests.ProvisionModel(**wish, **asks))
        assert ([hop.rate for hop in ready.hops], len(asked)) == (["assumed"] * 3, 2)
        over = await here.last(requests.StopRun())
        assert over.hops == ()
        nursery.cancel_scope.cancel()


async def _refuse_bursts(of: ScriptedStages, asked: list[int]) -> None:
    while True:
        order = await of.node.wait_for_one(stages.BurstExpect, stages.BurstSend)
        assert isinstance(order, stages.BurstExpect)
        of.node.heard.remove(order)
        asked.append(order.burst)
        fence = {"federation": order.federation, "epoch": order.epoch, "burst": order.burst}
        await of.node.say(stages.BurstRefused(**fence, reason="not now"))


async def test_weights_that_go_to_a_node_tell_how_much_its_path_carries(tmp_path: Path) -> None:
    write_tiny(tmp_path / "tiny.gguf", layers=96, quant="F32")
    rate = 10_000_000
    async with rig(tmp_path) as here:
        coordinator = here.coordinator
        for each in here.stages:
            weather = coordinator.network.between(coordinator.hub, each.node.me.node)
            weather.bytes_per_s = rate
            each.in_one_range = True
        # What is seen is a lower bound, of a path that was busy without a break: on a machine that
        # is busy with other things too it may take another time.
        for _ in range(3):
            ready = await here.provision("0:48,48:96")
            assert ready.takes_requests
            if [hop.rate for hop in ready.hops] == ["seen", "assumed", "seen"]:
                break
            await here.last(requests.StopRun())
        assert [hop.rate for hop in ready.hops] == ["seen", "assumed", "seen"]
        assert ready.hops[0].rate_age_s is not None
        assert 0.3 * rate < ready.hops[0].mbit_s * 1e6 / 8 < 1.1 * rate
