"""Rounds of this system for ``rounds.py``: real processes, real QUIC, a model of no computing."""

import json
import os
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from trees import Peaks, cpu_s

from lensemble.ctl import replies, requests
from lensemble_local.processes import Daemon, started

MEGABYTE = 1_000_000
READY_S = 60.0
SMALL_MEGABYTES, SMALL_ROUNDS = 10, 20
"""Rounds of small models are short: more of them are counted."""

MAX_ROUNDS_AFTER_KILL = 10_000
ASK_PAUSE_S = 0.05
PHASES = ("open", "collecting", "aggregating", "aligning", "committing")


@dataclass(frozen=True)
class Setting:
    """A federation; ``quorum`` 0 means that every node is needed."""

    megabytes: int
    nodes: int
    rounds: int
    aggregation: str = "masked"
    quorum: int = 0

    @property
    def parameters(self) -> int:
        return self.megabytes * MEGABYTE // 4


class Federation:
    """Its processes, and what the coordinator's watch wrote once they have ended."""

    def __init__(self, place: Path, hub: Daemon, members: list[Daemon]) -> None:
        self.hub = hub
        self.members = members
        self._watched = place / "coordinator.watched.json"

    @property
    def pids(self) -> list[int]:
        return [self.hub.pid, *(each.pid for each in self.members)]

    def run(self, rounds: int) -> None:
        """Run ``rounds`` rounds to their end; every one must close."""
        with self.hub.ask() as client:
            for reply in client.stream(requests.Run(rounds=rounds)):
                if isinstance(reply, replies.RunEnded) and not reply.completed:
                    raise RuntimeError(f"a run ended early: {reply}")

    def begin(self, rounds: int) -> None:
        with self.hub.ask() as client:
            client.ask(requests.Run(rounds=rounds, detach=True))

    def last_round(self) -> replies.RoundSummary | None:
        with self.hub.ask() as client:
            return status_of(client.ask(requests.Status())).last_round

    def watched(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._watched.read_text(encoding="ascii"))
        return found


def status_of(reply: replies.Reply) -> replies.CoordinatorStatus:
    if not isinstance(reply, replies.CoordinatorStatus):
        raise TypeError(reply)
    return reply


@contextmanager
def federation(place: Path, setting: Setting) -> Iterator[Federation]:
    """A joined federation, in which only moving, masking and folding bytes takes time."""
    (place / "workload.toml").write_text(
        f'name = "noop"\n[task]\nkind = "noop"\nparameters = {setting.parameters}\n'
        "[inner]\nsteps = 1\nbatch = 1\n"
    )
    quorum = setting.quorum or setting.nodes
    rules = f'[rounds]\naggregation = "{setting.aggregation}"\nmin_participants = {quorum}\n'
    if setting.aggregation == "masked":
        rules += f"secure_agg_threshold = {setting.nodes // 2 + 1}\n"
        rules += f"allow_two_party = {str(setting.nodes < 3).lower()}\n"
    # Where the coordinator's watch is found.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parent / "probes"), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    )
    hub = daemon(place, "coordinator", "watched_coordinator", 'workload = "workload.toml"\n', rules)
    shares = "[share]\nplain = true\n" if setting.aggregation == "plain" else ""
    members = [
        daemon(place, f"node-{n}", "lensemble_node", f'name = "node-{n}"\n', shares)
        for n in range(setting.nodes)
    ]
    with started([hub, *members]):
        with hub.ask() as client:
            invited = client.ask(requests.Invite(uses=setting.nodes))
        if not isinstance(invited, replies.Invited):
            raise TypeError(invited)
        for member in members:
            with member.ask() as client:
                client.ask(requests.Join(ticket=invited.ticket))
        hub.until("all nodes are ready", lambda: ready(hub) == setting.nodes, READY_S)
        yield Federation(place, hub, members)


def daemon(place: Path, name: str, module: str, config: str, tables: str = "") -> Daemon:
    path, socket = place / f"{name}.toml", place / f"{name}.sock"
    path.write_text(f'{config}state_dir = "{name}"\n[ctl]\nsocket = "{socket}"\n{tables}')
    return Daemon(name, module, path, socket, place / f"{name}.log")


