"""What a token costs over a network that is far: its delay, its computing, and little else.

``python benchmarks/delay.py [--delay-ms 20] [--tokens 60] [--stages 2 3] [--json]`` runs a
coordinator and nodes as processes, each in a network namespace of its own, with a delay on every
way between two of them, and a small generated model over two and over three nodes.  It prints a
table and one JSON object as the last line.

``excess_ms_per_hop`` is what a token takes beyond what the stages compute and the delays of the
edges it passes, divided by their number; a hop may take 3 ms.  The delays are made by a program
that passes packets between the namespaces (``tests/netns/wires.py``), which is late by itself:
``measured_delay_ms`` is what a bare datagram takes on the same way.  Needs root, ``ip``,
``nsenter`` and ``/dev/net/tun``.
"""

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lensemble.ctl import replies, requests
from lensemble.ctl.client import Client
from tests.e2e.federation import COORDINATOR  # hosts lie with the tests
from tests.e2e.serving import PROVISION_S, Serving
from tests.netns.hosts import Hosts, Network

LAYERS, CTX, ROWS = 4, 128, 8
WARM_TOKENS = 10
BUDGET_MS = 3.0
"""Of one hop, beside computing and delay."""

CUTS = {1: "0:4@node-0", 2: "0:2@node-0,2:4@node-1", 3: "0:1@node-0,1:3@node-1,3:4@node-2"}
PROBES = 100
ECHO = """
import socket, struct, sys, time
here = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
here.bind((sys.argv[1], 9))
print("up", flush=True)
late = []
while len(late) < int(sys.argv[2]):
    sent, = struct.unpack("<d", here.recv(64))
    late.append(time.monotonic() - sent)
print(sorted(late)[len(late) // 2], flush=True)
"""
SEND = """
import socket, struct, sys, time
here = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _ in range(int(sys.argv[2])):
    here.sendto(struct.pack("<d", time.monotonic()), (sys.argv[1], 9))
    time.sleep(0.01)
"""


class Away(Hosts, Serving):
    """A federation on hosts of their own, whose nodes may hold stages of a small model."""


def missing() -> str:
    """Why hosts cannot be made here; empty if they can."""
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    wanted = [name for name in ("ip", "nsenter") if shutil.which(name) is None]
    if wanted:
        return f"there is no program {wanted[0]}"
    return "" if Path("/dev/net/tun").exists() else "there is no /dev/net/tun"


def measured_delay_ms(network: Network, one: str, other: str) -> float:
    """Median of what a datagram takes from ``one`` to ``other``."""
    address = network.addresses[other]
    command = [*network.inside(other), sys.executable, "-c", ECHO, address, str(PROBES)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as listening:
        lines = iter(listening.stdout or ())
        next(lines)
        sending = [*network.inside(one), sys.executable, "-c", SEND, address, str(PROBES)]
        subprocess.run(sending, check=True)
        return 1e3 * float(next(lines))


def gaps(members: Away, run: str, tokens: int) -> list[float]:
    """Milliseconds from one token to the next, as their reader sees them."""
    request = requests.Prompt(run=run, text="abc", max_tokens=tokens + WARM_TOKENS)
    with Client(members.coordinator.socket, timeout_s=PROVISION_S) as client:
        times = [
            time.perf_counter()
            for reply in client.stream(request)
            if isinstance(reply, replies.TokenText)
        ]
    if len(times) <= WARM_TOKENS + 1:
        raise SystemExit(f"the answer has {len(times)} tokens, too few to measure")
    return [1e3 * (b - a) for a, b in itertools.pairwise(times[WARM_TOKENS:])]


def measure(members: Away, stages: int, options: argparse.Namespace) -> dict[str, Any]:
    run = members.run(CUTS[stages], ctx=CTX)
    took = gaps(members, run, options.tokens)
    status = members.inspect(run)
    computed = sum(stage.compute_ms or 0.0 for stage in status.stages)
    members.coordinator_stream(requests.TeardownRun(run=run))
    edges = stages + 1
    token = statistics.median(took)
    beyond = token - computed - edges * options.delay_ms
    return {
        "stages": stages,
        "token_ms": token,
        "token_ms_p90": sorted(took)[int(0.9 * len(took))],
        "compute_ms": computed,
        "delays_ms": edges * options.delay_ms,
        "excess_ms_per_hop": beyond / edges,
        "bound_ms": computed + edges * (options.delay_ms + BUDGET_MS),
        "holds": beyond <= edges * BUDGET_MS,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--delay-ms", type=float, default=20.0, help="one way, of every edge")
    parser.add_argument("--tokens", type=int, default=60, help="of each answer, after a warm-up")
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3], choices=sorted(CUTS))
    parser.add_argument("--json", action="store_true", help="only the JSON object")
    options = parser.parse_args()
    if reason := missing():
        print(json.dumps({"skipped": reason}))
        return 0
    nodes = max(options.stages)
    names = [COORDINATOR, *(f"node-{index}" for index in range(nodes))]
    network = Network(names)
    try:
        with tempfile.TemporaryDirectory() as directory:
            members = Away(Path(directory), network, nodes, step_deadline_s=30.0)
            try:
                members.ready()
                for name in names:
                    network.set(name, up={"delay_ms": options.delay_ms})
                real = measured_delay_ms(network, names[1], names[0])
                found = [measure(members, stages, options) for stages in options.stages]
            finally:
                members.end()
    finally:
        network.close()
    if not options.json:
        show(options.delay_ms, real, found)
    holds = all(each["holds"] for each in found)
    print(json.dumps({"measured_delay_ms": real, "holds": holds, "runs": found}))
    return 0 if holds else 1


def show(delay_ms: float, real: float, found: list[dict[str, Any]]) -> None:
    print(f"{delay_ms:g} ms one way on every edge; a bare datagram takes {real:.2f} ms")
    print(
        f"{'stages':>6}{'token':>9}{'p90':>9}{'compute':>9}{'delays':>9}{'per hop':>9}{'bound':>9}"
    )
    for each in found:
        print(
            f"{each['stages']:6}{each['token_ms']:9.1f}{each['token_ms_p90']:9.1f}"
            f"{each['compute_ms']:9.1f}{each['delays_ms']:9.1f}"
            f"{each['excess_ms_per_hop']:9.2f}{each['bound_ms']:9.1f}"
            + ("" if each["holds"] else "  over it")
        )


if __name__ == "__main__":
    sys.exit(main())
