"""Real daemons on hosts of their own while the network between them has a bad day."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lensemble.ctl import replies, requests
from tests.e2e.federation import COORDINATOR, participant, until
from tests.netns.hosts import WAN, Hosts, hosts

pytestmark = [pytest.mark.e2e, pytest.mark.netns]
NODES = ("node-0", "node-1", "node-2")
POOR = {"delay_ms": 50.0, "jitter_ms": 20.0, "loss": 0.02, "mbit_s": 20.0}
SLOW = {"delay_ms": 10.0, "mbit_s": 8.0}
CUT = {**SLOW, "cut": True}
SHORT = {"heartbeat_s": 0.3, "heartbeat_timeout_s": 1.5}
CHUNK_BYTES = 1 << 16
MODEL_BYTES = 2_000_000
"""Of models whose transfer is disturbed."""

REJOIN_S = 20.0
"""From the healing of a network to the return of a node: its dial timeout and its backoff."""


def _terms(
    megabytes: float, listen: dict[str, float] = WAN, quorum: int = 2
) -> dict[str, dict[str, object]]:
    task = {"parameters": int(megabytes * 250_000)}
    return {
        "workload": {"task": task, "inner": {"steps": 1, "batch": 1}},
        "coordinator": {
            "listen": listen,
            "rounds": {"aggregation": "plain", "min_participants": quorum},
            # A state of many chunks, so that weather meets it on its way.
            "edges": {"capacity_bytes": CHUNK_BYTES},
        },
        "node": {"listen": listen, "share": {"plain": True}},
    }


def _epochs(members: Hosts) -> dict[str, int]:
    return {each.name: each.epoch for each in members.status().participants}


def _wait(seconds: float) -> None:
    """Let the weather last."""
    end = time.monotonic() + seconds
    until(f"{seconds:g} s have passed", lambda: time.monotonic() > end, seconds + 5)


STATE, UPDATE = "tx", "rx"
"""Ways of an edge, as the coordinator has it."""


def _wait_moving(members: Hosts, name: str, way: str) -> None:
    """Until the state is on its way to ``name``, or its update from it, and not all there."""

    def found(status: replies.CoordinatorStatus) -> bool:
        moved = [e.bytes for e in status.edges if (e.peer, e.direction) == (name, way)]
        return bool(moved) and 0 < moved[0] < MODEL_BYTES

    members.wait_until(f"bytes move on {way} of {name}", found)


def _round_with_everyone(members: Hosts, index: int, within_s: float = 20.0) -> None:
    members.run(1)
    closed = members.wait_closed(index, within_s)
    assert (sorted(closed.contributors), closed.attempt) == (list(NODES), 0)


@pytest.mark.parametrize(
    ("megabytes", "poor"),
    [
        pytest.param(0.1, NODES, id="nodes-0.1"),
        pytest.param(1.0, NODES, marks=pytest.mark.soak, id="nodes-1"),
        pytest.param(10.0, NODES, marks=pytest.mark.soak, id="nodes-10"),
        pytest.param(1.0, (COORDINATOR, *NODES), marks=pytest.mark.soak, id="all-1"),
    ],
)
def test_rounds_close_with_everyone_across_a_poor_network(
    tmp_path: Path, megabytes: float, poor: tuple[str, ...]
) -> None:
    """50 ms +- 20 ms, 2 % loss and 20 Mbit/s, each way, on the link of each host in ``poor``."""
    with hosts(tmp_path, 3, **_terms(megabytes)) as members:
        before = _epochs(members)
        for name in poor:
            members.network.set(name, up=POOR, down=POOR)
        began = time.monotonic()
        members.run(2)
        members.wait_closed(0, 300.0)
        middle = time.monotonic()
        members.wait_closed(1, 300.0)
        took = f"{middle - began:.1f} s and {time.monotonic() - middle:.1f} s"
        print(f"two rounds of {megabytes:g} MB over {len(poor)} poor links took {took}")
        assert [sorted(each.contributors) for each in members.closed()] == [list(NODES)] * 2
        assert [each.attempt for each in members.closed()] == [0, 0]
        assert _epochs(members) == before, "a link was taken for lost"


PATIENT = {"heartbeat_s": 1.0, "heartbeat_timeout_s": 20.0}
"""For links that are cut for longer than the configuration advises to wait."""


@pytest.mark.soak
@pytest.mark.parametrize("moving", [STATE, UPDATE])
@pytest.mark.parametrize(
    ("listen", "seconds"), [(WAN, 2.0), (PATIENT, 10.0)], ids=["short", "ten-seconds"]
)
def test_a_cut_that_is_waited_out_costs_its_own_length(
    tmp_path: Path, listen: dict[str, float], seconds: float, moving: str
) -> None:
    """All three are needed: the round closes in the attempt in which the link was cut."""
    with hosts(tmp_path, 3, **_terms(MODEL_BYTES / 1e6, listen, 3)) as members:
        members.network.set("node-0", up=SLOW, down=SLOW)
        before, edges = _epochs(members), {each.id for each in members.status().edges}
        members.run(1)
        _wait_moving(members, "node-0", moving)
        members.network.set("node-0", up=CUT, down=CUT)
        cut = time.monotonic()
        _wait(seconds)
        members.network.set("node-0", up=SLOW, down=SLOW)
        healed = time.monotonic()
        closed = members.wait_closed(0, 60.0)
        print(f"cut {healed - cut:.1f} s, closed {time.monotonic() - healed:.1f} s after healing")
        assert (sorted(closed.contributors), closed.attempt) == (list(NODES), 0)
        assert _epochs(members) == before
        assert {each.id for each in members.status().edges} == edges, "the transfer began anew"


CUTS = pytest.mark.parametrize(
    ("listen", "seconds"),
    [(SHORT, 4.0), pytest.param(WAN, 10.0, marks=pytest.mark.soak)],
    ids=["short", "wan"],
)


@contextmanager
def _cut_in_mid_transfer(
    root: Path, listen: dict[str, float], quorum: int, moving: str = STATE
) -> Iterator[tuple[Hosts, float]]:
    """A run of one round in which the link of node-0 is cut, and since when."""
    with hosts(root, 3, **_terms(MODEL_BYTES / 1e6, listen, quorum)) as members:
        members.network.set("node-0", up=SLOW, down=SLOW)
        members.run(1)
        _wait_moving(members, "node-0", moving)
        members.network.set("node-0", up=CUT, down=CUT)
        yield members, time.monotonic()


def _heal(members: Hosts) -> None:
    """Mend the link of node-0, whose loss has been noticed, and wait until it is back."""
    away = members.participant("node-0")
    assert (away.connected, away.activity) == (False, "away")
    assert "no heartbeat" in away.last_reason, away
    members.network.set("node-0", up=SLOW, down=SLOW)
    healed = time.monotonic()
    members.wait_for(within_s=REJOIN_S)
    print(f"back {time.monotonic() - healed:.1f} s after the cut")


@CUTS
def test_a_long_cut_costs_one_node_one_round(
    tmp_path: Path, listen: dict[str, float], seconds: float
) -> None:
    with _cut_in_mid_transfer(tmp_path, listen, 2) as (members, began):
        closed = members.wait_closed(0)
        assert (sorted(closed.contributors), closed.attempt) == (["node-1", "node-2"], 0)
        dropped = members.coordinator.ask(requests.Round(index=0)).dropped
        assert set(dropped) == {"node-0"}
        assert "no heartbeat" in dropped["node-0"], dropped
        _wait(began + seconds - time.monotonic())
        _heal(members)
        _round_with_everyone(members, 1)


@pytest.mark.soak
@CUTS
def test_a_round_that_needs_all_goes_on_after_a_long_cut_where_it_was(
    tmp_path: Path, listen: dict[str, float], seconds: float
) -> None:
    with _cut_in_mid_transfer(tmp_path, listen, 3) as (members, began):
        aborted = members.wait_until("aborted", lambda s: s.round.state == "aborted").round
        assert "only 2 of the 3 updates needed can arrive" in aborted.reason, aborted
        _wait(began + seconds - time.monotonic())
        _heal(members)
        closed = members.wait_closed(0, 30.0)
        assert (sorted(closed.contributors), closed.attempt) == (list(NODES), 1)
        edges = [each for each in members.status().edges if each.peer == "node-0"]
        assert {each.direction for each in edges} == {"tx", "rx"}
        moved = {each.direction: each.bytes for each in edges}
        assert 0 < moved["tx"] < moved["rx"], "the state came from its beginning again"


@CUTS
def test_an_update_that_a_cut_broke_off_is_sent_again(
    tmp_path: Path, listen: dict[str, float], seconds: float
) -> None:
    """The same release, in the next attempt of the same round; nothing is trained twice."""
    with _cut_in_mid_transfer(tmp_path, listen, 3, UPDATE) as (members, began):
        members.wait_until("aborted", lambda s: s.round.state == "aborted")
        _wait(began + seconds - time.monotonic())
        _heal(members)
        closed = members.wait_closed(0, 30.0)
        assert (sorted(closed.contributors), closed.attempt) == (list(NODES), 1)
        log = members["node-0"].log.read_text(encoding="utf-8").splitlines()
        made = [json.loads(line) for line in log if '"release.made"' in line]
        assert [(each["attempt"], each["reused"]) for each in made] == [(0, False), (1, True)]
        state = [e for e in members.status().edges if (e.peer, e.direction) == ("node-0", "tx")]
        assert [each.bytes for each in state] == [0], "the state came again"


def test_a_cut_of_one_way_is_seen_from_both_ends(tmp_path: Path) -> None:
    with hosts(tmp_path, 3, **_terms(0.1, SHORT)) as members:
        for index, way in enumerate(("up", "down")):
            before = _epochs(members)
            members.network.set("node-0", **{way: {"cut": True}})
            gone = members.wait_until("lost", lambda s: not participant(s, "node-0").connected)
            assert participant(gone, "node-0").last_reason
            until("the node knows", lambda: members.node_status("node-0").link.state != "joined")
            members.run(1)
            closed = members.wait_closed(2 * index)
            assert sorted(closed.contributors) == ["node-1", "node-2"]
            members.network.set("node-0", **{way: {}})
            members.wait_for(within_s=REJOIN_S)
            assert _epochs(members)["node-0"] > before["node-0"]
            _round_with_everyone(members, 2 * index + 1)


def test_a_node_that_moves_to_another_address_takes_part_again(tmp_path: Path) -> None:
    with hosts(tmp_path, 3, **_terms(0.1, SHORT)) as members:
        before, old = _epochs(members), members.network.addresses["node-0"]
        new = "10.77.0.200"
        members.network.ip("node-0", f"addr del {old}/24 dev net0")
        members.network.ip("node-0", f"addr add {new}/24 dev net0")
        began = time.monotonic()

        def moved(status: replies.CoordinatorStatus) -> bool:
            now = participant(status, "node-0")
            return now.connected and new in now.path

        members.wait_until("node-0 is at its new address", moved, REJOIN_S)
        members.wait_for()
        kept = _epochs(members)["node-0"] == before["node-0"]
        print(f"{'migrated' if kept else 'rejoined'} in {time.monotonic() - began:.1f} s")
        _round_with_everyone(members, 0)


@pytest.mark.parametrize("seconds", [2.0, pytest.param(1800.0, marks=pytest.mark.soak)])
def test_idle_links_are_there_when_a_round_comes(tmp_path: Path, seconds: float) -> None:
    with hosts(tmp_path, 3, **_terms(0.1)) as members:
        before = _epochs(members)
        _wait(seconds)
        _round_with_everyone(members, 0)
        assert _epochs(members) == before
