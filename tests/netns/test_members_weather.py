"""Who lives, when the network between real daemons is cut for a while, loses, and is healed."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lensemble.ctl import replies, requests
from lensemble.ctl.client import Client
from tests.e2e.federation import COORDINATOR, until
from tests.netns.hosts import WAN, Hosts, hosts

pytestmark = [pytest.mark.e2e, pytest.mark.netns]
CUT = {"cut": True}
LOSSY = {"delay_ms": 20.0, "jitter_ms": 10.0, "loss": 0.05}


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Hosts]:
    """A coordinator and three nodes of the profile wan, who have all heard each other."""
    terms = {"listen": WAN}
    with hosts(tmp_path, 3, coordinator=terms, node={**terms, "share": {"plain": True}}) as made:
        until("everyone has heard everyone", lambda: _all(made, _heard), 30.0)
        yield made


def _heard(row: replies.MemberStatus) -> bool:
    return row.state == "alive" and row.heard_s is not None and row.path == "direct"


def _rows(members: Hosts, name: str) -> tuple[replies.MemberStatus, ...]:
    reply = members[name].ask(requests.Members())
    assert isinstance(reply, replies.MemberList)
    return reply.members


def _all(members: Hosts, holds: Callable[[replies.MemberStatus], bool]) -> bool:
    seen = [_rows(members, each.name) for each in members.processes()]
    return all(len(each) == 3 and all(map(holds, each)) for each in seen)


def _alive(row: replies.MemberStatus) -> bool:
    return row.state == "alive"


def _events(members: Hosts, kind: str) -> list[str]:
    with Client(members.coordinator.socket) as client:
        told = list(client.stream(requests.Events(limit=1000)))
    return [str(row.fields["peer"]) for row in told if row.event == kind]


def _wait(seconds: float) -> None:
    began = time.monotonic()
    until(f"{seconds:g} s have passed", lambda: time.monotonic() > began + seconds, seconds + 5)


def test_three_seconds_of_silence_are_no_death_and_ten_are_a_suspicion(members: Hosts) -> None:
    members.network.set("node-1", up=CUT, down=CUT)
    _wait(3)
    members.network.set("node-1", up={}, down={})
    until("all are alive", lambda: _all(members, _alive), 30.0)
    _wait(5)
    assert _events(members, "member.dead") == []

    members.network.set("node-1", up=CUT, down=CUT)
    _wait(10)
    (row,) = [row for row in _rows(members, COORDINATOR) if row.name == "node-1"]
    assert row.state == "suspect"
    members.network.set("node-1", up={}, down={})
    until("all are alive again", lambda: _all(members, _alive), 30.0)
    assert _events(members, "member.dead") == []
    # Probes that were on their way when the network healed still have their say.
    _wait(10)
    flaps = {row.name: row.flaps for row in _rows(members, COORDINATOR)}
    _wait(20)
    assert _all(members, _alive)
    assert {row.name: row.flaps for row in _rows(members, COORDINATOR)} == flaps


@pytest.mark.soak
def test_a_minute_of_five_percent_loss_is_no_death(members: Hosts) -> None:
    for name in members.nodes:
        members.network.set(name, up=LOSSY, down=LOSSY)
    _wait(60)
    assert _events(members, "member.dead") == []
    for name in members.nodes:
        members.network.set(name, up={}, down={})
    until("all are alive", lambda: _all(members, _alive), 30.0)
