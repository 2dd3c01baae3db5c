"""How daemons end, and that they begin only where they may."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.federation import Federation, Process, family, federation, until

pytestmark = pytest.mark.e2e
SLOW = {"workload": {"task": {"step_seconds": 0.2}, "inner": {"steps": 50, "batch": 1}}}
"""Ten seconds of training: a round is in flight for as long as a test looks at it."""


def _ended_well(process: Process) -> None:
    """SIGTERM: status 0 in 5 s, nothing of it left, no socket."""
    children = family(process.pid)
    began = time.monotonic()
    status = process.stop()
    assert (status, time.monotonic() - began < 5.0) == (0, True), process.last_words()
    assert not process.socket.exists()
    until("its children are gone", lambda: not [p for p in children if p.exists()], 1.0)
    assert "Traceback" not in process.log.read_text()


def test_sigterm_ends_daemons_at_rest_and_amid_a_round(tmp_path: Path) -> None:
    with federation(tmp_path, 3, **SLOW) as members:
        _ended_well(members["node-0"])
        gone = members.wait_until(
            "node-0 is away", lambda s: any(not p.connected for p in s.participants)
        )
        assert "left: the node shuts down" in [p.last_reason for p in gone.participants]
        members.run(1)
        members.wait_training("node-1", "node-2")
        _ended_well(members["node-1"])
        _ended_well(members.coordinator)
        until("node-2 retries", lambda: members.node_status("node-2").link.state == "waiting")
        link = members.node_status("node-2").link
        assert link.reason, link
        assert link.addresses
        _ended_well(members["node-2"])


def test_sigint_ends_a_coordinator_at_rest(tmp_path: Path) -> None:
    members = Federation(tmp_path, 0)
    try:
        members.start()
        members.coordinator.signal(signal.SIGINT)
        assert members.coordinator.exit_status() == 0
        assert not members.coordinator.socket.exists()
    finally:
        members.end()


def test_the_worker_of_a_killed_node_ends_with_it(tmp_path: Path) -> None:
    with federation(tmp_path, 2, **SLOW) as members:
        idle = family(members["node-0"].pid)
        assert len(idle) == 1
        members["node-0"].kill()
        until("the idle worker is gone", lambda: not idle[0].exists(), 5.0)
        members.start("node-0")
        members.wait_for()
        members.run(1)
        members.wait_training()
        busy = family(members["node-1"].pid)
        members["node-1"].kill()
        until("the busy worker is gone", lambda: not busy[0].exists(), 5.0)


def _refusal(process: Process) -> tuple[int, str]:
    """Exit status and stderr of one more daemon with the configuration of ``process``."""
    ended = subprocess.run(process.command, capture_output=True, text=True, timeout=20, check=False)
    return ended.returncode, ended.stderr


def test_a_state_directory_has_one_daemon(tmp_path: Path) -> None:
    with federation(tmp_path, 1) as members:
        for process in members.processes():
            status, said = _refusal(process)
            last = said.splitlines()[-2:]
            assert status == 1
            assert last[0].startswith("fatal: "), said
            assert f"in use by the process with pid {process.pid}" in last[0]
            assert last[1].startswith("Try: "), said
            assert process.serves()


WRONG = {
    "no_such_key = 1\n": "line 1: no_such_key: no such key",
    "name = 3\n": "line 1: name = 3: ",
    "name = \n": "line 1",
    "[listen]\nheartbeat_s = 100.0\n": "line 2: listen.heartbeat_s = 100.0: ",
}


@pytest.mark.parametrize("module", ["lensemble_coord", "lensemble_node"])
def test_a_wrong_configuration_is_refused_by_key_and_value(tmp_path: Path, module: str) -> None:
    begun = []
    for index, text in enumerate(WRONG):
        (config := tmp_path / f"{index}.toml").write_text(text)
        command = [sys.executable, "-m", module, str(config)]
        begun.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
    for popen, named in zip(begun, WRONG.values(), strict=True):
        _, said = popen.communicate(timeout=20)
        assert popen.returncode == 2, said
        error, remedy = said.splitlines()[:2]
        assert error.startswith(f"Error: {tmp_path}"), said
        assert named in error
        assert remedy.startswith("Try: "), said
    assert not (tmp_path / "state").exists()
