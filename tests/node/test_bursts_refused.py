"""A daemon measures no link beside a stage, in a round, or towards one who is no member."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from lensemble.edge.spec import EdgeSpec
from lensemble.ids import EdgeId, NodeId
from lensemble.transport.endpoint import EndpointSettings
from lensemble.transport.memory_driver import MemoryNetwork
from lensemble.wire import circle, stages
from tests.node.scripted import CALM, COORDINATOR, FEDERATION, Session, stage
from tests.node.staged import Floor, floor

OTHER = NodeId("77" * 32)
FIGURES = circle.Figures(
    name="lan",
    interval_s=60.0,
    probe_s=10.0,
    probe_rtts=4.0,
    helpers=0,
    suspicion_s=60.0,
    revive_intervals=4,
)


@asynccontextmanager
async def memory_floor(directory: Path) -> AsyncIterator[Floor]:
    network, pace = MemoryNetwork(), EndpointSettings(CALM)
    driver = network.driver(COORDINATOR, pace)
    async with floor(directory, driver, lambda who: network.driver(who.node, pace)) as made:
        yield made


async def introduce(session: Session) -> None:
    """Tell the node that ``OTHER`` is a member."""
    members = (circle.Acquaintance(node=OTHER, name="other"),)
    await session.say(
        circle.Circle(
            federation=FEDERATION,
            epoch=session.epoch,
            figures=FIGURES,
            fresh=True,
            members=members,
        )
    )


async def ask(session: Session, number: int, of: NodeId = OTHER) -> stages.BurstAnswer:
    """The answer of the node when it is to expect a burst of ``of``."""
    spec = EdgeSpec(EdgeId(900_000 + number), of, session.node, stages.BURST_FRAME_BYTES, 1)
    order = stages.BurstExpect(
        federation=FEDERATION,
        epoch=session.epoch,
        burst=number,
        edge=spec,
        far=stages.Address(node=of),
    )
    await session.say(order)
    answer: stages.BurstAnswer = await session.hear(stages.BurstAnswer)  # type: ignore[arg-type]  # a union
    assert answer.burst == number
    return answer


def reason(answer: stages.BurstAnswer) -> str:
    assert isinstance(answer, stages.BurstRefused), answer
    return answer.reason


async def test_not_beside_a_stage_nor_towards_a_stranger(tmp_path: Path) -> None:
    async with memory_floor(tmp_path) as f:
        node = await f.node()
        assert "is no member" in reason(await ask(node.session, 1))
        await introduce(node.session)
        assert "is no member" in reason(await ask(node.session, 1, NodeId("78" * 32)))
        run = await f.run(node)
        await run.provision()
        assert reason(await ask(node.session, 2)) == "a stage is live on this node"
        await run.tear_down()
        with trio.fail_after(10):
            while node.host.hosted:
                await node.host.changed.wait()
        assert isinstance(await ask(node.session, 3), stages.BurstReady)
        assert "another measurement" in reason(await ask(node.session, 4))


async def test_not_in_a_round(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        await s.start_node()
        session = await s.joined()
        await introduce(session)
        await session.bind()
        assert reason(await ask(session, 1)) == "it is in a round"
        await session.give_state()
        assert reason(await ask(session, 2)) == "it is in a round"
        await session.collect()
        await session.close(0, contributors=())
        # The close is taken in when that comes to it; what was said before it is answered before.
        with trio.fail_after(10):
            while isinstance(await ask(session, 3), stages.BurstRefused):
                await trio.lowlevel.checkpoint()
