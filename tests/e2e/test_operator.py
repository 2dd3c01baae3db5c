"""What an operator does with ``lensemblectl`` while real rounds go on."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from lensemble.ctl import requests
from tests.e2e.federation import COORDINATOR, Federation, federation, participant, until

pytestmark = pytest.mark.e2e
TERMS = {"workload": {"task": {"step_seconds": 0.05}, "inner": {"steps": 10, "batch": 1}}}
COMMAND = [sys.executable, "-m", "lensemblectl.app"]


class Console:
    """``lensemblectl`` pointed at one daemon."""

    def __init__(self, members: Federation, name: str = COORDINATOR) -> None:
        self._socket = ["--socket", str(members[name].socket)]

    def begin(self, *words: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [*COMMAND, *words, *self._socket],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ask(self, *words: str) -> tuple[int, str, str]:
        begun = self.begin(*words)
        out, err = begun.communicate(timeout=30)
        return begun.returncode, out, err


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    with federation(tmp_path_factory.mktemp("operator"), 2, **TERMS) as made:
        yield made


@pytest.fixture
def console(members: Federation) -> Console:
    return Console(members)


def test_ctrl_c_leaves_the_rounds_running(members: Federation, console: Console) -> None:
    first = members.status().round.index + bool(members.closed())
    run = console.begin("run", "--rounds", "3")
    members.wait_training(round_index=first)
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=10)
    assert run.returncode == 130, (out, err)
    assert "lensemblectl run --attach" in err
    assert members.status().run is not None
    status, out, err = console.ask("run", "--attach")
    assert status == 0, (out, err)
    assert f"rounds {first} to {first + 2}" in out
    assert re.search(r"run [0-9a-f]{16} completed: 3 rounds closed in", out), out
    assert [len(each.contributors) for each in members.closed()[first:]] == [2, 2, 2]


def test_an_aborted_run_fails_and_keeps_what_is_committed(
    members: Federation, console: Console
) -> None:
    before = len(members.closed())
    run = console.begin("run", "--rounds", "50")
    members.wait_closed(before)
    members.wait_training(round_index=before + 1)
    digest = members.status().digest
    # Over the socket itself: a process takes longer to begin than these nodes to train.
    said = members.coordinator.ask(requests.Abort(reason="cooling failed"))
    assert "is aborted and the run ends" in said.message
    out, err = run.communicate(timeout=10)
    assert run.returncode == 1
    assert re.search(r"Error: run \w+ ended with 1 of 50 rounds closed: cooling failed", err), err
    assert "Try: " in err
    rest = members.status()
    assert (rest.run, rest.digest) == (None, digest)
    assert rest.round.reason == "stopped: cooling failed"
    status, out, _ = console.ask("abort")
    assert (status, "nothing to abort" in out) == (0, True)
    status, out, err = console.ask("run", "--rounds", "1")
    assert status == 0, err
    assert members.closed()[-1].attempt == 1


def test_a_second_run_is_refused_while_one_goes_on(members: Federation, console: Console) -> None:
    members.run(3)
    members.wait_training()
    status, _, err = console.ask("run", "--rounds", "1")
    assert status == 1
    assert "goes on with" in err
    assert "lensemblectl run --attach" in err
    members.wait_rest()


def test_one_who_joins_late_takes_part_from_the_next_round(
    members: Federation, console: Console
) -> None:
    first = len(members.closed())
    members.add("late")
    members.start("late")
    status, ticket, _ = console.ask("invite", "--json")
    assert status == 0
    members.run(3)
    members.wait_training("node-0", "node-1", round_index=first)
    status, out, err = Console(members, "late").ask("join", json.loads(ticket)["ticket"])
    assert status == 0, (out, err)
    members.wait_rest()
    took_part = ["late" in each.contributors for each in members.closed()[first:]]
    assert took_part[0] is False
    assert took_part[1:] in ([True, True], [False, True])

    status, _, err = Console(members, "late").ask("leave", "--reason", "maintenance")
    assert status == 0, err
    gone = members.wait_until(
        "late has left", lambda status: not participant(status, "late").connected
    )
    assert participant(gone, "late").last_reason == "left: maintenance"
    assert members.node_status("late").link.state == "unconfigured"
    members.run(1)
    assert len(members.wait_closed(first + 3).contributors) == 2
    status, ticket, _ = console.ask("invite", "--json")
    status, _, err = Console(members, "late").ask("join", json.loads(ticket)["ticket"])
    assert status == 0, err
    members.wait_for("late")
    members.run(1)
    assert len(members.wait_closed(first + 4).contributors) == 3
    assert members["late"].stop() == 0


def test_too_few_nodes_fail_a_run_with_the_sentence_of_status(
    members: Federation, console: Console
) -> None:
    assert members["node-1"].stop() == 0
    members.wait_until("node-1 has left", lambda s: not participant(s, "node-1").connected)
    before = members.status().digest
    run = console.begin("run", "--rounds", "2", "--open-timeout", "1.5")
    waiting = "waiting for 1 more participant (have 1, quorum 2)"

    def says_so() -> bool:
        status, out, _ = console.ask("status")
        return status == 0 and waiting in out

    until("status says what is waited for", says_so, 5.0)
    _, err = run.communicate(timeout=10)
    assert run.returncode == 1
    assert waiting in err
    assert members.status().digest == before
    members.start("node-1")
    members.wait_for("node-0", "node-1")
    status, _, err = console.ask("run", "--rounds", "1")
    assert status == 0, err


def test_history_is_told_while_a_round_is_busy(members: Federation, console: Console) -> None:
    members.run(100)
    members.wait_training("node-0", "node-1")
    for words in (("status",), ("rounds",), ("round", "0"), ("events",), ("checkpoint", "ls")):
        status, out, err = console.ask(*words)
        assert (status, err) == (0, ""), words
        assert out
        status, out, err = console.ask(*words, "--json")
        assert (status, err) == (0, ""), words
        assert all(json.loads(line) for line in out.splitlines())
    status, _, err = console.ask("round", "1000")
    assert status == 1
    assert re.search(r"Try: Rounds 0 to \d+ are\.", err), err
    status, out, _ = Console(members, "node-0").ask("status")
    assert status == 0
    assert "joined" in out
    status, _, _ = console.ask("abort")
    assert status == 0
    members.wait_rest()
