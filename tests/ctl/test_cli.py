"""The command as a user runs it: real processes against a real socket of a scripted daemon."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import msgspec
import pytest

from lensemble import ticket
from lensemble.config import load
from lensemble.ids import FederationId, NodeId
from lensemble_coord.config import CoordinatorConfig
from lensemble_node import home
from lensemble_node.config import NodeConfig
from lensemblectl.app import answer

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "cli")]),
    "COLUMNS": "100",
    "TZ": "UTC",
}
COMMAND = [sys.executable, "-m", "lensemblectl.app"]
TICKET = ticket.encode(
    ticket.Ticket(
        coordinator=NodeId("ab" * 32),
        federation=FederationId("cd" * 16),
        addresses=("192.0.2.1:7707",),
        secret=b"sixteen bytes ok",
        expires=4_000_000_000,
    )
)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Path]:
    """The directory of a scripted daemon; its socket is where a running daemon's would be."""
    with tempfile.TemporaryDirectory(prefix="cli") as name:
        socket = Path(name) / "state" / "ctl.sock"
        served = subprocess.Popen(
            [sys.executable, "-m", "tests.ctl.scripted", str(socket)], cwd=ROOT, env=ENVIRONMENT
        )
        until = time.monotonic() + 20
        while not socket.exists() and served.poll() is None and time.monotonic() < until:
            os.sched_yield()
        yield Path(name)
        served.terminate()
        served.wait(10)


class Outcome(msgspec.Struct, frozen=True):
    returncode: int
    stdout: str
    stderr: str


Here: TypeAlias = Callable[..., Outcome]


