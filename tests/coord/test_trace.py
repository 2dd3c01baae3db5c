"""A trace of a run, through the whole coordinator, on scripted stages that tell their times."""

from itertools import pairwise
from pathlib import Path

import pytest

from lensemble.ctl import replies, requests
from lensemble.errors import OperatorError
from tests.coord.test_model_runs import Rig, rig

SLOW_S = 0.02
SLACK_US = 5
"""Of rounding."""


async def traced(here: Rig, last: int = 32) -> replies.RunTrace:
    told = await here.last(requests.TraceRun(last=last))
    assert isinstance(told, replies.RunTrace)
    return told


async def test_every_token_is_seen_at_every_stage_in_order(tmp_path: Path) -> None:
    async with rig(tmp_path) as here:
        await here.provision()
        names = [each.name for each in (await here.status()).stages]
        here.stages[1].slow_s = SLOW_S
        await here.prompt("hello there", most=8)
        told = await traced(here, last=6)
        assert [trip.index for trip in told.trips] == [2, 3, 4, 5, 6, 7]
        assert told.trips[0].sent_us == 0
        assert [stage.name for stage in told.stages] == names
        assert all(stage.uncertain_us is not None for stage in told.stages)
        at = {(visit.step, visit.stage): visit for visit in told.visits}
        for trip in told.trips:
            first, second = at[trip.step, 0], at[trip.step, 1]
            moments = [trip.sent_us, first.landed_us, first.left_us, second.landed_us]
            moments += [second.left_us, trip.received_us]
            for before, after in pairwise(moments):
                assert after >= before - SLACK_US, (moments, told.stages)
            slow = (first, second)[names.index("node-1")]
            assert slow.ended_us - slow.began_us >= SLOW_S * 1e6
            spent = sum(each.left_us - each.landed_us for each in (first, second))
            assert 0 <= trip.received_us - trip.sent_us - spent < 20_000


async def test_a_prompt_is_in_a_trace_of_everything(tmp_path: Path) -> None:
    async with rig(tmp_path) as here:
        await here.provision()
        await here.prompt("hello there", most=3)
        told = await traced(here)
        assert [trip.index for trip in told.trips] == [0, 0, 1, 2], "the probe comes first"
        steps = {trip.step for trip in told.trips}
        prompts = [visit for visit in told.visits if visit.step not in steps]
        assert {visit.rows for visit in prompts} == {1, 4}, "that of the probe has one row"


async def test_a_stage_that_does_not_answer_is_left_open(tmp_path: Path) -> None:
    async with rig(tmp_path) as here:
        await here.provision()
        await here.prompt("hello there", most=3)
        here.stages[1].mute = True
        told = await traced(here)
        silent = [stage.name for stage in told.stages if stage.uncertain_us is None]
        assert silent == ["node-1"]
        assert len(told.trips) == 4
        here.stages[1].mute = False


async def test_a_run_that_is_over_has_no_trace(tmp_path: Path) -> None:
    async with rig(tmp_path) as here:
        over = await here.provision()
        await here.last(requests.TeardownRun())
        await here.at_rest()
        with pytest.raises(OperatorError, match="is over"):
            await here.last(requests.TraceRun(run=over.run))
