"""The page: one HTML file that needs nothing beside it."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from lensemble.version import VERSION
from lensemble_coord.training.report import Report
from lensemble_report.history import History, Round, printable
from lensemble_report.plots import Plot

MAX_TABLE = 500
MAX_ABORTS = 200
MAX_REASON = 400
SHORT_HEX = 12
MAX_NAMES = 3
ROW_NAMES = 18
MAX_RUNS = 8
FIGURES = (
    ("seconds", "seconds"),
    ("loss", "loss"),
    ("probe_r2", "linear R2"),
    ("latent_error", "latent error"),
    ("state_error", "state error"),
)

MASKED = (
    "Updates were masked: the coordinator learned their sum and who contributed, and no single one."
)
PLAIN = "Updates came in the clear: the coordinator saw each one."
MIXED = "In some rounds updates were masked, in others the coordinator saw each one."
NO_NOISE = "No noise was added: what the sum says about one node is not bounded."


@dataclass(frozen=True)
class Row:
    """One round of the table, as text."""

    index: int
    closed: str
    attempt: int
    contributors: str
    names: str
    left_out: str
    seconds: str
    loss: str
    probe_r2: str
    latent_error: str
    state_error: str
    digest: str
    record: str
    remark: str
    rejected: bool

    @property
    def long(self) -> bool:
        """Whether the names have no room in the row itself."""
        return len(self.names) > ROW_NAMES

    @property
    def more(self) -> bool:
        """Whether a second row follows."""
        return self.long or bool(self.remark or self.left_out)


def page(history: History, plots: list[Plot], verified: Report | None, made_at: str) -> str:
    """The HTML of a report; every text is escaped, and only the plots are markup."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["counted"] = counted
    template = environment.from_string(
        (files("lensemble_report") / "page.html.j2").read_text(encoding="utf-8")
    )
    shown = history.rounds[-MAX_TABLE:]
    shown_rows = [_row(history, each) for each in reversed(shown)]
    return template.render(
        history=history,
        plots=[(plot, Markup(plot.svg)) for plot in plots if plot.svg],  # noqa: S704 - ours
        missing=_missing(plots),
        columns=_columns(shown_rows),
        rows=shown_rows,
        left_off=len(history.rounds) - len(shown),
        tiles=_tiles(history),
        facts=_facts(history),
        terms=_terms(history),
        aborts=[
            (each, _moment(each.closed_at), printable(each.reason, MAX_REASON))
            for each in history.aborted[-MAX_ABORTS:]
        ],
        aborts_left_off=max(0, len(history.aborted) - MAX_ABORTS),
        guarantees=guarantees(history),
        verified=verified,
        version=VERSION,
        made_at=_moment(made_at),
    )


def _missing(plots: list[Plot]) -> list[tuple[str, str]]:
    """What is not shown, and why; plots of one reason together."""
    grouped: dict[str, list[str]] = {}
    for plot in plots:
        if not plot.svg:
            grouped.setdefault(plot.note, []).append(plot.title)
    return [(", ".join(titles), note) for note, titles in grouped.items()]


def _columns(rows: list[Row]) -> list[tuple[str, str]]:
    """Field and heading of the figures that at least one round has."""
    return [(key, name) for key, name in FIGURES if any(getattr(row, key) for row in rows)]


def counted(count: int, noun: str) -> str:
    """``1 round``, ``3 rounds``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def guarantees(history: History) -> list[str]:
    """What the coordinator could know of one node's update, in sentences."""
    masked = {each.record.masking is not None for each in history.rounds}
    lines = (
        [] if not masked else [MIXED if len(masked) > 1 else MASKED if True in masked else PLAIN]
    )
    privacy = history.workload.privacy
    if privacy.enabled:
        lines.append(
            f"Noise of {privacy.noise_multiplier:g} x {privacy.clip_norm:g} ({privacy.placement}), "
            f"for a budget of epsilon {privacy.epsilon:g} at delta {privacy.delta:g} about each "
            f"{privacy.unit}."
        )
    else:
        lines.append(NO_NOISE)
    lines.append("Raw observations, actions and action heads stayed on their nodes.")
    return lines


