"""Daemons that run out of what they need: room, rights, descriptors, memory, their own files."""

import contextlib
import itertools
import os
import resource
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from lensemble.ctl import replies, requests
from lensemble.ctl.client import Client, DaemonUnreachable, Declined
from tests.e2e.federation import Federation, Process, federation, until
from tests.e2e.rooms import PAGE, Room, room

pytestmark = pytest.mark.e2e
NODES = ("node-0", "node-1")
TERMS = {
    "workload": {"task": {"parameters": 3000}, "inner": {"steps": 1, "batch": 1}},
    "coordinator": {
        "rounds": {
            "aggregation": "plain",
            "min_participants": 2,
            "max_attempts": 1,
            "open_grace_s": 0.0,
        },
        "storage": {"spool_memory_bytes": 0},
    },
    "node": {"share": {"plain": True}},
}
"""Twelve kilobytes of model, every update spooled to disk, one attempt for a round."""

MASKED = {
    **TERMS,
    "coordinator": {
        **TERMS["coordinator"],
        "rounds": {
            "aggregation": "masked",
            "min_participants": 3,
            "max_attempts": 2,
            "retry_backoff_s": 0.1,
            "open_grace_s": 0.0,
        },
    },
}


@contextlib.contextmanager
def crowded(
    root: Path, name: str, nbytes: int, terms: dict[str, dict[str, object]] = TERMS, nodes: int = 2
) -> Iterator[tuple[Federation, Room]]:
    """A federation in which the state of ``name`` has a file system of its own."""
    members = Federation(root, nodes, **terms)
    with room(members[name].place / "state", nbytes) as place:
        members[name].command = [*place.command, *members[name].command]
        try:
            members.start()
            members.join()
            yield members, place
        finally:
            members.end()


@pytest.mark.parametrize(
    ("terms", "nodes", "step"),
    [
        (TERMS, 2, 5),
        pytest.param(TERMS, 2, 1, marks=pytest.mark.soak),
        pytest.param(MASKED, 3, 2, marks=pytest.mark.soak),
    ],
    ids=["plain-some", "plain-every", "masked-half"],
)
def test_a_full_disk_of_the_coordinator_costs_rounds_and_nothing_else(
    tmp_path: Path, terms: dict[str, dict[str, object]], nodes: int, step: int
) -> None:
    """Whatever write is the first to find no room, from the ledger's to the last checkpoint's."""
    with crowded(tmp_path, "coordinator", 8 << 20, terms, nodes) as (members, place):
        pid, failures, closed = members.coordinator.pid, [], 0
        for pages in range(0, 45, step):
            place.leave(pages * PAGE)
            before = members.committed()
            reason = _try_round(members)
            if reason:
                failures.append(reason)
                assert members.committed() == before, (pages, reason)
            closed += not reason
            place.empty()
            assert not _try_round(members), pages
            closed += 1
            rounds = members.closed()
            assert [each.index for each in rounds] == list(range(closed)), (pages, reason)
        assert members.coordinator.pid == pid
        assert members.coordinator.popen is not None
        assert members.coordinator.popen.poll() is None
        assert failures
        print(*sorted(set(failures)), sep="\n")
        assert all("are free" in reason for reason in failures), failures
        members.coordinator.kill()
        members.start("coordinator")
        assert [each.index for each in members.closed()] == list(range(closed))


def _try_round(members: Federation) -> str:
    """Ask for one round; why it did not close, or nothing."""
    members.wait_for()
    before = len(members.closed())
    try:
        members.run(1)
    except Declined as refused:
        return refused.message
    members.wait_rest()
    if len(members.closed()) > before:
        return ""
    aborted = members.status().round
    return f"{aborted.state}: {aborted.reason}"


def test_a_node_that_comes_back_to_a_full_disk_is_let_in_once_there_is_room(
    tmp_path: Path,
) -> None:
    with crowded(tmp_path, "coordinator", 8 << 20) as (members, place):
        pid = members.coordinator.pid
        place.leave(0)
        members["node-0"].kill()
        members.start("node-0")

        def refused() -> bool:
            link = members.node_status("node-0").link
            return link.state == "waiting" and "are free" in link.reason

        until("node-0 is told why it must wait", refused)
        assert members.coordinator.serves()
        place.empty()
        assert not _try_round(members)
        assert members.coordinator.pid == pid