@pytest.fixture
def here(daemon: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    """The command in this process, in the directory of the daemon: quick, and the same code."""
    monkeypatch.chdir(daemon)

    def call(*arguments: str) -> Outcome:
        status = answer(list(arguments))
        said = capsys.readouterr()
        return Outcome(status, said.out, said.err)

    return call


def ctl(*arguments: str, cwd: Path, said: str | None = None) -> Outcome:
    """The command as a process of its own."""
    done = subprocess.run(
        [*COMMAND, *arguments], cwd=cwd, env=ENVIRONMENT, input=said,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return Outcome(done.returncode, done.stdout, done.stderr)


def test_status_finds_the_daemon_of_the_directory(daemon: Path) -> None:
    done = ctl("status", cwd=daemon)
    assert done.returncode == 0
    assert done.stderr == ""
    for part in [
        "coordinator lab  lensemble 0.1.0, up 3 min 12 s",
        "plain: the coordinator sees each update",
        "round 4 COLLECTING: waiting for 1 of 3 updates (2 arrived, quorum 2); on gripper-2",
        "for 12 s, 9 min 48 s left",
        "training 31/50",
        "[2001:db8:1:2:3:4:5:6]:40113",
        "gripper-2: connection lost in round 2; refused round 2",
        "unknown_peer 1",
    ]:
        assert part in done.stdout
    assert not re.search(r"[ \x1b]$", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    "verb",
    [
        ["status"],
        ["members"],
        ["budget"],
        ["privacy", "plan", "--rounds", "3"],
        ["rounds"],
        ["round", "3"],
        ["checkpoint", "ls"],
        ["events", "--limit", "2"],
        ["invite", "--ttl", "90s"],
        ["abort"],
        ["leave"],
        ["run", "--rounds", "2"],
        ["version"],
    ],
)
def test_every_verb_speaks_json(here: Here, verb: list[str]) -> None:
    done = here(*verb, "--json")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines
    assert all(isinstance(json.loads(line), dict) for line in lines)


@pytest.mark.parametrize(
    ("verb", "part"),
    [
        (["rounds"], "9c12ab349c12"),
        (["status"], "4.377"),
        (["members"], "is suspect for 4.2 s: no answer to probes of node-a, nor of lab"),
        (["budget"], "arm-berlin: epsilon 4.377 spent, as it reports"),
        (["privacy", "plan", "--rounds", "100", "--epsilon", "8"], "need sigma 6.01"),
        (["round", "3"], "left out: cell-9: no update before the collect timeout"),
        (["checkpoint", "ls"], "can be recomputed"),
        (
            ["events", "-n", "1"],
            "2023-11-14 22:13:20  round.closed          round=0 contributors=2",
        ),
        (["abort", "--reason", "x"], "abort: x"),
    ],
)
def test_every_verb_speaks_to_people(here: Here, verb: list[str], part: str) -> None:
    done = here(*verb)
    assert (done.returncode, done.stderr) == (0, "")
    assert part in done.stdout


@pytest.mark.parametrize("how", ["state/ctl.sock", "."])
def test_the_daemon_is_named_by_socket_or_directory(here: Here, how: str) -> None:
    assert here("version", "--socket", how).stdout == ("lensemblectl 0.1.0\ncoordinator 0.1.0\n")


def test_the_daemon_is_named_by_its_configuration(here: Here, daemon: Path, tmp_path: Path) -> None:
    config = tmp_path / "x.toml"
    config.write_text(f'[ctl]\nsocket = "{daemon}/state/ctl.sock"\n')
    assert "coordinator 0.1.0" in here("version", "--config", str(config)).stdout
    config.write_text(f'state_dir = "{daemon}/state"\n')
    assert "coordinator 0.1.0" in here("version", "-s", str(config)).stdout


def test_a_run_succeeds_only_if_every_round_closed(here: Here) -> None:
    good = here("run", "--rounds", "2")
    assert good.returncode == 0
    assert good.stdout.count("round 3 CLOSED: 2 contributors (arm-berlin, gripper-2), 2.3 s") == 2
    assert good.stdout.count("COLLECTING") == 1
    assert "run 77ab completed: 2 rounds closed in 4.5 s" in good.stdout
    short = here("run", "--rounds", "7")
    assert short.returncode == 1
    assert "Error: run 77ab ended with 6 of 7 rounds closed: OPEN: 1 more" in short.stderr
    assert "\nTry: Start more nodes" in short.stderr
    assert here("run", "--rounds", "7", "--json").returncode == 1
    assert here("run", "--rounds", "7", "--detach").returncode == 0
    assert here("run", "--attach").returncode == 0


def test_interrupting_a_run_leaves_it_running(daemon: Path) -> None:
    watching = subprocess.Popen(
        [*COMMAND, "run", "--rounds", "99"],
        cwd=daemon,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert watching.stdout is not None
    assert watching.stdout.readline() == "run 77ab starts: rounds 4 to 102\n"
    watching.send_signal(signal.SIGINT)
    _, err = watching.communicate(timeout=20)
    assert watching.returncode == 130
    assert err.strip() == "The rounds go on. Watch them again: lensemblectl run --attach"


def test_a_reader_that_has_seen_enough_is_no_failure(daemon: Path) -> None:
    shell = f"{' '.join(COMMAND)} events --limit 5000 | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", shell], cwd=daemon, env=ENVIRONMENT,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "status", "error", "remedy"),
    [
        (["round", "9"], 1, "there is no round 9", "lensemblectl rounds"),
        (["run", "--rounds", "666"], 1, "a run of 5 rounds goes on", "--attach"),
        (["run"], 2, "how many rounds?", "--rounds N"),
        (["run", "--attach", "--rounds", "2"], 2, "--attach watches", "Leave out"),
        (["run", "--rounds", "0"], 2, "--rounds", "lensemblectl run --help"),
        (["run", "--rouds", "3"], 2, "--rouds", "lensemblectl run --help"),
        (["privacy", "plan", "--rounds", "0"], 2, "--rounds", "lensemblectl privacy plan --help"),
        (["frobnicate"], 2, "frobnicate", "lensemblectl --help"),
        (["invite", "--ttl", "soon"], 2, "'soon' is not a duration", "24h"),
        (["status", "-s", "/nonexistent"], 69, "no such socket", "--socket"),
        (["status", "-s", "/nonexistent/x.toml"], 2, "cannot read", "--socket"),
        (["status", "-s", "/usr"], 2, "/usr holds neither", "--socket"),
        (["checkpoint", "export", "copy"], 2, "cannot copy /nonexistent", "coordinator's host"),
        (["checkpoint", "export", "state"], 2, "exists already", "does not exist yet"),
    ],
)
def test_a_failure_has_its_status_and_says_what_to_try(
    here: Here, arguments: list[str], status: int, error: str, remedy: str
) -> None:
    done = here(*arguments)
    assert done.returncode == status
    assert done.stdout == ""
    first, last = done.stderr.splitlines()
    assert first.startswith("Error: ")
    assert error in first
    assert last.startswith("Try: ")
    assert remedy in last


def test_what_another_machine_said_cannot_steer_the_terminal(here: Here) -> None:
    done = here("abort", "--reason", "say \x1b[31mred\nError: lies")
    assert done.stdout == "abort: say  [31mred Error: lies\n"
    assert "\x1b" not in here("abort", "--reason", "\x1b]0;title\x07", "--json").stdout


