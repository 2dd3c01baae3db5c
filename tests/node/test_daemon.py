import contextlib
import os
import resource
import signal
from pathlib import Path

import numpy as np
import pytest
import trio

from lensemble import ticket
from lensemble.errors import EdgeFault, LinkLost, StorageError, WorkerFault
from lensemble.ids import NodeId
from lensemble.wire import messages
from lensemble.workload import Workload, layout
from lensemble_node import home, participation, signals
from lensemble_node.daemon import Serving
from tests.node.scripted import (
    COORDINATOR,
    FEDERATION,
    PATIENCE_S,
    WORKLOAD,
    Session,
    Stage,
    stage,
)


async def until(serving: Serving, wanted: str) -> None:
    """Wait until the attempt in hand is of the class ``wanted``."""
    with trio.fail_after(PATIENCE_S):
        while True:
            changed = serving.member.changed
            joined = serving.member.state.membership
            if isinstance(joined, participation.Joined) and (
                type(joined.attempt).__name__ == wanted
            ):
                return
            await changed.wait()


async def serve(s: Stage, **changes: object) -> Serving:
    return (await s.start_node(**changes)).serving


def worker_pid(serving: Serving) -> int:
    return serving.member.supervisor.facts().pid


async def test_rounds_from_join_to_close(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        serving = await serve(s)
        session = await s.joined()
        first = await session.whole_round(0)
        assert first.shape == (20_000,)
        # The state is not asked for again while it is the same one.
        commitment = await session.bind(1)
        assert commitment.holds_bytes == session.layout.nbytes
        await session.collect(1)
        second = await session.take_update(await session.hear(messages.Update))
        assert not np.array_equal(first, second)
        await session.close(1, contributors=())
        await until(serving, "Idle")
        assert serving.member.last_contribution == 0
        phases = [m.phase for m in session.heard if isinstance(m, messages.Progress)]
        # Whether it waits depends on what is there first, the state or the go-ahead; the close may
        # overtake the last word.
        assert [p for p in phases if p != "waiting"][:3] == ["fetching", "training", "sending"]
        assert all(m.l2_norm is None for m in session.heard if isinstance(m, messages.Update))


async def test_norms_are_shared_only_where_the_node_says_so(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        await s.start_node(share={"norms": True, "plain": True})
        session = await s.joined()
        await session.bind()
        await session.give_state()
        await session.collect()
        update = await session.hear(messages.Update)
        assert update.l2_norm is not None
        assert update.l2_norm > 0


async def test_a_retry_sends_the_same_release(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        serving = await serve(s)
        session = await s.joined()
        await session.bind()
        await session.give_state()
        await session.collect()
        update = await session.hear(messages.Update)
        first = await session.take_update(update)
        # Its worker says so by a word of its own; an attempt that ends before costs the edges.
        await until(serving, "Sent")
        await session.close(outcome="aborted", contributors=(), retries=True)
        again = await session.whole_round(0, 1)
        assert np.array_equal(first, again)
        assert [m.reused for m in session.heard if isinstance(m, messages.Update)] == [False, True]


async def test_a_killed_worker_faults_the_round_and_serves_the_next_attempt(
    tmp_path: Path,
) -> None:
    async with stage(tmp_path) as s:
        serving = await serve(s)
        session = await s.joined()
        await session.bind()
        await until(serving, "Fetching")
        os.kill(worker_pid(serving), signal.SIGKILL)
        fault = await session.hear(messages.Fault)
        assert fault.code == "worker_fault"
        assert fault.reason == "the node's worker failed"
        await session.hear(messages.EdgeLost)
        await session.close(outcome="aborted", contributors=(), retries=True)
        await session.provision(s.nursery)
        await session.whole_round(0, 1)


async def test_a_state_cut_short_is_resumed_on_the_next_edges(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        await s.start_node()
        session = await s.joined()
        assert (await session.bind()).holds_bytes == 0
        await session.give_state(chunks=3)
        await session.tx.acquire()
        session.tx.close()
        await session.hear(messages.EdgeLost)
        await session.provision(s.nursery)
        # Asked again on new edges, for the same attempt.
        held = (await session.bind()).holds_bytes
        assert 0 < held < session.layout.nbytes
        await session.give_state(offset=held)
        await session.collect()
        await session.take_update(await session.hear(messages.Update))


async def test_a_lost_link_is_dialled_again_and_the_training_kept(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        serving = await serve(s)
        session = await s.joined()
        await session.bind()
        await session.give_state()
        await session.collect()
        await session.hear(messages.Update)
        pid = worker_pid(serving)
        s.network.cut(COORDINATOR, session.node)
        session = await s.joined()
        await session.whole_round(0, 0)
        assert worker_pid(serving) == pid
        assert [m.reused for m in session.heard if isinstance(m, messages.Update)] == [True]


async def test_a_silent_coordinator_is_noticed_and_named(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        serving = await serve(s)
        session = await s.joined()
        s.network.partition(COORDINATOR, session.node)
        with trio.fail_after(PATIENCE_S):
            while serving.answers.status().link.state != "waiting":
                await serving.member.changed.wait()
        assert serving.answers.status().link.reason
        s.network.heal(COORDINATOR, session.node)
        session = await s.joined()
        await session.whole_round()


async def test_a_restarted_node_takes_part_every_time(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        last = messages.LastRecord(round=-1, digest="0" * 64, contributors=())
        for index in range(4):
            node = await s.start_node()
            session = await s.joined(last=last)
            await session.whole_round(index)
            last = messages.LastRecord(
                round=index, digest=f"{index + 1:064x}", contributors=(session.node,)
            )
            await node.stop()
            await session.hear(messages.Leave)


async def test_a_restarted_node_reuses_its_release_and_adopts_what_closed(
    tmp_path: Path,
) -> None:
    async with stage(tmp_path) as s:
        node = await s.start_node()
        session = await s.joined()
        await session.bind()
        await session.give_state()
        await session.collect()
        await session.take_update(await session.hear(messages.Update))
        await node.stop()
        await session.hear(messages.Leave)
        assert (tmp_path / "state" / "local" / "pending-0").is_dir()
        serving = await serve(s)
        last = messages.LastRecord(round=0, digest="1" * 64, contributors=(session.node,))
        session = await s.joined(last=last)
        with trio.fail_after(PATIENCE_S):
            while serving.member.state.worker.owed is not None:
                await serving.member.changed.wait()
        assert not (tmp_path / "state" / "local" / "pending-0").exists()
        assert (tmp_path / "state" / "local" / "cursor.json").is_file()
        await session.whole_round(1)


async def test_farewell_ends_worker_and_socket(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        node = await s.start_node()
        session = await s.joined()
        pid = worker_pid(node.serving)
        assert node.serving.config.socket_path.is_socket()
        await node.stop()
        leave = await session.hear(messages.Leave)
        assert leave.reason == "the node shuts down"
        assert not node.serving.config.socket_path.exists()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_a_second_daemon_on_one_directory_is_refused(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        await s.start_node()
        with pytest.raises(StorageError, match=f"pid {os.getpid()}"):
            await s.start_node()


async def test_a_refused_node_says_so_and_tries_again_later(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        serving = await serve(s)
        session = await s.session()
        await session.hear(messages.Join)
        await session.say(
            messages.Refused(code="admission_refused", reason="not on the list", final=True)
        )
        with trio.fail_after(PATIENCE_S):
            while serving.answers.status().link.state != "refused":
                await serving.member.changed.wait()
        link = serving.answers.status().link
        assert "not on the list" in link.reason
        assert link.next_attempt_in_s is not None
        assert link.next_attempt_in_s > 25


async def test_noise_and_stale_words_are_counted_and_change_nothing(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        serving = await serve(s)
        session = await s.joined()
        await session.link.send(b"\x01\x00noise")
        await session.link.send(b"")
        await session.link.send(b"\x63\x00" + b"\x80")
        await session.open(federation="0" * 32)
        await session.open(epoch=99)
        await session.whole_round()
        assert serving.member.refused == {
            "frame": 2,
            "contract_violation": 1,
            "other_federation": 1,
            "stale_epoch": 1,
        }


async def test_a_ticket_joins_a_running_node_and_is_spent_once_admitted(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        serving = await serve(s, belongs=False)
        assert serving.answers.status().link.state == "unconfigured"
        invite = ticket.Membership(COORDINATOR, s.driver.addresses(), FEDERATION, b"s" * 16)
        await serving.member.assign(invite)
        session = await s.session()
        join = await session.welcome()
        assert join.invite == b"s" * 16
        await session.provision(s.nursery)
        stored = home.load_membership(serving.config.state_dir)
        assert stored is not None
        assert (stored.federation, stored.invite) == (FEDERATION, b"")


async def test_status_says_what_the_node_waits_for(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        serving = await serve(s)
        session = await s.joined()
        status = serving.answers.status()
        assert (status.link.state, status.link.name, status.round) == ("joined", "scripted", None)
        assert status.worker is not None
        assert (status.worker.state, status.worker.generation) == ("ready", 1)
        assert status.worker.rss_bytes > 0
        assert [edge.state for edge in status.edges] == ["live", "live"]
        assert status.config_hash == WORKLOAD.digest
        await session.bind()
        await until(serving, "Fetching")
        now = serving.answers.status().round
        assert now is not None
        assert (now.index, now.activity) == (0, "receiving state")
        assert now.reason == "waiting for the state from the coordinator"
        assert now.total_bytes == session.layout.nbytes


async def test_a_closed_round_stops_a_late_sender(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        serving = await serve(s)
        session = await s.joined()
        await session.bind()
        await session.give_state()
        await session.collect()
        await session.hear(messages.Update)
        # Nobody reads the update: the node is stuck sending when the round closes without it.
        await until(serving, "Sending")
        await session.close(contributors=(NodeId("e" * 64),))
        lost = await session.hear(messages.EdgeLost)
        assert "ended before its update was sent" in lost.reason
        await until(serving, "Idle")
        await session.provision(s.nursery)
        await session.whole_round(1)


async def test_what_a_worker_refuses_once_its_attempt_is_over_is_logged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with stage(tmp_path) as s:
        serving = await serve(s)
        session = await s.joined()
        await session.bind()
        # Another node's word ended the attempt while the state was on its way to this one.
        await session.close(outcome="aborted", digest=session.digest, contributors=())
        await until(serving, "Idle")
        slot = await session.tx.acquire()
        session.tx.region.slot(slot)[:4] = b"none"
        session.tx.filled(slot, 4)
        await session.hear(messages.EdgeLost)
        said = [line for line in capsys.readouterr().out.splitlines() if "worker.failed" in line]
        assert len(said) == 1
        assert "a chunk of 4 bytes where" in said[0], said


async def test_a_worker_without_its_dataset_declines_with_the_way_out(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        serving = await serve(s, data={"path": str(tmp_path / "nothing.hdf5")})
        session = await s.session()
        world = Workload()
        await session.welcome(
            workload=world.canonical(),
            config_hash=world.digest,
            layout_digest=layout(world).digest,
        )
        with trio.fail_after(PATIENCE_S):
            while not isinstance(serving.member.state.worker, participation.Unable):
                await serving.member.changed.wait()
        assert any("nothing.hdf5" in alert for alert in serving.answers.status().alerts)


async def test_edges_that_can_never_fit_are_reported_with_the_arithmetic(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        await s.start_node(edges={"arena_bytes": 1 << 16})
        session = await s.session()
        await session.welcome()
        state, update = session.specs(capacity_bytes=1 << 17)
        provision = messages.Provision(
            federation=FEDERATION, epoch=session.epoch, state=state, update=update
        )
        await session.say(provision)
        lost = await session.hear(messages.EdgeLost)
        assert f"2 slots x {1 << 17} bytes" in lost.reason
        await session.provision(s.nursery)
        await session.whole_round()


async def test_a_full_disk_is_named_and_costs_one_attempt(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        serving = await serve(s)
        session = await s.joined()
        pid = worker_pid(serving)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (40_000, resource.RLIM_INFINITY))
        await session.bind()
        s.nursery.start_soon(_give_what_is_taken, session)
        fault = await session.hear(messages.Fault)
        assert fault.code == "storage"
        assert fault.reason == "the node's storage failed"
        await session.hear(messages.EdgeLost)
        infinite = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, infinite)
        await session.provision(s.nursery)
        await session.whole_round(0, 1)
        assert worker_pid(serving) == pid


async def _give_what_is_taken(session: Session) -> None:
    with contextlib.suppress(EdgeFault):
        await session.give_state()


async def test_a_worker_that_claims_a_slot_that_is_not_its_own_is_ended(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        serving = await serve(s)
        session = await s.joined()
        edge = serving.member.provisioner.ends()[0][0].spec.edge
        with pytest.raises(WorkerFault, match="not the worker's"):
            serving.member.provisioner.signal(signals.Consumed(edge=edge, slot=1))
        with pytest.raises(WorkerFault, match="not the worker's"):
            serving.member.provisioner.signal(signals.Filled(edge=edge, slot=0, extent=1))
        # Of an edge that is gone nothing is believed, and nobody is to blame.
        serving.member.provisioner.signal(signals.Consumed(edge=7, slot=1))
        await session.whole_round()


async def test_a_flood_of_provisions_costs_the_link_and_nothing_else(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        serving = await serve(s)
        session = await s.joined()
        with contextlib.suppress(LinkLost):
            for _ in range(1500):
                state, update = session.specs()
                provision = messages.Provision(
                    federation=FEDERATION, epoch=session.epoch, state=state, update=update
                )
                await session.say(provision)
        if session.link.lost.is_set():
            assert serving.member.refused["edges_too_fast"] > 0
            session = await s.session()
            await session.welcome()
        await session.provision(s.nursery)
        await session.whole_round()
