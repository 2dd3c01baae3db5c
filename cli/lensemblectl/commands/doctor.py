"""``lensemblectl doctor``."""

import msgspec

from lensemblectl.doctor import examination
from lensemblectl.doctor.finding import Finding
from lensemblectl.exits import FAILED, printable, say, stop
from lensemblectl.options import Json, Socket, Timeout

TIMEOUT_S = 5.0
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
    mark = MARKS[found.outcome]
    first, *more = found.said.splitlines() or [""]
    say(f"{mark:>7}  {found.about}: {printable(first)}")
    for line in more:
        say(f"{'':>7}    {printable(line)}")
    if found.remedy:
        say(f"{'':>7}  Try: {printable(found.remedy)}")


def _verdict(problems: int, notes: int) -> str:
    if problems:
        return f"{problems} problem{'s' if problems > 1 else ''} found"
    return "nothing is wrong" + (f"; {notes} to know of" if notes else "")
