"""``lensemblectl doctor``."""

import shutil
import sys
import textwrap

import msgspec

from lensemblectl.doctor import examination
from lensemblectl.doctor.finding import Finding
from lensemblectl.exits import FAILED, printable, say, stop
from lensemblectl.options import Json, Socket, Timeout

TIMEOUT_S = 5.0
INDENT = 7
LEAST_COLUMNS = 40
MARKS = {"ok": "ok", "note": "note", "problem": "PROBLEM"}


def doctor(socket: Socket = None, timeout: Timeout = TIMEOUT_S, json: Json = False) -> None:
    """Look at a daemon's configuration, files, network and host; name each problem and its remedy.

    Fails if there is a problem. Works whether the daemon runs or not.

    Example: lensemblectl doctor --socket arm-1
    """
    problems = notes = 0
    for found in examination.findings(socket, timeout):
        problems += found.outcome == "problem"
        notes += found.outcome == "note"
        if json:
            say(msgspec.json.encode(found).decode())
        else:
            _show(found)
    if not json:
        say(_verdict(problems, notes))
    if problems:
        stop(FAILED)


def _show(found: Finding) -> None:
    first, *more = found.said.splitlines() or [""]
    _put(f"{MARKS[found.outcome]:>{INDENT}}  ", f"{found.about}: {first}")
    for line in more:
        _put(f"{'':>{INDENT}}    ", line)
    if found.remedy:
        _put(f"{'':>{INDENT}}  ", f"Try: {found.remedy}")


def _put(ahead: str, text: str) -> None:
    """In lines that fit a terminal; whole where nobody looks at one."""
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    clean = printable(text)
    if columns > LEAST_COLUMNS:
        wrapped = textwrap.wrap(clean, columns - len(ahead), break_long_words=False)
        clean = f"\n{'':>{len(ahead)}}".join(wrapped)
    say(ahead + clean)


def _verdict(problems: int, notes: int) -> str:
    if problems:
        return f"{problems} problem{'s' if problems > 1 else ''} found"
    return "nothing is wrong" + (f"; {notes} to know of" if notes else "")
