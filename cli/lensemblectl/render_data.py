"""A data set as ``lensemblectl data inspect`` shows it."""

from typing import Any

from rich.console import RenderableType
from rich.text import Text

from lensemblectl import render, words

MOST_COMPONENTS = 12


def show_inspected(report: dict[str, Any]) -> None:
    """Print a report of the survey; what it could not find out is left out."""
    parts: list[RenderableType] = [Text(report["path"], "bold"), render.facts(_facts(report))]
    if columns := report.get("columns"):
        parts += [Text(), _columns(report, columns)]
    if any(each["rows"] for each in report.get("statistics", {}).values()):
        parts += [Text(), _statistics(report["statistics"])]
    parts += [Text(f"note: {note}", "dim") for note in report["notes"]]
    parts += [Text(problem["message"], "red") for problem in report["problems"]]
    hidden = report["problem_count"] - len(report["problems"])
    if hidden:
        parts.append(Text(f"and {words.counted(hidden, 'problem')} more", "red"))
    render.show(*parts)


def _facts(report: dict[str, Any]) -> list[tuple[str, str]]:
    embodiments = report.get("embodiments", {})
    named = ", ".join(f"{name or '(none)'} {count}" for name, count in embodiments.items())
    return [
        ("layout", report.get("layout", "")),
        ("embodiments", "" if set(embodiments) == {""} else named),
        ("episodes", _episodes(report)),
        ("observations", _used(report, "observation")),
        ("pictures", _pictures(report)),
        ("actions", _used(report, "action")),
        ("root", report.get("root", "")),
        ("took", words.duration(report["seconds"])),
    ]


def _episodes(report: dict[str, Any]) -> str:
    if "lengths" not in report:
        return str(report.get("episodes_in_all", ""))
    lengths = report["lengths"]
    of = f"{lengths['shortest']}"
    if lengths["longest"] > lengths["shortest"]:
        of += f" to {lengths['longest']}, median {lengths['median']:g}"
    return f"{report['episodes']} of {of} transitions, {report['steps']} in all"


def _used(report: dict[str, Any], which: str) -> str:
    if f"{which}_keys" not in report:
        return ""
    keys = ", ".join(report[f"{which}_keys"])
    return f"{report[f'{which}_dim']} numbers: {keys}" if keys else ""


def _pictures(report: dict[str, Any]) -> str:
    shape = report.get("image_shape")
    if not shape:
        return ""
    return f"{' x '.join(map(str, shape))}: {', '.join(report['image_keys'])}"


def _columns(report: dict[str, Any], columns: list[dict[str, Any]]) -> RenderableType:
    used = {
        key: which
        for which in ("observation", "image", "action")
        for key in report.get(f"{which}_keys", ())
    }
    table = render.listing("COLUMN", "DTYPE", "ROW", "USED AS")
    table.columns[0].max_width = None
    for column in columns:
        shape = column["shape"]
        row = "once" if shape is None else " x ".join(map(str, shape)) or "1"
        table.add_row(column["key"], column["dtype"], row, used.get(column["key"], ""))
    return table


def _statistics(statistics: dict[str, dict[str, Any]]) -> RenderableType:
    numbers = ("MEAN", "STD", "MIN", "MAX")
    table = render.listing("COMPONENT", *numbers, right=numbers)
    table.columns[0].max_width = None
    for key, found in statistics.items():
        rows = list(zip(*(found[name.lower()] for name in numbers), strict=True))
        for at, row in enumerate(rows[:MOST_COMPONENTS]):
            table.add_row(f"{key}[{at}]", *(f"{value:.4g}" for value in row))
        if len(rows) > MOST_COMPONENTS:
            table.add_row(f"{key}: {len(rows) - MOST_COMPONENTS} more in --json")
    return table
