"""What a coordinator hears of another session, federation or attempt moves nothing, is counted."""

from pathlib import Path
from typing import Any, get_args

import trio
import trio.testing

from lensemble.wire import fence, messages
from lensemble_coord.training import outer_round
from tests.coord.test_coordinator import Bench, bench
from tests.library.message_examples import example

FENCED = [kind for kind in get_args(messages.FromNode) if kind is not messages.Join]
OF_ROUND = [kind for kind in FENCED if issubclass(kind, fence.OfRound)]


async def _refused(one: Any, hub: Bench, message: fence.Fenced, code: str) -> None:
    """``one`` says ``message``; it is counted under ``code`` and moves nothing."""
    session = hub.rounds.sessions[one.me.node]
    state, doing = hub.rounds.state, (session.activity.phase, session.commitment)
    count = session.refused[code]
    await one.say(message)
    with trio.fail_after(30):
        while session.refused[code] == count:
            await trio.testing.wait_all_tasks_blocked(0.001)
    assert session.refused[code] == count + 1, message
    assert hub.rounds.state == state, message
    assert (session.activity.phase, session.commitment) == doing, message
    assert hub.rounds.sessions[one.me.node] is session, "its session was ended"


async def test_what_is_of_another_session_or_attempt_is_refused(tmp_path: Path) -> None:
    """In mid-round, with a session whose epoch and attempt have predecessors."""
    async with (
        bench(tmp_path, min_participants=2, open_grace_s=0.0) as hub,
        hub.node("one") as one,
        hub.node("two") as two,
    ):
        await hub.serving.wait_for_nodes(2)
        await hub.rounds.ask(1)
        for each in (one, two):
            opening = await each.wait_for(messages.RoundOpen)
            assert isinstance(opening, messages.RoundOpen)
            await each.bind(opening)
        await hub.state(outer_round.Collecting)
        # The states go out by tasks of their own: what a session does is at rest only after.
        activities = [hub.rounds.sessions[each.me.node].activity for each in (one, two)]
        with trio.fail_after(30):
            while any(activity.phase != "fetching" for activity in activities):
                await trio.testing.wait_all_tasks_blocked(0.001)
        fields = {"federation": opening.federation, "epoch": one.welcome.epoch}
        for kind in FENCED:
            for wrong in (
                {"epoch": fields["epoch"] - 1},
                {"epoch": fields["epoch"] + 1},
                {"federation": "e" * 32},
            ):
                await _refused(one, hub, example(kind, **{**fields, **wrong}), "stale_epoch")
        for kind in OF_ROUND:
            for at in ({"round": 0, "attempt": 1}, {"round": 1, "attempt": 0}):
                await _refused(one, hub, example(kind, **fields, **at), "stale")
        assert isinstance(hub.rounds.state, outer_round.Collecting)
