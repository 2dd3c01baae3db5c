"""Links between hosts are measured as their network was made, and the planner goes by it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lensemble.ctl import replies, requests
from tests.e2e.federation import COORDINATOR
from tests.e2e.serving import Serving
from tests.netns.hosts import Hosts, Network

pytestmark = [pytest.mark.e2e, pytest.mark.netns, pytest.mark.soak]
NODES = 3
FAST, SLOW = 80.0, 0.6
DELAY_MS = 10.0


class Away(Hosts, Serving):
    """A federation on hosts of their own, whose nodes may hold stages of a small model."""


@pytest.fixture
def away(tmp_path: Path) -> Iterator[Away]:
    names = [f"node-{index}" for index in range(NODES)]
    network = Network([COORDINATOR, *names])
    made = Away(tmp_path, network, NODES)
    try:
        made.ready()
        for name in names:
            rate = SLOW if name == "node-1" else FAST
            ways: dict[str, Any] = {"delay_ms": DELAY_MS, "mbit_s": rate}
            network.set(name, up=ways, down=ways)
        yield made
    finally:
        made.end()
        network.close()


def between(plan: replies.ModelPlan) -> replies.PlannedHop:
    (_, hop, _) = plan.hops
    return hop


def test_a_slow_host_is_found_and_avoided(away: Away) -> None:
    run = away.run("0:2@node-0,2:4@node-2")
    busy = away.plan(split="0:2@node-1,2:4@node-2", measure=True)
    assert busy.unmeasured == ("node-1 to node-2: a stage is live on node-2",)
    assert between(busy).rate == "assumed"
    assert [hop.rate for hop in away.inspect(run).hops] == ["assumed"] * 3
    away.coordinator.ask(requests.StopRun(run=run))

    pinned = between(away.plan(split="0:2@node-0,2:4@node-1", measure=True))
    print(pinned)
    assert pinned.rate == "measured"
    # What the last chunk lacked when the time ran out is not counted.
    assert 0.6 * SLOW < pinned.mbit_s < 1.1 * SLOW
    assert (pinned.rtt_ms or 0.0) < 20 * DELAY_MS, "of before the burst filled the queues"
    plan = away.plan(split="0:2,2:4", measure=True)
    hop = between(plan)
    print(hop)
    assert {stage.name for stage in plan.stages} == {"node-0", "node-2"}
    assert plan.unmeasured == ()
    # A burst begins slowly: it takes six round trips of 40 ms for 1 MiB.
    assert 0.2 * FAST < hop.mbit_s < 1.1 * FAST
    assert hop.rtt_ms is not None
    assert 3 * DELAY_MS < hop.rtt_ms < 10 * DELAY_MS
