"""Tables about models and their runs."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lensemble.ctl import replies
from lensemblectl import model_words, words
from lensemblectl.render import facts, listing, wrap

COLOURS = {
    "provisioned": "green",
    "replacing": "yellow",
    "waiting for nodes": "yellow",
    "running": "green",
    "faulted": "red",
    "torn down": "dim",
}


def plan(reply: replies.ModelPlan) -> RenderableType:
    """What ``lensemblectl plan`` shows."""
    table = listing(
        "STAGE", "NODE", "LAYERS", "WEIGHTS", "CACHE", "PLANNED", "NEEDS", "HAS",
        right=("WEIGHTS", "CACHE", "PLANNED", "NEEDS", "HAS"),
    )  # fmt: skip
    for index, stage in enumerate(reply.stages):
        table.add_row(
            str(index),
            stage.name,
            model_words.layers(stage),
            *map(
                words.size,
                (
                    stage.weights_bytes,
                    stage.cache_bytes,
                    stage.planned_bytes,
                    stage.required_bytes,
                    stage.have_bytes,
                ),
            ),
        )
    unused = [Text(f"unused: {each.name}: {each.reason}", "dim") for each in reply.unused]
    return Group(
        Text.assemble(
            (reply.model, "bold"),
            f"  {reply.architecture}, {words.counted(reply.layers, 'layer')}, "
            f"{words.size(reply.file_bytes)}",
        ),
        facts(
            [
                ("ctx", f"{reply.ctx}, {words.counted(reply.sessions, 'session')}"),
                ("engine", reply.engine),
                ("on links", model_words.links_line(reply)),
                *_links(reply.hops),
            ]
        ),
        Text(),
        table,
        *unused,
        *(Text(f"not measured: {each}", "yellow") for each in reply.unmeasured),
    )


def _links(hops: Sequence[replies.PlannedHop]) -> list[tuple[str, str]]:
    return [
        (("links", "")[index > 0], model_words.link_line(hop)) for index, hop in enumerate(hops)
    ]


def stages(reply: replies.ModelRunStatus) -> RenderableType:
    """How far the stages of a run are."""
    table = listing("STAGE", "NODE", "LAYERS", "DOES")
    for stage in reply.stages:
        row = (str(stage.index), stage.name, model_words.layers(stage), model_words.doing(stage))
        table.add_row(*row)
    return Group(Text(f"{reply.model}: {reply.state}", "bold"), table)


def runs(reply: replies.ModelRunList) -> RenderableType:
    """The table of ``lensemblectl runs``."""
    table = listing("RUN", "MODEL", "STATE", "STAGES", "ASKED", "TOKENS", "AGE", "WHY")
    for run in reply.runs:
        table.add_row(
            run.run,
            run.model,
            Text(run.state, COLOURS.get(run.state, "")),
            ", ".join(f"{model_words.layers(each)} {each.name}" for each in run.stages),
            str(len(run.requests) + sum(run.finished.values())),
            str(run.tokens),
            words.brief(run.since_s),
            f"{run.outcome} {run.reason}".strip(),
        )
    wrap(table, "MODEL", "STAGES", "WHY")
    return table


def run(reply: replies.ModelRunStatus) -> RenderableType:
    """What ``lensemblectl inspect`` shows."""
    parts: list[RenderableType] = [
        Text.assemble(
            (f"run {reply.run}", "bold"), f"  {reply.model}, plan {reply.run_epoch}, ",
            (reply.state, COLOURS.get(reply.state, "cyan")),
            f", {'lasted' if reply.outcome else 'began'} {words.duration(reply.since_s)}",
            "" if reply.outcome else " ago",
        ),
        facts(_facts(reply)),
        Text(),
        _stages(reply),
    ]  # fmt: skip
    if reply.replacements:
        told = [Text(model_words.replacement_line(each), "yellow") for each in reply.replacements]
        parts += [Text(), *told]
    if reply.requests:
        parts += [Text(), _requests(reply)]
    if reply.fault is not None:
        said = f"{reply.fault.code}: {model_words.fault_line(reply.fault)}"
        parts += [Text(), Text(said, "red"), *(Text(f"  | {e}") for e in reply.fault.stderr)]
    return Group(*parts)


def _facts(reply: replies.ModelRunStatus) -> list[tuple[str, str]]:
    speed = "" if reply.tokens_per_s is None else f"{reply.tokens_per_s:.1f} tokens/s"
    trip = "" if reply.trip_ms is None else f"{reply.trip_ms:.1f} ms round"
    hop = "" if reply.hop_ms is None else f"{reply.hop_ms:.2f} ms a hop"
    ended = f"{reply.outcome}: {reply.reason}" if reply.reason else reply.outcome
    late = f", {reply.late_results} late" if reply.late_results else ""
    return [
        ("model", f"{reply.architecture}, {reply.layers} layers, {words.short(reply.digest)}"),
        ("engine", reply.engine),
        ("room", f"ctx {reply.ctx}, {reply.sessions} sessions, {reply.rows} rows"),
        ("answered", f"{words.counts(reply.finished) or 'nothing'}, {reply.tokens} tokens{late}"),
        ("on fault", reply.on_fault),
        ("speed", ", ".join(part for part in (speed, trip, hop) if part)),
        *_links(reply.hops),
        ("outcome", ended),
        ("teardown", "; ".join((reply.teardown, *reply.complaints))),
    ]


def _stages(reply: replies.ModelRunStatus) -> Table:
    table = listing(
        "STAGE", "NODE", "LAYERS", "DOES", "PLANNED", "MEASURED", "FETCHED", "READY IN", "CHUNKS",
        "COMPUTE", right=("PLANNED", "MEASURED", "FETCHED", "READY IN", "CHUNKS", "COMPUTE"),
    )  # fmt: skip
    for stage in reply.stages:
        table.add_row(
            str(stage.index),
            stage.name,
            model_words.layers(stage),
            model_words.doing(stage),
            words.size(stage.planned_bytes),
            words.size(stage.resident_bytes) if stage.resident_bytes else "",
            words.size(stage.fetched_bytes) if stage.resident_bytes else "",
            words.brief(stage.seconds) if stage.seconds else "",
            str(stage.chunks) if stage.chunks else "",
            "" if stage.compute_ms is None else f"{stage.compute_ms:.1f} ms",
        )
    return table


def _requests(reply: replies.ModelRunStatus) -> Table:
    table = listing("SESSION", "DOES", "PROMPT", "TOKENS", "FOR", right=("PROMPT", "TOKENS"))
    for each in reply.requests:
        table.add_row(
            "" if each.slot is None else str(each.slot),
            each.phase,
            str(each.prompt_tokens),
            str(each.tokens),
            words.brief(each.elapsed_s),
        )
    return table
