"""What the coordinator spends on a round and a node, from ten nodes to a thousand.

``python benchmarks/scale.py [--counts 10,100,1000] [--rounds 2] [--aggregation masked,plain]``
starts the real coordinator, and all nodes in one or two other processes: each has an endpoint, a
link and edges of its own over QUIC and speaks the whole protocol, but trains nothing.  CPU seconds
are of the coordinator alone, the median of the rounds; wall seconds are mostly of those other
processes, where a thousand nodes share a core.  Links beat every 20 s, not every second, so that
what a round costs is told apart from what links cost: with ``--beat 1`` see ``idle_ms_per_node_s``,
CPU time for each node and second in which nothing goes on.  Prints a table, and one JSON line at
the end: figures by aggregation and count, ``per_node_more``, what each node more costs from one
count to the next, and ``growth``, the figure per node of the largest count over the smallest.

Everything runs in a private network namespace where the kernel gives one.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from our_rounds import daemon, ready
from trees import most_resident_bytes, resident_bytes

from lensemble.ctl import replies, requests
from lensemble_local import netns
from lensemble_local.processes import Daemon, spawn, started

WORKLOAD = "workload.toml"
CROWD = Path(__file__).parent / "probes" / "crowd.py"
PARAMETERS = 1000
K = 12
MOST = 1024
"""Nodes; also what the field has room for."""

NODES_PER_PROCESS = 500
PATIENCE_S = 600
CAPACITY_BYTES = 1 << 16
MIB = 1 << 20
IDLE_S = 4.0
"""For so long nothing goes on but heartbeats."""

ENOUGH_UPDATES = 300
"""Rounds of few nodes are short: more of them are counted."""


@dataclass(frozen=True)
class Setting:
    """One federation; ``rounds`` are counted, and ``beat_s`` lie between two heartbeats."""

    nodes: int
    rounds: int
    aggregation: str
    beat_s: float


def numbers(text: str) -> list[int]:
    return sorted(int(each) for each in text.split(","))


def kinds(text: str) -> list[str]:
    found = text.split(",")
    if not set(found) <= {"masked", "plain"}:
        raise argparse.ArgumentTypeError(f"{text!r} is not masked, plain or both")
    return found


def cpu_s(pid: int) -> float:
    """CPU seconds of all threads of the process, by the scheduler's account."""
    return time.clock_gettime((~pid << 3) | 2)


def coordinator(place: Path, setting: Setting) -> Daemon:
    nodes = setting.nodes
    (place / WORKLOAD).write_text(
        f'name = "noop"\n[task]\nkind = "noop"\nparameters = {PARAMETERS}\n'
        f"[inner]\nsteps = 1\nbatch = 1\n[field]\nk = {K}\nn_max = {MOST}\n"
    )
    rules = (
        f'[rounds]\naggregation = "{setting.aggregation}"\nmin_participants = {nodes}\n'
        f"max_participants = {nodes}\nsecure_agg_threshold = {nodes // 2 + 1}\n"
        f"open_timeout_s = {PATIENCE_S}\ncollect_timeout_s = {PATIENCE_S}\n"
        f"share_timeout_s = {PATIENCE_S}\nunmask_timeout_s = {PATIENCE_S}\n"
        f"[edges]\ncapacity_bytes = {CAPACITY_BYTES}\n"
        f"[listen]\nheartbeat_s = {setting.beat_s}\nheartbeat_timeout_s = 300.0\n"
    )
    return daemon(place, "coordinator", "lensemble_coord", 'workload = "workload.toml"\n', rules)


def invite(hub: Daemon, nodes: int) -> str:
    with hub.ask() as client:
        invited = client.ask(requests.Invite(uses=nodes))
    if not isinstance(invited, replies.Invited):
        raise TypeError(invited)
    return invited.ticket


@contextmanager
def crowd(place: Path, setting: Setting, ticket: str) -> Iterator[list[IO[str]]]:
    """What the processes of the nodes say, a line at a time; they end with this process."""
    with ExitStack() as stack:
        said: list[IO[str]] = []
        for first in range(0, setting.nodes, NODES_PER_PROCESS):
            ours, theirs = os.pipe()
            count = min(NODES_PER_PROCESS, setting.nodes - first)
            numbers = map(str, (first, count, setting.rounds + 1, setting.beat_s))
            part = [*numbers, ticket, str(place / WORKLOAD)]
            with os.fdopen(theirs, "wb") as log:
                process = spawn([sys.executable, str(CROWD), *part], log)
            stack.callback(process.wait)
            stack.callback(process.kill)
            said.append(stack.enter_context(os.fdopen(ours, encoding="utf-8")))
        yield said


