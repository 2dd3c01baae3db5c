"""Hundreds of rounds of real daemons whose nodes and workers are killed: what grows, how fast.

``python benchmarks/endurance.py [--rounds 500] [--megabytes 10] [--nodes 4] [--json]`` reads the
memory of every process each round, and what else it holds each ten; prints a table and, as the last
line, one JSON object; exits 0 only if nothing grew.  A slope is that of resident memory, in MB per
100 rounds, by least squares within each life of a process once it has warmed up, pooled over its
lives.

Everything runs in a private network namespace where the kernel gives one.
"""

import argparse
import json
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rounds import daemon, ready

from lensemble.ctl import replies, requests
from lensemble_local import netns
from lensemble_local.processes import Daemon, started

MEGABYTE = 1_000_000
READY_S = 120.0
STALL_S = 180.0
EVERY = 10
"""Rounds between two looks at everything."""

WARM_UP = 20
"""Rounds of each life of a process that say nothing about its growth."""

LONG_ENOUGH = 40
"""Readings of one life that are enough to be part of a slope."""

KEEP = {"keep_last": 3, "keep_every": 20, "verify_keep_rounds": 10}
MOST_SLOPE = 1.0
LEDGER_BYTES_PER_ROUND = 1 << 14
LEDGER_BASE_BYTES = 8 << 20
NODE_MODELS = 4
"""A state and its successor coming in, a release and its successor being made."""
NODE_BASE_BYTES = 1 << 20


class Memory(NamedTuple):
    """One process after ``round`` rounds; ``life``, its pid, tells its processes apart."""

    round: int
    life: int
    rss_mb: float
    anonymous_mb: float


class Held(NamedTuple):
    fds: int
    threads: int
    leased: int


class Bound(NamedTuple):
    """The most artifacts of each kind that the retention lets lie there, and their bytes."""

    weights: int
    momentum: int
    sums: int
    nbytes: int


def retention_bound(newest: int, model_bytes: int) -> Bound:
    """What may be kept after round ``newest``, one more of each being made."""
    every, verify = KEEP["keep_every"], KEEP["verify_keep_rounds"]
    bases = (verify + every) // every + 1
    states = KEEP["keep_last"] + bases + 1
    weights = states + newest // every + 1
    sums = verify + every + 1
    # The outer step writes to parts, so one more of each, half done.
    files = (weights + states + sums + 3) * (model_bytes + 4096)
    ledger = LEDGER_BASE_BYTES + newest * LEDGER_BYTES_PER_ROUND
    return Bound(weights, states, sums, files + ledger)


def slope(readings: list[Memory]) -> float | None:
    """MB per 100 rounds, pooled over the lives that lasted; None if none did."""
    lives: dict[int, list[Memory]] = defaultdict(list)
    for each in readings:
        lives[each.life].append(each)
    above = below = 0.0
    for life in lives.values():
        warm = [each for each in life if each.round >= life[0].round + WARM_UP]
        if len(warm) < LONG_ENOUGH:
            continue
        x = sum(each.round for each in warm) / len(warm)
        y = sum(each.rss_mb for each in warm) / len(warm)
        above += sum((each.round - x) * (each.rss_mb - y) for each in warm)
        below += sum((each.round - x) ** 2 for each in warm)
    return 100 * above / below if below else None


def fields(pid: int) -> dict[str, int]:
    """The numbers in ``/proc/PID/status``; empty for a process that is gone."""
    with suppress(FileNotFoundError, ProcessLookupError):
        text = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
        return {name: int(value) for name, value in re.findall(r"(\w+):\s+(\d+)", text)}
    return {}


def tree_bytes(root: Path) -> tuple[int, int]:
    """Files under ``root`` and the bytes they take, while others come and go."""
    count = total = 0
    for place, _, names in os.walk(root):
        for name in names:
            with suppress(FileNotFoundError):
                facts = os.lstat(Path(place) / name)
                count, total = count + 1, total + facts.st_blocks * 512
    return count, total


