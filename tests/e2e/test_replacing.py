"""A model over real nodes that loses a stage, or its coordinator, and goes on.

All of it: ``pytest -m "soak or not soak" tests/e2e/test_replacing.py``.
"""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lensemble.ctl import replies, requests
from tests.e2e.federation import until
from tests.e2e.serving import Asking, Serving, Told, serving
from tests.e2e.test_inference import gone, words

pytestmark = pytest.mark.e2e

SPLIT = "0:1@node-0,1:2@node-1,2:4@node-2"
KILLED_AT = 20
MOST = 50
SEEDED = {"temperature": 1.5, "top_k": 50, "top_p": 0.9, "repeat_penalty": 1.2, "seed": 11}
READY_S = 120.0
"""A replacement compiles, on a machine that may be busy."""


@pytest.fixture
def here(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Serving]:
    with serving(tmp_path, getattr(request, "param", 4)) as made:
        yield made


def replacing(here: Serving, **terms: object) -> str:
    return here.run(SPLIT, on_fault="replace", **terms)


def two_askings(here: Serving, run: str) -> tuple[Asking, Asking]:
    """A greedy answer and a seeded one, both at the token where something is killed."""
    asked = here.asking(run, words(5), MOST), here.asking(run, words(7), MOST, **SEEDED)
    for each in asked:
        each.until(KILLED_AT)
    return asked


def undisturbed(here: Serving, run: str) -> tuple[Told, Told]:
    return here.ask(run, words(5), MOST), here.ask(run, words(7), MOST, **SEEDED)


def same(told: Told, wanted: Told) -> None:
    assert told.end.fault is None, told.end.fault
    assert (told.tokens, told.text, told.end.finish) == (
        wanted.tokens, wanted.text, wanted.end.finish,
    )  # fmt: skip
    assert told.end.completion_tokens == wanted.end.completion_tokens


def back(here: Serving, run: str, within_s: float = READY_S) -> replies.ModelRunStatus:
    """The status of ``run`` once it takes requests again."""

    def found() -> replies.ModelRunStatus | None:
        status = here.inspect(run)
        assert not status.outcome, status
        return status if status.takes_requests else None

    return until(f"run {run} takes requests", found, within_s)


def test_the_middle_worker_is_killed_and_answers_are_those_of_the_undisturbed_run(
    here: Serving,
) -> None:
    run = replacing(here, sessions=2)
    wanted = undisturbed(here, run)
    asked = two_askings(here, run)
    victim = here.stage_pid("node-1", run)
    os.kill(victim, signal.SIGKILL)
    for each, whole in zip(asked, wanted, strict=True):
        told = each.rest()
        same(told, whole)
        assert [(each.name, each.planned) for each in told.pauses] == [("node-1", False)]
    status = here.inspect(run)
    assert (status.run_epoch, status.state) == (2, "provisioned")
    assert [each.name for each in status.stages] == ["node-0", "node-3", "node-2"]
    (left,) = status.replacements
    assert left.fault is not None
    assert (left.fault.code, left.fault.name, left.dropped_name) == (
        "worker_fault", "node-1", "node-1",
    )  # fmt: skip
    assert "SIGKILL" in left.reason
    # What the survivors had in their caches was not fetched again.
    fetched = {each.name: each.fetched_bytes for each in status.stages}
    assert fetched["node-0"] == fetched["node-2"] == 0
    gone([victim])
    assert here.workers("node-1") == []
    print(f"pause {left.ready_s:.2f} s, of which teardown {left.cleared_s:.2f} s")


@pytest.mark.soak
def test_the_daemon_of_the_middle_stage_is_killed(here: Serving) -> None:
    run = replacing(here, sessions=2)
    wanted = undisturbed(here, run)
    asked = two_askings(here, run)
    orphans = here.workers("node-1")
    here["node-1"].kill()
    for each, whole in zip(asked, wanted, strict=True):
        same(each.rest(), whole)
    status = here.inspect(run)
    assert status.run_epoch == 2, status.replacements
    assert status.replacements[0].dropped_name == "node-1"
    gone(orphans)


