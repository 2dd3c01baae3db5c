"""Where the latest tokens of a run were when, from the trips here and what its stages tell."""

from collections import defaultdict

import trio

from lensemble.ctl import replies
from lensemble_coord.inference import moments
from lensemble_coord.inference.model_run import ModelRun
from lensemble_coord.inference.moments import Answer, Chunk, Round, Span

QUESTIONS = 5


async def trace(of: ModelRun, last: int) -> replies.RunTrace:
    """The latest ``last`` tokens of the plan that is carried out.

    Its stages are asked several times, for every answer says a little more of their clocks.
    """
    plan = of.deployment
    answers: defaultdict[int, list[Answer]] = defaultdict(list)
    for _ in range(QUESTIONS):
        asked = trio.current_time()
        silent = await plan.watch.ask(plan.ask_for_timelines)
        for stage in set(range(len(plan.plan.stages))) - silent:
            # What another asked meanwhile is answered without, and counts for nothing.
            timeline = plan.watch.latest[stage].timeline
            answers[stage].append(Answer(asked, plan.watch.at[stage], timeline))
        if silent:
            break
    return _told(of, answers, last)


def _told(of: ModelRun, answers: dict[int, list[Answer]], last: int) -> replies.RunTrace:
    trips = list(of.ring.trips)[-last:]
    rounds = [Round(trip.step, trip.at - trip.microseconds / 1e6, trip.at) for trip in trips]
    found = {
        stage: anchored
        for stage, given in sorted(answers.items())
        if (anchored := moments.anchored(given)) is not None
    }
    chunks = {
        stage: {each.step: each for each in timeline} for stage, (_, timeline) in found.items()
    }
    spans = moments.narrowed({stage: span for stage, (span, _) in found.items()}, chunks, rounds)
    origin = min((each.sent for each in rounds), default=0.0)
    steps = {each.step for each in rounds}
    visits = [
        _visit(stage, chunk, spans[stage].middle - origin)
        for stage, timeline in chunks.items()
        for chunk in timeline.values()
    ]
    return replies.RunTrace(
        run=of.run,
        run_epoch=of.wiring.run_epoch,
        model=of.model.facts.name,
        stages=tuple(
            replies.TracedStage(index=index, name=stage.name, uncertain_us=_off(spans.get(index)))
            for index, stage in enumerate(of.plan.stages)
        ),
        trips=tuple(
            replies.Trip(
                step=trip.step,
                session=trip.session,
                index=trip.index,
                sent_us=_microseconds(each.sent - origin),
                received_us=_microseconds(each.received - origin),
            )
            for trip, each in zip(trips, rounds, strict=True)
        ),
        visits=tuple(each for each in visits if each.landed_us >= 0 or each.step in steps),
    )


def _visit(stage: int, chunk: Chunk, anchor: float) -> replies.Visit:
    return replies.Visit(
        stage=stage,
        step=chunk.step,
        rows=chunk.rows,
        landed_us=_microseconds(anchor + chunk.landed),
        began_us=_microseconds(anchor + chunk.began),
        ended_us=_microseconds(anchor + chunk.ended),
        left_us=_microseconds(anchor + chunk.left),
    )


def _off(span: Span | None) -> int | None:
    return None if span is None else _microseconds(span.off_s)


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
