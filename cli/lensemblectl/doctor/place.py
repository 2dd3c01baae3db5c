"""A daemon's own files: its configuration, its state directory, its key, the room on the disk."""

import os
import pwd
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

from lensemblectl.doctor.finding import Finding, fine, note, problem
from lensemblectl.programs import INTERPRETER
from lensemblectl.words import size

CONFIG, STATE, KEY, DISK = "configuration", "state directory", "identity", "disk"
KEY_NAME = "identity.key"
CHECKERS = {"coordinator": "lensemble_coord", "node": "lensemble_node"}
CHECK_S = 60.0
LEAST_FREE = 256 << 20
COMFORTABLE = 4 << 30


def configuration(config: Path, part: str) -> Finding:
    """What the daemon's own check says of the file."""
    done = subprocess.run(  # noqa: S603 - our own modules, no shell
        [*INTERPRETER, CHECKERS[part], "check", str(config)],
        capture_output=True,
        text=True,
        timeout=CHECK_S,
        check=False,
    )
    if done.returncode == 0:
        return fine(CONFIG, f"{config} is valid")
    said, _, remedy = done.stderr.partition("\nTry: ")
    lines = said.removeprefix("Error: ").strip() or f"the check ended with {done.returncode}"
    return problem(CONFIG, lines, remedy.strip() or f"{CHECKERS[part]} check {config}")


def look(state: Path) -> Iterator[Finding]:
    """The state directory and what has to be right about it."""
    try:
        found = state.stat()
        entries = {each.name: each.lstat() for each in state.iterdir()}
    except FileNotFoundError:
        yield note(STATE, f"{state} does not exist yet", "The first start of the daemon makes it.")
        yield disk(state)
        return
    except OSError as error:
        yield problem(
            STATE,
            f"{state} cannot be looked at: {error.strerror}",
            "Run this as the daemon's user or as root.",
        )
        return
    yield ownership(state, found, entries)
    if KEY_NAME in entries:
        yield key(state / KEY_NAME, entries[KEY_NAME])
    yield disk(state)


def ownership(state: Path, found: os.stat_result, entries: dict[str, os.stat_result]) -> Finding:
    """Everything belongs to one user, and that user may write."""
    strangers = sorted(name for name, each in entries.items() if each.st_uid != found.st_uid)
    owner = _user(found.st_uid)
    if strangers:
        return problem(
            STATE,
            f"{state} belongs to {owner}, {strangers[0]} in it to "
            f"{_user(entries[strangers[0]].st_uid)}; the daemon cannot write it",
            f"chown -R {owner} {state}",
        )
    if found.st_mode & stat.S_IRWXU != stat.S_IRWXU:
        return problem(
            STATE,
            f"{owner}, to whom {state} belongs, may not write there",
            f"chmod u+rwx {state}",
        )
    if found.st_mode & stat.S_IRWXO:
        return problem(STATE, f"every user of this host may enter {state}", f"chmod o-rwx {state}")
    return fine(STATE, f"{state}, of {owner}")


def key(path: Path, found: os.stat_result) -> Finding:
    """Whoever reads the key is this daemon to everybody else."""
    if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        return problem(KEY, f"others may read {path}", f"chmod 600 {path}")
    return fine(KEY, f"{path}, readable by {_user(found.st_uid)} only")


def disk(state: Path) -> Finding:
    """Room for the next states and updates, where ``state`` is or would be made."""
    there = next(each for each in (state, *state.absolute().parents) if each.exists())
    return room(shutil.disk_usage(there).free, state)


def room(free: int, state: Path) -> Finding:
    """Whether ``free`` bytes are enough for what the daemon writes to ``state``."""
    said = f"{size(free)} free where {state} is"
    if free < LEAST_FREE:
        return problem(DISK, said, "Make room: rounds end, or are refused, when it is full.")
    if free < COMFORTABLE:
        return note(DISK, said, "Watch it: checkpoints, sums and weights of models grow there.")
    return fine(DISK, said)


def newest_write(state: Path) -> float:
    """When anything in the directory was last written, Unix seconds; 0 if that cannot be seen."""
    try:
        return max((each.lstat().st_mtime for each in state.iterdir()), default=0.0)
    except OSError:
        return 0.0


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
