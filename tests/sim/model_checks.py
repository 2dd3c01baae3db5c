"""What must hold of all runs and stages together, whatever becomes of them."""

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from lensemble.wire import stages
from lensemble_coord.inference import sequence, staging, survival
from lensemble_node import stage
from tests.sim.parts import Transition
from tests.sim.stage_node import StageNode

if TYPE_CHECKING:
    from tests.sim.model_course import Course
    from tests.sim.model_life import ModelLife
    from tests.sim.model_plan import Run

LOOK_S = 2.0


class StageParts(msgspec.Struct, frozen=True):
    stage: Transition = stage.transition
    staging: Transition = staging.transition
    survival: Transition = survival.transition
    sequence: Transition = sequence.transition


class StageChecks:
    """What must hold of all runs and stages together."""

    def __init__(self) -> None:
        self.told: Counter[tuple[str, int, str, int, int]] = Counter()
        self.answered: Counter[tuple[str, int, str, int, int]] = Counter()
        self.endings: dict[tuple[str, int], staging.Ending] = {}
        self.ends: dict[str, staging.Ending] = {}
        self.epochs: dict[str, int] = {}

    def told_to_end(self, node: StageNode, order: stages.StageTeardown) -> None:
        self.told[node.name, order.epoch, order.run, order.run_epoch, order.stage] += 1

    def said(self, node: StageNode, message: stages.StageAnswer) -> None:
        """A teardown is answered once each time that it is asked for, when nothing is held."""
        if isinstance(message, stages.StageTornDown):
            what = (node.name, message.epoch, message.run, message.run_epoch, message.stage)
            self.answered[what] += 1
            assert self.answered[what] <= self.told[what], f"{what} is answered twice"
            held = node.held.get(message.run)
            assert (
                held is None
                or held.order.run_epoch > message.run_epoch
                or (held.order.stage != message.stage)
            ), f"{what} is answered and still there"

    def moved(self, run: "Run", before: staging.State) -> None:
        """A run has one outcome, from its first to its last moment."""
        after = run.machine.state
        if isinstance(after, staging.Leaving | staging.TornDown):
            known = self.endings.setdefault(run.key, after.ending)
            assert known == after.ending, f"run {run.key} ends as {known} and as {after.ending}"
        over = isinstance(before, staging.Leaving | staging.TornDown)
        assert not over or isinstance(after, staging.Leaving | staging.TornDown)

    def carried(self, name: str, epoch: int) -> None:
        """An epoch is the next one, and comes once in all lives of a coordinator."""
        assert epoch == self.epochs.get(name, 0) + 1, f"{name} is carried as {epoch} now"
        self.epochs[name] = epoch

    def went(self, course: "Course", before: survival.State) -> None:
        """A run over its plans has one outcome too."""
        known = survival.ending(before)
        after = survival.ending(course.machine.state)
        assert known is None or known == after, f"{course.name} ends as {known} and as {after}"
        if isinstance(course.machine.state, survival.Over):
            assert after is not None
            self.ends[course.name] = after

    def look(self, life: "ModelLife") -> None:
        """Every now and then: whoever waits has a deadline."""
        for course in life.coord.courses.values():
            course.check_seats()
        unready = staging.Provisioning | staging.Opening | staging.Probing
        for run in life.coord.runs.values():
            state, waits = run.machine.state, run.timers.running
            if isinstance(state, unready) and not run.machine.busy:
                assert waits, f"run {run.key} waits without a deadline: {state}"
            if isinstance(state, staging.Leaving) and not state.edges_held:
                assert staging.TEARDOWN in waits, f"run {run.key} waits for ever to be torn down"
        life.world.at(life.world.now + LOOK_S, partial(self.look, life))

    def end(self, life: "ModelLife") -> None:
        """At rest: every teardown of a session that is there was answered, nothing is held."""
        for what, times in self.told.items():
            node = next(each for each in life.nodes if each.name == what[0])
            if node.epoch == what[1]:
                assert self.answered[what] == times, f"{what}: {times} told, {self.answered[what]}"