class Watch:
    """What every daemon and worker of one federation holds, over time."""

    def __init__(self, hub: Daemon, nodes: list[Daemon], place: Path) -> None:
        self.hub, self.nodes, self.place = hub, nodes, place
        self.memory: dict[str, list[Memory]] = defaultdict(list)
        self.held: dict[str, list[Held]] = defaultdict(list)
        self.files: dict[str, list[int]] = defaultdict(list)
        self.disk: dict[str, list[int]] = defaultdict(list)
        self.over: list[str] = []
        self._workers: dict[str, int] = {}

    def _pids(self) -> dict[str, int]:
        return {each.name: each.pid for each in (self.hub, *self.nodes)} | self._workers

    def glance(self, closed: int) -> None:
        """Read the memory of all."""
        for name, pid in self._pids().items():
            now = fields(pid)
            if "VmRSS" in now:
                sizes = (now["VmRSS"] / 1000, now["RssAnon"] / 1000)
                self.memory[name].append(Memory(closed, pid, *sizes))

    def look(self, closed: int, model_bytes: int) -> None:
        """Count what all hold, and weigh what lies on disk."""
        leased = {}
        for each in (self.hub, *self.nodes):
            with each.ask() as client:
                status: Any = client.ask(requests.Status())
            leased[each.name] = status.leased_bytes
            worker = getattr(status, "worker", None)
            if worker is not None and worker.pid:
                self._workers[f"{each.name} worker"] = worker.pid
            self._weigh(each, closed, model_bytes)
        for name, pid in self._pids().items():
            threads = fields(pid).get("Threads", 0)
            with suppress(FileNotFoundError, ProcessLookupError):
                fds = len(list(Path(f"/proc/{pid}/fd").iterdir()))
                self.held[name].append(Held(fds, threads, leased.get(name, 0)))

    def _weigh(self, each: Daemon, closed: int, model_bytes: int) -> None:
        count, nbytes = tree_bytes(self.place / each.name)
        self.files[each.name].append(count)
        self.disk[each.name].append(nbytes)
        if each is not self.hub:
            most = NODE_MODELS * (model_bytes + 4096) + NODE_BASE_BYTES
            if nbytes > most:
                self.over.append(f"{each.name} has {nbytes} bytes after {closed}, at most {most}")
            return
        bound = retention_bound(closed, model_bytes)
        state = self.place / each.name
        for kind, most in (
            ("checkpoints", bound.weights),
            ("momentum", bound.momentum),
            ("sums", bound.sums),
        ):
            found = [path for path in (state / kind).iterdir() if not path.name.startswith(".")]
            if len(found) > most:
                self.over.append(f"{len(found)} {kind} after {closed} rounds, at most {most}")
        if nbytes > bound.nbytes:
            self.over.append(f"{nbytes} bytes after {closed} rounds, at most {bound.nbytes}")

    def figures(self) -> dict[str, dict[str, Any]]:
        found = {}
        for name, readings in self.memory.items():
            grown, held = slope(readings), self.held[name]
            found[name] = {
                "lives": len({each.life for each in readings}),
                "rss_mb": round(readings[-1].rss_mb, 1),
                "rss_max_mb": round(max(each.rss_mb for each in readings), 1),
                "anonymous_max_mb": round(max(each.anonymous_mb for each in readings), 1),
                "slope_mb_per_100": None if grown is None else round(grown, 3),
                "rss_mb_by_50": _medians(readings),
                **_spread("fds", [each.fds for each in held]),
                **_spread("threads", [each.threads for each in held]),
                **_spread("leased", [each.leased for each in held]),
            }
        return found


