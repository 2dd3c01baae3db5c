"""A trace of a run as a file for Perfetto or chrome://tracing (Trace Event Format)."""

from typing import Any

from lensemble.ctl import replies

Event = dict[str, Any]
COORDINATOR = 0
"""Its process in the file; stage n is process n + 1."""


def document(trace: replies.RunTrace) -> dict[str, Any]:
    """The whole file: one process for the coordinator, with a row for each session, and one for
    each stage; arrows lead from where a token was sent to where it came back.
    """
    tokens = {trip.step: trip for trip in trace.trips}
    return {
        "displayTimeUnit": "ms",
        "otherData": {"run": trace.run, "run_epoch": trace.run_epoch, "model": trace.model},
        "traceEvents": [
            _named(COORDINATOR, "coordinator"),
            *(_named(stage.index + 1, _title(stage)) for stage in trace.stages),
            *(event for trip in trace.trips for event in _trip(trip)),
            *(event for visit in trace.visits for event in _visit(visit, tokens.get(visit.step))),
        ],
    }


def _title(stage: replies.TracedStage) -> str:
    if stage.uncertain_us is None:
        return f"stage {stage.index} on {stage.name} (did not answer)"
    return f"stage {stage.index} on {stage.name} (+- {stage.uncertain_us / 1e3:.2f} ms)"


def _named(process: int, name: str) -> Event:
    return {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}


def _trip(trip: replies.Trip) -> list[Event]:
    name = f"token {trip.index}"
    where = {"pid": COORDINATOR, "tid": trip.session}
    return [
        _slice(name, trip.sent_us, trip.received_us, where, {"step": trip.step}),
        _flow("s", trip.sent_us, where, trip.step),
        _flow("f", trip.received_us, where, trip.step),
    ]


def _visit(visit: replies.Visit, trip: replies.Trip | None) -> list[Event]:
    what = f"{visit.rows} tokens of a prompt" if trip is None else f"token {trip.index}"
    args = {"step": visit.step, "rows": visit.rows, "what": what}
    where = {"pid": visit.stage + 1, "tid": 0}
    events = [
        _slice("wait", visit.landed_us, visit.began_us, where, args),
        _slice("compute", visit.began_us, visit.ended_us, where, args),
        _slice("hand over", visit.ended_us, visit.left_us, where, args),
    ]
    if trip is not None:
        events.append(_flow("t", visit.began_us, where, visit.step))
    return events


def _slice(name: str, began: int, ended: int, where: Event, args: Event) -> Event:
    return {"ph": "X", "name": name, "ts": began, "dur": ended - began, **where, "args": args}


def _flow(phase: str, at: int, where: Event, step: int) -> Event:
    binding = {"bp": "e"} if phase == "f" else {}
    return {"ph": phase, "name": "trip", "cat": "trip", "id": step, "ts": at, **where, **binding}