@pytest.mark.soak
def test_a_worker_that_stands_still_is_replaced_too(here: Serving) -> None:
    run = replacing(here, sessions=2)
    wanted = undisturbed(here, run)
    asked = two_askings(here, run)
    victim = here.stage_pid("node-1", run)
    os.kill(victim, signal.SIGSTOP)
    for each, whole in zip(asked, wanted, strict=True):
        same(each.rest(), whole)
    (left,) = here.inspect(run).replacements
    assert left.fault is not None
    assert (left.fault.code, left.dropped_name) == ("stage_stalled", "node-1")
    gone([victim])


@pytest.mark.soak
@pytest.mark.parametrize("here", [3], indirect=True)
def test_without_a_spare_there_is_one_fault_and_the_survivors_are_free(here: Serving) -> None:
    run = replacing(here)
    asking = here.asking(run, words(5), MOST)
    asking.until(KILLED_AT)
    began = time.monotonic()
    os.kill(here.stage_pid("node-1", run), signal.SIGKILL)
    told = asking.rest()
    over = here.until_over(run)
    took = time.monotonic() - began
    assert told.end.fault == over.fault
    assert over.fault is not None
    assert over.fault.code == "plan_infeasible"
    for part in ("SIGKILL", "3 stages by hand", "2 can hold one", "node-0 needs"):
        assert part in over.fault.reason
    assert (over.outcome, over.teardown) == ("faulted", "clean")
    assert all(here.workers(f"node-{index}") == [] for index in range(3))
    again = here.run("0:2@node-0,2:4@node-2")
    assert len(here.ask(again, words(5), most=6).tokens) == 6
    print(f"one fault after {took:.2f} s")


@pytest.mark.soak
def test_a_coordinator_that_is_killed_brings_its_run_back_on_the_same_nodes(here: Serving) -> None:
    run = replacing(here)
    wanted = here.ask(run, words(5), MOST)
    asking = here.asking(run, words(5), MOST)
    asking.until(KILLED_AT)
    fails = here.run("0:4@node-3")
    orphans = [pid for index in range(4) for pid in here.workers(f"node-{index}")]
    assert len(orphans) == 4
    with asking.client:
        here.coordinator.kill()
    gone(orphans)
    here.start("coordinator")
    status = back(here, run)
    assert status.run_epoch == 2
    assert [each.name for each in status.stages] == ["node-0", "node-1", "node-2"]
    same(here.ask(run, words(5), MOST), wanted)
    over = here.inspect(fails)
    assert over.fault is not None
    assert (over.outcome, over.fault.code) == ("faulted", "coordinator_restarted")


@pytest.mark.soak
def test_a_coordinator_that_is_killed_while_it_provisions(here: Serving) -> None:
    begun = here.provision(SPLIT, on_fault="replace", detach=True)
    other = here.provision("0:4@node-3", detach=True)
    until("every worker has begun", lambda: _begun(here, begun.run, other.run), 60.0)
    orphans = [pid for index in range(4) for pid in here.workers(f"node-{index}")]
    here.coordinator.kill()
    gone(orphans)
    here.start("coordinator")
    status = back(here, begun.run)
    assert status.run_epoch == 2
    assert [each.name for each in status.stages] == ["node-0", "node-1", "node-2"]
    assert here.inspect(other.run).outcome == "faulted"
    assert len(here.ask(begun.run, words(5), most=6).tokens) == 6


def _begun(here: Serving, *runs: str) -> bool:
    statuses = [here.inspect(run) for run in runs]
    assert not any(each.takes_requests for each in statuses), "it was ready too soon"
    return sum(len(here.workers(f"node-{index}")) for index in range(4)) == 4


@pytest.mark.soak
def test_a_drained_node_is_left_in_the_midst_of_an_answer(here: Serving) -> None:
    run = replacing(here, sessions=2)
    wanted = undisturbed(here, run)
    asked = two_askings(here, run)
    drain = requests.Drain(node="node-1", wait=True)
    with asked[0].client, asked[1].client:
        *_, status = here.coordinator_stream(drain)
        assert (status.state, status.stays) == ("drained", ())
        for each, whole in zip(asked, wanted, strict=True):
            same(each.rest(), whole)
    assert here.inspect(run).run_epoch == 2
    here.coordinator.kill()
    here.start("coordinator")
    here.wait_for()
    assert here.participant("node-1").drain == "drained"
    assert back(here, run).stages[1].name == "node-3"
    assert here.coordinator.ask(requests.Drain(node="node-1", undo=True)).state == "in use"
