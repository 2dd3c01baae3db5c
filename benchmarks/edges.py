"""What an edge costs beside a bare loop over the same binding, and beside TCP.

``python benchmarks/edges.py [--megabytes 256] [--frame-kib 1024] [--repeats 3] [--json]`` runs two
processes on loopback, in a private network namespace, each way in turn: goodput and CPU seconds
for a GB by frame size, whole trips of small chunks, and many edges at once, busy or idle.  It
prints a table, and one JSON line at the end.  Ratios are results; absolute figures belong to the
machine.  A ratio is the median over repeats in which both ran.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from lensemble_local import netns

MEGABYTE = 1_000_000
ONE_END = Path(__file__).parent / "probes" / "one_end.py"
WAYS = ("edge", "bare", "tcp")
CHUNKS = (64, 16 << 10)
FIGURES = ("mb_per_s", "send_cpu_s_per_gb", "receive_cpu_s_per_gb")
Setting = dict[str, int]
Figures = dict[str, float]


def spawn(*role: str) -> "subprocess.Popen[str]":
    command = [sys.executable, str(ONE_END), *role]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def line(process: "subprocess.Popen[str]") -> Any:  # noqa: ANN401  # it is JSON
    text = "" if process.stdout is None else process.stdout.readline()
    if not text:
        raise SystemExit("a child ended without a word")
    return json.loads(text)


def both(how: str, sides: tuple[str, str], setting: Setting) -> tuple[Figures, Figures]:
    """What the process that listens says, and the one that dials."""
    given = json.dumps(setting)
    listens = spawn(how, sides[0], given)
    dials = spawn(how, sides[1], given, *line(listens))
    said, heard = line(dials), line(listens)
    for process in (dials, listens):
        process.wait(timeout=60)
    return heard, said


def moved(how: str, setting: Setting) -> Figures:
    """Figures of one transfer, per GB where that makes sense."""
    received, sent = both(how, ("receive", "send"), setting)
    gigabytes = setting["frame"] * setting["frames"] * setting.get("edges", 1) / 1e9
    return {
        "mb_per_s": gigabytes * 1000 / received["seconds"],
        "send_cpu_s_per_gb": sent["cpu"] / gigabytes,
        "receive_cpu_s_per_gb": received["cpu"] / gigabytes,
        "send_rss_mib": sent["rss_mib"],
        "receive_rss_mib": received["rss_mib"],
    }


def medians(runs: list[Figures]) -> Figures:
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def over(runs: list[Figures], others: list[Figures]) -> Figures:
    """Medians of the ratios of runs that were made side by side."""
    pairs = list(zip(runs, others, strict=True))
    return {key: statistics.median(a[key] / b[key] for a, b in pairs) for key in runs[0]}


def in_turn(repeats: int, ways: dict[str, Any]) -> dict[str, list[Figures]]:
    """The figures of each way, ``repeats`` times, one way after the other each time."""
    runs: dict[str, list[Figures]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            runs[name].append(way())
    return runs


def goodput(megabytes: int, frame: int, repeats: int) -> dict[str, Any]:
    setting = {"frame": frame, "frames": max(1, megabytes * MEGABYTE // frame)}
    runs = in_turn(repeats, {how: lambda how=how: moved(how, setting) for how in WAYS})
    return {
        "frame_bytes": frame,
        **{how: medians(each) for how, each in runs.items()},
        "edge_over_bare": {key: over(runs["edge"], runs["bare"])[key] for key in FIGURES},
        "edge_over_tcp": {key: over(runs["edge"], runs["tcp"])[key] for key in FIGURES},
    }


def latency(chunk: int, trips: int, repeats: int) -> dict[str, Any]:
    setting = {"frame": chunk, "frames": trips}
    ways = {how: lambda how=how: both(how, ("answer", "ask"), setting)[1] for how in WAYS}
    runs = in_turn(repeats, ways)
    return {
        "chunk_bytes": chunk,
        **{how: medians(each) for how, each in runs.items()},
        "edge_over_bare": over(runs["edge"], runs["bare"]),
    }


def together(megabytes: int, edges: int, idle: int, repeats: int) -> dict[str, Any]:
    """Many edges at once, and one among many that are idle, over one alone."""
    frame = 1 << 20
    frames = max(1, megabytes * MEGABYTE // frame)
    one = {"frame": frame, "frames": frames}
    busy = {"frame": frame, "frames": max(1, frames // edges), "edges": edges}
    quiet = {"frame": frame, "frames": frames, "idle": idle}
    runs = in_turn(
        repeats,
        {
            name: lambda setting=setting: moved("edge", setting)
            for name, setting in (("one", one), ("busy", busy), ("idle", quiet))
        },
    )
    return {
        "edges": edges,
        "idle_edges": idle,
        **{name: medians(each) for name, each in runs.items()},
        "busy_over_one": over(runs["busy"], runs["one"]),
        "idle_over_one": over(runs["idle"], runs["one"]),
    }


def show(results: dict[str, Any]) -> None:
    print(f"{'frame':>10} {'':>10} {'MB/s':>8} {'send s/GB':>10} {'recv s/GB':>10}")
    for result in results["goodput"]:
        for how in (*WAYS, "edge_over_bare"):
            row = " ".join(f"{result[how][key]:>9.2f}" for key in FIGURES)
            print(f"{result['frame_bytes']:>10} {how:>14} {row}")
    for result in results["latency"]:
        for how in (*WAYS, "edge_over_bare"):
            row = "  ".join(f"{key} {value:.3f}" for key, value in result[how].items())
            print(f"{result['chunk_bytes']:>10} {how:>14}  to and fro {row}")
    many = results["together"]
    for name in ("one", "busy", "idle", "busy_over_one", "idle_over_one"):
        row = "  ".join(f"{key} {value:.2f}" for key, value in many[name].items())
        print(f"{name:>14}  {row}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--frame-kib", type=int, nargs="*", default=[64, 1024, 8192])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--trips", type=int, default=1000)
    parser.add_argument("--edges", type=int, default=32, help="at once")
    parser.add_argument("--idle", type=int, default=1000, help="idle edges beside a busy one")
    parser.add_argument("--json", action="store_true", help="only the JSON object")
    given = parser.parse_args()
    if refused := netns.enter():
        raise SystemExit(f"this needs a private network: {refused}")
    results = {
        "goodput": [goodput(given.megabytes, kib << 10, given.repeats) for kib in given.frame_kib],
        "latency": [latency(chunk, given.trips, given.repeats) for chunk in CHUNKS],
        "together": together(given.megabytes, given.edges, given.idle, given.repeats),
    }
    if not given.json:
        show(results)
    print(json.dumps({"edges": results}))


if __name__ == "__main__":
    main()
