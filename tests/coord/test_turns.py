"""How many nodes are told something large at the same time."""

import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from lensemble.ids import NodeId
from lensemble_coord.training.turns import ON_THEIR_WAY_BYTES, TURN_S, Turns

NODES = [NodeId(f"{number:064x}") for number in range(5)]


async def tell(turns: Turns, told: list[NodeId]) -> None:
    for node in NODES:
        await turns.take(node)
        told.append(node)


async def test_another_is_told_once_one_has_answered(autojump_clock: MockClock) -> None:
    turns, told = Turns(ON_THEIR_WAY_BYTES // 2), list[NodeId]()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(tell, turns, told)
        await wait_all_tasks_blocked()
        assert told == NODES[:2]
        turns.end(NODES[1])
        await wait_all_tasks_blocked()
        assert told == NODES[:3]
        turns.end(NODES[1])
        await wait_all_tasks_blocked()
        assert told == NODES[:3]
        nursery.cancel_scope.cancel()


async def test_who_does_not_answer_keeps_others_waiting_for_a_moment_only(
    autojump_clock: MockClock,
) -> None:
    turns, told = Turns(10 * ON_THEIR_WAY_BYTES), list[NodeId]()
    began = trio.current_time()
    await tell(turns, told)
    assert told == NODES
    assert trio.current_time() - began == (len(NODES) - 1) * TURN_S


async def test_what_is_small_goes_to_everyone_at_once(autojump_clock: MockClock) -> None:
    began = trio.current_time()
    await tell(Turns(1000), [])
    assert trio.current_time() == began
