"""A federation in which one process after the other is killed at a named point, and looked over."""

import contextlib
import itertools
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lensemble.blob import ENVELOPE_BYTES
from lensemble.crash_points import VARIABLE
from lensemble.ctl import requests
from lensemble.ctl.client import DaemonUnreachable, Declined
from lensemble_coord.training.commit import orphans
from lensemble_coord.training.directory import StateDirectory
from lensemble_coord.training.ledger import Ledger
from lensemble_coord.training.outer_round import RoundState
from lensemble_coord.training.verify import verify_state
from tests.e2e.crash_matrix import Case
from tests.e2e.federation import COORDINATOR, START_S, Federation, Process, family, until

NODES = 3
VICTIM = "node-1"
PARAMETERS = 6000
CHUNK = 4096
MODEL_BYTES = 4 * PARAMETERS
TERMS: dict[str, dict[str, Any]] = {
    "workload": {
        "task": {"parameters": PARAMETERS, "step_seconds": 0.02},
        "inner": {"steps": 5, "batch": 1},
    },
    "coordinator": {
        "rounds": {
            "aggregation": "masked",
            "min_participants": NODES,
            "retry_backoff_s": 0.1,
            "retry_backoff_max_s": 0.5,
            "open_grace_s": 0.0,
            "max_attempts": 50,
        },
        "storage": {
            "spool_memory_bytes": 0,
            "keep_last": 1,
            "keep_every": 0,
            "verify_keep_rounds": 1,
        },
        "edges": {"capacity_bytes": CHUNK},
    },
    "node": {
        "listen": {"reconnect_backoff_s": 0.2, "reconnect_backoff_max_s": 0.5},
        "worker": {"restart_backoff_s": 0.2, "restart_backoff_max_s": 0.2},
    },
}
"""Masked; an update in words of 16 bits is three chunks, and every one is spooled to disk."""

PRIVATE = {
    **TERMS,
    "workload": {
        **TERMS["workload"],
        "field": {"k": 16},
        "privacy": {"enabled": True, "epsilon": 1000.0},
    },
}
SLOW = {**TERMS, "workload": {**TERMS["workload"], "inner": {"steps": 25, "batch": 1}}}
"""Half a second of training, to be disturbed in."""

DEED_TERMS = {"private": PRIVATE, "abort": SLOW}
_numbers = itertools.count()


