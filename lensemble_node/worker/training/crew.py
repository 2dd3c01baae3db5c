"""Several processes of one node that take the same inner steps, each on its part of every batch.

All draw the same numbers for a batch, from the same seed and cursor, and each takes its own equal
part of them; losses are means, so their mean over the processes is the loss of the whole batch, and
the mean of the gradients its gradient.  SIGReg is no mean over a batch, but it is made of means,
which are pooled before it (``Crew.pooled``).  What comes out is the update of one process, up to
the order in which floats are summed.

Rank 0 holds the node's state and everything before and after the steps.  Where they start goes to
the others by broadcast, and its stop flag before every step.
"""

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.autograd.function import FunctionCtx

from lensemble.errors import ConfigError, LensembleError, TaskError
from lensemble_node.worker import guard
from lensemble_node.worker.seat import GroupLost, Run, Seat
from lensemble_node.worker.training.inner_loop import (
    MOMENTS,
    Descent,
    LocalState,
    Progress,
    ShouldStop,
)
from lensemble_node.worker.training.model import slope_of, values
from lensemble_node.worker.training.segments import Losses, Segment
from lensemble_node.worker.training.stops import Diverged, Stopped

MEETING_S = 3600.0
"""How long all may take to open their data."""


class Part(Protocol):
    """One process's share of the model between two rounds; see ``Copied`` and ``Sharded``."""

    def load(self) -> None:
        """Start from what the descent holds, the same in every process."""

    def step(self, segment: Segment, step: int) -> float:
        """Take one step; the loss of the whole batch, the same in every process."""
        ...

    def store(self) -> None:
        """Put the result back into the descent of rank 0."""


def _deaf(_step: int, _loss: float) -> None:
    """Progress of a process that nobody listens to."""


@dataclass(frozen=True)
class Ears:
    """Who is told of each step, and who may stop them."""

    progress: Progress = _deaf
    should_stop: ShouldStop = lambda: False


