"""Every ``lensemblectl`` that a page names is there, with the options it is named with."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from lensemblectl.app import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PASSED_ON = {"simulate", "demo", "demo-inference", "models", "probe"}
"""Verbs of programs that parse their own options."""


def named(page: Path) -> Iterator[tuple[str, ...]]:
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for found in re.findall(r"lensemblectl((?: +[^\s`|]+)+)", text):
        yield tuple(found.replace(",", " ").replace(";", " ").split())


def verb_of(words: tuple[str, ...]) -> tuple[Any, tuple[str, ...]] | None:
    """The command that ``words`` begin with, and what follows."""
    command: Any = typer.main.get_command(app)
    at = 0
    while at < len(words) and words[at] in getattr(command, "commands", {}):
        command = command.commands[words[at]]
        at += 1
    return (command, words[at:]) if at else None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_is_there(page: Path) -> None:
    for words in named(page):
        if not re.fullmatch(r"[a-z][a-z-]+", words[0]):
            continue
        found = verb_of(words)
        if found is None:
            # In a sentence; there a verb is followed by its end.
            assert not any(word.startswith("--") for word in words), words
            continue
        command, rest = found
        if command.name in PASSED_ON:
            continue
        known = {option for each in command.params for option in each.opts} | {"--help"}
        options = [re.sub(r"[=.:)\]\"'].*", "", word) for word in rest if word.startswith("--")]
        assert set(options) <= known, (words, sorted(set(options) - known))


def test_the_pages_name_most_verbs() -> None:
    """Whatever a person can do is told somewhere."""
    told = {words[0] for page in PAGES for words in named(page)}
    hidden = set(getattr(typer.main.get_command(app), "commands", {})) - told
    spoken = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    told_otherwise = {verb for verb in hidden if re.search(rf"(`|make ){verb}\b", spoken)}
    assert hidden - told_otherwise == set()
