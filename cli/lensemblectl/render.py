"""Tables and colours; plain text where nobody looks at a terminal."""

import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from lensemble.ctl import replies
from lensemblectl import words
from lensemblectl.exits import say

WIDE_COLUMNS = 120
PLAIN_COLUMNS = 140
MAX_NAME = 20
COLOURS = {
    "open": "cyan",
    "collecting": "cyan",
    "aggregating": "blue",
    "aligning": "blue",
    "committing": "blue",
    "closed": "green",
    "aborted": "red",
}


def console() -> Console:
    """Standard output; as wide as a table may need where it is not a terminal."""
    if sys.stdout.isatty():
        return Console(highlight=False, markup=False, emoji=False)
    return Console(
        highlight=False, markup=False, emoji=False, width=PLAIN_COLUMNS, color_system=None
    )


def show(*parts: RenderableType) -> None:
    """Print ``parts`` below each other."""
    out = console()
    if sys.stdout.isatty():
        out.print(*parts, sep="\n")
        return
    with out.capture() as captured:
        out.print(*parts, sep="\n", soft_wrap=True)
    lines = (line.rstrip() for line in captured.get().splitlines())
    say("\n".join(lines))


def facts(rows: Iterable[tuple[str, str]]) -> Table:
    """Names and values in two columns; rows without a value are left out."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        if value:
            table.add_row(f"  {name}", Text(value))
    return table


def listing(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """An empty table without lines; the first column keeps its names whole if it can."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for column in columns:
        table.add_column(
            column,
            justify="right" if column in right else "left",
            overflow="ellipsis",
            no_wrap=True,
            max_width=MAX_NAME if column == columns[0] else None,
        )
    return table


def wrap(table: Table, *headers: str) -> None:
    """Where ``table`` is too wide, break the texts of these columns and keep the others whole."""
    for column in table.columns:
        if column.header in headers:
            column.no_wrap, column.overflow = False, "fold"


def coordinator(status: replies.CoordinatorStatus, width: int) -> RenderableType:
    """A whole ``status`` of a coordinator."""
    head = facts(
        [
            ("node", status.node),
            ("federation", status.federation),
            ("listens at", ", ".join(status.addresses)),
            ("serves", ", ".join(f"{k} at {v}" for k, v in status.surfaces.items())),
            ("workload", f"{status.workload}, config hash {words.short(status.config_hash)}"),
            ("state", words.short(status.digest)),
            ("aggregation", status.aggregation),
            ("updates", status.field),
            ("storage", _storage(status.storage)),
            ("refused", words.counts(status.refused)),
        ]
    )
    parts: list[RenderableType] = [
        _title("coordinator", status.name, status.version, status.uptime_s),
        head,
        Text(),
        *live(status, width),
    ]
    faults = [edge for edge in status.edges if edge.fault]
    parts += [Text(f"edge {edge.id} with {edge.peer}: {edge.fault}", "red") for edge in faults]
    return Group(*parts)


def live(status: replies.CoordinatorStatus, width: int) -> list[RenderableType]:
    """The part that changes: round, run, who does what, alerts."""
    parts: list[RenderableType] = [round_text(status.round)]
    if status.run is not None:
        parts.append(Text(words.run_line(status.run)))
    elif status.last_round is not None:
        parts.append(Text(f"last: {words.closed_line(status.last_round)}"))
    parts += [Text(), _participants(status.participants, width)]
    parts += [Text(note, "yellow") for note in _notes(status.participants)]
    parts += [Text(f"alert: {alert}", "bold red") for alert in status.alerts]
    return parts


def round_text(status: replies.RoundStatus) -> Text:
    """The round line, and for how long it has been so."""
    colour = COLOURS.get(status.state, "")
    return Text.assemble(
        (words.round_line(status), f"bold {colour}".strip()),
        (f"\n  {words.clock_line(status)}", "dim"),
    )


