"""Exit statuses, and what is printed when something does not work out."""

import os
import sys
from typing import NoReturn
from unicodedata import category

import typer

_CONTROLS = frozenset({"Cc", "Cs"})

ASK = "`lensemblectl events` and `lensemblectl doctor`, which name what went before."

OK = 0
FAILED = 1
USAGE = 2
INFEASIBLE = 3
NOT_PROVISIONED = 4
RUN_FAULTED = 5
NOT_TORN_DOWN = 6
UNREACHABLE = 69
INTERRUPTED = 130


def complain(message: str, remedy: str) -> None:
    """Say on standard error what is wrong, and what to try; where nobody knows, who may."""
    sys.stdout.flush()
    sys.stderr.write("".join(f"{printable(line)}\n" for line in f"Error: {message}".splitlines()))
    sys.stderr.write(f"Try: {printable(remedy) or ASK}\n")


def printable(text: str) -> str:
    """``text`` with a blank for each line end and control character."""
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)


def shown(text: str) -> str:
    """``text`` of a model: with its line ends, and a blank for every other control character."""
    return "".join(c if c in "\n\t" or category(c) not in _CONTROLS else " " for c in text)


def stop(status: int) -> NoReturn:
    """Leave the command with ``status``, everything having been said."""
    raise typer.Exit(status)


def say(text: str) -> None:
    """Print ``text`` and a line end; a reader that has gone away has seen enough."""
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # Nothing more may be written when the interpreter closes its files.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        stop(OK)
