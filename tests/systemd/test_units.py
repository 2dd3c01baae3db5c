"""The units as systemd judges them, and as it runs them on a host of its own."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.systemd.host import UNITS, Host, booted, install, refusal
from tests.tiny_gguf import write_tiny

MOST_EXPOSED = 4.0
WITHIN_S = 40.0
COORD, NODE = "/etc/lensemble/coord", "/etc/lensemble/node"
CTL = "/opt/lensemble/bin/lensemblectl"

needs_analyze = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze here"
)


@needs_analyze
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_is_no_more_exposed_than_allowed(unit: Path) -> None:
    command = ("systemd-analyze", "security", "--offline=true", "--no-pager", str(unit))
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    found = re.search(r"Overall exposure level for \S+: ([0-9.]+)", said)
    assert found, said
    assert float(found[1]) <= MOST_EXPOSED, said


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """A host on which both daemons are installed and belong together, and nothing runs yet."""
    reason = refusal()
    if reason:
        pytest.skip(reason)
    place = tmp_path_factory.mktemp("host")
    with booted(place) as host:
        install(host)
        arm = ("--out", "/srv", "--nodes", "1", "--episodes", "8", "--engine", "numpy")
        host.run(sys.executable, "-m", "lensemble_local.arm", *arm)
        host.put(write_tiny(place / "tiny.gguf"), "/srv/tiny.gguf")
        host.run(CTL, "init", "coord", COORD, "--system")
        host.run(CTL, "init", "node", NODE, "--system", "--data", "/srv/node0.h5")
        change(host, f"{COORD}/coord.toml", "min_participants = 1", 'aggregation = "plain"')
        change(host, f"{NODE}/node.toml", "plain = true")
        yield host


@needs_analyze
def test_the_units_hold_what_they_name(host: Host) -> None:
    said = host.run("systemd-analyze", "verify", *(unit.name for unit in UNITS), check=False)
    assert said == ""


def change(host: Host, path: str, *lines: str) -> None:
    """Have the commented configuration at ``path`` say ``lines`` where their keys stand."""
    for line in lines:
        key = line.split(" = ")[0]
        host.run("sed", "-i", f"s/^#{key} = .*/{line}/", path)
        host.run("grep", "-q", f"^{line}$", path)


def started(host: Host, unit: str) -> None:
    """Start a unit, which returns when the daemon has said that it is ready."""
    host.run("systemctl", "start", unit, check=False)
    said = host.run("tail", "-n", "40", f"/run/{unit}.log", check=False)
    assert host.shown(unit, "ActiveState") == "active", said


@pytest.mark.e2e
@pytest.mark.iroh
def test_both_daemons_train_and_answer_under_their_units(host: Host) -> None:
    started(host, "lensemble-coord")
    started(host, "lensemble-node")
    ticket = host.run(CTL, "invite", "--socket", COORD)
    host.run(CTL, "join", ticket.strip(), "--socket", NODE)
    host.until(
        "the node has joined",
        lambda: host.shown("lensemble-node", "StatusText").startswith("joined"),
        WITHIN_S,
    )
    host.run(CTL, "run", "--rounds", "1", "--socket", COORD)
    host.run(CTL, "provision", "/srv/tiny.gguf", "--ctx", "64", "--socket", COORD)
    host.run(CTL, "prompt", "ab", "--max-tokens", "4", "--socket", COORD)
    assert host.shown("lensemble-coord", "StatusText").startswith("round ")
    before = host.shown("lensemble-coord", "MainPID")
    host.run("systemctl", "reload", "lensemble-coord")
    host.run(CTL, "status", "--socket", COORD)
    assert host.shown("lensemble-coord", "MainPID") == before


@pytest.mark.e2e
@pytest.mark.iroh
@pytest.mark.parametrize("unit", ["lensemble-coord", "lensemble-node"])
def test_a_daemon_whose_loop_stands_still_is_started_again(host: Host, unit: str) -> None:
    started(host, unit)
    before = host.shown(unit, "MainPID")
    restarts = int(host.shown(unit, "NRestarts"))
    host.run("kill", "-STOP", before)
    host.until(
        f"{unit} runs again",
        lambda: (
            host.shown(unit, "MainPID") not in {before, "0"}
            and host.shown(unit, "ActiveState") == "active"
        ),
        WITHIN_S,
    )
    assert int(host.shown(unit, "NRestarts")) == restarts + 1


@pytest.mark.e2e
@pytest.mark.iroh
@pytest.mark.parametrize("unit", ["lensemble-node", "lensemble-coord"])
def test_a_stop_leaves_nothing_behind(host: Host, unit: str) -> None:
    started(host, unit)
    host.run("systemctl", "stop", unit)
    assert host.shown(unit, "Result") == "success"
    assert host.run("pgrep", "-u", unit, check=False) == ""
    part = unit.removeprefix("lensemble-")
    assert part not in host.run("ls", "/run/lensemble").split()
