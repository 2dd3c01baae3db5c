"""The plots of a report: SVG whose colours are the page's, so that they follow light and dark.

Text is drawn as it is (no formulas, no markup): names come from peers.
"""

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from lensemble_report.history import PHASES, History, Round

WIDTH, HEIGHT = 5.4, 3.3
ROW_HEIGHT = 0.26
MAX_ROWS = 24
"""Contributors that are shown one by one."""

MAX_NAMED = 5
"""Nodes that have a line each."""

LEGEND_CHARACTERS = 56
"""That stand side by side above a plot."""

MARKED = 40
"""Up to so many rounds have their points marked and their bars apart."""

INK, LINE, PAPER = "#010203", "#040506", "#070809"
SERIES = ("#0a0b0c", "#0d0e0f", "#101112", "#131415", "#161718", "#191a1b")
_VARIABLES = {
    INK: "var(--ink)",
    LINE: "var(--line)",
    PAPER: "var(--paper)",
    **{colour: f"var(--series-{number})" for number, colour in enumerate(SERIES)},
}
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 12,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": LINE,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": LINE,
    "axes.grid": True,
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 12,
    "lines.linewidth": 2.0,
    "lines.markersize": 4.5,
}


@dataclass(frozen=True)
class Plot:
    """``svg`` is empty where there is nothing to show; ``note`` says then why."""

    key: str
    title: str
    svg: str
    note: str
    wide: bool = False


@dataclass(frozen=True)
class Line:
    name: str
    values: Sequence[float | None]
    dashes: str = "-"


def all_plots(history: History) -> list[Plot]:
    """Every plot, in the order of the page."""
    with style.context(STYLE):
        return [
            *_of_the_model(history),
            _epsilon(history),
            _contributors(history),
            _bytes(history),
            _seconds(history),
        ]


def _of_the_model(history: History) -> Iterator[Plot]:
    rounds = history.rounds
    untested = "Not known of any round."
    if all(each.figures is None for each in rounds):
        untested = "No state was tested on public data ([gate] data names none)."
    losses = _lines_of_nodes(history, "loss")
    if losses:
        losses.insert(0, Line("mean", [each.loss for each in rounds]))
    yield _plot(
        "loss",
        "Training loss",
        rounds,
        losses,
        "What contributors tell of their own last loss.",
        "No contributor shares its loss (share.norms).",
    )
    start = history.start.figures if history.start else None
    before = [] if not rounds or rounds[0].index else [start]

    def of(name: str) -> list[float | None]:
        known = [*before, *(each.figures for each in rounds)]
        return [getattr(each, name) if each else None for each in known]

    first = rounds[0].index - len(before) if rounds else 0
    for key, title, lines, note in (
        (
            "errors",
            "Error on public data",
            [
                Line("latent, 1 step", of("latent_error")),
                Line("state, 5 steps", of("state_error"), "--"),
            ],
            "Of the prediction, over that of predicting no change; 1 is no better than that.",
        ),
        (
            "probe",
            "Linear probe",
            [Line("R2 of the state from the latent", of("probe_r2"))],
            "Public data; 1 is a latent from which the state can be read off.",
        ),
        (
            "spread",
            "Spread of the latent",
            [Line("std", of("std"))],
            "Public data; about 1 is healthy, near 0 has collapsed.",
        ),
        (
            "dimension",
            "Effective dimension",
            [Line("participation ratio of the latent", of("dimension"))],
            "Public data; no alarm by itself, for a collapsed latent has the most.",
        ),
        (
            "drift",
            "Drift of the frame",
            [
                Line("as it is", of("drift_before")),
                Line("turned back", of("drift_after"), "--"),
            ],
            "Distance from the prior state's latents, in latent variances.",
        ),
        (
            "angles",
            "Principal angles",
            [
                Line("largest", of("max_degrees"), ":"),
                Line("rms", of("rms_degrees")),
                Line("mean", of("mean_degrees"), "--"),
            ],
            "Degrees by which the frame has turned since the prior state.",
        ),
    ):
        yield _plot(key, title, rounds, lines, note, untested, first)
    norms = [Line("norm of the mean update", [each.update_norm for each in rounds])]
    yield _plot("norms", "Update", rounds, norms, "L2, before the outer step.", "Not recorded.")


