"""Kills a node's trainer at each of its system calls on files, in turn, while it makes a release.

Run as a program: a child is forked for each place, opens its account, trains, says so in a file and
ends without cleaning up just before its n-th audited call.  Whatever was said must be charged
afterwards; what was charged must stay so; and finishing the round charges it once.
"""

import os
import shutil
import sys
from pathlib import Path

from lensemble.workload import FieldTerms, NoopTask, Privacy, Workload, initial_parameters
from lensemble_node.worker.training.local_round import Trainer
from tests.node import worlds

WORKLOAD = Workload(
    task=NoopTask(parameters=300),
    field=FieldTerms(k=16),
    privacy=Privacy(enabled=True, epsilon=40.0),
)
FEDERATION = "5" * 32
KILLED = 77


def trainer(state: Path) -> Trainer:
    made = Trainer(WORKLOAD, None, state, "n0", 1)
    made.account(FEDERATION)
    return made


def make_one(state: Path, round_index: int) -> str:
    """One more release; what it is, once it may be spoken of."""
    done = trainer(state).train(initial_parameters(WORKLOAD), **worlds.order(WORKLOAD, round_index))
    return done.vector.tobytes().hex()


def die_at(place: int) -> None:
    calls = 0

    def count(event: str, _: tuple[object, ...]) -> None:
        nonlocal calls
        if event == "open" or event.startswith("os."):
            calls += 1
            if calls == place:
                os._exit(KILLED)

    sys.addaudithook(count)


def run_child(room: Path, state: Path, place: int) -> bool:
    """Whether the child was killed; what it said is in ``room/said``."""
    child = os.fork()
    if child == 0:
        (room / "said").write_text("")
        said = os.open(room / "said", os.O_WRONLY)
        die_at(place)
        os.write(said, make_one(state, 1).encode())
        os._exit(0)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in {0, KILLED}, code
    return code == KILLED


def spent(state: Path) -> tuple[int, float]:
    standing = trainer(state).standing
    assert standing is not None
    return standing.releases, standing.epsilon


def main(room: Path) -> None:
    first = room / "first"
    make_one(first, 0)
    assert trainer(first).adopt(0)
    before = spent(first)
    assert before[0] == 1
    place, killed = 0, True
    while killed:
        place += 1
        state = room / "work"
        shutil.copytree(first, state)
        killed = run_child(room, state, place)
        said = (room / "said").read_text()
        now = spent(state)
        assert now >= before
        assert now[0] == 2 or not said, place
        again = make_one(state, 1)
        assert not said or again == said
        assert spent(state)[0] == 2, (place, now)
        assert spent(state) >= now
        shutil.rmtree(state)
    print(place - 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
