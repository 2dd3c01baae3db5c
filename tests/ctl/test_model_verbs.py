"""The verbs about models, as a user runs them against a scripted coordinator."""

import json
import signal
import subprocess
from pathlib import Path

import pytest

from tests.ctl.scripted_models import RUN
from tests.ctl.test_cli import COMMAND, ENVIRONMENT, Here, ctl, daemon, here

__all__ = ["daemon", "here"]


@pytest.mark.parametrize(
    "verb",
    [
        ["plan", "tiny.gguf"],
        ["provision", "tiny.gguf"],
        ["prompt", "hello"],
        ["runs"],
        ["inspect"],
        ["trace"],
        ["teardown"],
        ["drain", "node-b", "--wait"],
    ],
)
def test_every_verb_speaks_json(here: Here, verb: list[str]) -> None:
    done = here(*verb, "--json")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines
    assert all(isinstance(json.loads(line), dict) for line in lines)


@pytest.mark.parametrize(
    ("verb", "status", "part"),
    [
        (["plan", "tiny.gguf", "--ctx", "1000"], 3, "node-a needs 2 GB"),
        (["provision", "tiny.gguf", "--ctx", "4"], 4, "not what it was"),
        (["provision", "tiny.gguf", "--ctx", "5"], 4, "stage 1 on node-b: the worker was killed"),
        (["prompt", "fault"], 5, "stage 1 on node-b"),
        (["stop"], 6, "no word within 10 s from stage 1"),
        (["prompt", "too long"], 2, "257 tokens"),
        (["prompt", "x", "--run", "not hex"], 2, "malformed"),
        (["drain", "nobody"], 1, "Try: See `lensemblectl status`"),
        (["drain", "node-b", "--undo", "--wait"], 2, ""),
        (["inspect", "--socket", "/nowhere/ctl.sock"], 69, "no daemon"),
    ],
)
def test_every_outcome_has_its_exit_status(
    here: Here, verb: list[str], status: int, part: str
) -> None:
    done = here(*verb)
    assert done.returncode == status, done
    assert part in done.stderr or status == 2


def test_last_words_of_a_worker_are_shown_without_escapes(here: Here) -> None:
    done = here("provision", "tiny.gguf", "--ctx", "5")
    assert "  | first word\n  | last" in done.stderr
    assert "\x1b" not in done.stderr + done.stdout


def test_a_provision_says_what_its_stages_do(here: Here) -> None:
    done = here("provision", "tiny.gguf")
    assert "stage 0, layers 0:2 on node-a: fetching 10 kB/50 kB" in done.stdout
    assert done.stdout.splitlines()[-1].startswith(f"run {RUN}: tiny provisioned in 8.0 s")


def test_an_answer_is_printed_as_it_is_but_for_escapes(here: Here) -> None:
    done = here("prompt", "hello")
    assert done.stdout == "Paris\n [31m🙂\n"
    assert done.stderr == ""


def test_tables_show_what_matters(here: Here) -> None:
    plan = here("plan", "tiny.gguf").stdout
    assert "node-c: 2 nodes are enough" in plan
    assert "174 MB" in plan
    runs = here("runs").stdout
    assert RUN in runs
    assert "faulted" in runs
    shown = here("inspect").stdout
    for part in ("12.5 tokens/s", "0.40 ms a hop", "151 MB", "decoding", "2:4"):
        assert part in shown
    over = here("inspect", RUN[:6]).stdout
    assert "worker_fault: stage 1 on node-b" in over


def test_links_are_shown_with_how_they_are_known_and_how_old_that_is(here: Here) -> None:
    for verb in (["plan", "tiny.gguf"], ["inspect"]):
        shown = " ".join(here(*verb).stdout.split())
        for part in (
            "coordinator to node-a: 1.50 ms (0.2s ago), at least 420 Mbit/s (seen 3min ago)",
            "node-a to node-b: 3.00 ms (4.0s ago), 9.47 Mbit/s (measured 12s ago)",
            "node-b to the coordinator: 1 ms assumed, 1000 Mbit/s assumed",
        ):
            assert part in shown, shown
    shown = " ".join(here("plan", "tiny.gguf").stdout.split())
    assert "about 4.50 ms for each token, 20.25 ms for 32 tokens of a prompt" in shown
    assert "not measured" not in shown
    measured = " ".join(here("plan", "tiny.gguf", "--measure").stdout.split())
    assert "not measured: node-a to node-b: node-b says: it is in a round" in measured
    (hop, *_) = json.loads(here("plan", "tiny.gguf", "--json").stdout)["hops"]
    assert hop == {
        "before": "", "after": "node-a", "rtt_ms": 1.5, "rtt_age_s": 0.2, "mbit_s": 420.0,
        "rate": "seen", "rate_age_s": 200.0,
    }  # fmt: skip


