"""Nodes and workers that are killed while a round is in flight, and come back."""

import os
import signal
import time
from pathlib import Path

import pytest

from lensemble.ctl import requests
from tests.e2e.federation import Federation, federation, until

pytestmark = pytest.mark.e2e
NODES = 4
TERMS = {
    "workload": {"task": {"step_seconds": 0.05}, "inner": {"steps": 50, "batch": 1}},
    "coordinator": {
        "listen": {"heartbeat_s": 1.0, "heartbeat_timeout_s": 3.0},
        "rounds": {"min_participants": 2, "collect_timeout_s": 600.0, "open_grace_s": 30.0},
    },
}
"""Time enough to be killed in training, and for the slowest node to bind, on a busy machine too.

Losses are noticed as they are by default.
"""

CLOSES_WITHIN_S = 60.0
"""Far less than what is waited for an update that does not come."""


@pytest.mark.parametrize(
    ("aggregation", "times"),
    [
        ("masked", 2),
        ("plain", 2),
        pytest.param("masked", 20, marks=pytest.mark.soak),
        pytest.param("plain", 20, marks=pytest.mark.soak),
    ],
)
def test_a_killed_node_is_left_out_and_takes_part_again(
    tmp_path: Path, aggregation: str, times: int
) -> None:
    rules = {**TERMS["coordinator"]["rounds"], "aggregation": aggregation, "min_participants": 3}
    terms = {**TERMS, "coordinator": {**TERMS["coordinator"], "rounds": rules}}
    with federation(tmp_path, NODES, **terms) as members:
        figures = [_kill_and_return(members, f"node-{n % NODES}", n) for n in range(times)]
    print("kill to close, start to edges ready (s):", *(f"{c:.2f}/{b:.2f}" for c, b in figures))


def _kill_and_return(members: Federation, victim: str, turn: int) -> tuple[float, float]:
    """Seconds from the kill to the close, and from the restart to the edges being ready."""
    others = sorted(name for name in members.nodes if name != victim)
    members.run(1)
    members.wait_training(round_index=2 * turn)
    members[victim].kill()
    killed = began = time.monotonic()
    at_once = turn % 2 == 1
    if at_once:
        # Back before its loss is noticed: the new process takes the place of the old one.
        members[victim].begin()
    short = members.wait_closed(2 * turn, CLOSES_WITHIN_S)
    closed = time.monotonic()
    assert sorted(short.contributors) == others
    dropped = members.coordinator.ask(requests.Round(index=2 * turn)).dropped
    assert set(dropped) == {victim}, dropped
    if not at_once:
        away = members.participant(victim)
        assert (away.connected, away.activity) == (False, "away")
        assert "silent" in away.last_reason or "heartbeat" in away.last_reason, away
        began = time.monotonic()
        members[victim].begin()
    members.wait_for(victim, within_s=60.0)
    back = time.monotonic()
    members.run(1)
    whole = members.wait_closed(2 * turn + 1)
    assert sorted(whole.contributors) == sorted(members.nodes)
    return closed - killed, back - began


def test_status_says_what_each_phase_waits_for(tmp_path: Path) -> None:
    """OPEN for newcomers, OPEN for answers, COLLECTING, ABORTED, CLOSED: why, on whom, how long."""
    rules = {"open_timeout_s": 10.0, "retry_backoff_s": 3.0, "open_grace_s": 1.0}
    listen = TERMS["coordinator"]["listen"]
    terms = {**TERMS, "coordinator": {"rounds": rules, "listen": listen}}
    with federation(tmp_path, 2, **terms) as members:
        at_rest = members.status().round
        assert (at_rest.state, at_rest.reason) == ("closed", "at rest: no round is asked for")
        assert at_rest.deadline_in_s is None
        members.run(1)
        members.wait_training()
        collecting = members.status().round
        assert (collecting.state, collecting.quorum, collecting.bound) == ("collecting", 2, 2)
        assert collecting.reason.startswith("waiting for 2 of 2 updates (have 0, quorum 2); node-")
        assert collecting.waiting_on == ("node-0", "node-1")
        assert collecting.since_s > 0
        assert collecting.deadline_in_s is not None
        assert 500 < collecting.deadline_in_s <= 600
        members.wait_closed(0)
        members["node-1"].signal(signal.SIGSTOP)
        members.run(1)
        deaf = members.wait_until("bound", lambda s: s.round.bound == 1).round
        assert (deaf.state, deaf.index, deaf.waiting_on) == ("open", 1, ("node-1",))
        assert deaf.reason == "waiting for 1 of 2 asked to bind (have 1, quorum 2)"
        assert deaf.deadline_in_s is not None
        assert 0 < deaf.deadline_in_s <= 10
        alone = members.wait_until("lost", lambda s: not s.round.waiting_on).round
        assert alone.reason == "waiting for 1 more participant (have 1, quorum 2)"
        assert alone.deadline_in_s is not None
        aborted = members.wait_until(
            "aborted", lambda s: s.round.state == "aborted" and s.round.deadline_in_s is not None
        ).round
        assert aborted.reason == f"retrying after a pause: OPEN: {alone.reason}"
        assert aborted.deadline_in_s is not None
        assert 0 < aborted.deadline_in_s <= 3
        members["node-1"].signal(signal.SIGCONT)
        closed = members.wait_closed(1)
        assert closed.attempt >= 1
        assert sorted(closed.contributors) == ["node-0", "node-1"]


def test_a_killed_worker_comes_back_for_the_next_round(tmp_path: Path) -> None:
    with federation(tmp_path, 3, **TERMS) as members:
        members.run(1)
        members.wait_training()
        worker = members.node_status("node-2").worker
        assert worker is not None
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        assert sorted(members.wait_closed(0, CLOSES_WITHIN_S).contributors) == ["node-0", "node-1"]
        dropped = members.coordinator.ask(requests.Round(index=0)).dropped
        assert "the node's worker failed" in dropped["node-2"], dropped

        def up() -> bool:
            now = members.node_status("node-2").worker
            return now is not None and now.state == "ready" and now.restarts == 1

        until("the worker is up again", up)
        members.wait_for()
        members.run(1)
        assert len(members.wait_closed(1).contributors) == 3
