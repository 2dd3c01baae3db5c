"""Named places in the code at which a test may end or halt the process: a hook for crash tests.

Without the environment variable ``LENSEMBLE_EXIT_AT`` nothing happens at any of them.  With it,
it names a file that a test writes when it wants something to happen: one line ``ACTION COUNT
POINT``, such as ``kill 2 file.named header.json``.  The process that comes to that point for the
``COUNT``-th time since then removes the file, which tells the test and makes it happen once, and
sends itself SIGKILL (``kill``) or SIGSTOP (``stop``).  Where a file of that name with ``.trace``
behind it exists, every point that is passed is added to it, a line each.
"""

import os
import re
import signal
from collections import Counter
from pathlib import PurePath

VARIABLE = "LENSEMBLE_EXIT_AT"
_ACTIONS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_VARYING = re.compile(r"[0-9a-f]{16,}|[0-9]+")
_order = os.environ.get(VARIABLE, "")
_passed: Counter[str] = Counter()


def reached(point: str, subject: str | PurePath = "") -> None:
    """The code is at ``point``, concerned with ``subject``: a kind, or a file by its last name."""
    if _order:
        _obey(f"{point} {kind(subject)}" if subject else point)


def kind(subject: str | PurePath) -> str:
    """``subject`` by its last name, with digests and numbers as ``*``."""
    return _VARYING.sub("*", PurePath(subject).name)


def _obey(name: str) -> None:
    _trace(name)
    try:
        with open(_order, encoding="utf-8") as file:
            order = file.read()
    except FileNotFoundError:
        return
    action, count, wanted = order.strip().split(" ", 2)
    if wanted != name:
        return
    _passed[order] += 1
    if _passed[order] < int(count):
        return
    try:
        os.unlink(_order)
    except FileNotFoundError:
        # Another process, or another thread, was here first.
        return
    del _passed[order]
    os.kill(os.getpid(), _ACTIONS[action])


def _trace(name: str) -> None:
    try:
        fd = os.open(_order + ".trace", os.O_WRONLY | os.O_APPEND)
    except FileNotFoundError:
        return
    try:
        os.write(fd, f"{name}\n".encode())
    finally:
        os.close(fd)