def node(status: replies.NodeStatus) -> RenderableType:
    """A whole ``status`` of a node."""
    link = status.link
    last = status.last_contribution
    contributed = f"to {words.counted(status.contributions, 'round')}" + (
        "" if last is None else f", last to round {last}"
    )
    parts: list[RenderableType] = [
        _title("node", status.name, status.version, status.uptime_s),
        facts(
            [
                ("node", status.node),
                ("listens at", ", ".join(status.addresses)),
                ("state dir", status.state_dir),
                ("coordinator", _coordinator_of(link)),
                ("federation", link.federation),
                ("link", _link(link)),
                ("worker", _worker(status.worker)),
                ("dataset", _dataset(status.dataset)),
                ("workload", status.config_hash and f"config hash {status.config_hash}"),
                ("contributed", contributed),
                ("state", words.STATE_BY[status.state_by]),
                ("privacy", _privacy(status.privacy)),
                ("drift", "" if status.drift is None else words.drift_line(status.drift)),
                ("shares", "loss and norms, in the clear" if status.shares_norms else ""),
                ("hosts stages", _hosting(status.hosting)),
                ("refused", words.counts(status.refused)),
            ]
        ),
        Text(),
        Text(_node_round(status.round), "bold"),
    ]
    if status.stages:
        parts += [Text(), _stages(status.stages)]
    parts += [Text(f"edge {edge.id}: {edge.fault}", "red") for edge in status.edges if edge.fault]
    parts += [Text(f"alert: {alert}", "bold red") for alert in status.alerts]
    return Group(*parts)


def rounds(reply: replies.RoundList) -> RenderableType:
    """The table of ``lensemblectl rounds``."""
    columns = ["ROUND", "CLOSED", "TOOK", "NODES", "BY SUM", "SAVED", "LOSS", "STATE"]
    if any(each.alerts for each in reply.rounds):
        columns.append("ALERTS")
    table = listing(*columns, right=("ROUND", "NODES", "BY SUM", "SAVED"))
    for each in reply.rounds:
        row = (
            str(each.index),
            words.moment(each.closed_unix_s),
            "" if each.seconds is None else words.duration(each.seconds),
            str(len(each.contributors)),
            str(each.by_sum or ""),
            words.size(each.bytes_saved) if each.bytes_saved > 0 else "",
            "" if each.loss is None else f"{each.loss:.4g}",
            words.short(each.digest),
            "; ".join(each.alerts),
        )
        table.add_row(*row[: len(columns)], style="yellow" if each.alerts else "")
    return table


def round_detail(reply: replies.RoundDetail) -> RenderableType:
    """One record of the ledger in full."""
    who = listing("CONTRIBUTOR", "NODE", "DATASET ROOT")
    for each in reply.contributors:
        who.add_row(each.name, words.short(each.node), words.short(each.dataset_root))
    spent = ", ".join(f"{state} {words.duration(s)}" for state, s in reply.seconds_by_state.items())
    return Group(
        Text(words.closed_line(reply.round), "bold green"),
        facts(
            [
                ("closed at", words.moment(reply.round.closed_unix_s)),
                ("spent", spent),
                ("public data", words.public_line(reply.public) if reply.public else ""),
                ("state", reply.round.digest),
                ("prior state", reply.prior_digest),
                ("momentum", reply.momentum_digest),
                ("field sum", reply.field_sum_digest),
                ("config hash", reply.config_hash),
                ("record", reply.record_hash),
                ("prior record", reply.previous_record_hash),
            ]
        ),
        Text(),
        who,
        *(Text(f"left out: {name}: {why}", "yellow") for name, why in reply.dropped.items()),
    )


def checkpoints(reply: replies.CheckpointList) -> RenderableType:
    """The table of ``lensemblectl checkpoint ls``."""
    table = listing("ROUND", "DIGEST", "SIZE", "STEP", right=("ROUND", "SIZE"))
    for each in reply.checkpoints:
        table.add_row(
            "start" if each.round < 0 else str(each.round),
            words.short(each.digest),
            words.size(each.bytes),
            "can be recomputed" if each.verifiable else "by chain only",
        )
    return table


