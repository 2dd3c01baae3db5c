"""A disk that fills up at each named point of a round, to the last byte, and not between rounds."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from lensemble.checkpoint import open_checkpoint
from lensemble.crash_points import VARIABLE
from lensemble.ctl.client import Declined
from lensemble_coord.training.verify import verify_state
from tests.e2e.crash_grounds import TERMS, VICTIM
from tests.e2e.crash_matrix import CASES, Case
from tests.e2e.federation import COORDINATOR, Federation, until
from tests.e2e.rooms import Room, room

pytestmark = pytest.mark.e2e
ROOM_BYTES = 8 << 20
ONE_TRY = {
    **TERMS,
    "coordinator": {
        **TERMS["coordinator"],
        "rounds": {**TERMS["coordinator"]["rounds"], "max_attempts": 1},
    },
}
WRITES = (
    "adopt.", "checkpoint.", "file.", "ledger.", "local.", "pending.", "spool.", "state.written",
    "state.received", "state.named", "sum.", "sweep.", "transaction.",
)  # fmt: skip
"""Points that stand at a write to the disk, and not at a word to somebody."""

CHOSEN = [case for case in CASES if case.deed == "round" and case.point.startswith(WRITES)]
SAMPLE = {"transaction.made records"}


class Crowd:
    """A federation in which the state of ``victim`` has a file system of its own."""

    def __init__(self, root: Path, victim: str, held: ExitStack) -> None:
        self.members = Federation(root, 3, **ONE_TRY)
        self.process = self.members[COORDINATOR if victim == COORDINATOR else VICTIM]
        self.order = self.process.place / "order"
        self.place: Room = held.enter_context(room(self.process.place / "state", ROOM_BYTES))
        hooked = ["env", f"{VARIABLE}={self.order}", *self.process.command]
        self.process.command = [*self.place.command, *hooked]
        held.callback(self.members.end)
        self.members.start()
        self.members.join()

    def round(self) -> str:
        """Ask for one round; why it did not close, or nothing."""
        self.members.wait_for()
        before = len(self.members.closed())
        try:
            self.members.run(1)
        except Declined as refused:
            return refused.message
        self.members.wait_rest(40.0)
        if len(self.members.closed()) > before:
            return ""
        last = self.members.status().round
        return f"{last.state}: {last.reason}"

    def pids(self) -> list[int]:
        """Of the daemon, and of its worker."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [self.process.pid, *map(int, children.read_text(encoding="ascii").split())]

    def stopped(self, pids: list[int]) -> bool:
        states = [
            Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(") ")[2][0]
            for pid in pids
        ]
        return not self.order.exists() and "T" in states

    def fill_at(self, case: Case) -> str:
        """A round in which no byte is left from the point of ``case`` on."""
        pids = self.pids()
        self.order.write_text(f"stop {case.count} {case.point}\n")
        with ThreadPoolExecutor(1) as beside:
            asked = beside.submit(self.round)
            try:
                until(f"{case} is reached", lambda: self.stopped(pids))
                self.place.leave(0)
            finally:
                self.order.unlink(missing_ok=True)
                for pid in pids:
                    os.kill(pid, signal.SIGCONT)
            return asked.result()


class Crowds:
    """One crowd at a time, since all coordinators want the same port."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self._held = ExitStack()
        self._crowd: tuple[str, Crowd] | None = None

    def of(self, victim: str) -> Crowd:
        if self._crowd is None or self._crowd[0] != victim:
            self.end()
            self._crowd = victim, Crowd(self._factory.mktemp("crowd"), victim, self._held)
        return self._crowd[1]

    def end(self) -> None:
        """End the crowd there is, and verify what it leaves."""
        if self._crowd is not None:
            crowd, self._crowd = self._crowd[1], None
            crowd.members.end()
            on_coordinator = crowd.process is crowd.members.coordinator
            report = verify_state(
                crowd.place.outside if on_coordinator else crowd.members.state_dir
            )
            assert report.sound, report.problems
        self._held.close()


@pytest.fixture(scope="module")
def crowds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crowds]:
    made = Crowds(tmp_path_factory)
    yield made
    made.end()


def _essence(members: Federation) -> list[tuple[int, int, str]]:
    """Closed rounds without what events add to them later."""
    return [(each.index, each.attempt, each.digest) for each in members.closed()]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, id=c.label, marks=() if c.point in SAMPLE else pytest.mark.soak)
        for c in CHOSEN
    ],
)
def test_a_disk_full_from_a_point_on_costs_a_round_at_most(crowds: Crowds, case: Case) -> None:
    crowd = crowds.of(case.victim)
    members = crowd.members
    assert not crowd.round()
    before, pid, digest = _essence(members), crowd.process.pid, members.status().digest
    reason = crowd.fill_at(case)
    print(case.label, reason or "closed", sep=": ")
    if reason:
        # What failed inside a node stays there; the coordinator hears that it did.
        words = reason if case.victim == COORDINATOR else crowd.process.last_words(40)
        assert "are free" in words, (reason, words)
        assert _essence(members) == before
        assert members.status().digest == digest
    if crowd.process is members.coordinator:
        state = crowd.place.outside
        open_checkpoint(state / "checkpoints" / members.status().digest).verify()
    crowd.place.empty()
    assert not crowd.round()
    rounds = _essence(members)
    assert rounds[: len(before)] == before
    assert [each[0] for each in rounds] == list(range(len(rounds)))
    assert crowd.process.pid == pid
    assert crowd.process.serves()
