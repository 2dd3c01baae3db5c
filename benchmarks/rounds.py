"""Seconds of a whole round of real processes over QUIC, with a model that trains in no time.

``python benchmarks/rounds.py [--sizes 1,100] [--nodes 2] [--rounds 4] [--json]`` prints a table,
and one JSON object as the last line.  Sizes are megabytes of float32 parameters; ``--nodes`` may be
a list too.  The first round of each federation warms up and is not counted.

Everything runs in a private network namespace where the kernel gives one.
"""

import argparse
import json
import re
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from lensemble.ctl import replies, requests
from lensemble_local import netns
from lensemble_local.processes import Daemon, started

MEGABYTE = 1_000_000
MIB = 1 << 20
READY_S = 60.0
PHASES = ("open", "collecting", "aggregating", "aligning", "committing")


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


@contextmanager
def federation(place: Path, megabytes: int, nodes: int, aggregation: str) -> Iterator[Daemon]:
    """The coordinator of a joined federation, in which only moving and folding bytes takes time."""
    parameters = megabytes * MEGABYTE // 4
    (place / "workload.toml").write_text(
        f'name = "noop"\n[task]\nkind = "noop"\nparameters = {parameters}\n'
        "[inner]\nsteps = 1\nbatch = 1\n"
    )
    rules = f'[rounds]\naggregation = "{aggregation}"\nmin_participants = {nodes}\n'
    hub = daemon(place, "coordinator", "lensemble_coord", 'workload = "workload.toml"\n', rules)
    shares = "[share]\nplain = true\n" if aggregation == "plain" else ""
    members = [
        daemon(place, f"node-{n}", "lensemble_node", f'name = "node-{n}"\n', shares)
        for n in range(nodes)
    ]
    with started([hub, *members]):
        with hub.ask() as client:
            invited = client.ask(requests.Invite(uses=nodes))
        if not isinstance(invited, replies.Invited):
            raise TypeError(invited)
        for member in members:
            with member.ask() as client:
                client.ask(requests.Join(ticket=invited.ticket))
        hub.until("all nodes are ready", lambda: ready(hub) == nodes, READY_S)
        yield hub


def daemon(place: Path, name: str, module: str, config: str, tables: str = "") -> Daemon:
    path, socket = place / f"{name}.toml", place / f"{name}.sock"
    path.write_text(f'{config}state_dir = "{name}"\n[ctl]\nsocket = "{socket}"\n{tables}')
    return Daemon(name, module, path, socket, place / f"{name}.log")


def ready(hub: Daemon) -> int:
    with hub.ask() as client:
        status = client.ask(requests.Status())
    if not isinstance(status, replies.CoordinatorStatus):
        raise TypeError(status)
    return len({edge.peer for edge in status.edges if edge.state == "ready"})


def memory(pid: int) -> tuple[int, int]:
    """Resident bytes of a process now, and at their peak."""
    text = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    now, peak = (re.search(rf"{key}:\s+(\d+) kB", text) for key in ("VmRSS", "VmHWM"))
    if now is None or peak is None:
        raise ValueError(text)
    return int(now[1]) << 10, int(peak[1]) << 10


def measure(megabytes: int, nodes: int, rounds: int, aggregation: str) -> dict[str, float]:
    with (
        tempfile.TemporaryDirectory() as name,
        federation(Path(name), megabytes, nodes, aggregation) as hub,
    ):
        idle, _ = memory(hub.pid)
        ends = []
        with hub.ask() as client:
            for reply in client.stream(requests.Run(rounds=rounds + 1)):
                if isinstance(reply, replies.RoundClosed):
                    ends.append(time.perf_counter())
                    if len(reply.round.contributors) != nodes:
                        raise RuntimeError(f"a round closed with {reply.round.contributors}")
            _, peak = memory(hub.pid)
            detail = client.ask(requests.Round(index=rounds))
    if len(ends) != rounds + 1 or not isinstance(detail, replies.RoundDetail):
        raise RuntimeError(f"{len(ends)} of {rounds + 1} rounds closed")
    took = [after - before for before, after in pairwise(ends)]
    return {
        "seconds": round(statistics.median(took), 3),
        "idle_mib": round(idle / MIB, 1),
        "peak_mib": round(peak / MIB, 1),
        **{phase: round(detail.seconds_by_state.get(phase, 0.0), 3) for phase in PHASES},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", type=numbers, default=[1, 100], help="megabytes: 1,100")
    parser.add_argument("--nodes", type=numbers, default=[2], help="nodes: 2,8")
    parser.add_argument("--rounds", type=int, default=4, help="rounds to take the median of")
    parser.add_argument("--aggregation", choices=["plain", "masked"], default="plain")
    parser.add_argument("--json", action="store_true", help="only the JSON object")
    options = parser.parse_args()
    open_network = netns.enter()
    found = {}
    for megabytes in options.sizes:
        for nodes in options.nodes:
            key = f"{megabytes}x{nodes}"
            found[key] = measure(megabytes, nodes, max(3, options.rounds), options.aggregation)
            if not options.json:
                columns = "  ".join(f"{name} {value:g}" for name, value in found[key].items())
                print(f"{megabytes:>6} MB x {nodes:<2}  {columns}")
    print(
        json.dumps(
            {
                "seconds_per_round": {key: each["seconds"] for key, each in found.items()},
                "detail": found,
                "aggregation": options.aggregation,
                "private_network": open_network is None,
            }
        )
    )


if __name__ == "__main__":
    main()