def _lines_of_nodes(history: History, name: str) -> list[Line]:
    """One line for each node that tells of ``name``; of many, the range of what they tell."""
    found = []
    for node in history.contributors:
        told = [
            getattr(each.nodes[node], name) if node in each.nodes else None
            for each in history.rounds
        ]
        if any(value is not None for value in told):
            found.append(Line(history.name(node), told, ":"))
    if len(found) <= MAX_NAMED:
        return found
    by_round = [
        [value for value in told if value is not None]
        for told in zip(*(line.values for line in found), strict=True)
    ]
    return [
        Line("largest", [max(told, default=None) for told in by_round], ":"),
        Line(f"smallest of {len(found)}", [min(told, default=None) for told in by_round], ":"),
    ]


def _plot(  # noqa: PLR0913, PLR0917 - a plot has as many words
    key: str,
    title: str,
    rounds: Sequence[Round],
    lines: Sequence[Line],
    note: str,
    missing: str,
    first: int | None = None,
) -> Plot:
    known = [line for line in lines if any(value is not None for value in line.values)]
    if not known:
        return Plot(key, title, "", missing)
    start = (rounds[0].index if rounds else 0) if first is None else first
    with _axes(key) as (axes, drawn):
        _draw(axes, known, start)
    return Plot(key, title, drawn[0], note)


def _draw(axes: Axes, lines: Sequence[Line], first: int) -> None:
    for number, line in enumerate(lines):
        at = [first + step for step, value in enumerate(line.values) if value is not None]
        values = [value for value in line.values if value is not None]
        axes.plot(
            at,
            values,
            line.dashes,
            color=SERIES[number % len(SERIES)],
            marker="o" if len(at) <= MARKED else "",
        )
    _rounds_below(axes)
    known = [value for line in lines for value in line.values if value is not None]
    low, high = min(0.0, *known), max(0.0, *known)
    room = 0.06 * (high - low or 1.0)
    axes.set_ylim(low - (room if low else 0.0), high + room)
    _name(axes, [line.name for line in lines])


