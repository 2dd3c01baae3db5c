"""The H local AdamW steps, on one thread-pinned process, reproducible from seeds and a cursor.

The learning rate follows a cosine over the global step, which the round gives, so that all nodes
agree on it whatever they missed.  Batches are a pure function of data seed and cursor: rolling the
cursor back gives the same batches again.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from lensemble.errors import CheckpointIntegrityError
from lensemble.params import FlatParameters
from lensemble.seeds import derive
from lensemble.workload import Inner, Workload, WorldModelTask
from lensemble_node.worker.training.dataset import Windows
from lensemble_node.worker.training.model import (
    CPU,
    ActionHead,
    WorldModel,
    slope_of,
    values,
    write,
)
from lensemble_node.worker.training.objective import (
    SKETCH_STEPS,
    Batch,
    Landmarks,
    Pool,
    alone,
    directions,
    loss,
)
from lensemble_node.worker.training.segments import Losses, Segment
from lensemble_node.worker.training.stops import Diverged, Stopped

Arrays: TypeAlias = dict[str, NDArray[np.float32]]
Progress: TypeAlias = Callable[[int, float], None]
ShouldStop: TypeAlias = Callable[[], bool]


MOMENTS = ("exp_avg", "exp_avg_sq")
_HEAD_STEP = "head.step"


@dataclass(frozen=True)
class LocalState:
    """What a node keeps from round to round and never sends.

    ``head``: the action head's tensors.  ``optimizer``: AdamW's moments of shared and head
    parameters, flat.  ``cursor``: batches drawn so far, which is also AdamW's step count; a head
    that came later has its own, as ``head.step``.
    """

    head: Arrays = field(default_factory=dict)
    optimizer: Arrays = field(default_factory=dict)
    cursor: int = 0


def learning_rate(inner: Inner, global_step: int) -> float:
    """Cosine from ``lr`` to ``final_lr_fraction * lr`` at ``schedule_steps``, then constant."""
    part = min(global_step, inner.schedule_steps) / inner.schedule_steps
    low = inner.final_lr_fraction
    return inner.lr * (low + (1.0 - low) * 0.5 * (1.0 + math.cos(math.pi * part)))


def batch_numbers(seed: int, cursor: int, count: int, size: int) -> NDArray[np.int64]:
    """The windows (``size`` of ``count``, with repetition) of the batch at ``cursor``."""
    generator = np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, 0, cursor]))
    return generator.integers(0, count, size, dtype=np.int64)


def adamw(inner: Inner, parameters: list[torch.Tensor]) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        parameters,
        lr=inner.lr,
        betas=(inner.beta1, inner.beta2),
        weight_decay=inner.weight_decay,
        foreach=False,
    )


class Held(Protocol):
    """Tensors in one flat vector, a leaf with its gradient: see ``bind``."""

    flat: torch.Tensor

    def named(self) -> dict[str, NDArray[np.float32]]: ...


class Shared(Held, Protocol):
    def load(self, prior: FlatParameters) -> None: ...


class Own(Held, Protocol):
    def load(self, arrays: Arrays) -> None: ...


class Descent:
    """Steps of AdamW along the gradients of a loss over ``count`` examples; see ``backward``.

    ``shared`` holds what is federated, ``own`` what stays on the node, ``{}`` of it included.
    """

    def __init__(self, workload: Workload, shared: Shared, own: Own, node: str, count: int) -> None:
        self.workload = workload
        self.count = count
        self._shared, self._own = shared, own
        self._device = shared.flat.device
        self._node = node
        self._data_seed = 0
        self.sketch = torch.empty(0)
        self.flats = {"shared": shared.flat} | ({"head": own.flat} if own.flat.numel() else {})
        self._optimizer = adamw(workload.inner, list(self.flats.values()))
        self._initial = {name: view.copy() for name, view in own.named().items()}
        self.cursor = 0

    def load(self, prior: FlatParameters, local: LocalState) -> None:
        """Start from ``prior`` (float32, shape ``(layout.size,)``) and this node's own state.

        An empty state means the seeded head and no moments.

        Raises:
            CheckpointIntegrityError: the state is of another head or model.
        """
        self._check(local)
        self.mirror(prior, local)

    def mirror(self, prior: FlatParameters, local: LocalState) -> None:
        """As ``load``, of what another process has checked."""
        self._shared.load(prior)
        self._own.load(local.head or self._initial)
        self.cursor = local.cursor
        self._optimizer.state.clear()
        self.take_moments(local.optimizer)

    def take_moments(self, optimizer: Arrays) -> None:
        """Go on with these, as ``LocalState`` has them."""
        for name, flat in self.flats.items():
            if f"{name}.exp_avg" in optimizer:
                step = optimizer.get(f"{name}.step", np.array([self.cursor], dtype=np.float32))
                moments = {
                    moment: torch.tensor(optimizer[f"{name}.{moment}"], device=self._device)
                    for moment in MOMENTS
                }
                self._optimizer.state[flat] = {"step": torch.tensor(float(step[0]))} | moments

    def cut_own(self, flat: NDArray[np.float32]) -> Arrays:
        """The tensors that stay on the node, by name, from one vector of them."""
        found, start = {}, 0
        for name, like in self._initial.items():
            found[name] = flat[start : start + like.size].reshape(like.shape)
            start += like.size
        return found

    def _check(self, local: LocalState) -> None:
        found = {
            name: array.shape
            for name, array in (local.head | local.optimizer).items()
            if name != _HEAD_STEP
        }
        # Without a head it is a fresh one, whose moments are not there either.
        old = self.flats if local.head else {"shared": self.flats["shared"]}
        wanted = {name: array.shape for name, array in self._initial.items() if local.head} | {
            f"{name}.{moment}": tuple(flat.shape)
            for name, flat in old.items()
            for moment in MOMENTS
        }
        if found and found != wanted:
            differ = sorted(k for k in found.keys() | wanted if found.get(k) != wanted.get(k))
            name = differ[0]
            raise CheckpointIntegrityError(
                f"{name!r} of the local training state has shape {found.get(name)}; model and data "
                f"need {wanted.get(name)}",
                "Remove `local/` of the state directory: the node starts with a fresh action head.",
            )

    def local_state(self) -> LocalState:
        """Copies of what this node keeps."""
        moments = {
            f"{name}.{moment}": self._optimizer.state[flat][moment].cpu().numpy().copy()
            for name, flat in self.flats.items()
            for moment in MOMENTS
            if flat in self._optimizer.state
        }
        step = float(self._optimizer.state.get(self._own.flat, {}).get("step", self.cursor))
        if step != self.cursor:
            moments[_HEAD_STEP] = np.array([step], dtype=np.float32)
        head = {name: view.copy() for name, view in self._own.named().items()}
        return LocalState(head, moments, self.cursor)

    def run(self, segment: Segment, progress: Progress, should_stop: ShouldStop) -> Losses:
        """Take the steps of ``segment``.

        Args:
            segment: which steps.
            progress: told the steps done (1, 2, ...) and the loss of each.
            should_stop: asked before every step.

        Raises:
            Stopped: ``should_stop`` answered yes.
            Diverged: a loss is not finite.
            DatasetError: the data cannot be read.
        """
        seen: list[float] = []
        for step in range(segment.steps):
            if should_stop():
                raise Stopped(f"told to stop before step {step + 1} of {segment.steps}")
            value = self.slope(segment, step)
            self.descend(segment, step)
            seen.append(value)
            progress(step + 1, value)
        return Losses(seen[0], seen[-1])

    def slope(self, segment: Segment, step: int) -> float:
        """Leave the gradient of ``step`` of ``segment`` in ``gradients``; the loss there.

        Raises:
            Diverged: the loss is not finite.
        """
        self.begin(segment, step)
        value = self.gradient(self.sketch)
        if not math.isfinite(value):
            raise Diverged(f"the loss of step {step + 1} is {value}")
        return value

    def begin(self, segment: Segment, step: int) -> None:
        """Draw what ``step`` of ``segment`` needs beside its batch."""
        if step % SKETCH_STEPS == 0:
            label = f"batches:{self._node}{segment.stream}"
            self._data_seed = derive(self.workload.root_seed, label)

    def descend(self, segment: Segment, step: int) -> None:
        """Step along what is in ``gradients``, at the rate of ``step`` of ``segment``."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self.workload.inner, segment.global_step + step)
        self._optimizer.step()
        self.cursor += 1

    def gradient(self, sketch: torch.Tensor) -> float:
        """Leave the gradient of the next batch where the optimiser takes it; the loss there."""
        return self.backward(self.numbers(), sketch)

    def numbers(self) -> NDArray[np.int64]:
        """The examples of the next batch."""
        size = self.workload.inner.batch
        return batch_numbers(self._data_seed, self.cursor, self.count, size)

    def backward(self, numbers: NDArray[np.int64], sketch: torch.Tensor) -> float:
        """The loss of the examples ``numbers``, its gradient in place of the one there was."""
        raise NotImplementedError

    def weights(self) -> FlatParameters:
        """The shared parameters now, a view (float32, shape ``(layout.size,)``)."""
        return values(self._shared.flat)


