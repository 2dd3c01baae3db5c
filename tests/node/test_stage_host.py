import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import trio

from lensemble.errors import EdgeFault
from lensemble.ids import EdgeId, NodeId
from lensemble.stage_chunk import Chunk, Kind, Sampling
from lensemble.transport.endpoint import EndpointSettings
from lensemble.transport.ends import TxEnd
from lensemble.transport.memory_driver import MemoryNetwork
from lensemble.wire import messages, stages
from lensemble_node import stage
from lensemble_node.stage_process import Engine
from tests.node.scripted import CALM, COORDINATOR, FEDERATION, PATIENCE_S
from tests.node.stage_play import fence, opening, teardown, weights
from tests.node.staged import Floor, Node, Run, floor


@asynccontextmanager
async def memory_floor(directory: Path) -> AsyncIterator[Floor]:
    network, pace = MemoryNetwork(), EndpointSettings(CALM)
    driver = network.driver(COORDINATOR, pace)
    async with floor(directory, driver, lambda who: network.driver(who.node, pace)) as made:
        made.network = network
        yield made


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def pid_of(node: Node, run: Run) -> int:
    process = node.host.hosted[run.run].process
    assert process is not None
    return process.pid


def leased(node: Node) -> int:
    return node.serving.member.provisioner._leases.arena.leased_bytes()


async def vacant(node: Node) -> None:
    """Wait until nothing of any run is held."""
    with trio.fail_after(PATIENCE_S):
        while node.host.hosted:
            await node.host.changed.wait()
    assert leased(node) == 0


async def test_one_stage_answers_and_leaves_nothing_behind(tmp_path: Path) -> None:
    async with memory_floor(tmp_path) as f:
        node = await f.node()
        assert (node.inventory.memory_bytes, node.inventory.engine) == (1 << 30, "scripted")
        assert node.inventory.taken_bytes == 0
        run = await f.run(node)
        [ready] = await run.provision()
        assert ready.resident_bytes == 1 << 20
        assert (await node.hear(stages.Inventory)).taken_bytes > 0
        await run.open()
        assert [await run.ask(n, 1) for n in range(5)] == [1, 2, 3, 4, 5]
        # The last chunk is here before the worker's line about it has been read.
        with trio.fail_after(PATIENCE_S):
            while (await run.look(0)).computed < 5:
                await trio.lowlevel.checkpoint()
        [status] = node.serving.answers.status().stages
        assert (status.phase, status.computed, status.pid) == ("live", 5, pid_of(node, run))
        assert (status.run, status.model, status.first, status.last) == (run.run, "toy", 0, 2)
        assert status.last_step_ms is not None
        seen = await run.look(0)
        assert (seen.computed, seen.held) == (5, 0)
        assert [step for step, _ in seen.recent] == [1, 2, 3, 4, 5]
        pid = pid_of(node, run)
        [torn_down] = await run.tear_down()
        assert torn_down.outcome == "clean"
        assert gone(pid)
        await vacant(node)


async def test_two_nodes_compute_one_after_the_other_over_a_link_of_their_own(
    tmp_path: Path,
) -> None:
    async with memory_floor(tmp_path) as f:
        one, other = await f.node(), await f.node()
        # Runs in both directions at once: both nodes dial each other.
        there, back = await f.run(one, other, number=1), await f.run(other, one, number=2)
        await there.provision()
        await back.provision()
        for run in (there, back):
            await run.say(opening)
        for run in (there, back):
            await run.opened()
        assert [await there.ask(n, 2) for n in range(3)] == [2, 3, 4]
        assert [await back.ask(n, 3) for n in range(3)] == [3, 4, 5]
        for run in (there, back):
            assert {answer.outcome for answer in await run.tear_down()} == {"clean"}
        await vacant(one)
        await vacant(other)