def ready(hub: Daemon) -> int:
    with hub.ask() as client:
        status = status_of(client.ask(requests.Status()))
    return len({edge.peer for edge in status.edges if edge.state == "ready"})


class Asking:
    """Asks for the status again and again, in a thread, and keeps how long each answer took."""

    def __init__(self, hub: Daemon) -> None:
        self._hub = hub
        self.took_s: list[float] = []
        self._over = threading.Event()

    @contextmanager
    def all_along(self) -> Iterator["Asking"]:
        thread = threading.Thread(target=self._ask)
        thread.start()
        try:
            yield self
        finally:
            self._over.set()
            thread.join()

    def _ask(self) -> None:
        with self._hub.ask() as client:
            while not self._over.wait(ASK_PAUSE_S):
                before = time.perf_counter()
                client.ask(requests.Status())
                self.took_s.append(time.perf_counter() - before)


def measure(setting: Setting, place: Path) -> dict[str, Any]:
    """Figures of whole rounds; the first one warms up and is not counted."""
    counted = setting.rounds
    if setting.megabytes <= SMALL_MEGABYTES:
        counted = max(counted, SMALL_ROUNDS)
    with federation(place, setting) as here:
        here.run(1)
        names = ["server", *(f"node-{n}" for n in range(setting.nodes))]
        peaks = Peaks(dict(zip(names, here.pids, strict=True)))
        asking = Asking(here.hub)
        before, of_server = cpu_s(*here.pids), cpu_s(here.hub.pid)
        with peaks.watched(), asking.all_along():
            here.run(counted + 1)
        spent = cpu_s(*here.pids) - before
        of_server = cpu_s(here.hub.pid) - of_server
    watched = here.watched()
    closed = watched["closed"][-counted - 1 :]
    took = [after["at"] - each["at"] for each, after in pairwise(closed)]
    late = [late for at, late in watched["late"] if closed[0]["at"] <= at <= closed[-1]["at"]]
    # Bytes of one parameter to, and from, one participant in one round.
    each_round = setting.parameters * setting.nodes * counted
    return {
        "seconds": round(statistics.median(took), 3),
        "server_mib": peaks.mib("server"),
        "server_and_spool_mib": peaks.mib_with_spool("server"),
        "node_mib": max(peaks.mib(name) for name in names[1:]),
        "cpu_s": round(spent / (counted + 1), 3),
        "server_cpu_s": round(of_server / (counted + 1), 3),
        "down": round((closed[-1]["sent_bytes"] - closed[0]["sent_bytes"]) / each_round, 3),
        "up": round((closed[-1]["received_bytes"] - closed[0]["received_bytes"]) / each_round, 3),
        "loop_late_ms_p99": round(1e3 * statistics.quantiles(late, n=100)[98], 2),
        "loop_late_ms_max": round(1e3 * max(late), 2),
        "status_ms_p50": round(1e3 * statistics.median(asking.took_s), 2),
        "status_ms_max": round(1e3 * max(asking.took_s), 2),
        **{
            phase: round(statistics.median(each["seconds"].get(phase, 0.0) for each in closed), 3)
            for phase in PHASES
        },
    }


def seconds_without_killed(setting: Setting, into_round: float, place: Path) -> float:
    """From SIGKILL of a node, ``into_round`` of a round after its begin, to the close without it.

    Raises:
        RuntimeError: no round closed without it.
    """
    with federation(place, setting) as here:
        here.run(1)
        before = time.monotonic()
        here.run(3)
        took = (time.monotonic() - before) / 3
        here.begin(MAX_ROUNDS_AFTER_KILL)
        time.sleep((2 + into_round) * took)
        last = here.last_round()
        index, killed = -1 if last is None else last.index, time.monotonic()
        here.members[-1].kill()
        here.hub.until(
            "a round closed without the killed node",
            lambda: (
                (last := here.last_round())
                and last.index > index
                and len(last.contributors) < setting.nodes
            ),
            READY_S,
        )
    for each in here.watched()["closed"]:
        if each["at"] > killed and each["contributors"] < setting.nodes:
            return float(each["at"] - killed)
    raise RuntimeError("no round closed without the killed node")