def test_nobody_answers(tmp_path: Path) -> None:
    done = ctl("status", cwd=tmp_path)
    assert done.returncode == 69
    assert "no daemon is named" in done.stderr
    assert ctl("version", cwd=tmp_path).returncode == 0


def test_status_loads_neither_tensors_nor_an_event_loop(daemon: Path) -> None:
    program = (
        "import sys; from lensemblectl.app import answer; code = answer(sys.argv[1:]);"
        "heavy = {'torch', 'trio', 'numpy', 'structlog', 'iroh', 'cryptography', 'h5py'};"
        "sys.exit(code or ' '.join(heavy & set(sys.modules)) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "status"],
        cwd=daemon, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_init_makes_directories_that_the_daemons_can_load(tmp_path: Path) -> None:
    done = ctl("init", "coord", "lab", cwd=tmp_path)
    assert done.returncode == 0
    assert re.fullmatch(r"made lab, node id [0-9a-f]{64}\n", done.stdout)
    assert "lensemble-coord lab/coord.toml" in done.stderr
    coordinator = load(tmp_path / "lab" / "coord.toml", CoordinatorConfig)
    assert (coordinator.name, coordinator.workload) == ("lab", tmp_path / "lab/workload.toml")
    made = json.loads(
        ctl("init", "node", "arm-1", "--data", "d.hdf5", "--json", cwd=tmp_path).stdout
    )
    node = load(tmp_path / made["config"], NodeConfig)
    assert node.data.path == tmp_path / "d.hdf5"
    assert (tmp_path / "arm-1/state/identity.key").stat().st_mode & 0o777 == 0o600
    again = ctl("init", "node", "arm-1", cwd=tmp_path)
    assert again.returncode == 2
    assert "Error: arm-1/node.toml exists already" in again.stderr


def test_init_makes_a_federation_that_trains_nothing(tmp_path: Path) -> None:
    done = ctl("init", "coord", "lab", "--no-training", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stderr == "Next: Edit lab/coord.toml, then: lensemble-coord lab/coord.toml\n"
    assert not (tmp_path / "lab" / "workload.toml").exists()
    assert not load(tmp_path / "lab" / "coord.toml", CoordinatorConfig).trains
    made = json.loads(ctl("init", "node", "gpu", "--no-data", "--json", cwd=tmp_path).stdout)
    assert made["data"] == ""
    both = ctl("init", "node", "n", "--no-data", "--data", "d.hdf5", cwd=tmp_path)
    assert both.returncode == 2


def test_join_works_while_the_node_is_down(tmp_path: Path) -> None:
    ctl("init", "node", "n", cwd=tmp_path)
    done = ctl("join", TICKET, "--socket", "n", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout == f"joined {'ab' * 6} at 192.0.2.1:7707\n"
    assert "reaches this machine only" in done.stderr
    config = load(tmp_path / "n" / "node.toml", NodeConfig)
    assert home.membership(config) == ticket.decode(TICKET).membership()
    assert (config.state_dir / home.MEMBERSHIP_NAME).stat().st_mode & 0o777 == 0o600
    piped = ctl("join", "-", "--json", "-s", "n/node.toml", cwd=tmp_path, said=TICKET + "\n")
    assert json.loads(piped.stdout)["coordinator"] == "ab" * 32


@pytest.mark.parametrize(
    ("text", "part"), [("nonsense", "not a ticket"), (TICKET[:-5], "cut short or mistyped")]
)
def test_a_bad_ticket_is_told(tmp_path: Path, text: str, part: str) -> None:
    ctl("init", "node", "n", cwd=tmp_path)
    done = ctl("join", text, "-s", "n", cwd=tmp_path)
    assert done.returncode == 2
    assert part in done.stderr
    assert "Try: Copy the whole line" in done.stderr


def test_a_daemon_that_runs_joins_by_itself(here: Here) -> None:
    assert "join: done" in here("join", TICKET, "--json").stdout


def test_verify_names_what_is_no_state_directory(tmp_path: Path) -> None:
    done = ctl("verify", "nowhere", cwd=tmp_path)
    assert done.returncode == 2
    assert "nowhere is not a directory" in done.stderr


@pytest.mark.parametrize(
    "verb",
    [["init"], ["run"], ["status"], ["join"], ["checkpoint", "export"], ["verify"], ["data"], []],
)
def test_help_is_there(here: Here, verb: list[str]) -> None:
    done = here(*verb, "--help")
    assert done.returncode == 0
    assert "Usage: lensemblectl" in done.stdout
