"""A trace of a run as tables: where the time of each token went."""

import statistics
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lensemble.ctl import replies
from lensemblectl.render import listing


def trace(reply: replies.RunTrace) -> RenderableType:
    """What ``lensemblectl trace`` shows."""
    at = {(visit.step, visit.stage): visit for visit in reply.visits}
    known = [
        (trip, [at[trip.step, stage.index] for stage in reply.stages])
        for trip in reply.trips
        if all((trip.step, stage.index) in at for stage in reply.stages)
    ]
    parts: list[RenderableType] = [
        Text.assemble((f"run {reply.run}", "bold"), f"  {reply.model}, plan {reply.run_epoch}"),
        _stages(reply, known),
        Text(),
        _tokens(known),
        Text(
            "TRANSIT is a trip less what its stages took: exact. A single HOP is between two clocks"
            " and may be off by what stands behind it.",
            "dim",
        ),
    ]
    if missing := len(reply.trips) - len(known):
        parts.append(Text(f"{missing} more tokens: stages no longer know of them", "dim"))
    return Group(*parts)


Known = Sequence[tuple[replies.Trip, list[replies.Visit]]]


def _stages(reply: replies.RunTrace, known: Known) -> Table:
    """Medians, and the hop that leads to each stage, and back."""
    table = listing(
        "STAGE", "NODE", "HOP", "OFF BY", "WAIT", "COMPUTE", "HAND OVER",
        right=("HOP", "OFF BY", "WAIT", "COMPUTE", "HAND OVER"),
    )  # fmt: skip
    before = 0
    for stage in reply.stages:
        own = stage.uncertain_us
        seen = [visits[stage.index] for _, visits in known]
        table.add_row(
            str(stage.index),
            stage.name,
            _median(_hop(trip, visits, stage.index) for trip, visits in known),
            "no answer" if own is None else _ms(before + own),
            _median(each.began_us - each.landed_us for each in seen),
            _median(each.ended_us - each.began_us for each in seen),
            _median(each.left_us - each.ended_us for each in seen),
        )
        before = own or 0
    back = _median(trip.received_us - visits[-1].left_us for trip, visits in known)
    table.add_row("", "coordinator", back, _ms(before), "", "", "")
    return table


def _hop(trip: replies.Trip, visits: list[replies.Visit], stage: int) -> int:
    left = visits[stage - 1].left_us if stage else trip.sent_us
    return visits[stage].landed_us - left


def _tokens(known: Known) -> Table:
    figures = ("TOOK", "COMPUTE", "WAIT", "HAND OVER", "TRANSIT")
    table = listing("SESSION", "TOKEN", "STEP", *figures, right=figures)
    for trip, visits in known:
        took = trip.received_us - trip.sent_us
        spent = [
            sum(each.ended_us - each.began_us for each in visits),
            sum(each.began_us - each.landed_us for each in visits),
            sum(each.left_us - each.ended_us for each in visits),
        ]
        shown = map(_ms, (took, *spent, took - sum(spent)))
        table.add_row(str(trip.session), str(trip.index), str(trip.step), *shown)
    return table


def _median(values: Iterable[int]) -> str:
    found = list(values)
    return _ms(statistics.median(found)) if found else ""


def _ms(microseconds: float) -> str:
    return f"{microseconds / 1e3:.2f} ms"
