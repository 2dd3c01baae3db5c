"""What the way round costs: real daemons, real QUIC on loopback, one model in 1, 2 and 3 stages.

``python benchmarks/rings.py [--tokens 200] [--turns 5] [--json]`` provisions a tiny model, whose
computing takes next to nothing, once for each number of stages, and lets the rings answer in turns.
A hop is one edge, from a filled slot over a daemon, QUIC and another daemon to a worker that takes
it up; ``hop_ms`` is a trip less what the workers say they computed, over the edges of the ring.
``daemon_cpu_ms`` is CPU time of all daemons for one hop of one token, which a busy machine changes
less.  The last line is one JSON object.  Figures belong to the machine, and to what else it does.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "cli"))

from lensemble_local import netns  # the daemons lie with the tests
from tests.e2e.serving import Serving

SPLITS = {1: "0:4@node-0", 2: "0:2@node-0,2:4@node-1", 3: "0:1@node-0,1:3@node-1,3:4@node-2"}
PROMPT = "xyz.xyz."


def daemon_cpu_s(here: Serving) -> float:
    """CPU time of the daemons, without their workers."""
    ticks = 0
    for each in here.processes():
        stat = Path(f"/proc/{each.pid}/stat").read_text(encoding="ascii")
        ticks += sum(map(int, stat.rpartition(") ")[2].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def measure(here: Serving, runs: dict[int, str], tokens: int, turns: int) -> list[dict[str, Any]]:
    """Let each ring answer ``turns`` times in turn; a row for each."""
    speeds: dict[int, list[float]] = {stages: [] for stages in runs}
    hops: dict[int, list[float]] = {stages: [] for stages in runs}
    trips: dict[int, list[float]] = {stages: [] for stages in runs}
    cpu: dict[int, list[float]] = {stages: [] for stages in runs}
    answers: dict[int, list[int]] = {}
    for _ in range(turns):
        for stages, run in runs.items():
            before = daemon_cpu_s(here)
            told = here.ask(run, PROMPT, most=tokens)
            spent = daemon_cpu_s(here) - before
            cpu[stages].append(1e3 * spent / len(told.tokens) / (stages + 1))
            answers[stages] = told.tokens
            speeds[stages].append(told.end.tokens_per_s or 0.0)
            status = here.inspect(run)
            hops[stages].append(status.hop_ms or 0.0)
            trips[stages].append(status.trip_ms or 0.0)
    same = all(each == answers[1] for each in answers.values())
    return [
        {
            "stages": stages,
            "tokens_per_s": round(statistics.median(speeds[stages]), 1),
            "trip_ms_p50": round(statistics.median(trips[stages]), 3),
            "hop_ms_p50": round(statistics.median(hops[stages]), 3),
            "hop_ms_best": round(min(hops[stages]), 3),
            "daemon_cpu_ms": round(statistics.median(cpu[stages]), 3),
            "identical": same,
        }
        for stages in runs
    ]


def main() -> None:
    """Provision, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="only the last line")
    options = parser.parse_args()
    if (reason := netns.enter()) is not None:
        raise SystemExit(reason)
    with tempfile.TemporaryDirectory(prefix="rings") as name:
        here = Serving(Path(name), len(SPLITS), step_deadline_s=60.0)
        try:
            here.ready()
            runs = {stages: here.run(split, ctx=256) for stages, split in SPLITS.items()}
            rows = measure(here, runs, options.tokens, options.turns)
        finally:
            here.end()
    if not options.json:
        for row in rows:
            print("  ".join(f"{key} {value}" for key, value in row.items()))
    print(json.dumps({"rings": rows}))


if __name__ == "__main__":
    main()
