"""Looks how far the stages of a run are when a result is overdue, and names the one that stands."""

from collections.abc import Callable
from typing import TypeAlias

import trio

from lensemble.wire.stages import StageSeen
from lensemble_coord.inference.staging import Fault

Counts: TypeAlias = tuple[int, ...]
"""Chunks that each stage has computed."""

ANSWER_S = 1.0
"""How long the daemon of a node may take to answer; its worker need not."""


class Watch:
    """What the stages of one run have told of themselves.

    Args:
        stages: how many there are.
        ask: asks all of them; each answer comes to ``seen``.
    """

    def __init__(self, stages: int, ask: Callable[[], None]) -> None:
        self.latest: dict[int, StageSeen] = {}
        self.at: dict[int, float] = {}
        """When each of them came."""

        self._stages = stages
        self._ask = ask
        self._answered: dict[int, trio.Event] = {}

    def seen(self, message: StageSeen) -> None:
        """A stage has answered."""
        self.latest[message.stage] = message
        self.at[message.stage] = trio.current_time()
        answered = self._answered.pop(message.stage, None)
        if answered is not None:
            answered.set()

    async def ask(self, how: Callable[[], None] | None = None) -> set[int]:
        """Ask every stage, or ``how`` does; the stages that did not answer in time."""
        waited = {
            stage: self._answered.setdefault(stage, trio.Event()) for stage in range(self._stages)
        }
        (how or self._ask)()
        with trio.move_on_after(ANSWER_S):
            for event in waited.values():
                await event.wait()
        return {stage for stage, event in waited.items() if not event.is_set()}

    async def look(self, phase: str, before: Counts | None) -> Counts | Fault:
        """How far the stages are; what is wrong, if they are where they were ``before``."""
        silent = await self.ask()
        if silent:
            reason = f"its daemon does not answer within {ANSWER_S:g} s while {phase}"
            return Fault("stage_stalled", reason, min(silent))
        counts = tuple(self.latest[stage].computed for stage in range(self._stages))
        if before != counts:
            return counts
        holding = [stage for stage in range(self._stages) if self.latest[stage].held]
        if not holding:
            return Fault("stage_stalled", f"a result got lost on its way round while {phase}")
        # Behind it everything waits for a place; what is ahead of it has nothing to do.
        stage = max(holding)
        reason = (
            f"it stands still with a chunk in its hands after {counts[stage]} chunks, while {phase}"
        )
        return Fault("stage_stalled", reason, stage)
