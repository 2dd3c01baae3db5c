"""Which stage is named when a result is overdue."""

from typing import Any

import pytest
import trio

from lensemble.wire.stages import StageSeen
from lensemble_coord.inference.staging import Fault
from lensemble_coord.inference.standstill import ANSWER_S, Watch

RUN: dict[str, Any] = {"federation": "0" * 32, "epoch": 1, "run": "0" * 16, "run_epoch": 1}


class Stages:
    """Answers at once as it is told, but for the stages that are ``silent``."""

    def __init__(self, counts: list[int], held: list[int]) -> None:
        self.counts, self.held, self.silent = counts, held, set[int]()
        self.watch = Watch(len(counts), self.ask)

    def ask(self) -> None:
        for stage, (computed, held) in enumerate(zip(self.counts, self.held, strict=True)):
            if stage not in self.silent:
                self.watch.seen(StageSeen(**RUN, stage=stage, computed=computed, held=held))


@pytest.mark.parametrize(
    ("held", "stage"), [([0, 1, 0], 1), ([2, 2, 0], 1), ([1, 0, 0], 0), ([0, 0, 0], None)]
)
async def test_the_last_stage_that_holds_a_chunk_is_named(
    held: list[int], stage: int | None
) -> None:
    stages = Stages([5, 4, 4], held)
    before = await stages.watch.look("decoding", None)
    assert before == (5, 4, 4)
    fault = await stages.watch.look("decoding", before)
    assert isinstance(fault, Fault)
    assert (fault.code, fault.stage) == ("stage_stalled", stage)
    assert "decoding" in fault.reason


async def test_stages_that_move_are_left_alone() -> None:
    stages = Stages([5, 4], [1, 1])
    before = await stages.watch.look("prefilling", None)
    stages.counts = [5, 5]
    assert await stages.watch.look("prefilling", before) == (5, 5)


async def test_a_daemon_that_does_not_answer_is_named(autojump_clock: object) -> None:
    stages = Stages([5, 4, 4], [0, 0, 0])
    stages.silent = {1, 2}
    began = trio.current_time()
    fault = await stages.watch.look("decoding", None)
    assert isinstance(fault, Fault)
    assert fault.stage == 1
    assert "daemon" in fault.reason
    assert trio.current_time() - began == pytest.approx(ANSWER_S)