def test_what_was_lost_is_said_beside_an_answer_and_in_full_on_inspection(here: Here) -> None:
    done = here("prompt", "loss")
    assert done.returncode == 0
    assert done.stdout.startswith("Paris\n")
    assert done.stderr == (
        "[a stage on node-b is lost (killed by  SIGKILL); the answer goes on elsewhere]\n"
    )
    shown = " ".join(here("inspect", "aa").stdout.split())
    for part in (
        "plan 2", "on fault replace", "plan 1 was left: worker_fault, stage 1 on node-b",
        "without node-b since; pause 7.1 s, cleared 0.2 s, planned 0.3 s",
        "plan 2 was left: node-c is drained: a new disk; not ready again yet",
    ):  # fmt: skip
        assert part in shown
    made = here("provision", "tiny.gguf", "--on-fault", "replace", "--max-replacements", "2")
    assert made.returncode == 0


def test_a_drain_says_what_is_left_and_what_stays(here: Here) -> None:
    done = here("drain", "node-b", "--wait")
    assert done.stdout == "node-b is draining: run 3f2a, a round\nnode-b is drained\n"
    assert done.stderr == (
        "Note: run 3f2a stays: it ends by itself\nTry: lensemblectl drain node-b --force\n"
    )
    assert here("drain", "node-b", "--undo").stdout == "node-b is in use\n"


def test_a_trace_says_where_the_time_went(here: Here) -> None:
    lines = here("trace").stdout.splitlines()
    assert "plan 2" in lines[0]
    shown = [" ".join(line.split()) for line in lines]
    assert "0 node-a 0.50 ms 0.15 ms 0.10 ms 4.00 ms 0.05 ms" in shown
    assert "1 node-b 0.55 ms 0.40 ms 0.10 ms 4.00 ms 0.05 ms" in shown
    assert "coordinator 0.65 ms 0.25 ms" in shown
    tokens = [line.split() for line in lines if line.strip().startswith("0 ") and "10.00" in line]
    assert [each[1:3] for each in tokens] == [["3", "8"], ["4", "9"]]
    assert all("1.70" in each for each in tokens), "a trip less what its stages took"
    assert "1 more tokens" in lines[-1]


def test_a_trace_is_a_file_for_perfetto(here: Here, daemon: Path) -> None:
    done = here("trace", "--out", "trace.json", "--last", "3")
    assert "3 tokens are in trace.json" in done.stdout
    events = json.loads((daemon / "trace.json").read_text())["traceEvents"]
    names = {each["pid"]: each["args"]["name"] for each in events if each["ph"] == "M"}
    assert names[0] == "coordinator"
    assert names[2] == "stage 1 on node-b (+- 0.25 ms)"
    slices = [each for each in events if each["ph"] == "X"]
    assert all(each["dur"] >= 0 for each in slices)
    assert [each["name"] for each in slices if each["pid"] == 0] == [
        "token 3", "token 4", "token 5",
    ]  # fmt: skip
    first = [each for each in slices if each["pid"] == 1 and each["args"]["step"] == 8]
    assert [(each["name"], each["ts"], each["dur"]) for each in first] == [
        ("wait", 500, 100), ("compute", 600, 4_000), ("hand over", 4_600, 50),
    ]  # fmt: skip
    prompt = [each for each in slices if each["args"].get("what") == "32 tokens of a prompt"]
    assert len(prompt) == 6
    flows = [(each["ph"], each["pid"]) for each in events if each.get("id") == 8]
    assert flows == [("s", 0), ("f", 0), ("t", 1), ("t", 2)]
    refused = here("trace", "--out", "/nowhere/trace.json")
    assert refused.returncode != 0
    assert "cannot be written" in refused.stderr


def test_a_chat_remembers_what_was_said(daemon: Path) -> None:
    done = ctl("chat", "--json", cwd=daemon, said="hello\nfault\n")
    assert done.returncode == 5
    ends = [json.loads(line) for line in done.stdout.splitlines() if "finish" in line]
    assert [each["finish"] for each in ends] == ["stop", "faulted"]


@pytest.mark.parametrize(
    ("verb", "first"),
    [(["prompt", "for ever"], "Par"), (["provision", "tiny.gguf", "--ctx", "130"], "stage 0")],
)
def test_ctrl_c_ends_it_with_130(daemon: Path, verb: list[str], first: str) -> None:
    with subprocess.Popen(
        [*COMMAND, *verb], cwd=daemon, env=ENVIRONMENT, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        said = process.stdout.read(len(first))
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
    assert said == first
