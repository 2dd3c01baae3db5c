"""How many nodes a round needs: quality and drift against C_t / C and H.

``python benchmarks/churn.py [--seeds 3] [--nodes 8] [--processes 2] [--json]`` federates different
arms with the same number of rounds while only C_t of C nodes, another random choice each round,
contribute to any of them.  All ratios are to the same seed and H with everyone there.  Drift is
that of the contributors' latents on a public probe, from the round's start, in latent variances:
of the first round's and of the last quarter of rounds.  The last line is one JSON object;
``quorum`` is the smallest C_t whose errors stay within ``MEAN`` of everyone's on average, and
within ``WORST`` on each seed, for every H.
"""

import argparse
import concurrent.futures
import functools
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from learning import OUTER, SKETCH, STEPS, WARM_STEPS

from lensemble.workload import Inner, Objective, Workload
from lensemble_local import arm, rounds
from lensemble_node.worker.training import baseline, probe
from lensemble_node.worker.training.evaluate import Domain, Evaluator, Scores
from lensemble_node.worker.training.source import DataSource

EPISODES = 10
LANDMARKS = 128
MEAN, WORST = 1.1, 1.3


def present_counts(nodes: int) -> list[int]:
    """All of C, then three quarters, half, three eighths, a quarter and one."""
    parts = (1.0, 0.75, 0.5, 0.375, 0.25, 1 / nodes)
    return sorted({max(1, round(part * nodes)) for part in parts}, reverse=True)


class Arms:
    """Data, warm start, probe and judge of one seed."""

    def __init__(self, place: Path, seed: int, nodes: int) -> None:
        self.place, self.seed = place, seed
        arm.make(place, arm.Order(nodes, EPISODES, "numpy", seed))
        self.data = {f"n{i}": place / f"node{i}.h5" for i in range(nodes)}
        plain = self.terms(50, "")
        public = DataSource(place / "public.h5")
        self.warm = baseline.warm_start(plain, public.path, WARM_STEPS)
        self.probe = probe.build(public, plain, self.warm, LANDMARKS)
        self.probe.write(place / "probe.safetensors")
        names = [(place / f"node{i}.h5", place / f"heldout-{i}.h5") for i in range(nodes)]
        self.judge = Evaluator(plain, [Domain.read(*pair, plain) for pair in names])

    def terms(self, horizon: int, probe_hash: str) -> Workload:
        return Workload(
            root_seed=self.seed,
            inner=Inner(steps=horizon, lr=2e-3, schedule_steps=STEPS),
            objective=Objective(sketch_dim=SKETCH, probe_hash=probe_hash),
            outer=OUTER[horizon],
        )

    def federate(self, horizon: int, present: int) -> dict[str, float]:
        """Errors and drift after all rounds with ``present`` contributors in each."""
        terms, path = self.terms(horizon, self.probe.digest), self.place / "probe.safetensors"
        draw = np.random.default_rng([self.seed, horizon, present])
        drifts: list[float] = []
        with tempfile.TemporaryDirectory(dir=self.place) as state:
            nodes = rounds.trainers(terms, self.data, Path(state))
            for node in nodes:
                node.pin(path, self.probe.digest)
            federation = rounds.Federation(terms, nodes, self.warm)
            count = STEPS // horizon
            for _ in range(count):
                away = draw.permutation(len(nodes))[present:]
                federation.round(set(away.tolist()))
                found = [each.drift.before for each in federation.releases if each.drift]
                drifts.append(statistics.fmean(found))
        scores = Scores.mean(self.judge.score(federation.parameters))
        return {
            "latent": scores.latent,
            "state5": scores.state5,
            "drift_first": drifts[0],
            "drift_last": statistics.fmean(drifts[-max(1, count // 4) :]),
        }


def one_seed(seed: int, nodes: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    began = time.process_time()
    with tempfile.TemporaryDirectory() as place:
        arms = Arms(Path(place), seed, nodes)
        found = {
            horizon: {count: arms.federate(horizon, count) for count in present_counts(nodes)}
            for horizon in OUTER
        }
    return {"grid": found, "cpu_s": round(time.process_time() - began, 1)}


def summary(grids: Sequence[dict[int, Any]], nodes: int) -> list[dict[str, float]]:
    """A row for each H and C_t, means and worst over seeds."""
    rows = []
    for horizon in OUTER:
        for count in present_counts(nodes):
            cells = [(grid[horizon][count], grid[horizon][nodes]) for grid in grids]
            row: dict[str, float] = {"H": horizon, "present": count, "of": nodes}
            for figure in ("latent", "state5"):
                ratios = [cell[figure] / full[figure] for cell, full in cells]
                row[f"{figure}_mean"] = statistics.geometric_mean(ratios)
                row[f"{figure}_worst"] = max(ratios)
            for figure in ("drift_first", "drift_last"):
                row[figure] = statistics.fmean(cell[figure] for cell, _ in cells)
            rows.append({name: round(value, 4) for name, value in row.items()})
    return rows


def quorum(rows: Sequence[dict[str, float]], nodes: int) -> int:
    """The smallest C_t that is good enough for every H, as are all larger ones."""
    enough = nodes
    for count in present_counts(nodes):
        mine = [row for row in rows if row["present"] == count]
        good = all(
            row[f"{figure}_mean"] <= MEAN and row[f"{figure}_worst"] <= WORST
            for row in mine
            for figure in ("latent", "state5")
        )
        if not good:
            break
        enough = count
    return enough


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--json", action="store_true", help="only the JSON object")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    work = functools.partial(one_seed, nodes=options.nodes)
    with concurrent.futures.ProcessPoolExecutor(options.processes, context) as pool:
        found = list(pool.map(work, range(options.seeds)))
    rows = summary([each["grid"] for each in found], options.nodes)
    if not options.json:
        print("  H  C_t/C   latent (worst)   state (worst)    drift first, last")
        for row in rows:
            print(
                f"{row['H']:3.0f}  {row['present']:3.0f}/{row['of']:.0f}"
                f"   {row['latent_mean']:6.3f} ({row['latent_worst']:.3f})"
                f"  {row['state5_mean']:6.3f} ({row['state5_worst']:.3f})"
                f"    {row['drift_first']:.3f}, {row['drift_last']:.3f}"
            )
    result = {
        "quorum": quorum(rows, options.nodes),
        "of": options.nodes,
        "rows": rows,
        "seeds": options.seeds,
        "cpu_s": [each["cpu_s"] for each in found],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
