"""What is told of plans and runs, put together when it is asked."""

import statistics
from itertools import pairwise

import msgspec
import trio

from lensemble.ctl import replies
from lensemble_coord.inference import sequence, staging, survival
from lensemble_coord.inference.model_run import ModelRun
from lensemble_coord.inference.models import Model
from lensemble_coord.inference.paths import Paths
from lensemble_coord.inference.placement import Plan
from lensemble_coord.inference.request import Answer, Pause, Request
from lensemble_coord.inference.run_terms import MAX_REPLACED, Left

STDERR_KEPT = 20
"""Last lines of a worker whose stage was replaced."""

RECENT_S = 10.0
"""Tokens per second are of so long at most before the latest token."""


def plan(
    model: Model, planned: Plan, paths: Paths, unmeasured: tuple[str, ...] = ()
) -> replies.ModelPlan:
    """A plan in full, with the age of what is known of its links."""
    return replies.ModelPlan(
        model=planned.model,
        architecture=model.facts.architecture,
        layers=model.facts.layers,
        file_bytes=model.facts.file_bytes,
        engine=planned.engine,
        ctx=planned.ctx,
        sessions=planned.sessions,
        rows=planned.rows,
        stages=tuple(
            replies.PlannedStage(
                node=each.node,
                name=each.name,
                first=each.first,
                last=each.last,
                weights_bytes=each.need.weights,
                cache_bytes=each.need.cache,
                planned_bytes=each.need.planned,
                required_bytes=each.required_bytes,
                have_bytes=each.have_bytes,
            )
            for each in planned.stages
        ),
        unused=tuple(
            replies.UnusedNode(node=each.node, name=each.name, reason=each.reason)
            for each in planned.unused
        ),
        link_ms=planned.link_ns / 1e6,
        chunk_ms=planned.chunk_ns / 1e6,
        hops=hops(planned, paths),
        unmeasured=unmeasured,
        exhaustive=planned.exhaustive,
    )


def hops(planned: Plan, paths: Paths) -> tuple[replies.PlannedHop, ...]:
    """The links of ``planned`` as they are known at the moment."""
    names = ("", *(stage.name for stage in planned.stages), "")
    known = paths.of(tuple(stage.node for stage in planned.stages))
    return tuple(
        replies.PlannedHop(
            before=before,
            after=after,
            rtt_ms=None if path.rtt_ns is None else path.rtt_ns / 1e6,
            rtt_age_s=path.rtt_age_s,
            mbit_s=path.bytes_per_s * 8 / 1e6,
            rate=path.how,
            rate_age_s=path.age_s,
        )
        for (before, after), path in zip(pairwise(names), known, strict=True)
    )


def run(of: ModelRun) -> replies.ModelRunStatus:
    """A run as it stands."""
    facts, planned = of.model.facts, of.plan
    end = trio.current_time() if of.ended_at is None else of.ended_at
    ending = survival.ending(of.course)
    over = of.course if isinstance(of.course, survival.Over) else None
    trips = [trip.microseconds / 1e3 for trip in of.ring.trips if trip.alone]
    return replies.ModelRunStatus(
        run=of.run,
        run_epoch=of.wiring.run_epoch,
        model=facts.name,
        digest=of.model.digest,
        architecture=facts.architecture,
        engine=planned.engine,
        state=public_state(of),
        takes_requests=of.takes_requests,
        layers=facts.layers,
        ctx=planned.ctx,
        sessions=planned.sessions,
        rows=planned.rows,
        stages=tuple(_stage(of, index) for index in range(len(planned.stages))),
        requests=tuple(_session(each) for each in of.requests.values()),
        finished=dict(of.finished),
        tokens=of.tokens + sum(each.drawn for each in of.requests.values()),
        tokens_per_s=_tokens_per_s(of),
        trip_ms=statistics.median(trips) if trips else None,
        hop_ms=hop_ms(of),
        hops=() if of.over else hops(planned, of.paths),
        late_results=of.ring.late,
        since_s=end - of.since,
        outcome="" if ending is None else ending.outcome,
        reason="" if ending is None else ending.reason,
        fault=None if ending is None else fault(of.plan, ending.fault),
        teardown="" if over is None else over.teardown,
        complaints=() if over is None else over.complaints,
        on_fault="replace" if of.rules.replaces else "fail",
        replacements=(*of.before, *map(_replacement, of.left))[-MAX_REPLACED:],
    )


