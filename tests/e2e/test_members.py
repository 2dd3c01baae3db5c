"""Who lives, found out by real processes: one is killed, started again, and ended in order."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from lensemble.ctl import replies, requests
from lensemble.ctl.client import Client
from tests.e2e.federation import COORDINATOR, Federation, Process, until

pytestmark = pytest.mark.e2e

FAST = {"profile": "lan", "interval_s": 0.3, "probe_timeout_s": 0.3, "suspicion_s": 1.5}
DEAD_WITHIN_S = 20.0
"""On a busy machine; a second of interval and probes and three of suspicion on a quiet one."""


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    made = Federation(tmp_path, 3, coordinator={"membership": FAST})
    try:
        yield made
    finally:
        made.end()


def rows(process: Process) -> dict[str, replies.MemberStatus]:
    reply = process.ask(requests.Members())
    assert isinstance(reply, replies.MemberList)
    return {row.name: row for row in reply.members}


def all_see(watchers: list[Process], name: str, state: str) -> bool:
    found = [rows(each).get(name) for each in watchers]
    return all(row is not None and row.state == state for row in found)


def events(federation: Federation, kind: str) -> list[str]:
    with Client(federation.coordinator.socket) as client:
        told = list(client.stream(requests.Events(limit=1000)))
    return [str(row.fields["peer"]) for row in told if row.event == kind]


def test_killed_is_dead_started_is_alive_and_ended_has_left(federation: Federation) -> None:
    federation.start()
    federation.join()
    hub, *nodes = federation.processes()
    everyone = [hub, *nodes]

    def all_heard() -> bool:
        seen = [rows(each) for each in everyone]
        return all(
            len(each) == 3 and all(row.heard_s is not None for row in each.values())
            for each in seen
        )

    until("everyone has heard everyone", all_heard)
    until(
        "all paths are direct",
        lambda: all(row.path == "direct" for each in everyone for row in rows(each).values()),
    )
    until(
        "every round trip is known",
        lambda: all(row.rtt_ms is not None for each in everyone for row in rows(each).values()),
    )

    victim = federation["node-1"]
    victim.kill()
    left = [each for each in everyone if each is not victim]
    until("all know that it is dead", lambda: all_see(left, "node-1", "dead"), DEAD_WITHIN_S)
    others = [row for each in left for name, row in rows(each).items() if name != "node-1"]
    assert all(row.state == "alive" for row in others)
    before = rows(hub)["node-1"].incarnation

    victim.begin()
    until("all know that it lives", lambda: all_see(left, "node-1", "alive"), DEAD_WITHIN_S)
    assert rows(hub)["node-1"].incarnation > before

    assert federation["node-2"].stop() == 0
    left = [hub, federation["node-0"]]
    until("all know that it has left", lambda: all_see(left, "node-2", "left"), 5.0)
    assert events(federation, "member.dead") == ["node-1"]
    assert events(federation, "member.left") == ["node-2"]

    node = federation["node-0"]
    assert hub.stop() == 0
    until("the node knows it too", lambda: all_see([node], "coordinator", "left"), 5.0)
    federation.start(COORDINATOR)
    until("it is back", lambda: all_see([node], "coordinator", "alive"), DEAD_WITHIN_S)