def verified(report: dict[str, Any]) -> RenderableType:
    """What ``lensemblectl verify`` found; ``report`` as the program prints it."""
    newest = report.get("newest_round")
    checked = [
        f"{value} {name.replace('_', ' ')}"
        for name, value in report.items()
        if isinstance(value, int) and name != "newest_round"
    ]
    sound = not report["problems"]
    head = f"{report['directory']}: {'sound' if sound else 'NOT sound'}"
    return Group(
        Text(head, "bold green" if sound else "bold red"),
        facts(
            [
                ("federation", report.get("federation", "")),
                ("newest round", "" if newest is None or newest < 0 else str(newest)),
                ("checked", ", ".join(checked)),
            ]
        ),
        *(Text(f"note: {note}", "dim") for note in report["notes"]),
        *(Text(_problem(problem), "red") for problem in report["problems"]),
    )


def _problem(problem: dict[str, Any]) -> str:
    index = problem.get("round")
    of_round = "" if index is None or index < 0 else f" (round {index})"
    return f"{problem['where']}{of_round}: {problem['what']}"


def _title(kind: str, name: str, version: str, uptime_s: float) -> Text:
    about = f"  lensemble {version}, up {words.duration(uptime_s)}"
    return Text.assemble((f"{kind} {name}", "bold"), (about, "dim"))


def _participants(who: tuple[replies.ParticipantStatus, ...], width: int) -> RenderableType:
    if not who:
        return Text("no node has joined yet; `lensemblectl invite` makes a ticket for one", "dim")
    wide = width >= WIDE_COLUMNS
    rows = [_participant(each) for each in who]
    columns = ["NAME", "DOES", "SEEN", "RTT", "AT"]
    columns += ["ROUNDS", "STATE BY", "NODE"] if wide else []
    if wide and any(each.epsilon is not None for each in who):
        columns.append("EPSILON")
    table = listing(*columns, right=("SEEN", "RTT", "ROUNDS", "EPSILON"))
    for index, column in enumerate(table.columns):
        # Where the terminal is narrow, the address is cut, and nothing else.
        if column.header not in {"NAME", "AT"}:
            column.min_width = max(len(row[index]) for row in rows)
    for each, row in zip(who, rows, strict=True):
        table.add_row(*row[: len(columns)], style="" if each.connected else "dim")
    return table


def _participant(each: replies.ParticipantStatus) -> list[str]:
    return [
        each.name,
        _doing(each),
        "" if each.last_seen_s is None else words.brief(each.last_seen_s),
        "" if each.rtt_ms is None else words.milliseconds(each.rtt_ms),
        each.path,
        str(each.contributions),
        each.state_by,
        words.short(each.node),
        "" if each.epsilon is None else f"{each.epsilon:.3f}",
    ]


def _doing(each: replies.ParticipantStatus) -> str:
    doing = words.progress(each.activity, each.step, each.steps, each.bytes, each.total_bytes)
    return f"{doing}, {each.drain}" if each.drain else doing


def _notes(who: tuple[replies.ParticipantStatus, ...]) -> list[str]:
    notes = []
    for each in who:
        told = [each.last_reason] if each.last_reason else []
        told += [f"refused {words.counts(each.refused)}"] if each.refused else []
        if told:
            notes.append(f"{each.name}: {'; '.join(told)}")
    return notes


def _storage(storage: replies.StorageStatus | None) -> str:
    if storage is None:
        return ""
    spool = f", spool {words.size(storage.spool_bytes)}" if storage.spool_bytes else ""
    return (
        f"{storage.state_dir}: {words.counted(storage.records, 'record')}, "
        f"{words.counted(storage.checkpoints, 'checkpoint')} "
        f"({words.size(storage.checkpoint_bytes)}){spool}, {words.size(storage.free_bytes)} free"
    )


