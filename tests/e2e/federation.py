"""Real daemons as processes of this machine: started, watched over their sockets, killed."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from lensemble.ctl import replies, requests
from lensemble.ctl.client import Client, DaemonUnreachable
from lensemble_local.processes import spawn
from tests.e2e.log_scan import faults

COORDINATOR = "coordinator"
POLL_S = 0.02
START_S = 30.0
STOP_S = 5.0
"""What a daemon may take from SIGTERM to its exit."""

QUICK = {"heartbeat_s": 0.2, "heartbeat_timeout_s": 1.0}
"""For tests that are about something else than how a loss is noticed."""

PLAIN = {"aggregation": "plain", "min_participants": 2}
"""For tests that are about something else than masks."""

Found = TypeVar("Found")


def until(what: str, found: Callable[[], Found | None], within_s: float = 20.0) -> Found:
    """What ``found`` gives once it gives something; fails after ``within_s``."""
    end = time.monotonic() + within_s
    while not (answer := found()):
        assert time.monotonic() < end, f"not within {within_s:g} s: {what}"
        time.sleep(POLL_S)
    return answer


def toml(tree: dict[str, Any]) -> str:
    """``tree`` of plain values and tables of them."""
    lines = [f"{k} = {json.dumps(v)}" for k, v in tree.items() if not isinstance(v, dict)]
    for name, table in tree.items():
        if isinstance(table, dict):
            lines += [f"[{name}]", *(f"{k} = {json.dumps(v)}" for k, v in table.items())]
    return "\n".join(lines) + "\n"


class Process:
    """One daemon: its command, its socket, its log, and the process while there is one."""

    def __init__(self, name: str, module: str, place: Path) -> None:
        self.name = name
        self.place = place
        self.config = place / "config.toml"
        self.socket = place / "ctl.sock"
        self.log = place / "daemon.log"
        self.command = [sys.executable, "-m", module, str(self.config)]
        self.popen: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self.popen is not None
        return self.popen.pid

    def begin(self) -> None:
        """Start it, without waiting for it to serve."""
        with self.log.open("ab") as log:
            self.popen = spawn(self.command, log)

    def serves(self) -> bool:
        assert self.popen is not None
        assert self.popen.poll() is None, f"{self.name} exited:\n{self.last_words()}"
        try:
            with Client(self.socket):
                return True
        except DaemonUnreachable:
            return False

    def last_words(self, lines: int = 15) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def ask(self, request: requests.Request) -> replies.Reply:
        with Client(self.socket) as client:
            return client.ask(request)

    def kill(self) -> None:
        """End it as a crash would."""
        assert self.popen is not None
        self.popen.kill()
        self.popen.wait()

    def signal(self, number: signal.Signals) -> None:
        assert self.popen is not None
        self.popen.send_signal(number)

    def stop(self) -> int:
        """SIGTERM; its exit status, which is that of SIGKILL if it takes too long."""
        assert self.popen is not None
        self.popen.terminate()
        return self.exit_status()

    def exit_status(self, within_s: float = STOP_S) -> int:
        assert self.popen is not None
        try:
            return self.popen.wait(within_s)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            return self.popen.wait()

    def peak_bytes(self) -> int:
        text = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii")
        found = re.search(r"VmHWM:\s+(\d+) kB", text)
        assert found is not None
        return int(found[1]) << 10


class Federation:
    """A coordinator and nodes under ``root``, configured and not started.

    ``workload``, ``coordinator`` and ``node`` are tables of the configuration files, where a test
    differs from the defaults.
    """

    def __init__(
        self,
        root: Path,
        nodes: int,
        *,
        workload: dict[str, Any] | None = None,
        coordinator: dict[str, Any] | None = None,
        node: dict[str, Any] | None = None,
    ) -> None:
        self.root = root
        self.workload = root / "workload.toml"
        terms = {"name": "noop", **(workload or {})}
        terms["task"] = {"kind": "noop", "parameters": 1000, **terms.get("task", {})}
        self.workload.write_text(toml(terms))
        self.coordinator = self._process(COORDINATOR, "lensemble_coord")
        given = {"workload": str(self.workload), **(coordinator or {})}
        given["rounds"] = {**PLAIN, **given.get("rounds", {})}
        self._configure(self.coordinator, given)
        self._node_terms = {"share": {"plain": True}, **(node or {})}
        self.nodes: dict[str, Process] = {}
        for index in range(nodes):
            self.add(f"node-{index}")

    def add(self, name: str) -> Process:
        """Configure one more node."""
        self.nodes[name] = added = self._process(name, "lensemble_node")
        self._configure(added, {"name": name, **self._node_terms})
        return added

    def _process(self, name: str, module: str) -> Process:
        place = self.root / name
        place.mkdir(mode=0o700)
        return Process(name, module, place)

    def _configure(self, process: Process, given: dict[str, Any]) -> None:
        listen = {**QUICK, **given.get("listen", {})}
        ctl = {"socket": str(process.socket)}
        process.config.write_text(toml({**given, "listen": listen, "ctl": ctl}))

    @property
    def state_dir(self) -> Path:
        """The coordinator's."""
        return self.coordinator.place / "state"

    def __getitem__(self, name: str) -> Process:
        return self.coordinator if name == COORDINATOR else self.nodes[name]

    def processes(self) -> list[Process]:
        return [self.coordinator, *self.nodes.values()]

    # ---- life ----

    def start(self, *names: str) -> None:
        """Start these, or all, at the same time, and wait until they serve."""
        chosen = [self[name] for name in names] or self.processes()
        for process in chosen:
            process.begin()
        for process in chosen:
            until(f"{process.name} serves", process.serves, START_S)

    def join(self, *names: str) -> None:
        """Invite these nodes, or all, and wait until their edges are ready."""
        chosen = names or tuple(self.nodes)
        ticket = self.coordinator.ask(requests.Invite(uses=len(chosen))).ticket
        for name in chosen:
            self[name].ask(requests.Join(ticket=ticket))
        self.wait_for(*chosen)

    def wait_for(self, *names: str, within_s: float = 20.0) -> replies.CoordinatorStatus:
        """Wait until these nodes, or all, are connected and asked into the next round."""
        chosen = names or tuple(self.nodes)

        def here(status: replies.CoordinatorStatus) -> bool:
            ready = {edge.peer for edge in status.edges if edge.state == "ready"}
            return ready.issuperset(chosen)

        return self.wait_until(f"{chosen} are here", here, within_s)

    def end(self) -> None:
        """End whatever still runs, the nodes first."""
        running = [p for p in reversed(self.processes()) if p.popen is not None]
        for process in running:
            # One that a test had stopped hears SIGTERM only when it goes on.
            process.signal(signal.SIGCONT)
            process.signal(signal.SIGTERM)
        for process in running:
            process.exit_status()
        for process in self.processes():
            found = faults(process.log, process.place / "state" / "identity.key")
            assert not found, "\n".join(found)

    # ---- what is going on ----

    def status(self) -> replies.CoordinatorStatus:
        return self.coordinator.ask(requests.Status())

    def node_status(self, name: str) -> replies.NodeStatus:
        return self[name].ask(requests.Status())

    def wait_until(
        self,
        what: str,
        found: Callable[[replies.CoordinatorStatus], bool],
        within_s: float = 20.0,
    ) -> replies.CoordinatorStatus:
        """The first status of the coordinator of which ``found`` holds."""

        def look() -> replies.CoordinatorStatus | None:
            nonlocal last
            last = self.status()
            return last if found(last) else None

        last: replies.CoordinatorStatus | None = None
        try:
            return until(what, look, within_s)
        except AssertionError as error:
            round_ = None if last is None else (last.round, last.participants)
            raise AssertionError(f"{error}\n{round_}\n{self.coordinator.last_words()}") from None

    def participant(self, name: str) -> replies.ParticipantStatus:
        """The newest entry of ``name`` in the coordinator's status."""
        return participant(self.status(), name)

    def run(self, rounds: int, **options: object) -> None:
        """Start a run and leave it alone."""
        self.coordinator.ask(requests.Run(rounds=rounds, detach=True, **options))

    def closed(self) -> tuple[replies.RoundSummary, ...]:
        """All rounds in the ledger, oldest first."""
        return self.coordinator.ask(requests.Rounds(limit=1000)).rounds

    def committed(self) -> list[tuple[int, int, str, tuple[str, ...]]]:
        """What a record holds of each; figures beside it come from events, which may come later."""
        rounds = self.closed()
        return [(each.index, each.attempt, each.digest, each.contributors) for each in rounds]

    def wait_closed(self, index: int, within_s: float = 20.0) -> replies.RoundSummary:
        """Wait until round ``index`` is committed and announced."""

        def found(status: replies.CoordinatorStatus) -> bool:
            return status.last_round is not None and status.last_round.index >= index

        self.wait_until(f"round {index} is closed", found, within_s)
        return self.closed()[index]

    def wait_rest(self, within_s: float = 20.0) -> replies.CoordinatorStatus:
        """Wait until no run goes on."""
        return self.wait_until("the run has ended", lambda status: status.run is None, within_s)

    def wait_training(self, *names: str, round_index: int | None = None) -> None:
        """Wait until these nodes, or all, train."""
        chosen = names or tuple(self.nodes)

        def train(status: replies.CoordinatorStatus) -> bool:
            doing = {each.name for each in status.participants if each.activity == "training"}
            right = round_index is None or status.round.index == round_index
            return right and doing.issuperset(chosen)

        self.wait_until(f"{chosen} train", train)


def participant(status: replies.CoordinatorStatus, name: str) -> replies.ParticipantStatus:
    found = [each for each in status.participants if each.name == name]
    assert found, f"no {name} among {status.participants}"
    return found[0]


@contextmanager
def federation(root: Path, nodes: int, **terms: dict[str, Any]) -> Iterator[Federation]:
    """A federation that is started and joined; ended whatever happens."""
    made = Federation(root, nodes, **terms)
    try:
        made.start()
        made.join()
        yield made
    finally:
        made.end()


def family(pid: int) -> list[Path]:
    """The ``/proc`` directories of the children of ``pid``, and of all in the sessions of those."""
    above: dict[Path, set[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text(encoding="ascii").rpartition(") ")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        above[entry] = {int(fields[1]), int(fields[3])}
    children = {int(entry.name) for entry, ids in above.items() if pid in ids} - {pid}
    return [entry for entry, ids in above.items() if ids & children]
