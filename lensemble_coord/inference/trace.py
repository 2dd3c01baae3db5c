"""Where the latest tokens of a run were when, from the trips here and what its stages tell.

No two clocks agree.  A stage tells how long ago things were, as of its answer; when that was by
the clock here is known to half the round trip of question and answer.  So the stages are asked
several times, and the quickest answer of each counts.
"""

import msgspec
import trio

from lensemble.ctl import replies
from lensemble.wire.stages import StageSeen, Times
from lensemble_coord.inference.model_run import ModelRun
from lensemble_coord.inference.ring import Trip

QUESTIONS = 5


class Answer(msgspec.Struct, frozen=True):
    """What a stage told, when it was asked and when its answer came, in seconds."""

    seen: StageSeen
    asked: float
    came: float

    @property
    def uncertain_s(self) -> float:
        """How far off the middle between question and answer may be."""
        return (self.came - self.asked) / 2


async def trace(of: ModelRun, last: int) -> replies.RunTrace:
    """The latest ``last`` tokens of the plan that is carried out."""
    plan = of.deployment
    answers: dict[int, Answer] = {}
    for _ in range(QUESTIONS):
        asked = trio.current_time()
        silent = await plan.watch.ask(plan.ask_for_timelines)
        for stage in set(range(len(plan.plan.stages))) - silent:
            answer = Answer(plan.watch.latest[stage], asked, plan.watch.at[stage])
            # What another asked meanwhile is answered without.
            if answer.seen.timeline or not plan.ring.trips:
                answers[stage] = min(answers.get(stage, answer), answer, key=_uncertainty)
        if silent:
            break
    return told(of, list(plan.ring.trips)[-last:], answers)


def _uncertainty(answer: Answer) -> float:
    return answer.uncertain_s


def told(of: ModelRun, trips: list[Trip], answers: dict[int, Answer]) -> replies.RunTrace:
    """``trips`` and what is known of them from ``answers``, by stage."""
    origin = min((_sent(trip) for trip in trips), default=0.0)
    steps = {trip.step for trip in trips}
    visits = [
        visit
        for stage, answer in sorted(answers.items())
        for times in answer.seen.timeline
        if (visit := _visit(stage, answer, times, origin)).landed_us >= 0 or visit.step in steps
    ]
    return replies.RunTrace(
        run=of.run,
        run_epoch=of.wiring.run_epoch,
        model=of.model.facts.name,
        stages=tuple(
            replies.TracedStage(
                index=index,
                name=stage.name,
                uncertain_us=_microseconds(answers[index].uncertain_s)
                if index in answers
                else None,
            )
            for index, stage in enumerate(of.plan.stages)
        ),
        trips=tuple(
            replies.Trip(
                step=trip.step,
                session=trip.session,
                index=trip.index,
                sent_us=_microseconds(_sent(trip) - origin),
                received_us=_microseconds(trip.at - origin),
            )
            for trip in trips
        ),
        visits=tuple(visits),
    )


def _sent(trip: Trip) -> float:
    return trip.at - trip.microseconds / 1e6


def _visit(stage: int, answer: Answer, times: Times, origin: float) -> replies.Visit:
    step, rows, ago, waited, computed, handed = times
    said = (answer.asked + answer.came) / 2
    landed = _microseconds(said - origin) - ago
    return replies.Visit(
        stage=stage,
        step=step,
        rows=rows,
        landed_us=landed,
        began_us=landed + waited,
        ended_us=landed + waited + computed,
        left_us=landed + waited + computed + handed,
    )


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
