"""Real daemons whose nodes follow by sums: how many bytes, and what becomes of damage."""

from pathlib import Path

import pytest

from tests.e2e.federation import Federation, federation, until

pytestmark = pytest.mark.e2e
PARAMETERS = 100_000
MODEL_BYTES = 4 * PARAMETERS
NODES = ("node-0", "node-1")
TERMS = {
    "workload": {
        "task": {"parameters": PARAMETERS, "step_seconds": 0.01},
        "inner": {"steps": 2, "batch": 1},
    },
    "node": {
        "listen": {"reconnect_backoff_s": 0.2, "reconnect_backoff_max_s": 0.5},
        "worker": {"restart_backoff_s": 0.2, "restart_backoff_max_s": 0.2},
    },
}


def ways(members: Federation, rounds: int = 1) -> list[str]:
    """How both nodes came to the state of the last of ``rounds`` rounds."""
    index = len(members.closed())
    members.run(rounds)
    members.wait_closed(index + rounds - 1)
    members.wait_rest()
    return [members.participant(name).state_by for name in NODES]


def test_nodes_fetch_once_then_follow_by_sums(tmp_path: Path) -> None:
    with federation(tmp_path, 2, **TERMS) as members:
        assert ways(members) == ["state", "state"]
        first = [members.participant(name).state_bytes for name in NODES]
        assert first == [MODEL_BYTES, MODEL_BYTES]
        assert ways(members, 5) == ["sum", "sum"]
        for name, before in zip(NODES, first, strict=True):
            sent = members.participant(name).state_bytes - before
            assert sent <= 5 * 2.1 * PARAMETERS
            assert members.node_status(name).state_by == "sum"
        last = members.status().last_round
        assert last is not None
        assert last.by_sum == 2
        assert last.bytes_saved >= 2 * (MODEL_BYTES - 2.1 * PARAMETERS)


@pytest.mark.soak
def test_a_node_that_missed_rounds_follows_all_the_same(tmp_path: Path) -> None:
    terms = {**TERMS, "coordinator": {"rounds": {"min_participants": 2, "open_grace_s": 0.2}}}
    with federation(tmp_path, 3, **terms) as members:
        ways(members, 2)
        members["node-1"].kill()
        until("it is gone", lambda: not members.participant("node-1").connected)
        index = len(members.closed())
        members.run(2)
        members.wait_closed(index + 1)
        members.wait_rest()
        members["node-1"].begin()
        members.wait_for("node-1")
        before = members.participant("node-1").state_bytes
        ways(members)
        node = members.participant("node-1")
        assert node.state_by == "sum"
        assert before < node.state_bytes <= 3 * 2.1 * PARAMETERS


def test_a_sum_that_rotted_with_the_coordinator_costs_nothing_but_bytes(tmp_path: Path) -> None:
    """Every node finds it out, says so, and fetches the state in its place."""
    with federation(tmp_path, 2, **TERMS) as members:
        ways(members, 2)
        members.coordinator.stop()
        newest = max((members.state_dir / "sums").iterdir(), key=lambda path: path.stat().st_mtime)
        raw = bytearray(newest.read_bytes())
        raw[1234] ^= 1
        newest.write_bytes(raw)
        members.start("coordinator")
        members.wait_for()
        assert ways(members) == ["state", "state"]
        for name in NODES:
            assert "a blob with the digest" in members[name].log.read_text()
        assert ways(members) == ["sum", "sum"]


@pytest.mark.soak
def test_a_momentum_that_rotted_with_a_node_is_fetched_again(tmp_path: Path) -> None:
    with federation(tmp_path, 2, **TERMS) as members:
        ways(members, 2)
        node = members["node-1"]
        node.stop()
        (momentum,) = (node.place / "state" / "global").glob("*.momentum.f32")
        raw = bytearray(momentum.read_bytes())
        raw[-1] ^= 1
        momentum.write_bytes(raw)
        node.begin()
        members.wait_for()
        assert ways(members) == ["sum", "state"]
        assert ways(members) == ["sum", "sum"]


@pytest.mark.soak
def test_a_large_state_is_in_memory_between_rounds_and_survives_a_stop_and_a_kill(
    tmp_path: Path,
) -> None:
    """5 million parameters are stepped in memory: after a stop nothing is fetched, but sums."""
    large = {**TERMS["workload"], "task": {"parameters": 5_000_000}}
    with federation(tmp_path, 2, **{**TERMS, "workload": large}) as members:
        assert ways(members, 3) == ["sum", "sum"]
        node = members["node-1"]
        node.stop()
        node.begin()
        members.wait_for()
        assert ways(members) == ["sum", "sum"]
        before = members.participant("node-1").state_bytes
        # What it was put down from, as it stopped, is two rounds back.
        node.kill()
        node.begin()
        members.wait_for()
        assert ways(members) == ["sum", "sum"]
        assert members.participant("node-1").state_bytes - before <= 3 * 2.1 * 5_000_000