async def test_chunks_that_nobody_waited_for_come_through_in_order(tmp_path: Path) -> None:
    async with memory_floor(tmp_path) as f:
        one, other = await f.node(), await f.node()
        run = await (await f.run(one, other)).start()
        count = 60

        async def feed() -> None:
            for step in range(count):
                # As in a prompt: most chunks are only computed, and nothing comes back.
                how = Sampling() if step % 3 == 2 else None
                await run.send(Chunk(Kind.TOKENS, 0, 2, 0, step, how), step, 1)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(feed)
            answers = [await run.result() for _ in range(count // 3)]
        assert answers == [(step + 1, step) for step in range(2, count, 3)]
        for index in (0, 1):
            seen = await run.look(index)
            assert (seen.computed, seen.held) == (count, 0)


async def test_a_killed_worker_is_said_within_two_seconds_with_its_log(tmp_path: Path) -> None:
    async with memory_floor(tmp_path) as f:
        one, other = await f.node(), await f.node()
        run, bystander = await f.run(one, other), await f.run(one, number=2)
        await run.start()
        await bystander.start()
        pid = pid_of(one, run)
        with trio.fail_after(2):
            os.kill(pid, signal.SIGKILL)
            fault = await one.hear(stages.StageFault)
        assert (fault.run, fault.code) == (run.run, "worker_fault")
        assert f"(pid {pid}) was killed by SIGKILL" in fault.reason
        assert fault.stderr == ("hosting 0:1",)
        symptom = await other.hear(stages.StageFault)
        assert symptom.code == "upstream_lost"
        assert await bystander.ask(4, 5) == 9
        assert {answer.outcome for answer in await run.tear_down()} == {"clean"}
        again = await f.run(one, other, number=3)
        assert await (await again.start()).ask(1, 1) == 2


@pytest.mark.parametrize(
    ("place", "code", "words"),
    [
        ("fails", "weights_short", "bodies kept ending early"),
        ("garbage", "worker_fault", "not the stage protocol"),
    ],
)
async def test_a_worker_that_cannot_go_on_is_a_fault_by_name(
    tmp_path: Path, place: str, code: str, words: str
) -> None:
    async with memory_floor(tmp_path) as f:
        node = await f.node()
        run = await f.run(node, place=place)
        await run.say(lambda order: order)
        fault = await node.hear(stages.StageFault)
        assert fault.code == code
        assert words in fault.reason
        assert fault.stderr[0] == "hosting 0:2"
        assert (await run.tear_down())[0].outcome == "clean"
        await vacant(node)


async def test_a_slot_that_is_not_the_workers_ends_its_stage_and_not_the_daemon(
    tmp_path: Path,
) -> None:
    async with memory_floor(tmp_path) as f:
        node = await f.node()
        run = await f.run(node, place="liar")
        await run.start()
        slot = await run.tx.acquire()
        run.tx.filled(slot, 8)
        fault = await node.hear(stages.StageFault)
        assert fault.code == "worker_fault"
        await run.tear_down()
        assert await (await (await f.run(node, number=2)).start()).ask(7) == 7


async def test_a_worker_that_does_not_stop_is_killed_and_the_teardown_says_so(
    tmp_path: Path,
) -> None:
    async with memory_floor(tmp_path) as f:
        node = await f.node()
        run = await f.run(node, place="stubborn")
        await run.start()
        pid = pid_of(node, run)
        [torn_down] = await run.tear_down()
        assert torn_down.outcome == "faulted"
        assert "did not stop" in torn_down.reason
        assert gone(pid)


async def test_weights_come_over_an_edge_of_their_own(tmp_path: Path) -> None:
    async with memory_floor(tmp_path) as f:
        node = await f.node()
        source = weights(node=node.node)
        run = await f.run(node, source=source)
        await run.say(lambda order: order)
        wants = await node.hear(stages.StageWants)
        assert wants.ranges == ((0, 100), (500, 100))
        tx = TxEnd(source.edge, await f.leases.lease(source.edge), f.driver)
        await f.nursery.start(tx.serve)
        for offset, length in wants.ranges:
            slot = await tx.acquire()
            tx.region.slot(slot)[:8] = offset.to_bytes(8, "little")
            tx.filled(slot, 8 + length)
        await tx.finished()
        ready = await node.hear(stages.StageReady)
        assert ready.fetched_bytes == 200
        await run.open()
        assert await run.ask(2, 2) == 4


async def test_a_lost_coordinator_frees_every_stage_at_once(tmp_path: Path) -> None:
    async with memory_floor(tmp_path) as f:
        one, other = await f.node(), await f.node()
        runs = [await f.run(one, other, number=1), await f.run(one, number=2, place="stubborn")]
        for run in runs:
            await run.start()
        pids = [pid_of(one, run) for run in runs]
        f.network.cut(COORDINATOR, one.node)
        with trio.fail_after(2):
            await vacant(one)
        assert all(map(gone, pids))
        await f.welcome(one, epoch=9)
        assert one.inventory.taken_bytes == 0
        assert one.inventory.epoch == 9
        # Nothing of the runs is said in the next session, and the next run works.
        assert await (await (await f.run(one, number=3)).start()).ask(3, 4) == 7
        assert not any(isinstance(m, stages.StageFault) for m in one.session.heard)


async def test_a_stopped_daemon_leaves_no_worker(tmp_path: Path) -> None:
    async with memory_floor(tmp_path) as f:
        node = await f.node()
        ready, early = await f.run(node), await f.run(node, number=2, place="never")
        await ready.start()
        await early.say(lambda order: order)
        await node.hear(stages.StageProgress, run=early.run, phase="fetching")
        pids = [pid_of(node, ready), pid_of(node, early)]
        await node.stop()
        assert all(map(gone, pids))


async def test_a_node_that_stops_is_felt_by_the_next_one_only(tmp_path: Path) -> None:
    async with memory_floor(tmp_path) as f:
        one, other = await f.node(), await f.node()
        run, bystander = await f.run(one, other), await f.run(other, number=2)
        await run.start()
        await bystander.start()
        pids = [pid_of(one, run), pid_of(other, run)]
        await one.stop()
        symptom = await other.hear(stages.StageFault)
        assert (symptom.run, symptom.code) == (run.run, "upstream_lost")
        with trio.fail_after(PATIENCE_S):
            while run.run in other.host.hosted:
                await other.host.changed.wait()
        assert all(map(gone, pids))
        assert await bystander.ask(2, 2) == 4


async def test_what_is_not_here_is_refused_by_name(tmp_path: Path) -> None:
    async with memory_floor(tmp_path) as f:
        node = await f.node()
        run = await f.run(node)
        order = run.orders[0]
        for asked in (opening(order), stages.StageLook(**fence(order))):
            await node.session.say(asked)
            refused = await node.hear(stages.StageRefused)
            assert (refused.field, refused.run) == ("run", run.run)
        await node.session.say(teardown(order))
        assert (await node.hear(stages.StageTornDown)).outcome == "clean"
        for changes, field in (
            ({"build": "lensemble 9"}, "build"),
            ({"protocol": 9}, "protocol"),
            ({"engine": "another"}, "engine"),
            ({"tokenizer_digest": "0" * 64}, "tokenizer_digest"),
            ({"sessions": 256, "ctx": 64, "rows": 999}, "inbound.capacity_bytes"),
            ({"tensors": order.tensors[::-1]}, "tensors"),
            ({"last": 1}, "layers"),
            ({"source": stages.FromPath(path="/script/../etc/shadow")}, "source"),
            ({"source": stages.FromUrl(url="http://192.0.2.1/script/echo")}, "source"),
        ):
            await node.session.say(msgspec.structs.replace(order, **changes))
            refused = await node.hear(stages.StageRefused)
            assert refused.field == field
        small = await f.node(inference={"memory_bytes": 4096, "sources": ["/"]})
        await small.session.say((await f.run(small, number=2)).orders[0])
        refused = await small.hear(stages.StageRefused)
        assert refused.field == "memory_bytes"
        assert refused.have == "4096 bytes free of 4096"
        none = await f.node(engine=Engine("", {}, "no C compiler. Install one."))
        assert (none.inventory.memory_bytes, none.inventory.reason) == (
            0,
            "no C compiler. Install one.",
        )
        await none.session.say((await f.run(none, number=3)).orders[0])
        assert (await none.hear(stages.StageRefused)).field == "inference"


async def test_weights_are_read_from_where_the_node_allows(tmp_path: Path) -> None:
    terms = {"memory_bytes": 1 << 30, "sources": ["/script", "https://example.org/models"]}
    async with memory_floor(tmp_path) as f:
        strict = await f.node(inference={"memory_bytes": 1 << 30})
        await strict.session.say((await f.run(strict)).orders[0])
        refused = await strict.hear(stages.StageRefused)
        assert (refused.field, refused.want) == ("source", "/script/echo")
        assert "inference.sources" in refused.remediation
        node = await f.node(inference=terms)
        order = (await f.run(node, number=2)).orders[0]
        for source in (
            stages.FromPath(path="/scripts/echo"),
            stages.FromUrl(url="https://example.org/modelsandmore/a.gguf"),
            stages.FromUrl(url="https://example.org/models/%2e%2e/../secret"),
        ):
            await node.session.say(msgspec.structs.replace(order, source=source))
            assert (await node.hear(stages.StageRefused)).field == "source"
        await (await f.run(node, number=3)).start()


async def test_a_refused_chunk_is_a_fault_at_once(tmp_path: Path) -> None:
    async with memory_floor(tmp_path) as f:
        node = await f.node()
        run = await (await f.run(node, place="picky")).start()
        with pytest.raises(EdgeFault):
            await run.ask(5)
        fault = await node.hear(stages.StageFault, run=run.run)
        assert (fault.code, "it is not finite" in fault.reason) == ("chunk_refused", True)


async def test_a_newer_plan_replaces_the_older_and_an_older_one_is_refused(
    tmp_path: Path,
) -> None:
    async with memory_floor(tmp_path) as f:
        node = await f.node()
        first = await f.run(node)
        await first.start()
        pid = pid_of(node, first)
        newer = await f.run(node, run_epoch=2)
        newer.tx.close()
        await newer.provision()
        assert gone(pid)
        assert isinstance(node.host.state(first.run), stage.ReadyToOpen)
        await first.say(lambda order: order)
        refused = await node.hear(stages.StageRefused)
        assert (refused.field, refused.want) == ("run_epoch", "plan 1")


async def test_an_edge_that_ends_here_already_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    async with memory_floor(tmp_path) as f:
        node = await f.node()
        run = await (await f.run(node)).start()
        twin = msgspec.structs.replace(run.orders[0], run="f" * 16)
        await node.session.say(twin)
        refused = await node.hear(stages.StageRefused, run=twin.run)
        assert refused.field == "edges"
        assert await run.ask(5) == 5


async def test_a_stages_edge_asked_for_a_second_time_costs_the_link_only(tmp_path: Path) -> None:
    async with memory_floor(tmp_path) as f:
        node = await f.node(trains=True)
        run = await (await f.run(node)).start()
        into, out = run.specs[0], msgspec.structs.replace(run.specs[1], edge=EdgeId(9999))
        session = node.session
        provision = messages.Provision(
            federation=FEDERATION, epoch=session.epoch, state=into, update=out
        )
        await session.say(provision)
        with trio.fail_after(PATIENCE_S):
            await session.link.lost.wait()
        assert node.serving.member.refused["edge_in_use"] == 1
        await f.welcome(node, epoch=session.epoch + 1)
        assert await (await (await f.run(node, number=2)).start()).ask(4) == 4


async def test_a_stranger_is_turned_away(tmp_path: Path) -> None:
    async with memory_floor(tmp_path) as f:
        node = await f.node()
        stranger = f.network.driver(NodeId("7" * 64), EndpointSettings(CALM))
        await f.nursery.start(stranger.run)
        link = await stranger.dial(f.network.address(node.node))
        with trio.fail_after(PATIENCE_S):
            await link.lost.wait()
        assert "takes calls only from nodes" in link.lost_reason()
        assert node.serving.member.refused["uninvited"] == 1
