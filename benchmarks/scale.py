"""What the coordinator spends on a round and a node, from ten nodes to a thousand.

``python benchmarks/scale.py [--counts 10,100,1000] [--rounds 2] [--aggregation masked] [--json]``
starts the real coordinator, and all nodes in one other process: each has an endpoint, a link and
edges of its own over QUIC and speaks the whole protocol, but trains nothing.  CPU seconds are of
the coordinator alone; wall seconds are mostly of that other process, where a thousand nodes share
one core: minutes for a masked round.  Prints a table, and one JSON
line at the end; ``growth`` is the figure per node of the largest count over that of the smallest.

Everything runs in a private network namespace where the kernel gives one.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from our_rounds import daemon, ready
from trees import cpu_s, resident_bytes

from lensemble.ctl import replies, requests
from lensemble_local import netns
from lensemble_local.processes import Daemon, spawn, started

CROWD = Path(__file__).parent / "probes" / "crowd.py"
PARAMETERS = 1000
K = 12
MOST = 1024
"""Nodes; also what the field has room for."""

NODES_PER_PROCESS = 500
PATIENCE_S = 600
CAPACITY_BYTES = 1 << 16
MIB = 1 << 20


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def coordinator(place: Path, nodes: int, aggregation: str) -> Daemon:
    (place / "workload.toml").write_text(
        f'name = "noop"\n[task]\nkind = "noop"\nparameters = {PARAMETERS}\n'
        f"[inner]\nsteps = 1\nbatch = 1\n[field]\nk = {K}\nn_max = {MOST}\n"
    )
    rules = (
        f'[rounds]\naggregation = "{aggregation}"\nmin_participants = {nodes}\n'
        f"max_participants = {nodes}\nsecure_agg_threshold = {nodes // 2 + 1}\n"
        f"open_timeout_s = {PATIENCE_S}\ncollect_timeout_s = {PATIENCE_S}\n"
        f"share_timeout_s = {PATIENCE_S}\nunmask_timeout_s = {PATIENCE_S}\n"
        f"[edges]\ncapacity_bytes = {CAPACITY_BYTES}\n"
        "[listen]\nheartbeat_s = 2.0\nheartbeat_timeout_s = 300.0\n"
    )
    return daemon(place, "coordinator", "lensemble_coord", 'workload = "workload.toml"\n', rules)


def invite(hub: Daemon, nodes: int) -> str:
    with hub.ask() as client:
        invited = client.ask(requests.Invite(uses=nodes))
    if not isinstance(invited, replies.Invited):
        raise TypeError(invited)
    return invited.ticket


@contextmanager
def crowd(nodes: int, rounds: int, ticket: str, workload: Path) -> Iterator[list[IO[str]]]:
    """What the processes of the nodes say, a line at a time; they end with this process."""
    with ExitStack() as stack:
        said = []
        for first in range(0, nodes, NODES_PER_PROCESS):
            ours, theirs = os.pipe()
            part = [str(first), str(min(NODES_PER_PROCESS, nodes - first)), str(rounds)]
            with os.fdopen(theirs, "wb") as log:
                process = spawn([sys.executable, str(CROWD), *part, ticket, str(workload)], log)
            stack.callback(process.wait)
            stack.callback(process.kill)
            said.append(stack.enter_context(os.fdopen(ours, encoding="utf-8")))
        yield said


def expect(said: list[IO[str]], word: str) -> None:
    for lines in said:
        line = lines.readline()
        if line.strip() != word:
            raise RuntimeError(f"the crowd says {line + lines.read(4000)!r} instead of {word!r}")


def measure(place: Path, nodes: int, rounds: int, aggregation: str) -> dict[str, float]:
    hub = coordinator(place, nodes, aggregation)
    with started([hub]):
        idle = resident_bytes(hub.pid)
        ticket = invite(hub, nodes)
        with crowd(nodes, rounds + 1, ticket, place / "workload.toml") as lines:
            expect(lines, "joined")
            hub.until("all nodes are ready", lambda: ready(hub) == nodes, PATIENCE_S)
            joined = resident_bytes(hub.pid)
            with hub.ask() as client:
                client.ask(requests.Run(rounds=rounds + 1, detach=True))
            expect(lines, "closed 0")
            spent, began = cpu_s(hub.pid), time.monotonic()
            for number in range(rounds):
                expect(lines, f"closed {number + 1}")
            spent, took = cpu_s(hub.pid) - spent, time.monotonic() - began
            closed = resident_bytes(hub.pid)
    return {
        "coordinator_cpu_s": round(spent / rounds, 3),
        "cpu_ms_per_node": round(1e3 * spent / rounds / nodes, 3),
        "idle_mib": round(idle / MIB, 1),
        "joined_mib": round(joined / MIB, 1),
        "after_rounds_mib": round(closed / MIB, 1),
        "kib_per_node": round((closed - idle) / 1024 / nodes, 1),
        "seconds": round(took / rounds, 3),
    }


def growth(found: dict[int, dict[str, float]], figure: str) -> float:
    return round(found[max(found)][figure] / found[min(found)][figure], 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--counts", type=numbers, default=[10, 100], help="of nodes")
    parser.add_argument("--rounds", type=int, default=2, help="counted; one more warms up")
    parser.add_argument("--aggregation", choices=["plain", "masked"], default="masked")
    parser.add_argument("--json", action="store_true", help="only the JSON object")
    options = parser.parse_args()
    if max(options.counts) > MOST:
        parser.error(f"at most {MOST} nodes")
    open_network = netns.enter()
    found = {}
    for nodes in options.counts:
        with tempfile.TemporaryDirectory(prefix="scale-") as name:
            found[nodes] = measure(Path(name), nodes, options.rounds, options.aggregation)
        if not options.json:
            columns = "  ".join(f"{name} {value:g}" for name, value in found[nodes].items())
            print(f"{nodes:>5} nodes  {columns}", flush=True)
    result: dict[str, Any] = {
        "aggregation": options.aggregation,
        "nodes": found,
        "growth": {key: growth(found, key) for key in ("cpu_ms_per_node", "kib_per_node")},
        "load": round(os.getloadavg()[0], 2),
        "private_network": open_network is None,
    }
    print(json.dumps({"scale": result}))


if __name__ == "__main__":
    main()
