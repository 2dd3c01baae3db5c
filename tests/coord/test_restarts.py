"""Runs of a coordinator that ends in their midst, and drained nodes; on scripted stages."""

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from lensemble import identity
from lensemble.ctl import replies, requests
from lensemble.errors import OperatorError, StorageError
from lensemble_coord.drains import Drains
from lensemble_coord.inference.run_rows import RunRow, RunRows, Wish
from tests.coord.scripted_stage import answer
from tests.coord.test_model_runs import Rig, rig
from tests.coord.test_replacing import Asking, seen, slow
from tests.ctl.scripted_models import READY
from tests.tiny_gguf import write_tiny

SPLIT = "0:2@node-0,2:4@node-1"


def people(count: int) -> tuple[identity.Identity, ...]:
    return tuple(identity.generate() for _ in range(count))


async def ready(here: Rig, run: str) -> replies.ModelRunStatus:
    """The status of ``run`` once it takes requests."""
    with trio.fail_after(10):
        while not (status := await here.status(run)).takes_requests:
            assert not status.outcome, status
            changed = here.orchestrator.changed
            live = here.orchestrator.runs.get(run)
            await (changed if live is None else live.changed).wait()
    return status


async def test_a_run_that_replaces_comes_back_on_its_nodes_under_a_higher_epoch(
    tmp_path: Path,
) -> None:
    who = people(3)
    edges: list[set[int]] = []
    epochs = []
    run = ""
    for life in range(3):
        async with rig(tmp_path, 3, who) as here:
            if not life:
                run = (await here.provision(split=SPLIT, on_fault="replace")).run
            status = await ready(here, run)
            assert [each.name for each in status.stages] == ["node-0", "node-1"]
            epochs.append(status.run_epoch)
            assert [each.reason for each in status.replacements] == [
                "the coordinator restarted"
            ] * life
            orders = [order for each in here.stages for order in each.orders]
            edges += [{order.inbound.edge, order.outbound.edge} for order in orders]
            *tokens, _ = await here.prompt()
            assert [each.token for each in tokens] == answer(here.tokens(), 5)
    assert epochs == [1, 2, 3]
    assert len(set.union(*edges)) == 9, "edge ids come once"


async def test_a_run_that_fails_is_over_after_a_restart_and_stays_so(tmp_path: Path) -> None:
    async with rig(tmp_path) as here:
        run = (await here.provision(split=SPLIT)).run
    for _ in range(2):
        async with rig(tmp_path) as here:
            over = await here.status(run)
            assert (over.state, over.outcome) == ("torn down", "faulted")
            assert over.fault is not None
            assert over.fault.code == "coordinator_restarted"
            assert not here.orchestrator.runs
            assert not any(each.orders for each in here.stages)
            with pytest.raises(OperatorError, match="is over"):
                await here.prompt(run=run)


async def test_what_was_being_provisioned_comes_back_too(tmp_path: Path) -> None:
    who = people(2)
    async with rig(tmp_path, 2, who) as here:
        here.stages[1].never_ready = True
        begun = await here.provision(split=SPLIT, on_fault="replace", detach=True)
        await seen(here, lambda run: run.state.places[0].phase == "ready")
    async with rig(tmp_path, 2, who) as here:
        status = await ready(here, begun.run)
        assert (status.run_epoch, len(status.stages)) == (2, 2)


async def test_nodes_that_do_not_come_back_are_waited_for_and_then_done_without(
    tmp_path: Path,
) -> None:
    who = people(3)
    async with rig(tmp_path, 3, who) as here:
        run = (await here.provision(split=SPLIT, on_fault="replace")).run
    async with rig(tmp_path, 2, (who[0], who[2]), restart_wait_s=0.8) as here:
        waits = await here.status(run)
        assert (waits.state, waits.outcome, waits.takes_requests) == (
            "waiting for nodes", "", False,
        )  # fmt: skip
        assert "waits for node-1" in waits.reason
        assert [each.run for each in (await here.last(requests.ModelRuns())).runs] == [run]
        with pytest.raises(OperatorError, match="not back yet"):
            await here.prompt(run=run)
        status = await ready(here, run)
        assert {each.node for each in status.stages} == {who[0].node, who[2].node}
    async with rig(tmp_path, 1, who[:1], restart_wait_s=0.3) as here:
        over = await here.until_over(run)
        assert (over.outcome, over.fault.code) == ("faulted", "plan_infeasible")
        assert "the coordinator restarted" in over.reason


