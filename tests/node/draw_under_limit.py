"""Trains a few steps on a data set, draws its pictures and commits to it, under a memory limit.

Arguments: the data set, and the bytes of address space that may be added to what Python, torch and
the open data set take.  Prints one JSON object.
"""

import json
import resource
import sys
from pathlib import Path

import numpy as np
import torch

from lensemble.workload import Inner, Workload, WorldModelTask, initial_parameters
from lensemble_node.worker.training.dataset import DataSource, open_dataset
from lensemble_node.worker.training.inner_loop import Learner, LocalState, Segment

STEPS, BATCH = 5, 64


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> None:
    path, more = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    workload = Workload(
        task=WorldModelTask(observation_dim=4, hidden=16, latent_dim=8, history=2),
        inner=Inner(steps=STEPS, batch=BATCH),
    )
    with open_dataset(DataSource(path, image_keys=("pixels",)), 0) as data:
        windows = data.windows(3)
        learner = Learner(workload, data.windows(2), data.action_dim, "n")
        learner.load(initial_parameters(workload), LocalState())
        learner.run(Segment(1, 0, 7), lambda *_: None, lambda: False)
        limit = _address_space() + more
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        before = _resident()
        losses = learner.run(Segment(STEPS, 1, 7), lambda *_: None, lambda: False)
        draw = np.random.Generator(np.random.Philox(1))
        seen = 0
        for _ in range(STEPS):
            seen += windows.images(draw.integers(0, windows.count, BATCH)).nbytes
        facts = data.commitment()
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    told = {"grown": grown, "seen": seen, "root": facts.root, "loss": losses.last}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