@pytest.mark.parametrize("pages", [0, 1, 3, 6, 9])
def test_a_full_disk_of_a_node_costs_it_rounds_and_nothing_else(tmp_path: Path, pages: int) -> None:
    with crowded(tmp_path, "node-0", 8 << 20) as (members, place):
        pid = members["node-0"].pid
        place.leave(pages * PAGE)
        reason = _try_round(members)
        assert "the node's storage failed" in reason, reason
        link = members.node_status("node-0").link
        assert link.state == "joined", link
        place.empty()
        assert not _try_round(members)
        assert members["node-0"].pid == pid
        assert members["node-0"].serves()


def test_a_node_joins_though_it_cannot_write_that_down(tmp_path: Path) -> None:
    """The ticket is kept by ``join``; what the welcome adds to it is lost, and nothing else."""
    with crowded(tmp_path, "node-0", 8 << 20) as (members, place):
        ticket = members.coordinator.ask(requests.Invite(uses=1)).ticket
        place.leave(0)
        with pytest.raises(Declined) as caught:
            members["node-0"].ask(requests.Join(ticket=ticket))
        assert "no room" in caught.value.message
        place.empty()
        assert not _try_round(members)


def test_a_disk_that_turns_read_only_stops_rounds_and_starts(tmp_path: Path) -> None:
    with crowded(tmp_path, "coordinator", 8 << 20) as (members, place):
        assert not _try_round(members)
        # What lies open for writing would keep the file system from changing.
        members.coordinator.kill()
        place.remount("ro")
        members.coordinator.begin()
        assert members.coordinator.exit_status(20) == 1
        words = members.coordinator.last_words(2)
        assert "fatal: " in words, words
        assert "Read-only file system" in words, words
        assert "Try: Give the daemon's user a state directory" in words, words
        place.remount("rw")
        members.start("coordinator")
        assert not _try_round(members)


