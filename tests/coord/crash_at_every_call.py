"""Kills a process at each of its system calls on files, in turn, while it commits a round.

Run as a program: a child is forked for each place, works on a copy of the same state directory and
ends without cleaning up just before its n-th audited call.  What is left is then verified from its
files alone, recovered, and taken to the same state as a run that was never interrupted.
"""

import os
import shutil
import sys
from pathlib import Path

from lensemble.workload import NoopTask, Workload
from lensemble_coord.training.commit import Retention, orphans
from lensemble_coord.training.verify import verify_state
from tests.coord.history import History

WORKLOAD = Workload(root_seed=5, task=NoopTask(parameters=300))
TIGHT = Retention(keep_last=1, keep_every=0, verify_keep_rounds=1)
ROUNDS = 3
KILLED = 77


def commit_one(root: Path) -> str:
    history = History.reopened(root, WORKLOAD)
    digest = history.advance(1, TIGHT).next_digest
    history.ledger.close()
    return digest


def die_at(place: int) -> None:
    """End this process before its ``place``-th call, from 1."""
    calls = 0

    def count(event: str, _: tuple[object, ...]) -> None:
        nonlocal calls
        if event == "open" or event.startswith(("os.", "sqlite3.")):
            calls += 1
            if calls == place:
                os._exit(KILLED)

    sys.addaudithook(count)


def run_child(root: Path, place: int) -> bool:
    """Whether the child was killed; False if it came to its end before that call."""
    child = os.fork()
    if child == 0:
        die_at(place)
        commit_one(root)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in {0, KILLED}, code
    return code == KILLED


def require_recovery(root: Path, due: str) -> None:
    report = verify_state(root)
    assert report.sound, report.problems
    history = History.reopened(root, WORKLOAD)
    tail = history.ledger.tail()
    assert tail.round in {ROUNDS - 1, ROUNDS}
    if tail.round < ROUNDS:
        tail = history.advance(1, TIGHT)
    assert tail.next_digest == due
    assert orphans(history.directory, history.ledger) == ()
    assert history.ledger.unfinished_run() is not None
    history.ledger.close()
    assert verify_state(root).sound


def main(room: Path) -> None:
    first = History(room / "first", WORKLOAD)
    first.advance(ROUNDS, TIGHT)
    first.ledger.close()
    shutil.copytree(room / "first", room / "due")
    due = commit_one(room / "due")
    place, killed = 0, True
    while killed:
        place += 1
        work = room / "work"
        shutil.copytree(room / "first", work)
        killed = run_child(work, place)
        require_recovery(work, due)
        shutil.rmtree(work)
    print(place - 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
