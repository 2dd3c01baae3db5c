"""A node that is put out, and one that gets another key."""

import subprocess
import sys
from pathlib import Path

import pytest

from lensemble.ctl import replies, requests
from tests.e2e.federation import Federation, federation, until

pytestmark = pytest.mark.e2e
COMMAND = [sys.executable, "-m", "lensemblectl.app"]


def ctl(*words: str, status: int = 0) -> str:
    done = subprocess.run(
        [*COMMAND, *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def refused(members: Federation, name: str) -> replies.NodeStatus:
    def look() -> replies.NodeStatus | None:
        status = members.node_status(name)
        return status if status.link.state == "refused" else None

    return until(f"{name} is refused", look)


def test_a_revoked_node_is_put_out_for_good_and_its_next_key_comes_in(tmp_path: Path) -> None:
    hub = ("--socket", str(tmp_path / "coordinator" / "ctl.sock"))
    slow = {"task": {"step_seconds": 0.05}, "inner": {"steps": 20, "batch": 1}}
    with federation(tmp_path, 3, workload=slow) as members:
        members.run(1)
        members.wait_training()
        assert "is revoked" in ctl("revoke", "node-2", "--reason", "a stolen disk", *hub)
        # In the midst of a round it is as any other loss: those that are left close it.
        assert set(members.wait_closed(0).contributors) == {"node-0", "node-1"}
        status = refused(members, "node-2")
        assert "a stolen disk" in status.link.reason
        ticket = members.coordinator.ask(requests.Invite(uses=1)).ticket
        members["node-2"].ask(requests.Join(ticket=ticket))
        assert "a stolen disk" in refused(members, "node-2").link.reason
        members.coordinator.stop()
        members.start("coordinator")
        assert "a stolen disk" in refused(members, "node-2").link.reason

        config = str(members["node-2"].config)
        assert "is in use by" in ctl("rotate-key", "--socket", config, status=1)
        members["node-2"].stop()
        before = (members["node-2"].place / "state" / "identity.key").read_bytes()
        assert "revoke" in ctl("rotate-key", "--socket", config)
        key = members["node-2"].place / "state" / "identity.key"
        assert key.read_bytes() != before
        assert key.stat().st_mode & 0o777 == 0o600
        assert before not in {each.read_bytes() for each in key.parent.iterdir() if each.is_file()}
        members.start("node-2")
        members.join("node-2")
        assert "is revoked" not in ctl("revoke", "node-0", "--undo", *hub)


def test_who_is_meant_has_to_be_known(tmp_path: Path) -> None:
    hub = ("--socket", str(tmp_path / "coordinator" / "ctl.sock"))
    with federation(tmp_path, 2):
        assert "no node 'nobody' has ever joined" in ctl("revoke", "nobody", *hub, status=1)
