"""Training outside a federation, by the same inner loop: baselines and warm starts.

``local`` trains one node's data alone from given parameters, in as many steps as a federation
takes, under the same schedule and sketches.  ``central`` trains all data in one place, each step
on a batch of every file, with a head for each: what a federation would be without its distance.
``warmstart`` trains public data from the workload's
seed and writes what round 0 starts from.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save

from lensemble.params import FlatParameters, parameter_digest
from lensemble.seeds import derive, sketch
from lensemble.workload import Workload, initial_parameters, layout
from lensemble_node.worker.training.arguments import (
    RAW,
    THREADS,
    WEIGHTS,
    ending_well,
    read_parameters,
    read_workload,
    world_task,
)
from lensemble_node.worker.training.dataset import open_dataset
from lensemble_node.worker.training.inner_loop import Learner, LocalState
from lensemble_node.worker.training.segments import Segment
from lensemble_node.worker.training.source import DataSource
from lensemble_node.worker.training.storage import write_atomically

MAX_STEPS = 10_000_000
WARM_START_STEPS = 200
WARM_START_NODE = "warm-start"


def train(
    workload: Workload, data: Path, start: FlatParameters, segments: Iterator[Segment], node: str
) -> FlatParameters:
    """Parameters (float32, shape ``(size,)``) after ``segments`` from ``start`` on ``data``.

    Raises:
        DatasetError: data that cannot be used, or does not fit the workload.
        Diverged: a loss is not finite.
    """
    task = world_task(workload)
    with open_dataset(DataSource(data)) as dataset:
        dataset.fit(task, workload.normalize)
        windows = dataset.windows(task.history)
        learner = Learner(workload, windows, dataset.action_dim, node)
        learner.load(start, LocalState())
        for segment in segments:
            learner.run(segment, lambda _step, _loss: None, lambda: False)
        return learner.weights().copy()


def rounds(workload: Workload, steps: int) -> Iterator[Segment]:
    """``steps`` steps cut as a federation's rounds are: same schedule, same sketches."""
    horizon = workload.inner.steps
    for index, start in enumerate(range(0, steps, horizon)):
        length = min(horizon, steps - start)
        yield Segment(length, start, sketch(workload.root_seed, index))


def local_only(
    workload: Workload, data: Path, start: FlatParameters, steps: int, node: str
) -> FlatParameters:
    """What ``node`` reaches alone from ``start`` in ``steps`` steps."""
    return train(workload, data, start, rounds(workload, steps), node)


def warm_start(workload: Workload, data: Path, steps: int) -> FlatParameters:
    """Parameters for round 0: from the seed, ``steps`` steps on public ``data``."""
    seed = derive(workload.root_seed, "sketch:warm-start")
    once = iter([Segment(steps, 0, seed)])
    return train(workload, data, initial_parameters(workload), once, WARM_START_NODE)


def centralised(
    workload: Workload,
    data: Sequence[Path],
    start: FlatParameters,
    steps: int,
    nodes: Sequence[str],
) -> FlatParameters:
    """Parameters after ``steps`` steps on the mean gradient of all ``data``, one step at a time.

    Raises:
        DatasetError, Diverged: as ``train``.
    """
    task = world_task(workload)
    learners = []
    with ExitStack() as opened:
        for path, node in zip(data, nodes, strict=True):
            dataset = opened.enter_context(open_dataset(DataSource(path)))
            dataset.fit(task, workload.normalize)
            learner = Learner(workload, dataset.windows(task.history), dataset.action_dim, node)
            learner.load(start, LocalState())
            learners.append(learner)
        for segment in rounds(workload, steps):
            for step in range(segment.steps):
                _together(learners, segment, step)
        return learners[0].weights().copy()


def _together(learners: Sequence[Learner], segment: Segment, step: int) -> None:
    """One step of all ``learners`` on their mean gradient; equal weights stay equal."""
    for learner in learners:
        learner.slope(segment, step)
    slopes = [learner.gradients for learner in learners]
    whole = np.stack([shared for shared, _ in slopes])
    mean: NDArray[np.float32] = whole.mean(axis=0, dtype=np.float64).astype(np.float32)
    for learner, (_, head) in zip(learners, slopes, strict=True):
        learner.follow(mean, head)
        learner.descend(segment, step)


def write_parameters(path: Path, workload: Workload, flat: FlatParameters) -> None:
    """``flat`` as ``.f32`` (raw, little-endian), else as safetensors named by the layout."""
    if path.suffix == RAW:
        write_atomically(path, flat.astype("<f4").tobytes())
        return
    where = layout(workload)
    about: dict[str, str] = {
        "digest": parameter_digest(where, flat),
        "config_hash": workload.digest,
    }
    tensors = {name: np.ascontiguousarray(view) for name, view in where.views(flat).items()}
    write_atomically(path, save(tensors, metadata=about))


def _steps(text: str) -> int:
    value = int(text)
    if not 1 <= value <= MAX_STEPS:
        raise argparse.ArgumentTypeError(f"{value} is not within 1 to {MAX_STEPS}")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lensemble_node.worker.training.baseline", description=__doc__
    )
    modes = parser.add_subparsers(dest="mode", required=True)
    local = modes.add_parser("local", help="train one node's data alone")
    central = modes.add_parser("central", help="train the data of all nodes in one place")
    warm = modes.add_parser("warmstart", help="train public data from the seed")
    for mode in (local, central, warm):
        mode.add_argument("--workload", type=Path, required=True, help="TOML or canonical JSON")
        several = {"nargs": "+"} if mode is central else {}
        mode.add_argument("--data", type=Path, required=True, **several)
        mode.add_argument("--out", type=Path, required=True, help="a .f32 file or safetensors")
    for mode in (local, central):
        mode.add_argument("--start", type=Path, required=True, help="parameters or checkpoint")
        mode.add_argument("--steps", type=_steps, required=True)
    local.add_argument("--node", default="local", help="seeds batches and head")
    warm.add_argument("--steps", type=_steps, default=WARM_START_STEPS)
    return parser


def _train(given: argparse.Namespace) -> None:
    torch.set_num_threads(THREADS)
    workload = read_workload(given.workload)
    if given.mode == "warmstart":
        flat = warm_start(workload, given.data, given.steps)
    else:
        start = read_parameters(given.start, workload)
        if given.mode == "local":
            flat = local_only(workload, given.data, start, given.steps, given.node)
        else:
            names = [f"central-{index}" for index in range(len(given.data))]
            flat = centralised(workload, given.data, start, given.steps, names)
    out = given.out / WEIGHTS if given.out.is_dir() else given.out
    write_parameters(out, workload, flat)
    digest = parameter_digest(layout(workload), flat)
    print(json.dumps({"parameters": str(out), "digest": digest}))  # noqa: T201  # its answer


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    given = _parser().parse_args(arguments)
    return ending_well(lambda: _train(given))


if __name__ == "__main__":
    sys.exit(main())