async def test_a_run_that_waits_for_its_nodes_can_be_stopped(tmp_path: Path) -> None:
    who = people(2)
    async with rig(tmp_path, 2, who) as here:
        run = (await here.provision(split=SPLIT, on_fault="replace")).run
    async with rig(tmp_path, 1, who[:1]) as here:
        over = await here.last(requests.StopRun(run=run))
        assert (over.outcome, over.state) == ("stopped", "torn down")
    async with rig(tmp_path, 2, who) as here:
        assert (await here.status(run)).outcome == "stopped"


async def test_a_run_does_not_come_back_with_another_model(tmp_path: Path) -> None:
    who = people(2)
    async with rig(tmp_path, 2, who) as here:
        run = (await here.provision(split=SPLIT, on_fault="replace")).run
        model = here.model
    write_tiny(model, layers=4, seed=7)
    async with rig(tmp_path, 2, who) as here:
        over = await here.until_over(run)
        assert (over.outcome, over.fault.code) == ("faulted", "weights_changed")
        assert not any(each.orders for each in here.stages)


async def test_a_run_that_was_to_end_does_not_come_back(tmp_path: Path) -> None:
    who = people(2)
    async with rig(tmp_path, 2, who) as here:
        run = (await here.provision(split=SPLIT, on_fault="replace")).run
        slow(here, 0.05)
        asked = Asking(here, run, 40)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(asked.run)
            await asked.until(3)
            nursery.start_soon(here.all, requests.TeardownRun(reason="enough"))
            await seen(here, lambda each: bool(each.course.ground.draining))
            nursery.cancel_scope.cancel()
    async with rig(tmp_path, 2, who) as here:
        over = await here.status(run)
        assert (over.outcome, over.reason) == ("stopped", "enough")


async def test_how_runs_ended_is_known_after_a_restart(tmp_path: Path) -> None:
    async with rig(tmp_path) as here:
        run = (await here.provision(split=SPLIT)).run
        await here.prompt()
        before = await here.last(requests.TeardownRun())
        await here.at_rest()
    async with rig(tmp_path) as here:
        assert await here.status(run) == before


async def test_a_plan_that_cannot_be_written_down_reaches_no_node(tmp_path: Path) -> None:
    async with rig(tmp_path, nodes=4) as here:
        (tmp_path / "state" / "runs").write_bytes(b"in the way")
        over = await here.provision(split=SPLIT, on_fault="replace")
        assert (over.outcome, over.teardown) == ("faulted", "clean")
        assert over.fault is not None
        assert over.fault.code == "storage"
        assert not any(each.orders for each in here.stages)
        await here.at_rest()
        (tmp_path / "state" / "runs").unlink()
        assert (await here.provision(split=SPLIT)).takes_requests


def test_rows_that_cannot_be_read_are_passed_by(tmp_path: Path) -> None:
    rows = RunRows(tmp_path / "runs")
    assert rows.load() == []
    kept = [
        RunRow(f"{index:016x}", Wish("m", replaces=True), index, (), READY) for index in range(3)
    ]
    for row in kept:
        rows.write(row)
    (tmp_path / "runs" / "bad.json").write_bytes(b"{")
    assert sorted(rows.load(), key=lambda row: row.run) == kept
    rows.write(msgspec.structs.replace(kept[1], over=True))
    rows.forget(kept[0].run)
    rows.forget(kept[0].run)
    assert [(row.run, row.over) for row in rows.load()] == [
        (kept[2].run, False), (kept[1].run, True),
    ]  # fmt: skip


# ---- drained nodes ----


async def drain(here: Rig, node: str = "node-1", **terms: Any) -> list[replies.DrainStatus]:
    answers = here.coordinator.serving.draining.answer(requests.Drain(node=node, **terms))
    with trio.fail_after(10):
        return [reply async for reply in answers]


