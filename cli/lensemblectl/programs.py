"""Parts of Lensemble that are programs of their own, because they need more than a socket."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

from lensemblectl.exits import FAILED, stop

# -P: modules come from the installation, never from the directory that the user is in.
INTERPRETER = (sys.executable, "-P", "-m")


def become(module: str, arguments: list[str]) -> NoReturn:
    """Go on as ``python -m module``; its exit status is the command's."""
    sys.stdout.flush()
    os.execv(sys.executable, [*INTERPRETER, module, *arguments])  # noqa: S606 - our own modules


class Lines:
    """The JSON objects that ``python -m module`` prints, one a line; then ``status`` is known."""

    def __init__(self, module: str, arguments: list[str]) -> None:
        self._command = [*INTERPRETER, module, *arguments]
        self.status = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with subprocess.Popen(  # noqa: S603 - our own modules, no shell
            self._command, stdout=subprocess.PIPE, text=True
        ) as running:
            for line in running.stdout or ():
                yield json.loads(line)
        self.status = running.returncode


def ask(module: str, arguments: list[str], said: str = "") -> dict[str, Any]:
    """The JSON object that ``python -m module`` prints; ``said`` is its standard input.

    What it complains about is on standard error already when the command leaves with its status.
    """
    status, answer = report(module, arguments, said)
    if status:
        stop(status)
    return answer


def report(module: str, arguments: list[str], said: str = "") -> tuple[int, dict[str, Any]]:
    """Exit status and JSON object of a program whose failure is a result too.

    A program that prints no object ends the command with its status.
    """
    done = subprocess.run(  # noqa: S603 - our own modules, no shell
        [*INTERPRETER, module, *arguments],
        input=said,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        stop(done.returncode if done.returncode > 0 else FAILED)
    return done.returncode, answer
