"""Two processes with one identity: the older session is fenced, and the newer one works."""

import shutil
import signal
from pathlib import Path

import pytest

from lensemble.ctl import replies
from tests.e2e.federation import federation, until

pytestmark = pytest.mark.e2e
TERMS = {
    "workload": {"task": {"parameters": 2000, "step_seconds": 0.02}, "inner": {"steps": 10}},
    "coordinator": {"rounds": {"aggregation": "plain", "min_participants": 2}},
}


def test_a_node_that_was_copied_and_comes_back_is_fenced(tmp_path: Path) -> None:
    """It falls silent, its copy takes part; what it says when it wakes counts nothing."""
    with federation(tmp_path, 2, **TERMS) as members:
        first, twin = members["node-0"], members.add("twin")
        shutil.copytree(first.place / "state", twin.place / "state")
        (twin.place / "state" / "lock").unlink()
        node, old = members.participant("node-0").node, members.participant("node-0").epoch
        members.start("twin")

        def kept_out() -> bool:
            link = members.node_status("twin").link
            return link.state != "joined" and "answers there" in link.reason

        until("the second holder is told of the first", kept_out)
        assert members.participant("node-0").epoch == old

        first.signal(signal.SIGSTOP)
        members.wait_for("twin", within_s=30.0)
        now = _holder(members.status(), node)
        assert (now.name, now.connected) == ("twin", True)
        assert now.epoch > old
        members.run(1)
        members.wait_training("twin")
        # In mid-round it wakes, with all that it had to say in an older session.
        first.signal(signal.SIGCONT)
        closed = members.wait_closed(0)
        assert sorted(closed.contributors) == ["node-1", "twin"]
        until("the first knows", lambda: members.node_status("node-0").link.state != "joined")
        assert _holder(members.status(), node).epoch == now.epoch, "the older one came between"
        members.run(1)
        assert sorted(members.wait_closed(1).contributors) == ["node-1", "twin"]
        twin.stop()
        members.wait_for("node-0", within_s=30.0)
        assert _holder(members.status(), node).epoch > now.epoch


def _holder(status: replies.CoordinatorStatus, node: str) -> replies.ParticipantStatus:
    (found,) = [each for each in status.participants if each.node == node]
    return found