async def test_a_run_that_replaces_moves_off_a_drained_node(tmp_path: Path) -> None:
    async with rig(tmp_path, nodes=3) as here:
        run = await here.provision(split=SPLIT, on_fault="replace")
        slow(here)
        asked = Asking(here, run.run, 30)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(asked.run)
            await asked.until(5)
            *_, last = await drain(here, wait=True)
        assert last.state == "drained"
        assert asked.tokens == answer(here.tokens(), 30)
        assert [(each.planned, each.name) for each in asked.pauses] == [(True, "")]
        status = await here.status()
        assert [each.name for each in status.stages] == ["node-0", "node-2"]
        assert [(each.fault, each.dropped) for each in status.replacements] == [(None, "")]
        plan = await here.last(requests.PlanModel(model=str(here.model), ctx=64))
        assert "it is drained" in [each.reason for each in plan.unused if each.name == "node-1"]
        here_now = here.coordinator.serving.answers.observer.status().participants
        assert [each.drain for each in here_now] == ["", "drained", ""]
        known = here.coordinator.serving
        listed = known.draining.marked(partial(known.members.listing, "coordinator"))
        assert {each.drain for each in listed.members if each.name == "node-1"} <= {"drained"}
        (back,) = await drain(here, undo=True)
        assert back.state == "in use"
        await drain(here, "node-2", wait=True)
        assert [each.name for each in (await here.status()).stages] == ["node-0", "node-1"]


async def test_a_run_that_fails_is_left_to_finish_or_stopped_by_force(tmp_path: Path) -> None:
    async with rig(tmp_path, nodes=3) as here:
        run = await here.provision(split=SPLIT)
        (status,) = await drain(here)
        assert (status.state, status.runs) == ("draining", (run.run,))
        assert "--force" in status.stays[0]
        *tokens, _ = await here.prompt()
        assert len(tokens) == 5
        *_, last = await drain(here, force=True, wait=True)
        assert (last.state, last.stays) == ("drained", ())
        over = await here.until_over(run.run)
        assert (over.outcome, over.reason) == (
            "stopped",
            "node-1 is drained: drained by the operator",
        )


async def test_a_run_that_has_nowhere_to_go_stays_where_it_is(tmp_path: Path) -> None:
    async with rig(tmp_path) as here:
        run = await here.provision(split=SPLIT, on_fault="replace")
        (status,) = await drain(here)
        assert status.state == "draining"
        assert "2 stages by hand are for 2 nodes, 1 can hold one" in status.stays[0]
        assert (await here.status(run.run)).run_epoch == 1


async def test_a_drained_node_is_not_asked_for_rounds_and_a_restart_keeps_that(
    tmp_path: Path,
) -> None:
    who = people(3)
    async with rig(tmp_path, 3, who) as here:
        assert [each.state for each in await drain(here, who[1].node[:20])] == ["drained"]
    async with rig(tmp_path, 3, who) as here:
        rounds = here.coordinator.serving.rounds
        assert rounds.state.ground.asked == tuple(sorted({who[0].node, who[2].node}))
        assert rounds.state.ground.here == tuple(sorted(each.node for each in who))
        await drain(here, undo=True)
        with trio.fail_after(20):
            while len(rounds.state.ground.asked) < 3:
                await rounds.changed.wait()
        with pytest.raises(OperatorError, match="has ever joined"):
            await drain(here, "nobody")


async def test_what_is_written_of_drained_nodes_is_read_or_refused(tmp_path: Path) -> None:
    node = identity.generate().node
    drains = Drains(tmp_path)
    await drains.add(node, "a new disk")
    await drains.add(node, "again")
    assert Drains(tmp_path).nodes == {node: "a new disk"}
    assert await Drains(tmp_path).remove(node)
    assert Drains(tmp_path).nodes == {}
    (tmp_path / "drained.json").write_bytes(b"[]")
    with pytest.raises(StorageError, match="which nodes are drained"):
        Drains(tmp_path)