def _tiles(history: History) -> list[tuple[str, str, str]]:
    """The figures to see first: name, value, and what it was before."""
    rounds = history.rounds
    tiles = [("rounds closed", str(len(rounds)), "")]
    refused = sum(bool(each.record.refusal) for each in rounds)
    if refused:
        tiles.append(("of these rejected", str(refused), ""))
    if history.aborted:
        tiles.append(("attempts aborted", str(len(history.aborted)), ""))
    tiles.append(("nodes that contributed", str(len(history.contributors)), ""))
    tested = [each.figures for each in rounds if each.figures]
    if history.start and rounds and not rounds[0].index:
        tested.insert(0, history.start.figures)
    for name, key in (
        ("5-step state error", "state_error"),
        ("latent error", "latent_error"),
        ("linear R2", "probe_r2"),
    ):
        known = [value for each in tested if (value := getattr(each, key)) is not None]
        if known:
            was = f"from {known[0]:.3g}" if len(known) > 1 else ""
            tiles.append((name, f"{known[-1]:.3g}", was))
    return tiles


def _facts(history: History) -> list[tuple[str, str]]:
    rounds = history.rounds
    newest = rounds[-1].record if rounds else None
    span = "none yet"
    if rounds:
        first, last = _moment(rounds[0].committed_at), _moment(rounds[-1].committed_at)
        span = f"{rounds[0].index} to {rounds[-1].index}, {first} to {last}"
    return [
        ("federation", history.federation),
        ("workload", history.workload.name),
        ("config hash", history.config_hash),
        ("runs", ", ".join(each.run for each in history.runs[-MAX_RUNS:]) or "none"),
        ("rounds", span),
        ("state", newest.next_digest if newest else "as at the start"),
        ("directory", printable(str(history.directory), 200)),
    ]


def _terms(history: History) -> list[tuple[str, list[tuple[str, str]]]]:
    """The workload, section by section."""
    whole = history.workload.model_dump(mode="json")
    sections = [("", {k: v for k, v in whole.items() if not isinstance(v, dict)})]
    sections += [(k, v) for k, v in whole.items() if isinstance(v, dict)]
    return [(name, [(k, _value(v)) for k, v in terms.items()]) for name, terms in sections]


def _value(value: object) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return printable(text, 120)


def _row(history: History, entry: Round) -> Row:
    record, figures = entry.record, entry.figures
    remarks = (f"rejected: {record.refusal}",) if record.refusal else _alarms(entry)
    return Row(
        index=entry.index,
        closed=_moment(entry.committed_at),
        attempt=record.attempt,
        contributors=f"{record.c_t} of {entry.cohort}",
        names=_who(history, entry),
        left_out=printable(entry.left_out, MAX_REASON),
        seconds=f"{sum(entry.seconds.values()):.1f}" if entry.seconds else "",
        loss=_figure(entry.loss),
        probe_r2=_figure(figures.probe_r2 if figures else None),
        latent_error=_figure(figures.latent_error if figures else None),
        state_error=_figure(figures.state_error if figures else None),
        digest=record.next_digest,
        record=entry.record_hash,
        remark=printable("; ".join(remarks), 2 * MAX_REASON),
        rejected=bool(record.refusal),
    )


def _alarms(entry: Round) -> tuple[str, ...]:
    return entry.verdict.alarms if entry.verdict else ()


def _who(history: History, entry: Round) -> str:
    """The contributors of a round, or if those are fewer, who of all was none."""
    there = {each.node for each in entry.record.contributors}
    away = [node for node in history.contributors if node not in there]
    if len(there) <= MAX_NAMES:
        return _names(history, there)
    if len(away) <= MAX_NAMES:
        return f"all but {_names(history, away)}" if away else "all"
    return f"{_names(history, there)} and {len(there) - MAX_NAMES} more"


def _names(history: History, nodes: Iterable[str]) -> str:
    return ", ".join(sorted(history.name(node) for node in nodes)[:MAX_NAMES])


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _moment(at: str) -> str:
    """Date and time in UTC, to the second."""
    return datetime.fromisoformat(at).astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S") if at else ""