def expect(said: list[IO[str]], word: str) -> None:
    for lines in said:
        line = lines.readline()
        if line.strip() != word:
            raise RuntimeError(f"the crowd says {line + lines.read(4000)!r} instead of {word!r}")


def measure(place: Path, setting: Setting) -> dict[str, float]:
    hub, nodes = coordinator(place, setting), setting.nodes
    with started([hub]):
        empty = resident_bytes(hub.pid)
        with crowd(place, setting, invite(hub, nodes)) as lines:
            expect(lines, "joined")
            hub.until("all nodes are ready", lambda: ready(hub) == nodes, PATIENCE_S)
            joined, before = resident_bytes(hub.pid), cpu_s(hub.pid)
            time.sleep(IDLE_S)
            idle = cpu_s(hub.pid) - before
            with hub.ask() as client:
                client.ask(requests.Run(rounds=setting.rounds + 1, detach=True))
            marks = []
            for number in range(setting.rounds + 1):
                expect(lines, f"closed {number}")
                marks.append((cpu_s(hub.pid), time.monotonic()))
            closed, most = resident_bytes(hub.pid), most_resident_bytes(hub.pid)
    cpu, seconds = (
        statistics.median(after[which] - before[which] for before, after in pairwise(marks))
        for which in (0, 1)
    )
    return {
        "cpu_s": round(cpu, 4),
        "cpu_ms_per_node": round(1e3 * cpu / nodes, 3),
        "idle_ms_per_node_s": round(1e3 * idle / IDLE_S / nodes, 3),
        "empty_mib": round(empty / MIB, 1),
        "joined_mib": round(joined / MIB, 1),
        "after_rounds_mib": round(closed / MIB, 1),
        "peak_mib": round(most / MIB, 1),
        "kib_per_node": round((closed - empty) / 1024 / nodes, 1),
        "seconds": round(seconds, 3),
        "rounds": setting.rounds,
    }


def per_node_more(found: dict[int, dict[str, float]]) -> dict[str, dict[str, float]]:
    """What each node more costs, from one count to the next."""
    return {
        f"{few} to {many}": {
            "cpu_ms": round(1e3 * _slope(found, few, many, "cpu_s"), 3),
            "kib": round(1024 * _slope(found, few, many, "after_rounds_mib"), 1),
            "peak_kib": round(1024 * _slope(found, few, many, "peak_mib"), 1),
        }
        for few, many in pairwise(found)
    }


def _slope(found: dict[int, dict[str, float]], few: int, many: int, figure: str) -> float:
    return (found[many][figure] - found[few][figure]) / (many - few)


def growth(found: dict[int, dict[str, float]]) -> dict[str, float]:
    least, most = found[min(found)], found[max(found)]
    return {
        figure: round(most[figure] / least[figure], 2)
        for figure in ("cpu_ms_per_node", "kib_per_node")
    }


def measured(options: argparse.Namespace, aggregation: str) -> dict[str, Any]:
    """All counts of one aggregation."""
    found = {}
    for nodes in options.counts:
        rounds = max(options.rounds, ENOUGH_UPDATES // nodes)
        setting = Setting(nodes, rounds, aggregation, options.beat)
        with tempfile.TemporaryDirectory(prefix="scale-") as name:
            found[nodes] = measure(Path(name), setting)
        if not options.json:
            columns = "  ".join(f"{name} {value:g}" for name, value in found[nodes].items())
            print(f"{aggregation} {nodes:>5} nodes  {columns}", flush=True)
    return {"nodes": found, "per_node_more": per_node_more(found), "growth": growth(found)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--counts", type=numbers, default=[10, 100], help="of nodes")
    parser.add_argument("--rounds", type=int, default=3, help="counted; one more warms up")
    parser.add_argument("--aggregation", type=kinds, default=["masked"], help="masked, plain")
    parser.add_argument("--beat", type=float, default=20.0, help="seconds between heartbeats")
    parser.add_argument("--json", action="store_true", help="only the JSON object")
    options = parser.parse_args()
    if max(options.counts) > MOST:
        parser.error(f"at most {MOST} nodes")
    open_network = netns.enter()
    result: dict[str, Any] = {kind: measured(options, kind) for kind in options.aggregation}
    result |= {"load": round(os.getloadavg()[0], 2), "private_network": open_network is None}
    print(json.dumps({"scale": result}))


if __name__ == "__main__":
    main()
