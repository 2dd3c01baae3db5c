"""One thing that was looked at, and what came of it."""

from typing import Literal

import msgspec

Outcome = Literal["ok", "note", "problem"]


class Finding(msgspec.Struct, frozen=True):
    """``about`` is what was looked at; a problem and a note come with what to do."""

    about: str
    outcome: Outcome
    said: str
    remedy: str = ""


def fine(about: str, said: str) -> Finding:
    return Finding(about, "ok", said)


def note(about: str, said: str, remedy: str) -> Finding:
    """Works, and is worth knowing."""
    return Finding(about, "note", said, remedy)


def problem(about: str, said: str, remedy: str) -> Finding:
    """Does not work, or will not for long."""
    return Finding(about, "problem", said, remedy)