def public_state(of: ModelRun) -> str:
    """One word or two for people: that of the plan, replacing, or torn down."""
    if of.over:
        return "torn down"
    return "replacing" if of.replacing else staging.public_state(of.state)


def _replacement(left: Left) -> replies.Replacement:
    why = fault(left.plan, left.fault)
    if why is not None:
        why = msgspec.structs.replace(why, stderr=why.stderr[-STDERR_KEPT:])
    gone = [each for each in left.plan.stages if each.node == left.dropped]
    return replies.Replacement(
        run_epoch=left.run_epoch,
        reason=left.reason,
        fault=why,
        dropped=gone[0].node if gone else "",
        dropped_name=gone[0].name if gone else "",
        teardown=left.teardown or "",
        complaints=left.complaints,
        cleared_s=left.cleared_s,
        planned_s=left.planned_s,
        ready_s=left.ready_s,
    )


def paused(of: ModelRun, pause: Pause) -> replies.Paused:
    """An answer that waits for the next plan."""
    return replies.Paused(
        run=of.run, reason=pause.reason, name=pause.name, planned=pause.fault is None
    )


def fault(plan: Plan, what: staging.Fault | None) -> replies.FaultStatus | None:
    """``what`` with the node it is about."""
    if what is None:
        return None
    planned = None if what.stage is None else plan.stages[what.stage]
    return replies.FaultStatus(
        code=what.code,
        reason=what.reason,
        stage=what.stage,
        node="" if planned is None else planned.node,
        name="" if planned is None else planned.name,
        remediation=what.remediation,
        stderr=what.stderr,
    )


def answered(of: ModelRun, end: Answer) -> replies.Answered:
    """The end of one answer."""
    speed = None
    after_first = end.seconds - (end.first_token_s or 0.0)
    if end.usage.completion_tokens > 1 and after_first > 0:
        speed = (end.usage.completion_tokens - 1) / after_first
    return replies.Answered(
        run=of.run,
        text=end.text,
        finish=end.finish,
        prompt_tokens=end.usage.prompt_tokens,
        completion_tokens=end.usage.completion_tokens,
        queued_s=end.queued_s,
        first_token_s=end.first_token_s,
        seconds=end.seconds,
        tokens_per_s=speed,
        fault=fault(of.plan, end.fault),
    )


def hop_ms(of: ModelRun) -> float | None:
    """Median of a trip less its computing, over the edges of the ring; None if nobody knows."""
    tables = [dict(seen.recent) for _, seen in sorted(of.watch.latest.items())]
    if len(tables) < len(of.plan.stages):
        return None
    hops = [
        (trip.microseconds - sum(table[trip.step] for table in tables)) / 1e3 / (len(tables) + 1)
        for trip in of.ring.trips
        if trip.alone and all(trip.step in table for table in tables)
    ]
    return statistics.median(hops) if hops else None


def _tokens_per_s(of: ModelRun) -> float | None:
    trips = of.ring.trips
    recent = [trip.at for trip in trips if trip.at >= trips[-1].at - RECENT_S]
    if len(recent) < 3:
        return None
    return (len(recent) - 1) / max(1e-9, recent[-1] - recent[0])


def _stage(of: ModelRun, index: int) -> replies.RunStage:
    planned, place = of.plan.stages[index], of.state.places[index]
    loaded, seen = place.loaded, of.watch.latest.get(index)
    alone = {trip.step for trip in of.ring.trips if trip.alone}
    took = [] if seen is None else [us for step, us in seen.recent if step in alone]
    return replies.RunStage(
        index=index,
        node=planned.node,
        name=planned.name,
        first=planned.first,
        last=planned.last,
        phase=place.phase,
        done=place.done,
        total=place.total,
        planned_bytes=planned.need.planned,
        weights_bytes=0 if loaded is None else loaded.weights_bytes,
        resident_bytes=0 if loaded is None else loaded.resident_bytes,
        fetched_bytes=0 if loaded is None else loaded.fetched_bytes,
        seconds=0.0 if loaded is None else loaded.seconds,
        chunks=0 if seen is None else seen.computed,
        held=0 if seen is None else seen.held,
        compute_ms=statistics.median(took) / 1e3 if took else None,
    )


def _session(of: Request) -> replies.SessionStatus:
    return replies.SessionStatus(
        slot=of.slot,
        phase=sequence.phase(of.state),
        prompt_tokens=len(of.ask.prompt),
        tokens=of.drawn,
        elapsed_s=trio.current_time() - of.since,
    )
