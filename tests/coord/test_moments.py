"""When things on other hosts were: hosts are made up here, with clocks of their own."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lensemble_coord.inference import moments
from lensemble_coord.inference.moments import Answer, Chunk, Round, Span

MICROSECOND = 1e-6


class World:
    """Trips over stages whose delays are known here, and what each side tells of them."""

    def __init__(self, seed: int, stages: int, trips: int) -> None:
        self.draw = random.Random(seed)
        self.now = 100.0
        self.stages = stages
        self.rounds: list[Round] = []
        self.true: list[dict[int, tuple[float, float, float, float]]] = [{} for _ in range(stages)]
        for step in range(trips):
            self.trip(step)
        self.now += self.draw.uniform(0, 3)

    def passes(self, most: float = 0.02) -> float:
        self.now += self.draw.uniform(1e-5, most)
        return self.now

    def trip(self, step: int) -> None:
        sent = self.now
        for stage in range(self.stages):
            self.true[stage][step] = (self.passes(), self.passes(), self.passes(), self.passes())
        self.rounds.append(Round(step, sent, self.passes()))

    def answers(self, stage: int, count: int) -> list[Answer]:
        given = []
        for _ in range(count):
            asked, said, came = self.now, self.passes(), self.passes()
            rows = tuple(
                (step, 1, *(round(each * 1e6) for each in spans))
                for step, (a, b, c, d) in self.true[stage].items()
                for spans in [(said - a, b - a, c - b, d - c)]
            )
            given.append(Answer(asked, came, rows))  # type: ignore[arg-type]
        return given


def solved(world: World, count: int) -> tuple[dict[int, Span], dict[int, dict[int, Chunk]]]:
    found = {stage: moments.anchored(world.answers(stage, count)) for stage in range(world.stages)}
    spans = {stage: each[0] for stage, each in found.items() if each}
    chunks = {stage: {c.step: c for c in each[1]} for stage, each in found.items() if each}
    for stage, span in spans.items():
        assert span.off_s <= 0.02, stage
    return moments.narrowed(spans, chunks, world.rounds), chunks


@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 12), st.integers(1, 5))
def test_the_truth_is_within_what_it_may_be_off_by(
    seed: int, stages: int, trips: int, count: int
) -> None:
    world = World(seed, stages, trips)
    spans, chunks = solved(world, count)
    for stage, span in spans.items():
        truth = world.true[stage][trips - 1][0]
        assert span.low - 5 * MICROSECOND <= truth <= span.high + 5 * MICROSECOND
        for step, chunk in chunks[stage].items():
            landed = world.true[stage][step][0]
            assert abs(span.middle + chunk.landed - landed) <= span.off_s + 5 * MICROSECOND


@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 12))
def test_nothing_lands_before_it_was_sent(seed: int, stages: int, trips: int) -> None:
    world = World(seed, stages, trips)
    spans, chunks = solved(world, 3)
    for each in world.rounds:
        times = [each.sent]
        for stage in range(stages):
            chunk, middle = chunks[stage][each.step], spans[stage].middle
            times += [middle + chunk.landed, middle + chunk.left]
        times.append(each.received)
        assert all(after >= before - 5 * MICROSECOND for before, after in pairwise(times))


def test_trips_say_more_than_answers_alone() -> None:
    world = World(7, 3, 12)
    found = [moments.anchored(world.answers(stage, 1)) for stage in range(3)]
    alone = {stage: each[0] for stage, each in enumerate(found) if each}
    chunks = {stage: {c.step: c for c in each[1]} for stage, each in enumerate(found) if each}
    spans = moments.narrowed(alone, chunks, world.rounds)
    assert all(spans[stage].off_s <= alone[stage].off_s for stage in alone)
    assert sum(span.off_s for span in spans.values()) < sum(e.off_s for e in alone.values())


def test_where_clocks_ran_apart_the_trips_count() -> None:
    chunk = Chunk(0, 1, 0.0, 0.0, 0.0, 0.0)
    drifted = {0: Span(5.0, 5.1)}
    for sent, received in ((6.0, 7.0), (3.0, 4.0)):
        (span,) = moments.narrowed(drifted, {0: {0: chunk}}, [Round(0, sent, received)]).values()
        assert sent <= span.middle <= received


@pytest.mark.parametrize("answers", [[], [Answer(0.0, 1.0, ())]])
def test_a_stage_that_told_nothing_is_nowhere(answers: list[Answer]) -> None:
    assert moments.anchored(answers) is None