class Learner(Descent):
    """World model, action head and optimiser of one node, in one process."""

    def __init__(
        self,
        workload: Workload,
        windows: Windows,
        action_dim: int,
        node: str,
        device: torch.device = CPU,
    ) -> None:
        if not isinstance(workload.task, WorldModelTask):
            raise TypeError(f"task {workload.task.kind} has no world model to train")
        self.task = workload.task
        self.windows = windows
        self.landmarks: Landmarks | None = None
        self.model = WorldModel(workload.task, device)
        seed = derive(workload.root_seed, node)
        self.head = ActionHead(workload.task, action_dim, seed, device)
        super().__init__(workload, self.model, self.head, node, windows.count)

    def begin(self, segment: Segment, step: int) -> None:
        super().begin(segment, step)
        if step % SKETCH_STEPS == 0:
            count = self.workload.objective.sketch_dim
            unit = directions(segment.sketch_seed, step, self.task.latent_dim, count)
            self.sketch = torch.from_numpy(unit).to(self._device)

    def batch(self, numbers: NDArray[np.int64], device: torch.device, pool: Pool = alone) -> Batch:
        """The windows ``numbers`` on ``device``; raises ``DatasetError``."""
        observations, actions = self.windows.gather(numbers)
        seen = self.windows.images(numbers) if self.task.pictures else observations
        on_device = [torch.from_numpy(each).to(device) for each in (seen, actions)]
        return Batch(on_device[0], on_device[1], pool)

    def backward(self, numbers: NDArray[np.int64], sketch: torch.Tensor) -> float:
        """The loss of the windows ``numbers``, its gradient in place of the one there was."""
        batch = self.batch(numbers, self._device)
        for flat in self.flats.values():
            slope_of(flat).zero_()
        value = loss(
            (self.model, self.head), batch, sketch, self.workload.objective, self.landmarks
        )
        torch.autograd.backward(value)
        return float(value.detach())

    @property
    def gradients(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Of all shared parameters, and of the head's; to be read only, see ``follow``."""
        return values(slope_of(self.model.flat)), values(slope_of(self.head.flat))

    def follow(self, shared: NDArray[np.float32], head: NDArray[np.float32]) -> None:
        """Have the optimiser take these gradients (float32, flat) in its next step."""
        write(slope_of(self.model.flat), shared)
        write(slope_of(self.head.flat), head)

    def anchor_to(self, landmarks: Landmarks) -> None:
        """Use ``landmarks`` where the objective has an anchor."""
        self.landmarks = Landmarks(
            landmarks.points.to(self._device), landmarks.targets.to(self._device)
        )