class Crew:
    """This process and the others, met in the file ``rendezvous``.

    Args:
        seat: which of them this is.
        rendezvous: a path that does not exist yet, the same for all.
        device: where the steps are computed.

    Raises:
        GroupLost: the others do not come.
    """

    def __init__(self, seat: Seat, rendezvous: str, device: torch.device) -> None:
        self.seat, self.device = seat, device
        if device.type == "cuda":
            torch.cuda.set_device(seat.rank % torch.cuda.device_count())
        try:
            dist.init_process_group(
                "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
                init_method=f"file://{rendezvous}",
                rank=seat.rank,
                world_size=seat.ranks,
                timeout=timedelta(seconds=MEETING_S),
            )
            self.group = dist.new_group(timeout=timedelta(seconds=seat.timeout_s))
        except RuntimeError as error:
            raise GroupLost(f"the processes of the group did not meet: {error}") from error

    @property
    def leads(self) -> bool:
        return self.seat.rank == 0

    # ---- what they tell each other ----

    def share(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, overwritten everywhere with that of rank 0."""
        dist.broadcast(tensor, 0, group=self.group)
        return tensor

    def average(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, overwritten everywhere with the mean of all."""
        dist.all_reduce(tensor, group=self.group)
        return tensor.div_(self.seat.ranks)

    def any(self, *flags: bool) -> list[bool]:
        """Which of ``flags`` is set in any process."""
        told = torch.tensor([float(flag) for flag in flags])
        dist.all_reduce(told, dist.ReduceOp.MAX, group=self.group)
        return [bool(flag) for flag in told]

    def part(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """This process's part of a batch."""
        own = len(numbers) // self.seat.ranks
        return numbers[self.seat.rank * own : (self.seat.rank + 1) * own]

    def pooled(self, mean: torch.Tensor) -> torch.Tensor:
        """The mean over all processes of a mean over this one's part, with its gradient."""
        pooled: torch.Tensor = _Pooled.apply(mean, self)  # type: ignore[no-untyped-call]  # torch's
        return pooled

    def require_divisible(self, batch: int) -> None:
        """Refuse a batch that cannot be cut into equal parts.

        Raises:
            ConfigError: it cannot.
        """
        if batch % self.seat.ranks:
            raise ConfigError(
                f"inner.batch is {batch}, which {self.seat.ranks} processes cannot share equally",
                "Set `worker.processes` to a divisor of it.",
            )

    # ---- the steps ----

    def ready(self) -> None:
        """Wait until all have opened their data.

        Raises:
            GroupLost: one does not come.
        """
        try:
            dist.barrier()
        except RuntimeError as error:
            raise GroupLost(f"the processes of the group did not meet: {error}") from error

    def take(
        self, part: Part, descent: Descent, segment: Segment, ears: "Ears | None" = None
    ) -> Losses:
        """As ``Descent.run``, with everyone.

        Raises:
            GroupLost: a process is gone or hangs.
        """
        try:
            return self._take(part, descent, segment, ears or Ears())
        except RuntimeError as error:
            if guard.is_out_of_memory(error):
                raise
            raise GroupLost(f"a process of the group is gone or hangs: {error}") from error

    def _take(self, part: Part, descent: Descent, segment: Segment, ears: "Ears") -> Losses:
        seen: list[float] = []
        self._share_state(descent)
        part.load()
        for step in range(segment.steps):
            if self.any(ears.should_stop())[0]:
                raise Stopped(f"told to stop before step {step + 1} of {segment.steps}")
            value = part.step(segment, step)
            if not math.isfinite(value):
                raise Diverged(f"the loss of step {step + 1} is {value}")
            seen.append(value)
            ears.progress(step + 1, value)
        part.store()
        return Losses(seen[0], seen[-1])

    def _share_state(self, descent: Descent) -> None:
        """Have every process's ``descent`` hold what that of rank 0 holds."""
        kept = descent.local_state()
        step = kept.optimizer.get("head.step", np.array([-1.0]))
        facts: list[float] = [
            kept.cursor,
            any(name.startswith("shared.") for name in kept.optimizer),
        ]
        facts += [any(name.startswith("head.exp") for name in kept.optimizer), float(step[0])]
        cursor, *has, own_step = self.share(torch.tensor(facts, dtype=torch.float64)).tolist()
        arrays = {}
        for (name, flat), moments in zip(descent.flats.items(), has, strict=False):
            arrays[name] = self._shared_array(values(flat))
            for moment in MOMENTS if moments else ():
                full = f"{name}.{moment}"
                arrays[full] = self._shared_array(kept.optimizer.get(full, values(flat)))
        if self.leads:
            return
        if own_step >= 0:
            arrays["head.step"] = np.array([own_step], dtype=np.float32)
        prior = arrays.pop("shared")
        head = descent.cut_own(arrays.pop("head")) if "head" in arrays else {}
        descent.mirror(prior, LocalState(head, arrays, int(cursor)))

    def _shared_array(self, array: NDArray[np.float32]) -> NDArray[np.float32]:
        return self.share(torch.from_numpy(array.copy())).numpy()


class _Pooled(torch.autograd.Function):
    """Mean over processes.  Each computes the same function of it, so gradients are added up."""

    @staticmethod
    def forward(ctx: FunctionCtx, mean: torch.Tensor, crew: Crew) -> torch.Tensor:
        ctx.crew = crew  # type: ignore[attr-defined]  # how torch hands things on
        return crew.average(mean.clone())

    @staticmethod
    def backward(ctx: FunctionCtx, slope: torch.Tensor) -> tuple[torch.Tensor, None]:
        # Sum over processes, over their number: what is left is averaged with the gradients.
        crew: Crew = ctx.crew  # type: ignore[attr-defined]  # see above
        return crew.average(slope.clone()), None


class Copied:
    """Every process holds all of the model; gradients are averaged.  For a task of one's own."""

    def __init__(self, crew: Crew, descent: Descent) -> None:
        crew.require_divisible(descent.workload.inner.batch)
        self._crew, self._descent = crew, descent

    def load(self) -> None:
        """It is there already."""

    def step(self, segment: Segment, step: int) -> float:
        crew, descent = self._crew, self._descent
        descent.begin(segment, step)
        failure: LensembleError | None = None
        value = math.nan
        try:
            value = descent.backward(crew.part(descent.numbers()), torch.empty(0))
        except LensembleError as error:
            failure = error
        if crew.any(failure is not None)[0]:
            raise failure or TaskError("the task failed in another process of the group")
        (mean,) = crew.average(torch.tensor([value], dtype=torch.float64)).tolist()
        if math.isfinite(mean):
            for flat in descent.flats.values():
                crew.average(slope_of(flat))
            descent.descend(segment, step)
        return float(mean)

    def store(self) -> None:
        """It is there already."""


class Team:
    """A crew and this process's part of what it trains."""

    def __init__(self, crew: Crew, part: Part, descent: Descent) -> None:
        self.crew, self._part, self._descent = crew, part, descent

    def lead(self, segment: Segment, progress: Progress, should_stop: ShouldStop) -> Losses:
        """As ``Descent.run``, with the others; called by rank 0."""
        self.crew.seat.order(
            Run(
                steps=segment.steps,
                global_step=segment.global_step,
                sketch_seed=segment.sketch_seed,
                stream=segment.stream,
            )
        )
        return self.crew.take(self._part, self._descent, segment, Ears(progress, should_stop))

    def follow(self, run: Run) -> None:
        """Take part in the steps of ``run``; called by the others."""
        segment = Segment(run.steps, run.global_step, run.sketch_seed, run.stream)
        self.crew.take(self._part, self._descent, segment)
