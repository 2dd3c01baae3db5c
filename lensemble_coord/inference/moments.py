"""When things on a stage's host were by the clock here, as closely as can be said.

No two clocks agree, and nodes tell none: a stage says how long before its answer things were.  The
answer was made between question and its coming, which bounds when they were; several answers bound
it from both sides.  What cannot have been bounds it further: a chunk lands after it was sent, at
every stage of every trip (cf. Lamport, Time, Clocks, and the Ordering of Events, 1978).

All times are seconds by the clock here, but a stage's own are from the landing of its anchor, the
newest chunk that it told of: where that is, is what is sought.
"""

from collections.abc import Mapping, Sequence

import msgspec

from lensemble.wire.stages import Times


class Answer(msgspec.Struct, frozen=True):
    """What a stage told, when it was asked, and when its answer came."""

    asked: float
    came: float
    timeline: tuple[Times, ...]


class Span(msgspec.Struct, frozen=True):
    """The anchor landed not before ``low`` and not after ``high``."""

    low: float
    high: float

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2

    @property
    def off_s(self) -> float:
        """How far from the middle it may have been."""
        return max(0.0, self.high - self.low) / 2


class Chunk(msgspec.Struct, frozen=True):
    """One chunk of a stage, from the landing of the anchor."""

    step: int
    rows: int
    landed: float
    began: float
    ended: float
    left: float


class Round(msgspec.Struct, frozen=True):
    """A trip: its step, when it was sent from here and when it was back."""

    step: int
    sent: float
    received: float


def anchored(answers: Sequence[Answer]) -> tuple[Span, tuple[Chunk, ...]] | None:
    """Where the anchor of one stage may be, and its chunks; None if it told of none."""
    told = [answer for answer in answers if answer.timeline]
    if not told:
        return None
    newest = told[-1]
    anchor, _, since, *_ = newest.timeline[-1]
    ago = [(answer, row[2]) for answer in told for row in answer.timeline if row[0] == anchor]
    span = Span(
        max(answer.asked - each / 1e6 for answer, each in ago),
        min(answer.came - each / 1e6 for answer, each in ago),
    )
    return span, tuple(_chunk(row, since) for row in newest.timeline)


def _chunk(row: Times, since: int) -> Chunk:
    step, rows, ago, waited, computed, handed = row
    landed = (since - ago) / 1e6
    began = landed + waited / 1e6
    ended = began + computed / 1e6
    return Chunk(step, rows, landed, began, ended, ended + handed / 1e6)


def narrowed(
    spans: Mapping[int, Span], chunks: Mapping[int, Mapping[int, Chunk]], rounds: Sequence[Round]
) -> dict[int, Span]:
    """``spans`` by stage, without what would have a chunk land before it was sent.

    ``chunks`` are by stage and step.  Clocks run apart; where trips of long ago contradict what was
    answered now, the trips count.
    """
    stages = sorted(spans)
    kept = {stage: spans[stage] for stage in stages}
    for stage, span in kept.items():
        kept[stage] = _cut(span, _from_before(stage, kept, chunks, rounds), float("inf"))
    for stage in reversed(stages):
        kept[stage] = _cut(kept[stage], -float("inf"), _from_behind(stage, kept, chunks, rounds))
    return kept


def _cut(span: Span, low: float, high: float) -> Span:
    low, high = max(span.low, low), min(span.high, high)
    if low <= high:
        return Span(low, high)
    return Span(low, low) if low > span.high else Span(high, high)


Chunks = Mapping[int, Mapping[int, Chunk]]


def _from_before(
    stage: int, spans: Mapping[int, Span], chunks: Chunks, rounds: Sequence[Round]
) -> float:
    """The earliest that the anchor can be, for what was sent had not landed before."""
    bounds = [-float("inf")]
    own, before = chunks[stage], chunks.get(stage - 1, {})
    for each in rounds:
        if each.step not in own:
            continue
        if stage == 0:
            bounds.append(each.sent - own[each.step].landed)
        elif each.step in before and stage - 1 in spans:
            left = spans[stage - 1].low + before[each.step].left
            bounds.append(left - own[each.step].landed)
    return max(bounds)


def _from_behind(
    stage: int, spans: Mapping[int, Span], chunks: Chunks, rounds: Sequence[Round]
) -> float:
    """The latest that the anchor can be, for what left landed elsewhere, or here, after that."""
    bounds = [float("inf")]
    own, behind = chunks[stage], chunks.get(stage + 1)
    for each in rounds:
        if each.step not in own:
            continue
        if behind is None:
            bounds.append(each.received - own[each.step].left)
        elif each.step in behind:
            landed = spans[stage + 1].high + behind[each.step].landed
            bounds.append(landed - own[each.step].left)
    return min(bounds)