def _medians(readings: list[Memory]) -> list[float]:
    """Resident MB in each 50 rounds."""
    spans: dict[int, list[float]] = defaultdict(list)
    for each in readings:
        spans[each.round // 50].append(each.rss_mb)
    return [round(statistics.median(spans[span]), 1) for span in sorted(spans)]


def _spread(name: str, values: list[int]) -> dict[str, float]:
    """The most in the first and in the last third: what is flat has no more in the last."""
    third = max(1, len(values) // 3)
    return {f"{name}_first_third": max(values[:third]), f"{name}_last_third": max(values[-third:])}


class Trouble:
    """Ends daemons and workers at moments drawn from ``seed``; the first node is left alone."""

    def __init__(self, hub: Daemon, nodes: list[Daemon], seed: int, every: int) -> None:
        self._hub, self._nodes, self._every = hub, nodes, every
        self._drawn = np.random.default_rng(seed)
        self._next = self._draw(0)
        self.done: dict[str, int] = defaultdict(int)

    def _draw(self, closed: int) -> int:
        return closed + int(self._drawn.integers(self._every // 2, self._every * 3 // 2 + 1))

    def make(self, closed: int) -> None:
        """Once it is time and everyone is here, so that the rest is a quorum."""
        if closed < self._next or ready(self._hub) < len(self._nodes):
            return
        self._next = self._draw(closed)
        victim = self._nodes[int(self._drawn.integers(1, len(self._nodes)))]
        how = str(self._drawn.choice(["stop", "kill", "worker"]))
        self.done[how] += 1
        if how == "worker":
            with victim.ask() as client:
                status: Any = client.ask(requests.Status())
            if status.worker is not None and status.worker.pid:
                with suppress(ProcessLookupError):
                    os.kill(status.worker.pid, signal.SIGKILL)
            return
        if how == "stop":
            victim.stop()
        else:
            victim.kill()
        victim.start()


@contextmanager
def federation(place: Path, megabytes: int, nodes: int) -> Iterator[tuple[Daemon, list[Daemon]]]:
    """A masked federation that is joined."""
    (place / "workload.toml").write_text(
        f'name = "endurance"\n[task]\nkind = "noop"\nparameters = {megabytes * MEGABYTE // 4}\n'
        "[inner]\nsteps = 1\nbatch = 1\n"
    )
    keeps = "".join(f"{key} = {value}\n" for key, value in KEEP.items())
    tables = f"[rounds]\nmin_participants = {nodes - 1}\nmax_attempts = 1000\n[storage]\n{keeps}"
    hub = daemon(place, "coordinator", "lensemble_coord", 'workload = "workload.toml"\n', tables)
    members = [
        daemon(place, f"node-{n}", "lensemble_node", f'name = "node-{n}"\n') for n in range(nodes)
    ]
    with started([hub, *members]):
        with hub.ask() as client:
            invited: Any = client.ask(requests.Invite(uses=nodes))
        for member in members:
            with member.ask() as client:
                client.ask(requests.Join(ticket=invited.ticket))
        hub.until("all nodes are ready", lambda: ready(hub) == nodes, READY_S)
        yield hub, members


def drive(watch: Watch, trouble: Trouble, rounds: int, model_bytes: int) -> int:
    """Run the rounds; how many closed.  Gives up when none closes for ``STALL_S``."""
    with watch.hub.ask() as client:
        client.ask(requests.Run(rounds=rounds, detach=True))
    closed, moved, due = 0, time.monotonic(), EVERY
    while closed < rounds and time.monotonic() < moved + STALL_S:
        with watch.hub.ask() as client:
            status: Any = client.ask(requests.Status())
        now = 0 if status.last_round is None else status.last_round.index + 1
        if now > closed:
            closed, moved = now, time.monotonic()
            watch.glance(closed)
        if closed >= due:
            due = closed - closed % EVERY + EVERY
            watch.look(closed, model_bytes)
            if closed % 100 < EVERY:
                sys.stderr.write(f"{closed} rounds\n")
        if status.run is None and closed < rounds:
            break
        trouble.make(closed)
        time.sleep(0.05)
    return closed


def verdict(watch: Watch, closed: int, rounds: int) -> list[str]:
    """What grew, or did not come to its end."""
    found = list(watch.over)
    if closed < rounds:
        found.append(f"{closed} of {rounds} rounds closed")
    for name, each in watch.figures().items():
        grown = each["slope_mb_per_100"]
        if grown is not None and grown >= MOST_SLOPE:
            found.append(f"{name} grows by {grown} MB in 100 rounds")
        for what, slack in (("fds", 2), ("threads", 2), ("leased", 0)):
            first, last = each[f"{what}_first_third"] or 0, each[f"{what}_last_third"] or 0
            if last > first + slack:
                found.append(f"{name}: {what} {first} at first, {last} at last")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--megabytes", type=int, default=10)
    parser.add_argument("--nodes", type=int, default=4, help="at least 4: one may be away")
    parser.add_argument("--every", type=int, default=20, help="rounds between two restarts, mean")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dir", type=Path, help="where the state directories go")
    parser.add_argument("--json", action="store_true", help="only the JSON object")
    options = parser.parse_args()
    open_network = netns.enter()
    model_bytes = options.megabytes * MEGABYTE
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(dir=options.dir) as name,
        federation(Path(name), options.megabytes, options.nodes) as (hub, members),
    ):
        watch = Watch(hub, members, Path(name))
        trouble = Trouble(hub, members, options.seed, options.every)
        closed = drive(watch, trouble, options.rounds, model_bytes)
        with hub.ask() as client:
            status: Any = client.ask(requests.Status())
            last: Any = client.ask(requests.Rounds(limit=1))
    wrong = verdict(watch, closed, options.rounds)
    figures = watch.figures()
    if not options.json:
        for process, each in figures.items():
            print(f"{process:<18}", *(f"{key} {value}" for key, value in each.items()))
        print(*wrong, sep="\n")
    bound = retention_bound(closed, model_bytes)
    print(
        json.dumps(
            {
                "rounds_closed": closed,
                "seconds": round(time.monotonic() - began, 1),
                "attempts_aborted": _aborted(status, last),
                "restarts": dict(trouble.done),
                "processes": figures,
                "files_max": {name: max(each) for name, each in watch.files.items()},
                "disk_max_bytes": {name: max(each) for name, each in watch.disk.items()},
                "disk_bound_bytes": bound.nbytes,
                "retention": KEEP,
                "passed": not wrong,
                "wrong": wrong,
                "private_network": open_network is None,
            }
        )
    )
    return 1 if wrong else 0


def _aborted(status: replies.CoordinatorStatus, last: replies.RoundList) -> int | None:
    """Aborted attempts of the run, while it is known; of the last round otherwise."""
    if status.run is not None:
        return status.run.attempts_aborted
    return last.rounds[-1].attempt if last.rounds else None


if __name__ == "__main__":
    sys.exit(main())
