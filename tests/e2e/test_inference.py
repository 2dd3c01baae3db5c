"""A model over real nodes: the same answers as the whole, and what happens when something dies."""

import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lensemble.ctl import replies, requests
from lensemble.ctl.client import Declined
from tests.e2e.federation import family, until
from tests.e2e.serving import CTX, DEADLINE_S, ROWS, Serving, Told, serving
from tests.node.range_server import serving as served
from tests.tiny_gguf import write_tiny

pytestmark = pytest.mark.e2e

SPLIT = "0:2@node-0,2:4@node-1"
WHOLE = "0:4@node-1"
HEARTBEAT_TIMEOUT_S = 1.0
WORKER_S, DAEMON_S, STALL_S = 2.0, HEARTBEAT_TIMEOUT_S + 1.0, DEADLINE_S + 1.0
BUSY_S = 1.0
"""Granted to a machine that does other things too; the figures in notes are of a quiet one."""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(tmp_path_factory.mktemp("split"), 2) as made:
        yield made


@pytest.fixture(scope="module")
def runs(here: Serving) -> tuple[str, str]:
    """The model split over two nodes with four sessions, and whole on one of them."""
    return here.run(SPLIT, sessions=4), here.run(WHOLE)


def words(count: int) -> str:
    """A text of ``count`` tokens in the tiny model."""
    return "".join("xyz."[index % 4] for index in range(count))


@pytest.mark.parametrize("count", [1, ROWS - 1, ROWS, ROWS + 1, CTX - 3, CTX])
def test_a_split_model_answers_as_the_whole(
    here: Serving, runs: tuple[str, str], count: int
) -> None:
    split, whole = runs
    answers = [here.ask(run, words(count), most=6) for run in (split, whole)]
    assert answers[0].end.prompt_tokens == count
    assert len(answers[0].tokens) == min(6, CTX - count + 1)
    assert answers[0].tokens == answers[1].tokens


def test_seeded_sampling_is_the_same_wherever_the_model_is_cut(
    here: Serving, runs: tuple[str, str]
) -> None:
    terms = {"temperature": 1.5, "top_k": 50, "top_p": 0.9, "repeat_penalty": 1.2, "seed": 11}
    first, second = (here.ask(run, "hello", most=12, **terms) for run in runs)
    assert first.tokens == second.tokens
    assert first.tokens != here.ask(runs[0], "hello", most=12, **{**terms, "seed": 12}).tokens


def test_four_sessions_answer_as_each_alone_and_a_fifth_queues(
    here: Serving, runs: tuple[str, str]
) -> None:
    split, _ = runs
    texts = [words(3 + 5 * index) for index in range(6)]
    alone = [here.ask(split, text, most=20).tokens for text in texts]
    together: dict[int, Told] = {}

    def ask(index: int) -> None:
        together[index] = here.ask(split, texts[index], most=20)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(texts))]
    for thread in threads:
        thread.start()
    most, waiting = 0, 0
    while any(thread.is_alive() for thread in threads):
        status = here.inspect(split)
        held = [each.slot for each in status.requests if each.slot is not None]
        assert len(set(held)) == len(held) <= 4
        most, waiting = max(most, len(held)), max(waiting, len(status.requests) - len(held))
    for thread in threads:
        thread.join()
    assert [together[index].tokens for index in range(len(texts))] == alone
    assert sum(told.end.queued_s > 0.01 for told in together.values()) >= 1
    assert most >= 2


def test_one_token_too_many_is_refused_before_any_traffic(
    here: Serving, runs: tuple[str, str]
) -> None:
    split, _ = runs
    before = [each.chunks for each in here.inspect(split).stages]
    with pytest.raises(Declined) as caught:
        here.ask(split, words(CTX + 1))
    assert caught.value.reply.code == "context_length_exceeded"
    assert f"{CTX + 1}" in caught.value.reply.message
    assert f"{CTX}" in caught.value.reply.message
    assert [each.chunks for each in here.inspect(split).stages] == before


def test_ctrl_c_frees_the_session_within_a_step(here: Serving, runs: tuple[str, str]) -> None:
    _, whole = runs
    command = [here.coordinator.command[0], "-m", "lensemblectl.app", "prompt", "hi", "--raw"]
    command += [
        "--run",
        whole,
        "--max-tokens",
        "60",
        "--json",
        f"--socket={here.coordinator.socket}",
    ]
    before = here.inspect(whole).finished.get("cancelled", 0)
    for _ in range(5):
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as asking:
            assert asking.stdout is not None
            asking.stdout.readline()
            asking.send_signal(signal.SIGINT)
            status = asking.wait(20)
        began = time.monotonic()
        until("the session is free", lambda: not here.inspect(whole).requests, 5.0)
        assert time.monotonic() - began < BUSY_S
        if status == 130:
            break
    assert status == 130, "the answer was always faster than Ctrl-C"
    assert here.inspect(whole).finished["cancelled"] > before
    assert len(here.ask(whole, "hi", most=5).tokens) == 5


