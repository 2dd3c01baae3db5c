"""The shipped alert rules and dashboard ask for figures that there are."""

import json
import re
from pathlib import Path

import pytest

from lensemble.web import figures as both
from lensemble_coord.http import figures as coordinator
from lensemble_node import figures as node

ROOT = Path(__file__).parents[2]
FILES = ("configs/prometheus/alerts.yml", "configs/grafana/dashboard.json")
SUFFIXES = re.compile(r"_(?:total|bucket|sum|count)$")


def told() -> set[str]:
    """The names that daemons tell, without the endings that the format adds."""
    sources = [Path(str(each.__file__)).read_text("utf-8") for each in (coordinator, node, both)]
    names = {name for text in sources for name in re.findall(r'Name\(\s*"([a-z_]+)"', text)}
    return names | {f"public_{name}" for name in coordinator.PUBLIC}


@pytest.mark.parametrize("file", FILES)
def test_every_figure_asked_for_is_told(file: str) -> None:
    asked = set(re.findall(r"lensemble_([a-z0-9_]+)", (ROOT / file).read_text("utf-8")))
    assert asked
    unknown = {
        name for name in asked if name not in told() and SUFFIXES.sub("", name) not in told()
    }
    assert unknown == set()


def test_the_dashboard_has_a_place_for_every_panel() -> None:
    board = json.loads((ROOT / FILES[1]).read_text("utf-8"))
    taken = {(p["gridPos"]["x"], p["gridPos"]["y"]) for p in board["panels"]}
    assert len(taken) == len(board["panels"]) == len({panel["id"] for panel in board["panels"]})


def test_every_alert_says_what_to_try() -> None:
    text = (ROOT / FILES[0]).read_text("utf-8")
    assert text.count("- alert: ") == text.count("try: ") == text.count("summary: ")