def _coordinator_of(link: replies.LinkStatus) -> str:
    if not link.coordinator:
        return "none; `lensemblectl join TICKET` names one"
    name = f"{link.name} " if link.name else ""
    return f"{name}{words.short(link.coordinator)} at {', '.join(link.addresses)}"


def _link(link: replies.LinkStatus) -> str:
    parts = [
        link.state,
        link.reason,
        f"attempt {link.attempt}" if link.state != "joined" and link.attempt else "",
        ""
        if link.next_attempt_in_s is None
        else f"next in {words.duration(link.next_attempt_in_s)}",
        "" if link.rtt_ms is None else f"rtt {words.milliseconds(link.rtt_ms)}",
        f"via {link.path}" if link.path else "",
        "" if link.last_seen_s is None else f"seen {words.duration(link.last_seen_s)} ago",
    ]
    return ", ".join(part for part in parts if part)


def _worker(worker: replies.WorkerStatus | None) -> str:
    if worker is None:
        return "none"
    parts = [
        worker.state,
        worker.reason,
        "" if worker.pid is None else f"pid {worker.pid}",
        f"{words.counted(worker.restarts, 'restart')}" if worker.restarts else "",
        words.size(worker.rss_bytes) if worker.rss_bytes else "",
    ]
    return ", ".join(part for part in parts if part)


def _hosting(hosting: replies.HostingStatus | None) -> str:
    if hosting is None or not hosting.memory_bytes:
        return "" if hosting is None else f"none: {hosting.reason}" if hosting.reason else "none"
    parts = [
        f"{words.size(hosting.taken_bytes)} of {words.size(hosting.memory_bytes)} taken",
        hosting.engine,
        f"linked to {words.counted(len(hosting.links), 'node')}" if hosting.links else "",
    ]
    return ", ".join(part for part in parts if part)


def _stages(stages: tuple[replies.StageStatus, ...]) -> Table:
    table = listing(
        "RUN", "STAGE", "LAYERS", "PHASE", "MEMORY", "CHUNKS", "STEP", "PID", "MODEL",
        right=("STAGE", "MEMORY", "CHUNKS", "STEP", "PID"),
    )  # fmt: skip
    for each in stages:
        far = f" {100 * each.done // each.total} %" if each.total else ""
        table.add_row(
            each.run,
            f"{each.stage + 1}/{each.stages}",
            f"{each.first}:{each.last}",
            each.phase + far,
            words.size(each.rss_bytes or each.bytes),
            str(each.computed),
            "" if each.last_step_ms is None else words.milliseconds(each.last_step_ms),
            "" if each.pid is None else str(each.pid),
            each.model,
        )
    return table


def _privacy(privacy: replies.PrivacyStatus | None) -> str:
    if privacy is None:
        return ""
    return (
        f"epsilon {privacy.spent:.3f} of {privacy.epsilon:g} spent at delta {privacy.delta:g}, "
        f"{words.counted(privacy.rounds_left, 'round')} left, unit {privacy.unit}"
    )


def _dataset(dataset: replies.DatasetStatus | None) -> str:
    if dataset is None:
        return ""
    if not dataset.root:
        return f"{dataset.path}, not read yet"
    return (
        f"{dataset.path}: {words.counted(dataset.episodes, 'episode')}, "
        f"{words.counted(dataset.steps, 'step')}, root {words.short(dataset.root)}"
    )


def _node_round(status: replies.NodeRoundStatus | None) -> str:
    if status is None:
        return "no round in flight here"
    does = words.progress(
        status.activity, status.step, status.steps, status.bytes, status.total_bytes
    )
    attempt = f", attempt {status.attempt}" if status.attempt else ""
    why = f" ({status.reason})" if status.reason else ""
    return f"round {status.index}{attempt}: {does}{why}, for {words.duration(status.since_s)}"
