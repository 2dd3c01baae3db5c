"""SIGHUP: what can change without a restart does, the rest is named; a bad file changes nothing."""

import signal
from pathlib import Path

import pytest

from lensemble.ctl import requests
from lensemble.ctl.client import Declined
from tests.e2e.federation import Process, federation, until

pytestmark = pytest.mark.e2e


def change(process: Process, before: str, after: str, says: str) -> str:
    """Edit the configuration, have the daemon read it again, and wait for what it logs."""
    text = process.config.read_text()
    assert before in text
    process.config.write_text(text.replace(before, after))
    seen = process.log.read_text().count(says)
    process.signal(signal.SIGHUP)
    until(f"it logs {says}", lambda: process.log.read_text().count(says) > seen)
    return process.last_words(1)


def test_a_changed_file_is_followed_as_far_as_that_goes(tmp_path: Path) -> None:
    terms = {"coordinator": {"admission": {"invites": True}}, "node": {"log": {"level": "info"}}}
    with federation(tmp_path, 1, **terms) as members:
        hub, node = members.coordinator, members["node-0"]
        said = change(hub, "invites = true", "invites = false", "config.read")
        assert '"adopted":["admission.invites"]' in said.replace(" ", "")
        with pytest.raises(Declined, match="allow-list only"):
            hub.ask(requests.Invite(uses=1))
        said = change(hub, "min_participants = 2", "min_participants = 1", "config.read")
        assert '"needs_restart":["rounds.min_participants"]' in said.replace(" ", "")
        said = change(hub, "min_participants = 1", "min_participants = 0", "config.refused")
        assert "rounds.min_participants" in said
        said = change(node, 'level = "info"', 'level = "debug"', "config.read")
        assert '"adopted":["log.level"]' in said.replace(" ", "")
        assert members.node_status("node-0").link.state == "joined"
