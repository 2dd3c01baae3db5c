"""An answer that is under way while the network between the stages loses packets and pauses."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lensemble.ctl import replies, requests
from lensemble.ctl.client import Client
from tests.e2e.federation import COORDINATOR, Process, until
from tests.e2e.serving import Serving
from tests.netns.hosts import WAN, Hosts, Network, Terms

pytestmark = [pytest.mark.e2e, pytest.mark.netns, pytest.mark.soak]
NODES = 2
CUT = {"cut": True}
LOSSY = {"delay_ms": 20.0, "jitter_ms": 10.0, "loss": 0.05}
PAUSE_S = 3.0
DEADLINE_S = 15.0
"""Beyond the pause and what the transport then waits before it tries again."""

TOKENS = 40


class Away(Hosts, Serving):
    """A federation on hosts across the internet, whose nodes hold stages of a small model."""

    def _configure(self, process: Process, given: Terms) -> None:
        super()._configure(process, {**given, "listen": WAN})


@pytest.fixture
def away(tmp_path: Path) -> Iterator[Away]:
    names = [f"node-{index}" for index in range(NODES)]
    network = Network([COORDINATOR, *names])
    made = Away(tmp_path, network, NODES, step_deadline_s=DEADLINE_S)
    try:
        made.ready()
        yield made
    finally:
        made.end()
        network.close()


def _wait(seconds: float) -> None:
    began = time.monotonic()
    until(f"{seconds:g} s have passed", lambda: time.monotonic() > began + seconds, seconds + 5)


def _deaths(away: Away) -> list[str]:
    with Client(away.coordinator.socket) as client:
        told = list(client.stream(requests.Events(limit=1000)))
    return [str(row.fields) for row in told if row.event in {"member.dead", "peer.left"}]


def test_a_run_completes_through_loss_and_a_pause_and_nobody_is_called_dead(away: Away) -> None:
    run = away.run("0:2@node-0,2:4@node-1")
    calm = away.ask(run, "ab", most=TOKENS, temperature=0.0)
    for name in away.nodes:
        away.network.set(name, up=LOSSY, down=LOSSY)
    asking = away.asking(run, "ab", TOKENS, temperature=0.0)
    asking.until(10)
    away.network.set("node-1", up=CUT, down=CUT)
    _wait(PAUSE_S)
    away.network.set("node-1", up=LOSSY, down=LOSSY)
    told = asking.rest()
    assert told.tokens == calm.tokens
    assert told.pauses == []
    status = away.inspect(run)
    assert isinstance(status, replies.ModelRunStatus)
    assert status.takes_requests
    assert _deaths(away) == []