@pytest.mark.parametrize("damage", ["garbage", "empty", "torn"])
def test_a_damaged_ledger_is_named_with_the_way_out(tmp_path: Path, damage: str) -> None:
    with federation(tmp_path, 2, **TERMS) as members:
        assert not _try_round(members)
        members.coordinator.stop()
        ledger = members.state_dir / "ledger.sqlite"
        sound = ledger.read_bytes()
        wrong = {"garbage": os.urandom(len(sound)), "empty": b"", "torn": sound[: len(sound) // 2]}
        ledger.write_bytes(wrong[damage])
        before = sorted(path for path in members.state_dir.rglob("*") if "ledger" not in path.name)
        members.coordinator.begin()
        assert members.coordinator.exit_status(20) == 1
        words = members.coordinator.last_words(2)
        assert f"fatal: {ledger}" in words, words
        assert "Try: Restore the state directory from a copy" in words, words
        assert "Traceback" not in members.coordinator.log.read_text()
        after = sorted(path for path in members.state_dir.rglob("*") if "ledger" not in path.name)
        assert after == before, "what a damaged ledger does not name was removed"
        ledger.write_bytes(sound)
        members.start("coordinator")
        assert not _try_round(members)


def test_a_deleted_socket_comes_back(tmp_path: Path) -> None:
    with federation(tmp_path, 2, **TERMS) as members:
        for process in members.processes():
            process.socket.unlink()
        for process in members.processes():
            until(f"{process.name} serves again", process.serves)
        assert not _try_round(members)


def _limit_descriptors(process: Process, spare: int | None) -> None:
    """Let ``process`` open ``spare`` files beside those it has open; None: what it could before."""
    _, most = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    held = _open_files(process)
    free = (number for number in itertools.count() if number not in held)
    allowed = most if spare is None else next(itertools.islice(free, spare, None))
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (allowed, most))


def _open_files(process: Process) -> dict[int, str]:
    """What is behind each descriptor of ``process``, once no update is spooled any more."""

    def look() -> dict[int, str] | None:
        found = {}
        for entry in Path(f"/proc/{process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                found[int(entry.name)] = str(entry.readlink())
        return None if any(".spool" in each for each in found.values()) else found

    return until("no update is spooled", look)


def test_a_coordinator_without_descriptors_aborts_and_goes_on(tmp_path: Path) -> None:
    with federation(tmp_path, 2, **TERMS) as members:
        assert not _try_round(members)
        coordinator = members.coordinator
        with Client(coordinator.socket) as client:
            # What is open stays open; there is no room for the files of a round.
            _limit_descriptors(coordinator, 0)
            with pytest.raises(Declined) as caught:
                client.ask(requests.Run(rounds=1, detach=True))
            assert "Too many open files" in caught.value.message
            assert "LimitNOFILE" in caught.value.remediation
            assert client.ask(requests.Status()).round.state == "closed"
            for spare in range(1, 7):
                _limit_descriptors(coordinator, spare)
                with contextlib.suppress(Declined):
                    client.ask(requests.Run(rounds=1, detach=True))

                def rests() -> bool:
                    return client.ask(requests.Status()).run is None

                until("the run has ended", rests)
            _limit_descriptors(coordinator, None)
        assert not _try_round(members)
        assert coordinator.serves()


def test_clients_that_take_all_descriptors_are_outlived(tmp_path: Path) -> None:
    with federation(tmp_path, 2, **TERMS) as members:
        coordinator = members.coordinator
        _limit_descriptors(coordinator, 3)
        idle = [socket.socket(socket.AF_UNIX) for _ in range(12)]
        try:
            for each in idle:
                each.connect(str(coordinator.socket))
            with pytest.raises(DaemonUnreachable), Client(coordinator.socket, timeout_s=2):
                pass
        finally:
            for each in idle:
                each.close()
        until("the coordinator answers", coordinator.serves)
        _limit_descriptors(coordinator, None)
        assert not _try_round(members)


def test_a_worker_that_may_not_have_the_memory_is_a_fault_with_a_name(tmp_path: Path) -> None:
    """Its arena fits into the limit; the model does not."""
    node = {
        **TERMS["node"],
        "worker": {"memory_bytes": 256 << 20, "restart_backoff_s": 0.2},
        "edges": {"arena_bytes": 16 << 20},
    }
    workload = {"task": {"parameters": 30_000_000}, "inner": {"steps": 1, "batch": 1}}
    with federation(tmp_path, 2, **{**TERMS, "node": node, "workload": workload}) as members:
        pids = {process.name: process.pid for process in members.processes()}
        members.run(1)
        ended = members.wait_rest(60.0)
        assert not members.closed()
        # Whether the mapping of a file was refused or an allocation is the nodes' own affair.
        assert "the node's worker was refused memory" in ended.round.reason, ended
        for name in NODES:
            assert members.node_status(name).link.state == "joined"
        assert {process.name: process.pid for process in members.processes()} == pids


def test_a_node_without_descriptors_gets_its_worker_when_there_are_some(tmp_path: Path) -> None:
    node = {**TERMS["node"], "worker": {"restart_backoff_s": 0.2, "restart_backoff_max_s": 0.2}}
    with federation(tmp_path, 2, **{**TERMS, "node": node}) as members:
        process = members["node-0"]
        with Client(process.socket) as client:

            def worker() -> replies.WorkerStatus:
                found = client.ask(requests.Status()).worker
                assert found is not None
                return found

            pid = worker().pid
            assert pid is not None
            # What the old worker gives back is not enough for a new one.
            _limit_descriptors(process, 0)
            os.kill(pid, signal.SIGKILL)
            until("starting it fails", lambda: worker().restarts > 2)
            assert "Too many open files" in worker().reason, worker()
            _limit_descriptors(process, None)
            until("the worker is up", lambda: worker().state == "ready")
        assert not _try_round(members)
