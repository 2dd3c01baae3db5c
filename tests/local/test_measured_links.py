"""Links between real daemons in this process are measured, and the planner goes by it."""

from pathlib import Path

import trio
from trio.testing import MockClock

from lensemble.wire.stages import MAX_BURST_BYTES
from lensemble_coord.inference import run_status
from lensemble_coord.inference.run_rows import Wish
from tests.local.circle import HUB, Circle
from tests.tiny_gguf import write_tiny

SLOW_MBIT_S = 6.0


async def test_a_plan_that_is_measured_avoids_the_slow_link(
    tmp_path: Path, nursery: trio.Nursery, mock_clock: MockClock
) -> None:
    circle = Circle(tmp_path, nursery, mock_clock)
    await circle.start(3)
    offered = circle.hub.reception.peers.here
    await circle.until(
        lambda: all(peer.inventory and peer.inventory.linked for peer in offered.values())
    )
    model = write_tiny(tmp_path / "tiny.gguf", layers=4)
    wish = Wish(model=str(model), ctx=64, rows=8, split="0:2,2:4")
    here = circle.hub.orchestrator
    # From here on in real time: a plan is made in a thread.
    circle.end()
    _, plan = await here.plan(wish)
    a, b = (stage.node for stage in plan.stages)
    assert not here.around.book.rates(), "nothing is measured unless that is asked for"
    circle.network.between(a, b).bytes_per_s = SLOW_MBIT_S * 1e6 / 8
    before = {name: _carried(circle, name) for name in circle.nodes}
    facts, plan, unmeasured = await here.plan_measured(wish)
    assert unmeasured == ()
    chosen = tuple(stage.node for stage in plan.stages)
    assert set(chosen) != {a, b}
    rates = here.around.book.rates()
    assert rates[a, b].how == "measured"
    assert SLOW_MBIT_S / 4 < rates[a, b].bytes_per_s * 8 / 1e6 < 1.1 * SLOW_MBIT_S
    told = run_status.plan(facts, plan, here.around.paths).hops[1]
    assert (told.rate, told.rtt_ms) == ("measured", 0.0)
    assert told.rate_age_s is not None
    assert told.rate_age_s < 30
    carried = sum(_carried(circle, name) - before[name] for name in circle.nodes)
    bursts = len(rates)
    assert bursts * MAX_BURST_BYTES < carried < (bursts + 1) * MAX_BURST_BYTES
    assert (await here.plan_measured(wish))[1].canonical() == plan.canonical()
    assert len(here.around.book.rates()) == bursts, "what is known is not measured again"


def _carried(circle: Circle, name: str) -> int:
    """Bytes that came to a node from other nodes."""
    links = circle.nodes[name].driver.links()  # type: ignore[attr-defined]  # of this driver
    return sum(
        link.facts().received_bytes for node, link in links.items() if node != circle.node(HUB)
    )
