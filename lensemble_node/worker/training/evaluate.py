"""Score parameters on held-out trajectories, each embodiment with a fresh action head.

Fair-head protocol: encoder and predictor frozen, a new head is fitted for a fixed number of steps
on an embodiment's training file, then scored on its held-out file.  Figures, lower better for the
first three, which are 1 for predicting no change:

``latent``: one-step error of the latent over that of predicting no change.
``state5``: five steps open loop, decoded to the observed state, over predicting no change there; it
cannot be gamed by a shrinking latent.  The decoder is fitted offline on the training files.
``horizon``: the same after 1, 2, ... K steps.
``linear_r2``: observed state from the latent by ridge regression, on held-out data.
``std``: square root of the mean latent variance.
``dimension``: participation ratio of the latent spectrum.

A latent has collapsed when its std is below ``COLLAPSED_STD`` and its linear R2 below
``COLLAPSED_R2``: a small latent alone may still be read, and its dimension is highest when nothing
but noise is left.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lensemble.errors import EvaluationError
from lensemble.params import FlatParameters
from lensemble.seeds import derive
from lensemble.workload import Workload
from lensemble_node.worker.training.arguments import (
    THREADS,
    ending_well,
    read_parameters,
    read_workload,
    world_task,
)
from lensemble_node.worker.training.dataset import Dataset, open_dataset
from lensemble_node.worker.training.gauge import participation_ratio
from lensemble_node.worker.training.inner_loop import batch_numbers
from lensemble_node.worker.training.model import ActionHead, WorldModel
from lensemble_node.worker.training.source import DataSource

HEAD_STEPS = 150
HEAD_RATE = 5e-3
HEAD_BATCH = 128
ROLLOUT = 5
MAX_ROLLOUT = 1000
COLLAPSED_STD = 0.1
COLLAPSED_R2 = 0.5
FEATURES = 384
MAX_PICTURES = 1024
"""Windows of pictures that are held to score; they are large."""
RIDGE = 0.1
"""Of the decoder, in standardised latents.  A thousandth of it reads the latents of observations
about as well (either way their error is about a hundredth of predicting no change at most), but
predicted latents lie beside those it was fitted on, and there it reads small errors up to half as
large again."""
PROBE_RIDGE = 1e-4
"""Of the linear probe, in latents as they are: below its root a latent is too small to be read."""

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Scores:
    """See the module; ``mean`` averages over embodiments."""

    latent: float
    state5: float
    linear_r2: float
    std: float
    dimension: float
    horizon: tuple[float, ...]

    @staticmethod
    def mean(scores: Sequence["Scores"]) -> "Scores":
        def over(figure: str) -> float:
            return float(np.mean([getattr(each, figure) for each in scores]))

        return Scores(
            latent=over("latent"),
            state5=over("state5"),
            linear_r2=over("linear_r2"),
            std=over("std"),
            dimension=over("dimension"),
            horizon=tuple(np.mean([each.horizon for each in scores], axis=0).tolist()),
        )

    @property
    def collapsed(self) -> bool:
        """Whether the alarm goes off: the latent says nothing any more."""
        return not (self.std >= COLLAPSED_STD or self.linear_r2 >= COLLAPSED_R2)

    @property
    def facts(self) -> dict[str, Any]:
        """All figures and the alarm, for JSON."""
        return asdict(self) | {"collapsed": self.collapsed}


@dataclass(frozen=True)
class Runs:
    """Windows of a file: true states (n, span + 1, d), actions (n, span, a), and what is encoded.

    ``seen`` is the states again, or pictures.
    """

    observations: torch.Tensor
    actions: torch.Tensor
    seen: torch.Tensor

    @staticmethod
    def of(dataset: Dataset, span: int, *, pictures: bool) -> "Runs":
        """All windows of ``dataset``; of pictures, at most ``MAX_PICTURES`` evenly through it."""
        windows = dataset.windows(span)
        count = min(windows.count, MAX_PICTURES) if pictures else windows.count
        numbers = np.linspace(0, windows.count - 1, count).astype(np.int64)
        states, actions = map(torch.from_numpy, windows.gather(numbers))
        seen = torch.from_numpy(windows.images(numbers)) if pictures else states
        return Runs(states, actions, seen)


@dataclass(frozen=True)
class Domain:
    """One embodiment: windows to fit its head on, and longer ones to score."""

    name: str
    train: Runs
    heldout: Runs

    @staticmethod
    def read(train: Path, heldout: Path, workload: Workload, rollout: int = ROLLOUT) -> "Domain":
        """Both files of one embodiment, to be scored over ``rollout`` steps (at least 5).

        Raises:
            DatasetError: data that cannot be used, or does not fit the workload.
            EvaluationError: the two files differ in their actions.
        """
        task = world_task(workload)
        with (
            open_dataset(DataSource(train)) as fit,
            open_dataset(DataSource(heldout)) as score,
        ):
            for data in (fit, score):
                data.fit(task, workload.normalize)
            if fit.action_dim != score.action_dim:
                raise EvaluationError(
                    f"{train} has {fit.action_dim} action columns, {heldout} {score.action_dim}"
                )
            span = task.history - 1 + max(rollout, ROLLOUT)
            pictures = task.pictures
            return Domain(
                heldout.stem,
                Runs.of(fit, task.history, pictures=pictures),
                Runs.of(score, span, pictures=pictures),
            )


class Decoder:
    """Latent to state by ridge regression: linear, or with random rectified ``features``.

    With features, latents are standardised first, so that their scale does not matter.  Linear,
    they are taken as they are: of a latent that has shrunk to nothing, nothing is read.
    """

    def __init__(self, latents: Floats, states: Floats, features: int, seed: int) -> None:
        self._mean = latents.mean(axis=0)
        self._scale = latents.std(axis=0) + 1e-6 if features else np.float32(1.0)
        draw = np.random.Generator(np.random.Philox(seed))
        self._project = draw.standard_normal((latents.shape[1], features)).astype(np.float32)
        self._shift = draw.uniform(-2, 2, features).astype(np.float32)
        basis = self._basis(latents).astype(np.float64)
        ridge = RIDGE if features else PROBE_RIDGE
        gram = basis.T @ basis + ridge * len(basis) * np.eye(basis.shape[1])
        self._weights = np.linalg.solve(gram, basis.T @ states).astype(np.float32)

    def _basis(self, latents: Floats) -> Floats:
        unit = (latents - self._mean) / self._scale
        bent = np.maximum(unit @ self._project + self._shift, 0)
        return np.concatenate([np.ones((len(unit), 1), np.float32), unit, bent], axis=1)

    def __call__(self, latents: Floats) -> Floats:
        """States (n, observation_dim) of latents (n, latent_dim)."""
        return self._basis(latents) @ self._weights


class Evaluator:
    """Scores parameters of one workload on the same domains."""

    def __init__(self, workload: Workload, domains: Sequence[Domain]) -> None:
        self._workload = workload
        self._task = world_task(workload)
        self._domains = domains
        self._model = WorldModel(self._task)

    def score(self, parameters: FlatParameters) -> list[Scores]:
        """The scores of ``parameters`` (float32, shape ``(layout.size,)``), one a domain.

        Raises:
            EvaluationError: parameters that are not finite.
        """
        if not np.isfinite(parameters).all():
            raise EvaluationError("the parameters are not finite; there is nothing to score")
        self._model.load(parameters)
        fit = [torch.from_numpy(self._model.latents(d.train.seen)) for d in self._domains]
        latents = np.concatenate([z[:, 0].numpy() for z in fit])
        states = np.concatenate([d.train.observations[:, 0].numpy() for d in self._domains])
        seed = derive(self._workload.root_seed, "evaluate:decoder")
        probes = [Decoder(latents, states, count, seed) for count in (FEATURES, 0)]
        return [
            self._score(domain, self._head(domain, z), probes)
            for domain, z in zip(self._domains, fit, strict=True)
        ]

    def _head(self, domain: Domain, latents: torch.Tensor) -> ActionHead:
        seed = derive(self._workload.root_seed, f"evaluate:{domain.name}")
        head = ActionHead(self._task, domain.train.actions.shape[-1], seed)
        optimizer = torch.optim.AdamW([head.flat], lr=HEAD_RATE, foreach=False)
        for step in range(HEAD_STEPS):
            numbers = torch.from_numpy(batch_numbers(seed, step, len(latents), HEAD_BATCH))
            some = latents[numbers]
            # In place: the head's parameters and gradients are views of this one vector.
            optimizer.zero_grad(set_to_none=False)
            after = self._model.predict(some[:, :-1], head(domain.train.actions[numbers]))
            torch.autograd.backward((after - some[:, -1]).square().mean(), inputs=_leaves(head))
            optimizer.step()
        return head

    @torch.no_grad()
    def _score(self, domain: Domain, head: ActionHead, probes: list[Decoder]) -> Scores:
        runs, history = domain.heldout, self._task.history
        latents = torch.from_numpy(self._model.latents(runs.seen))
        actions = head(runs.actions)
        path = latents[:, :history]
        for step in range(actions.shape[1] + 1 - history):
            after = self._model.predict(path[:, step:], actions[:, step : step + history])
            path = torch.cat([path, after.unsqueeze(1)], dim=1)
        now, target = latents[:, history - 1].numpy(), latents[:, history].numpy()
        decode, linear = probes
        states = runs.observations[:, history - 1].numpy()
        horizon = tuple(
            _ratio(decode(path[:, at].numpy()), runs.observations[:, at].numpy(), states)
            for at in range(history, path.shape[1])
        )
        return Scores(
            latent=_ratio(path[:, history].numpy(), target, now),
            state5=horizon[ROLLOUT - 1],
            linear_r2=1.0 - _ratio(linear(now), states, states.mean(axis=0)),
            std=float(np.sqrt(now.var(axis=0).mean())),
            dimension=participation_ratio(now),
            horizon=horizon,
        )


def _leaves(head: ActionHead) -> list[torch.Tensor]:
    return list(head.parameters())


def _ratio(guess: Floats, truth: Floats, nothing: Floats) -> float:
    """Squared error of ``guess`` over that of ``nothing``."""
    return float(np.square(guess - truth).sum() / np.square(nothing - truth).sum())


def _rollout(text: str) -> int:
    value = int(text)
    if not ROLLOUT <= value <= MAX_ROLLOUT:
        raise argparse.ArgumentTypeError(f"{value} is not within {ROLLOUT} to {MAX_ROLLOUT}")
    return value


def _parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lensemble_node.worker.training.evaluate", description=__doc__
    )
    parser.add_argument("--workload", type=Path, required=True, help="TOML or canonical JSON")
    parser.add_argument("--train", type=Path, action="append", required=True)
    parser.add_argument("--heldout", type=Path, action="append", required=True)
    parser.add_argument("--parameters", type=Path, nargs="+", required=True)
    parser.add_argument(
        "--rollout", type=_rollout, default=ROLLOUT, help="steps of the error over the horizon"
    )
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    if len(given.train) != len(given.heldout):
        parser.error("give as many --train as --heldout, in the same order")
    return given


def _evaluate(given: argparse.Namespace) -> None:
    torch.set_num_threads(THREADS)
    workload = read_workload(given.workload)
    pairs = list(zip(given.train, given.heldout, strict=True))
    evaluator = Evaluator(workload, [Domain.read(*pair, workload, given.rollout) for pair in pairs])
    answers = []
    for path in given.parameters:
        scores = evaluator.score(read_parameters(path, workload))
        each = {str(heldout): s.facts for (_, heldout), s in zip(pairs, scores, strict=True)}
        answers.append({"parameters": str(path), "mix": Scores.mean(scores).facts, "domains": each})
    if given.json:
        print(json.dumps(answers))  # noqa: T201  # this command's answer
        return
    for answer in answers:
        print(answer["parameters"], answer["mix"])  # noqa: T201  # this command's answer


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    given = _parsed(arguments)
    return ending_well(lambda: _evaluate(given))


if __name__ == "__main__":
    sys.exit(main())
