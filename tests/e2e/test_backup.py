"""A backup of a federation that is at work, laid out again elsewhere, and gone on with."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lensemble.state_dir import CHARGES
from lensemble_coord.config import CoordinatorConfig
from lensemble_node.config import NodeConfig
from lensemblectl import places
from tests.e2e.federation import Federation, federation

pytestmark = pytest.mark.e2e
COMMAND = [sys.executable, "-m", "lensemblectl.app"]
TERMS = {"workload": {"task": {"parameters": 50_000}}}


def ctl(*words: str, status: int = 0) -> str:
    done = subprocess.run(
        [*COMMAND, *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def lose(place: Path) -> None:
    """What a dead disk leaves of a daemon's directory: nothing."""
    shutil.rmtree(place)
    place.mkdir(mode=0o700)


def test_a_federation_goes_on_from_the_backup_of_a_working_day(tmp_path: Path) -> None:
    with federation(tmp_path, 2, **TERMS) as members:
        members.run(40)
        members.wait_closed(2)
        archives = {}
        for name in ("coordinator", "node-0"):
            archives[name] = tmp_path / f"{name}.tar"
            ctl("backup", str(archives[name]), "--socket", str(members[name].config))
        kept = json.loads(
            ctl("rounds", "--limit", "100", "--json", "--socket", str(members.coordinator.socket))
        )
        assert archives["coordinator"].stat().st_mode & 0o777 == 0o600
        members.end()
        # The node is lost later than the coordinator was copied; both come back as they were.
        for name, archive in archives.items():
            place = members[name].place
            lose(place)
            ctl("restore", str(archive), str(place))
        assert "sound" in ctl("verify", str(members.state_dir))
        members.start()
        members.wait_for()
        there = members.closed()
        assert len(there) >= 3
        assert [each.digest for each in there] == [
            each["digest"] for each in kept["rounds"][: len(there)]
        ]
        # The run was on its way when the copy was made, and it is again.
        members.wait_closed(len(there))


@pytest.fixture
def stopped(tmp_path: Path) -> Federation:
    """A coordinator and a node that have run once, and do not run."""
    with federation(tmp_path, 2) as members:
        members.run(1)
        members.wait_closed(0)
        members.wait_rest()
    return members


def test_what_is_not_whole_or_not_safe_is_refused_and_leaves_nothing(
    stopped: Federation, tmp_path: Path
) -> None:
    archive, there = tmp_path / "coord.tar", tmp_path / "there"
    config = str(stopped.coordinator.config)
    ctl("backup", str(archive), "--socket", config)
    assert "exists already" in ctl("backup", str(archive), "--socket", config, status=1)
    content = bytearray(archive.read_bytes())

    def refused(changed: bytes, said: str) -> None:
        (tmp_path / "changed.tar").write_bytes(changed)
        answer = ctl("restore", str(tmp_path / "changed.tar"), str(there), status=1)
        assert said in answer
        assert "Try: " in answer
        assert list(there.iterdir()) == []

    at = content.index(b"SQLite format 3") + 5000
    flipped = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
    refused(flipped, "state/ledger.sqlite in")
    refused(content[: len(content) // 2], "cut short")
    refused(b"not an archive", "not a backup")
    ctl("restore", str(archive), str(there))
    assert "exists already" in ctl("restore", str(archive), str(there), status=1)


def test_a_budget_as_it_was_is_restored_only_on_somebodys_word(
    stopped: Federation, tmp_path: Path
) -> None:
    node = stopped.nodes["node-0"]
    charges = node.place / "state" / CHARGES[0]
    charges.parent.mkdir(exist_ok=True)
    charges.write_text("{}\n")
    archive, there = tmp_path / "node.tar", tmp_path / "there"
    ctl("backup", str(archive), "--socket", str(node.config))
    assert "privacy budget" in ctl("restore", str(archive), str(there), status=1)
    ctl("restore", str(archive), str(there), "--none-since")
    assert (there / "state" / CHARGES[0]).read_text() == "{}\n"


def test_the_tables_that_tell_a_node_are_those_that_only_a_node_has() -> None:
    only = NodeConfig.model_fields.keys() - CoordinatorConfig.model_fields.keys()
    assert only >= places.NODE_TABLES