def test_what_does_not_fit_fetches_nothing(here: Serving, runs: tuple[str, str]) -> None:
    before = len(here.coordinator.ask(requests.ModelRuns()).runs)
    with pytest.raises(Declined) as caught:
        here.provision(SPLIT, ctx=1 << 19)
    assert caught.value.reply.code == "plan_infeasible"
    assert len(here.coordinator.ask(requests.ModelRuns()).runs) == before


# ---- what dies ----


def faulted(here: Serving, run: str, within_s: float, began: float) -> replies.FaultStatus:
    """The one fault of ``run``, which ended so soon after ``began``."""
    over = here.until_over(run)
    took = time.monotonic() - began
    assert over.outcome == "faulted", over
    assert over.fault is not None
    assert took < within_s + BUSY_S, (took, over.fault)
    return over.fault


def gone(pids: list[int]) -> None:
    """No orphan after 5 s."""
    until(f"{pids} are gone", lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 5.0)


def test_a_killed_worker_ends_its_run_and_nothing_else(
    here: Serving, runs: tuple[str, str]
) -> None:
    split, whole = runs
    victim = here.stage_pid("node-1", split)
    asking = here.asking(split, words(5), most=50)
    asking.first()
    began = time.monotonic()
    subprocess.run(["kill", "-KILL", str(victim)], check=True)
    told = asking.rest()
    fault = faulted(here, split, WORKER_S, began)
    assert (fault.stage, fault.name) == (1, "node-1")
    assert "SIGKILL" in fault.reason
    assert told.end.fault == fault
    over = here.inspect(split)
    assert over.teardown == "clean", over.complaints
    assert len(here.ask(whole, words(5), most=5).tokens) == 5
    assert here.workers("node-0") == []
    gone([victim])
    again = here.run(SPLIT)
    assert here.ask(again, words(5), most=6).tokens == here.ask(whole, words(5), most=6).tokens


@pytest.mark.soak
def test_a_stopped_worker_is_named_at_the_deadline(tmp_path: Path) -> None:
    with serving(tmp_path, 2) as here:
        run = here.run(SPLIT)
        asking = here.asking(run, words(5), most=50)
        asking.first()
        began = time.monotonic()
        subprocess.run(["kill", "-STOP", str(here.stage_pid("node-0", run))], check=True)
        told = asking.rest()
        fault = faulted(here, run, STALL_S, began)
        assert (fault.code, fault.stage, fault.name) == ("stage_stalled", 0, "node-0")
        assert told.end.fault == fault
        until("no worker is left", lambda: not here.workers("node-0"), 10.0)
        again = here.run(SPLIT)
        assert len(here.ask(again, words(5), most=6).tokens) == 6


@pytest.mark.soak
def test_a_killed_daemon_is_named_and_leaves_no_orphan(tmp_path: Path) -> None:
    with serving(tmp_path, 3) as here:
        other = here.run("0:4@node-2")
        run = here.run(SPLIT)
        orphans = here.workers("node-1")
        asking = here.asking(run, words(5), most=50)
        asking.first()
        began = time.monotonic()
        here["node-1"].kill()
        told = asking.rest()
        fault = faulted(here, run, DAEMON_S, began)
        assert (fault.stage, fault.name) == (1, "node-1")
        assert told.end.fault == fault
        gone(orphans)
        assert len(here.ask(other, words(5), most=6).tokens) == 6
        here.start("node-1")
        here.wait_for()
        again = here.run(SPLIT)
        assert len(here.ask(again, words(5), most=6).tokens) == 6


@pytest.mark.soak
def test_a_killed_coordinator_leaves_nothing_behind(tmp_path: Path) -> None:
    with serving(tmp_path, 2) as here:
        run = here.run(SPLIT)
        orphans = [*here.workers("node-0"), *here.workers("node-1")]
        assert len(orphans) == 2
        asking = here.asking(run, words(5), most=50)
        asking.first()
        with asking.client:
            here.coordinator.kill()
        gone(orphans)
        for name in ("node-0", "node-1"):
            assert here.node_status(name).stages == ()
        here.start("coordinator")
        here.wait_for()
        until("both have said what they can hold", lambda: here.offered() == 2, 20.0)
        again = here.run(SPLIT)
        assert len(here.ask(again, words(5), most=6).tokens) == 6
        assert all(family(here[name].pid) for name in ("node-0", "node-1"))


@pytest.mark.soak
def test_nodes_fetch_by_themselves_from_a_path_or_a_url(tmp_path: Path) -> None:
    with serving(tmp_path, 2) as here:
        sent = here.run(WHOLE)
        wanted = here.ask(sent, words(5), most=6).tokens
        by_path = here.run(SPLIT, fetch="path")
        assert here.ask(by_path, words(5), most=6).tokens == wanted
        # Another file: what one run has fetched is not fetched again.
        other = write_tiny(tmp_path / "other.gguf", layers=4, seed=5)
        with served(other.read_bytes()) as origin:
            status = here.provision(SPLIT, model=origin.url)
            assert status.takes_requests, status.fault
            fetched = [each.fetched_bytes for each in status.stages]
            assert sum(fetched) <= 1.02 * 2 * other.stat().st_size
        by_url = here.ask(status.run, words(5), most=6).tokens
        whole = here.run("0:4@node-0", model=str(other))
        assert here.ask(whole, words(5), most=6).tokens == by_url
        assert by_url != wanted
