"""What a round of a large model costs the coordinator, with few nodes and with many."""

from pathlib import Path

import pytest

from tests.e2e.federation import federation

pytestmark = [pytest.mark.e2e, pytest.mark.soak]
MODEL_BYTES = 100_000_000
ROUNDS = 3
ALLOWANCE_BYTES = 64 << 20
TERMS = {
    "workload": {
        "task": {"parameters": MODEL_BYTES // 4},
        "inner": {"steps": 1, "batch": 1},
    },
    "coordinator": {"listen": {"heartbeat_s": 1.0, "heartbeat_timeout_s": 5.0}},
    "node": {"listen": {"heartbeat_s": 1.0, "heartbeat_timeout_s": 5.0}},
}
"""Heartbeats for a small machine that runs everything at once."""


def _idle_and_peak(root: Path, nodes: int) -> tuple[int, int]:
    root.mkdir()
    with federation(root, nodes, **TERMS) as members:
        idle = members.status().rss_bytes
        members.run(ROUNDS)
        seen: set[tuple[str, str]] = set()

        def over(status: object) -> bool:
            seen.add((status.round.state, status.round.reason))
            return status.run is None

        members.wait_until("the rounds have closed", over, 300.0)
        assert [len(each.contributors) for each in members.closed()] == [nodes] * ROUNDS
        states = {state for state, _ in seen}
        assert {"open", "collecting", "aggregating", "committing"} <= states
        assert all(reason for _, reason in seen)
        assert ("aggregating", f"summing {nodes} updates twice and comparing") in seen
        return idle, members.coordinator.peak_bytes()


def test_memory_does_not_grow_with_the_number_of_nodes(tmp_path: Path) -> None:
    idle, few = _idle_and_peak(tmp_path / "few", 2)
    _, many = _idle_and_peak(tmp_path / "many", 8)
    print("MiB idle, peak with 2 and with 8 nodes:", *(n >> 20 for n in (idle, few, many)))
    assert abs(many - few) < 0.15 * few
    assert many <= idle + 3 * MODEL_BYTES + ALLOWANCE_BYTES
