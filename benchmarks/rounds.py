"""Seconds of a whole round of real processes, with a model that trains in no time.

``python benchmarks/rounds.py [--sizes 1,100] [--nodes 2] [--rounds 4] [--flower] [--json]`` prints
a table, and one JSON object as the last line; its ``seconds_per_round`` has keys like ``100x2``,
megabytes of float32 parameters x nodes.  The first round of each federation warms up and is not
counted.  ``up`` and ``down`` are bytes on the wire for one parameter and participant in a round, by
the transport's own counters; ``loop_late_ms`` says how late a task of the coordinator woke up, and
``status_ms`` how long an answer took, asked all along.

``--flower`` compares with Flower's deployment engine in the same run and network: FedAvg with the
same array, SecAgg+ with four nodes, and a killed node.  It lives in an environment of its own,
because its dependencies exclude ours: ``--flower-python`` names its interpreter, else one is made.

Everything runs in a private network namespace where the kernel gives one.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parent))

import flower_rounds
import our_rounds
from our_rounds import MEGABYTE, Setting

from lensemble_local import netns

__all__ = ["MEGABYTE", "measure"]

KILL_NODES = 4
INTO_ROUND = 0.3
"""How far a round has come when a node is killed."""

Found = TypeVar("Found")


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def somewhere(work: Callable[[Path], Found]) -> Found:
    with tempfile.TemporaryDirectory(prefix="rounds-") as name:
        return work(Path(name))


def measure(megabytes: int, nodes: int, rounds: int, aggregation: str) -> dict[str, Any]:
    """Figures of rounds of this system."""
    setting = Setting(megabytes, nodes, max(3, rounds), aggregation)
    return somewhere(partial(our_rounds.measure, setting))


def killed(megabytes: int, aggregation: str) -> float:
    setting = Setting(megabytes, KILL_NODES, 1, aggregation, quorum=KILL_NODES - 1)
    took = somewhere(partial(our_rounds.seconds_without_killed, setting, INTO_ROUND))
    return round(took, 2)


class Table:
    """Rows of figures, printed as they come unless only JSON is wanted."""

    def __init__(self, silent: bool) -> None:
        self._silent = silent

    def row(self, name: str, figures: dict[str, Any]) -> None:
        if not self._silent:
            columns = "  ".join(f"{key} {value:g}" for key, value in figures.items())
            print(f"{name:>20}  {columns}", flush=True)


def ours(options: argparse.Namespace, table: Table) -> dict[str, dict[str, Any]]:
    found = {}
    for megabytes in options.sizes:
        for nodes in options.nodes:
            key = f"{megabytes}x{nodes}"
            found[key] = measure(megabytes, nodes, options.rounds, options.aggregation)
            table.row(key, found[key])
    return found


def theirs(options: argparse.Namespace, table: Table, python: Path) -> dict[str, Any]:
    """The same of Flower, and its SecAgg+ beside our masked rounds."""
    plain, masked, beside = {}, {}, {}
    for megabytes in options.sizes:
        for nodes in options.nodes:
            setting = Setting(megabytes, nodes, max(3, options.flower_rounds))
            key = f"{megabytes}x{nodes}"
            plain[key] = somewhere(partial(flower_rounds.measure, python, setting))
            table.row(f"Flower {key}", plain[key])
    for megabytes in options.secagg_sizes:
        nodes = flower_rounds.MASKED_NODES
        key = f"{megabytes}x{nodes}"
        setting = Setting(megabytes, nodes, 3, "masked")
        masked[key] = somewhere(partial(flower_rounds.measure, python, setting, masked=True))
        table.row(f"Flower SecAgg+ {key}", masked[key])
        beside[key] = measure(megabytes, nodes, options.rounds, "masked")
        table.row(f"masked {key}", beside[key])
    return {"plain": plain, "secagg": masked, "masked_beside": beside}


def ratios(found: dict[str, Any], flower: dict[str, Any]) -> dict[str, Any]:
    """Theirs over ours."""
    secagg, beside = flower["secagg"], flower["masked_beside"]
    return {
        "seconds": {
            key: round(each["seconds"] / found[key]["seconds"], 2)
            for key, each in flower["plain"].items()
        },
        "server_mib": {
            key: round(each["server_mib"] / found[key]["server_and_spool_mib"], 2)
            for key, each in flower["plain"].items()
        },
        "cpu_s": {
            key: round(each["cpu_s"] / found[key]["cpu_s"], 2)
            for key, each in flower["plain"].items()
        },
        "secagg_seconds": {
            key: round(each["seconds"] / beside[key]["seconds"], 2) for key, each in secagg.items()
        },
    }


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", type=numbers, default=[1, 100], help="megabytes: 1,100")
    parser.add_argument("--nodes", type=numbers, default=[2], help="nodes: 2,4")
    parser.add_argument("--rounds", type=int, default=4, help="rounds to take the median of")
    parser.add_argument("--aggregation", choices=["plain", "masked"], default="masked")
    parser.add_argument("--kill-size", type=int, default=25, help="megabytes; 0 kills no node")
    parser.add_argument("--flower", action="store_true", help="compare with Flower")
    parser.add_argument("--flower-python", type=Path, help="interpreter that has flwr")
    parser.add_argument("--flower-rounds", type=int, default=3)
    parser.add_argument("--secagg-sizes", type=numbers, default=[1, 25], help="megabytes")
    parser.add_argument("--json", action="store_true", help="only the JSON object")
    return parser.parse_args()


def main() -> None:
    options = parsed()
    # The network is private from the next line on: what has to be fetched is fetched before.
    python = flower_rounds.interpreter(options.flower_python) if options.flower else None
    open_network = netns.enter()
    table = Table(options.json)
    load = os.getloadavg()[0]
    found = ours(options, table)
    result: dict[str, Any] = {
        "seconds_per_round": {key: each["seconds"] for key, each in found.items()},
        "detail": found,
        "aggregation": options.aggregation,
        "private_network": open_network is None,
    }
    if options.kill_size:
        result["killed_s"] = killed(options.kill_size, options.aggregation)
        table.row("killed node", {"closed_without_it_s": result["killed_s"]})
    if python is not None:
        flower = theirs(options, table, python)
        flower["version"] = flower_rounds.version(python)
        result["flower"] = flower
        result["flower_over_ours"] = ratios(found, flower)
        if options.kill_size:
            setting = Setting(options.kill_size, KILL_NODES, 1)
            kill = flower_rounds.seconds_without_killed
            took = somewhere(partial(kill, python, setting, INTO_ROUND))
            flower["killed_s"] = round(took, 2)
            result["flower_over_ours"]["killed_s"] = round(took / result["killed_s"], 1)
            table.row("Flower killed node", {"closed_without_it_s": flower["killed_s"]})
        table.row("Flower over ours", flat(result["flower_over_ours"]))
    result["load"] = [round(load, 2), round(os.getloadavg()[0], 2)]
    print(json.dumps(result))


def flat(nested: dict[str, Any]) -> dict[str, float]:
    """``{"a": {"b": 1}}`` as ``{"a b": 1}``."""
    found: dict[str, float] = {}
    for name, value in nested.items():
        inner = (
            {f"{name} {key}": each for key, each in value.items()}
            if isinstance(value, dict)
            else {name: value}
        )
        found |= inner
    return found


if __name__ == "__main__":
    main()
