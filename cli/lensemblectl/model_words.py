"""Sentences about models and their runs."""

import sys

from lensemble.ctl import replies
from lensemblectl import words
from lensemblectl.exits import complain, printable

STDERR_SHOWN = 12
"""Last lines of a worker that a complaint repeats; ``inspect --json`` has all."""


def stage_line(stage: replies.RunStage) -> str:
    """``stage 0, layers 0:15 on node-a: fetching 12 MB of 52 MB``."""
    return f"stage {stage.index}, layers {layers(stage)} on {stage.name}: {doing(stage)}"


def layers(stage: replies.RunStage | replies.PlannedStage) -> str:
    return f"{stage.first}:{stage.last}"


def links_line(plan: replies.ModelPlan) -> str:
    """What is predicted to be spent on links."""
    chunk = f"{plan.chunk_ms:.2f} ms for {words.counted(plan.rows, 'token')} of a prompt"
    return f"about {plan.link_ms:.2f} ms for each token, {chunk}"


def link_line(hop: replies.PlannedHop) -> str:
    """``node-a to node-b: 3.00 ms (4 s ago), 95 Mbit/s (measured 12 s ago)``."""
    ends = f"{hop.before or 'the coordinator'} to {hop.after or 'the coordinator'}"
    trip = "1 ms assumed"
    if hop.rtt_ms is not None:
        trip = f"{hop.rtt_ms:.2f} ms{_ago(hop.rtt_age_s)}"
    rate = f"{hop.mbit_s:.3g} Mbit/s" if hop.mbit_s < 100 else f"{hop.mbit_s:.0f} Mbit/s"
    if hop.rate == "assumed":
        return f"{ends}: {trip}, {rate} assumed"
    least = "at least " if hop.rate == "seen" else ""
    return f"{ends}: {trip}, {least}{rate}{_ago(hop.rate_age_s, hop.rate)}"


def _ago(age_s: float | None, how: str = "") -> str:
    if age_s is None:
        return ""
    return f" ({how}{' ' if how else ''}{words.brief(age_s)} ago)"


def doing(stage: replies.RunStage) -> str:
    """What a stage does, and how far it is."""
    if not stage.total:
        return stage.phase
    if stage.phase == "compiling":
        return f"{stage.phase} {stage.done}/{stage.total}"
    return f"{stage.phase} {words.size(stage.done)}/{words.size(stage.total)}"


def started_line(run: replies.ModelRunStatus) -> str:
    """A run that takes requests, or is on its way."""
    on = ", ".join(f"{layers(stage)} on {stage.name}" for stage in run.stages)
    took = f" in {words.duration(run.since_s)}" if run.takes_requests else ""
    return f"run {run.run}: {run.model} {run.state}{took}, layers {on}"


def over_line(run: replies.ModelRunStatus) -> str:
    return f"run {run.run} {run.outcome}, teardown {run.teardown}"


def answer_line(end: replies.Answered) -> str:
    """What an answer took."""
    parts = [
        words.counted(end.completion_tokens, "token"),
        f"prompt {end.prompt_tokens}",
        "" if end.first_token_s is None else f"first after {words.duration(end.first_token_s)}",
        "" if end.tokens_per_s is None else f"{end.tokens_per_s:.1f} tokens/s",
        f"queued {words.duration(end.queued_s)}" if end.queued_s > 0.1 else "",
    ]
    return f"[{', '.join(part for part in parts if part)}; {end.finish}]"


def paused_line(pause: replies.Paused) -> str:
    """Why an answer waits, and that it goes on."""
    on = f" on {pause.name}" if pause.name else ""
    what = pause.reason if pause.planned else f"a stage{on} is lost ({pause.reason})"
    return printable(f"[{what}; the answer goes on elsewhere]")


def replacement_line(left: replies.Replacement) -> str:
    """One plan that was left: why, without whom it went on, and after how long."""
    why = left.reason if left.fault is None else f"{left.fault.code}, {fault_line(left.fault)}"
    without = f"; without {left.dropped_name} since" if left.dropped else ""
    after = "not ready again yet" if left.ready_s is None else f"{words.duration(left.ready_s)}"
    spans = [
        f"{what} {words.duration(seconds)}"
        for what, seconds in (("cleared", left.cleared_s), ("planned", left.planned_s))
        if seconds is not None
    ]
    took = f"pause {after}" if left.ready_s is not None else after
    if left.teardown not in {"", "clean"}:
        spans.append(f"teardown {left.teardown}: {'; '.join(left.complaints)}")
    return f"plan {left.run_epoch} was left: {why}{without}; {', '.join((took, *spans))}"


def where(fault: replies.FaultStatus) -> str:
    """``stage 1 on node-b``."""
    return "" if fault.stage is None else f"stage {fault.stage} on {fault.name or fault.node[:12]}"


def fault_line(fault: replies.FaultStatus) -> str:
    place = where(fault)
    return f"{place}: {fault.reason}" if place else fault.reason


def complain_of(run: str, fault: replies.FaultStatus) -> None:
    """Say why a run ended, with the last words of the worker that did it."""
    complain(f"run {run} faulted ({fault.code}): {fault_line(fault)}", fault.remediation)
    for line in fault.stderr[-STDERR_SHOWN:]:
        sys.stderr.write(f"  | {printable(line)}\n")
