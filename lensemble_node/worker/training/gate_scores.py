"""What a global state is worth on public data, and how its latents lie to the prior state's.

The data are split by episode, the last part held out; scores are those of ``evaluate``, with a
fresh action head by the fair-head protocol.
"""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lensemble.errors import CheckpointIntegrityError, EvaluationError, LensembleError
from lensemble.params import FlatParameters
from lensemble.workload import Gauge, Workload, layout
from lensemble_node.worker.training.arguments import (
    THREADS,
    read_parameters,
    read_workload,
    world_task,
)
from lensemble_node.worker.training.dataset import Dataset, open_dataset
from lensemble_node.worker.training.evaluate import ROLLOUT, Domain, Evaluator, Runs
from lensemble_node.worker.training.gauge import MAX_POINTS, Alignment, Sight
from lensemble_node.worker.training.model import WorldModel
from lensemble_node.worker.training.source import DataSource
from lensemble_node.worker.training.windows import Windows

HELD_OUT = 0.25
"""Part of the episodes that scores are taken on."""
LEAST_FIT, MOST_FIT = 0.5, 0.9
"""Where no episode ends between these parts of the windows, one is cut."""

MAX_FIT, MAX_SCORED = 4096, 2048
MAX_PICTURES = 512
DRIFT = Gauge(align=True, threshold_degrees=0.0)
"""Says what turning back would do, however little there is of it."""

Numbers = NDArray[np.int64]


def split(windows: Windows) -> tuple[Numbers, Numbers]:
    """Numbers of windows to fit on, and to score on: the last episodes, or the last part.

    Raises:
        EvaluationError: too few windows for both.
    """
    numbers = np.arange(windows.count)
    cut = math.ceil(windows.count * (1 - HELD_OUT))
    ends = [windows.of_episode(index).stop for index in range(windows.episodes)]
    between = [end for end in ends if LEAST_FIT <= end / windows.count <= MOST_FIT]
    if between:
        cut = min(between, key=lambda end: abs(end - cut))
    if not 2 <= cut <= windows.count - 2:
        raise EvaluationError(
            f"the public data have {windows.count} windows, too few to fit on some and score "
            "others",
            "Give more episodes, or longer ones.",
        )
    return numbers[:cut], numbers[cut:]


def read_domain(source: DataSource, workload: Workload) -> Domain:
    """The public data as one embodiment, part of it held out.

    Raises:
        DatasetError: data that cannot be used, or do not fit the workload.
        EvaluationError: too little of it.
    """
    task = world_task(workload)
    with open_dataset(source) as data:
        data.fit(task, workload.normalize)
        span = task.history - 1 + ROLLOUT
        fit, scored = split(data.windows(span))
        return Domain(
            "public",
            _runs(data, span, fit, MAX_FIT, pictures=task.pictures).first(task.history),
            _runs(data, span, scored, MAX_SCORED, pictures=task.pictures).runs,
        )


@dataclass(frozen=True)
class _Cut:
    runs: Runs

    def first(self, span: int) -> Runs:
        """The same windows, of ``span`` transitions only."""
        whole = self.runs
        return Runs(
            whole.observations[:, : span + 1], whole.actions[:, :span], whole.seen[:, : span + 1]
        )


def _runs(data: Dataset, span: int, numbers: Numbers, most: int, *, pictures: bool) -> _Cut:
    most = min(most, MAX_PICTURES) if pictures else most
    chosen = numbers[np.linspace(0, len(numbers) - 1, min(len(numbers), most)).astype(np.int64)]
    windows = data.windows(span)
    states, actions = map(torch.from_numpy, windows.gather(chosen))
    seen = torch.from_numpy(windows.images(chosen)) if pictures else states
    return _Cut(Runs(states, actions, seen))


class Scorer:
    """Tests states of ``workload`` on ``domain``."""

    def __init__(self, workload: Workload, domain: Domain) -> None:
        self._workload = workload
        self._layout = layout(workload)
        self._evaluator = Evaluator(workload, [domain])
        self._model = WorldModel(world_task(workload))
        seen = domain.train.seen[:, 0]
        spread = np.linspace(0, len(seen) - 1, min(len(seen), MAX_POINTS)).astype(np.int64)
        self._points = seen[torch.from_numpy(spread)]
        self.windows = len(domain.heldout.actions)

    @staticmethod
    def of(given: argparse.Namespace) -> "Scorer":
        """As the command line says.

        Raises:
            ConfigError, DatasetError, EvaluationError: no test can be made of that.
        """
        torch.set_num_threads(THREADS)
        workload = read_workload(given.workload)
        source = DataSource(
            given.data,
            tuple(given.observation_key),
            given.embodiment,
            tuple(given.image_key),
            tuple(given.action_key),
            given.format,
        )
        return Scorer(workload, read_domain(source, workload))

    def test(self, state: Path, prior: Path | None) -> dict[str, Any]:
        """The figures of ``state``; a figure that is not finite is None, and ``finite`` false.

        Raises:
            LensembleError: the state cannot be read.
        """
        try:
            parameters = read_parameters(state, self._workload)
        except CheckpointIntegrityError as error:
            if "not finite" in error.message:
                return {"finite": False}
            raise
        # That a state overflows is what this is to find out; it is no fault of the test.
        with np.errstate(all="ignore"):
            try:
                return self._figures(parameters, prior)
            except np.linalg.LinAlgError:
                return {"finite": False}

    def _figures(self, parameters: FlatParameters, prior: Path | None) -> dict[str, Any]:
        if not np.isfinite(np.square(self._sight(parameters).latents).sum()):
            return {"finite": False}
        (scores,) = self._evaluator.score(parameters)
        figures: dict[str, Any] = {
            "std": scores.std,
            "probe_r2": scores.linear_r2,
            "latent_error": scores.latent,
            "state_error": scores.state5,
            "dimension": scores.dimension,
        }
        finite = all(math.isfinite(value) for value in figures.values())
        if finite and prior is not None:
            figures |= self._drift(parameters, prior)
        clean = {
            name: value if not isinstance(value, float) or math.isfinite(value) else None
            for name, value in figures.items()
        }
        return {"finite": finite, **clean}

    def _drift(self, parameters: FlatParameters, prior: Path) -> dict[str, Any]:
        """How the latents of the public points have moved; nothing if the prior is not there."""
        try:
            before = read_parameters(prior, self._workload)
        except LensembleError as error:
            return {"warning": f"no drift: {error.message}"}
        seen = (self._sight(parameters), self._sight(before))
        drift = Alignment(DRIFT, *seen, world_task(self._workload).history).drift
        return {
            "drift_before": drift.before,
            "drift_after": drift.after,
            "mean_degrees": drift.mean_degrees,
            "rms_degrees": drift.rms_degrees,
            "max_degrees": drift.max_degrees,
            "warning": drift.warning,
        }

    def _sight(self, parameters: FlatParameters) -> Sight:
        self._model.load(parameters)
        return Sight(self._model.latents(self._points), self._layout.views(parameters))