def _name(axes: Axes, names: Sequence[str]) -> None:
    """A legend above the plot, in as many columns as there is room for."""
    columns = max(1, min(3, LEGEND_CHARACTERS // (max(map(len, names)) + 5)))
    axes.legend(
        axes.get_lines()[: len(names)] or axes.containers or axes.collections,
        names,
        loc="lower left",
        bbox_to_anchor=(-0.02, 1.0),
        ncols=columns,
        handlelength=1.6,
        columnspacing=1.2,
        borderaxespad=0.2,
    )


def _rounds_below(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.xaxis.set_major_formatter(FuncFormatter(_round_name))
    axes.set_xlabel("round")


def _round_name(value: float, _: int) -> str:
    return "start" if round(value) == -1 else f"{value:.0f}"


def _epsilon(history: History) -> Plot:
    title, privacy = "Privacy spent", history.workload.privacy
    lines = _lines_of_nodes(history, "epsilon")
    if not lines:
        off = "The workload asks for no noise." if not privacy.enabled else "No node reports it."
        return Plot("epsilon", title, "", off)
    with _axes("epsilon") as (axes, drawn):
        _draw(axes, lines, history.rounds[0].index)
        axes.axhline(privacy.epsilon, color=INK, linewidth=1.2, linestyle="-.")
        axes.set_ylim(0, 1.12 * max(privacy.epsilon, axes.get_ylim()[1] / 1.12))
        axes.text(
            history.rounds[0].index, privacy.epsilon, f"budget {privacy.epsilon:g}", va="bottom"
        )
    return Plot("epsilon", title, drawn[0], f"Epsilon at delta {privacy.delta:g}, as reported.")


def _contributors(history: History) -> Plot:
    title, rounds = "Contributors", history.rounds
    if not rounds:
        return Plot("contributors", title, "", "No round has closed.")
    nodes = history.contributors
    if len(nodes) > MAX_ROWS:
        counts = [Line("contributors", [float(each.record.c_t) for each in rounds])]
        bound = Line("nodes of the round", [float(each.cohort) for each in rounds], "--")
        note = f"{len(nodes)} nodes contributed to one round or more."
        return _plot("contributors", title, rounds, [*counts, bound], note, "")
    height = 1.2 + ROW_HEIGHT * max(3, len(nodes))
    with _axes("contributors", height) as (axes, drawn):
        for row, node in enumerate(nodes):
            there = [
                each.index
                for each in rounds
                if any(who.node == node for who in each.record.contributors)
            ]
            bars = _bars(there, apart=len(rounds) <= MARKED)
            axes.broken_barh(bars, (row - 0.36, 0.72), fc=SERIES[0], linewidth=0)
        axes.set_yticks(range(len(nodes)), [history.name(node) for node in nodes])
        axes.set_ylim(len(nodes) - 0.4, -0.6)
        axes.grid(visible=False)
        axes.set_xlim(rounds[0].index - 0.6, rounds[-1].index + 0.6)
        _rounds_below(axes)
    fewest = min(rounds, key=lambda each: each.record.c_t / each.cohort)
    note = "Every node of every round contributed."
    if fewest.record.c_t < fewest.cohort:
        note = f"Fewest: {fewest.record.c_t} of {fewest.cohort} nodes, in round {fewest.index}."
    return Plot("contributors", title, drawn[0], note)


def _bars(there: Sequence[int], *, apart: bool) -> list[tuple[float, float]]:
    """Start and length of a bar for each round, or for each run of rounds without a gap."""
    if apart:
        return [(at - 0.45, 0.9) for at in there]
    found: list[tuple[float, float]] = []
    for at in there:
        if found and at - 0.5 == sum(found[-1]):
            found[-1] = (found[-1][0], found[-1][1] + 1.0)
        else:
            found.append((at - 0.5, 1.0))
    return found


def _bytes(history: History) -> Plot:
    rounds = [each for each in history.rounds if each.nodes]
    if not rounds:
        return Plot("bytes", "Bytes", "", "Not recorded.")
    down = [sum(node.bytes_down for node in each.nodes.values()) / 1e6 for each in rounds]
    up = [sum(node.bytes_up for node in each.nodes.values()) / 1e6 for each in rounds]
    with _axes("bytes") as (axes, drawn):
        at = [each.index for each in rounds]
        if len(rounds) <= MARKED:
            axes.bar([x - 0.21 for x in at], down, 0.4, color=SERIES[0])
            axes.bar([x + 0.21 for x in at], up, 0.4, color=SERIES[1])
        else:
            axes.plot(at, down, color=SERIES[0])
            axes.plot(at, up, "--", color=SERIES[1])
            axes.set_ylim(0, 1.06 * max(*down, *up))
        axes.set_ylabel("MB")
        _rounds_below(axes)
        _name(axes, ["states to nodes", "updates from nodes"])
    return Plot("bytes", "Bytes", drawn[0], "Payload of the contributors' edges, in each round.")


def _seconds(history: History) -> Plot:
    rounds = [each for each in history.rounds if each.seconds]
    if not rounds:
        return Plot("seconds", "Time", "", "Not recorded.")
    with _axes("seconds") as (axes, drawn):
        at = [each.index for each in rounds]
        spent = [[each.seconds.get(phase, 0.0) for each in rounds] for phase in PHASES]
        if len(rounds) <= MARKED:
            base = [0.0] * len(rounds)
            for seconds, colour in zip(spent, SERIES, strict=False):
                axes.bar(at, seconds, 0.8, bottom=base, color=colour)
                base = [low + more for low, more in zip(base, seconds, strict=True)]
        else:
            axes.stackplot(at, spent, colors=SERIES[: len(PHASES)], step="mid", linewidth=0)
        axes.set_ylabel("seconds")
        _rounds_below(axes)
        _name(axes, PHASES)
    return Plot(
        "seconds", "Time", drawn[0], "In each state of a round, at the attempt that closed."
    )


# ---- figures as text ----


@contextmanager
def _axes(key: str, height: float = HEIGHT) -> Iterator[tuple[Axes, list[str]]]:
    """Axes to draw on; the SVG is in the list behind the block."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.add_subplot()
    drawn: list[str] = []
    yield axes, drawn
    drawn.append(_svg(figure, key))


def _svg(figure: Figure, key: str) -> str:
    written = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": key}):
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(written, format="svg", metadata=nothing)
    text = written.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # Several of these stand in one page: an id may be there once.
    text = re.sub(r'( id="|url\(#|xlink:href="#)', rf"\g<1>{key}-", text)
    text = re.sub(r'<svg ([^>]*?)height="[^"]*"([^>]*?)width="[^"]*"', r"<svg \1\2", text)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, variable)
    return text