class Grounds:
    """A federation that outlives the kills of its processes.

    ``begun`` says whether it is started and joined at once.
    """

    def __init__(self, root: Path, terms: dict[str, dict[str, Any]], *, begun: bool = True) -> None:
        self.members = Federation(root, NODES, **terms)
        for process in self.members.processes():
            order, trace = _order(process), _trace(process)
            process.command = ["env", f"{VARIABLE}={order}", *process.command]
            trace.touch()
        if begun:
            try:
                self.members.start()
                self.members.join()
                self._round()
            except BaseException:
                self.members.end()
                raise

    # ---- one kill ----

    def visit(self, case: Case) -> None:
        """Kill at the point of ``case``, let all recover, and look them over."""
        members, before = self.members, self.essence()
        victim = members[COORDINATOR if case.victim == COORDINATOR else VICTIM]
        workers = self._workers()
        self._order(victim, case)
        asked = False
        with contextlib.suppress(DaemonUnreachable):
            self._deed(case)
            asked = True
        self._wait_killed(victim, case)
        resumes = case.point.startswith("state.written")
        left, of = self._left_to_come(victim) if resumes else (0, 0)
        if case.state:
            assert self._state() == case.state, (case, self._state())
        if case.deed == "leave" or self._died(victim):
            # One that was leaving, and whose worker alone was killed, leaves as it should.
            expected = {-signal.SIGKILL, *({0} if case.deed == "leave" else ())}
            assert victim.exit_status() in expected, case
            _require_gone(victim.pid, workers.get(victim.name))
            victim.begin()
            until(f"{victim.name} serves again", victim.serves, START_S)
        members.wait_for()
        self._finish(case, before, asked=asked)
        self.require_sound(before, case)
        if resumes:
            self._require_resumed(victim, left, of)

    def join_through(self, case: Case) -> None:
        """Let ``VICTIM`` join for the first time, and kill at the point of ``case`` meanwhile."""
        members = self.members
        victim = members[COORDINATOR if case.victim == COORDINATOR else VICTIM]
        self._order(victim, case)
        with contextlib.suppress(DaemonUnreachable, Declined):
            self._invite()
        self._wait_killed(victim, case)
        if self._died(victim):
            victim.begin()
            until(f"{victim.name} serves again", victim.serves, START_S)
        link = members.node_status(VICTIM).link
        if link.state == "unconfigured":
            # Neither the invite nor the membership was durable, and nobody was told it was.
            self._invite()
        members.wait_for(VICTIM, within_s=30.0)
        assert not [*_litter(members[VICTIM].place / "state"), *members.state_dir.rglob(".part*")]

    def _invite(self) -> None:
        ticket = self.members.coordinator.ask(requests.Invite(uses=1)).ticket
        self.members[VICTIM].ask(requests.Join(ticket=ticket))

    def _order(self, victim: Process, case: Case) -> None:
        # The blank line that tells this order from one just like it is cut off by its reader.
        text = f"kill {case.count} {case.point}\n" + "\n" * (next(_numbers) % 1000)
        _order(victim).write_text(text)

    def _deed(self, case: Case) -> None:
        match case.deed:
            case "round" | "private":
                self.members.run(1)
            case "fetch":
                self.members[VICTIM].kill()
                for path in (self.members[VICTIM].place / "state" / "global").iterdir():
                    path.unlink()
                self.members[VICTIM].begin()
                self.members.wait_for(VICTIM, within_s=START_S)
                self.members.run(1)
            case "abort":
                self.members.run(1)
                self.members.wait_training()
                other = VICTIM if case.victim == "node" else "node-2"
                worker = self.members.node_status(other).worker
                assert worker is not None
                assert worker.pid is not None
                os.kill(worker.pid, signal.SIGKILL)
            case "return":
                self.members[VICTIM].kill()
                self.members[VICTIM].begin()
            case "leave":
                self.members[VICTIM].signal(signal.SIGTERM)

    def _wait_killed(self, victim: Process, case: Case) -> None:
        order = _order(victim)
        try:
            until(f"{case} is reached", lambda: not order.exists())
        except AssertionError:
            order.unlink(missing_ok=True)
            raise

    def _died(self, victim: Process) -> bool:
        """Whether it was the daemon that was killed, and not its worker."""
        assert victim.popen is not None
        moment = time.monotonic() + 0.3
        until("dead or not", lambda: victim.popen.poll() is not None or time.monotonic() > moment)
        return victim.popen.poll() is not None

    def _finish(self, case: Case, before: list[Any], *, asked: bool) -> None:
        """Wait for the round that was asked for, and for the end of the run."""
        index = len(before)
        if case.deed in {"leave", "return"}:
            self.members.run(1)
        elif not asked:
            # It was never told that its run was begun, which may be so or not.
            status = self.members.status()
            if status.run is None and len(self.members.closed()) == index:
                with contextlib.suppress(Declined):
                    self.members.run(1)
        self.members.wait_until(
            f"round {index} is closed and none goes on",
            lambda status: status.run is None and len(self.members.closed()) > index,
        )

    def _round(self) -> None:
        index = len(self.members.closed())
        self.members.run(1)
        self.members.wait_closed(index)
        self.members.wait_rest()

    # ---- looking over ----

    def essence(self) -> list[Any]:
        return [(e.index, e.attempt, e.digest, e.closed_unix_s) for e in self.members.closed()]

    def require_sound(self, before: list[Any], case: Case) -> None:
        """One more round than before, those before as they were, and nothing lies around."""
        after = self.essence()
        assert after[: len(before)] == before, case
        assert [each[0] for each in after] == list(range(len(before) + 1)), (case, after)
        state = self.members.state_dir

        def clean() -> bool:
            left = [*(state / "spool").iterdir(), *state.rglob(".part*")]
            for name in self.members.nodes:
                left += _litter(self.members[name].place / "state")
            self._left = sorted(str(path.relative_to(self.members.root)) for path in left)
            return not self._left

        self._left: list[str] = []
        try:
            until("all is tidy", clean, 5.0)
        except AssertionError:
            raise AssertionError(f"after {case} there lies {self._left}") from None
        self._require_spent_stays_spent()

    def _require_spent_stays_spent(self) -> None:
        """No node has sent again what it gave a share for."""
        for process in self.members.nodes.values():
            answered: set[int] = set()
            for line in _events(process.log):
                if line.get("event") == "round.answered":
                    answered.add(line["round"])
                if line.get("event") == "release.made" and line["round"] in answered:
                    assert not line["reused"], (process.name, line)

    def _left_to_come(self, process: Process) -> tuple[int, int]:
        """How many bytes lack of what a round starts from, or of the sum that leads there."""
        here = process.place / "state" / "global"
        if parts := list(here.glob("*.sum.part")):
            whole = self.members.state_dir / "sums" / parts[0].name.replace(".sum.part", ".u32")
            held, nbytes = parts[0].stat().st_size, whole.stat().st_size
            # A chunk of which a part is here comes again.
            return nbytes - held // (CHUNK - 4) * (CHUNK - 4), nbytes
        held = sum(path.stat().st_size for path in here.iterdir())
        return 2 * MODEL_BYTES - held, 2 * MODEL_BYTES

    def _require_resumed(self, victim: Process, left: int, of: int) -> None:
        """What lay there was not fetched again; a pair of edges lives no longer than its worker."""
        edges = self.members.node_status(victim.name).edges
        (came,) = [edge.bytes for edge in edges if edge.direction == "rx"]
        print(f"{victim.name} lacked {left} of {of} bytes, then {came} came")
        assert left < of
        # Of a state that is whole the last word comes again, with its trailer.
        assert came <= max(4, left) + 4 * ENVELOPE_BYTES

    def _workers(self) -> dict[str, int | None]:
        found = {}
        for name, process in self.members.nodes.items():
            if process.popen is not None:
                worker = self.members.node_status(name).worker
                found[name] = None if worker is None else worker.pid
        return found

    def _state(self) -> str:
        """The state of the round that the coordinator entered last."""
        entered = [line for line in _lines(_trace(self.members.coordinator)) if "entered" in line]
        name = entered[-1].split()[1].lower()
        return {"sharing": "open", "unmasking": "aggregating"}.get(name) or RoundState(name).value

    def passed(self) -> set[str]:
        """All points that any process has passed."""
        found: set[str] = set()
        for process in self.members.processes():
            found.update(_lines(_trace(process)))
        return found

    def end(self) -> None:
        """End all of it, and verify what is left."""
        self.members.end()
        state = self.members.state_dir
        if not (state / "ledger.sqlite").exists():
            return
        report = verify_state(state)
        assert report.sound, report.problems
        ledger = Ledger(state / "ledger.sqlite")
        try:
            assert orphans(StateDirectory(state), ledger) == ()
        finally:
            ledger.close()
        for process in self.members.processes():
            if process.popen is not None:
                assert not family(process.pid)


def _order(process: Process) -> Path:
    return process.place / "order"


def _trace(process: Process) -> Path:
    return process.place / "order.trace"


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def _events(log: Path) -> Iterator[dict[str, Any]]:
    for line in log.read_text(errors="replace").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            found = json.loads(line)
            if isinstance(found, dict):
                yield found


def _require_gone(pid: int, worker: int | None) -> None:
    """Nothing of a killed daemon is left."""
    until("its family is gone", lambda: not family(pid), 3.0)
    if worker is not None:
        until("its worker is gone", lambda: not _runs(worker), 3.0)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(") ")[2][0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def _litter(state: Path) -> list[Path]:
    """What is at rest only after a crash that was not cleaned up."""
    return [
        *state.glob(".part*"),
        *state.glob(".identity*"),
        *(state / "local").glob("pending-*"),
        *(state / "local").glob("adopt-*"),
        *(state / "local").glob("*.part"),
        *(state / "privacy").glob("*.part"),
        *(state / "release").glob("*"),
        *(state / "global").glob("*.part"),
        *list((state / "global").glob("*.f32"))[2:],
        *list((state / "global").glob("*.momentum.f32"))[1:],
    ]
