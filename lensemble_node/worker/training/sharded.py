"""The world model spread over the processes of a crew by FSDP2, each with a part of every tensor.

Parameters, gradients and AdamW's moments are split along the first dimension; a layer's parameters
are gathered while it computes.  AdamW acts on each number by itself, so the split changes nothing.
"""

import math
import warnings

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lensemble.errors import DatasetError
from lensemble_node.worker.training.crew import Crew
from lensemble_node.worker.training.inner_loop import (
    MOMENTS,
    Learner,
    adamw,
    learning_rate,
)
from lensemble_node.worker.training.model import ActionHead, WorldModel, values, write
from lensemble_node.worker.training.objective import Batch, Landmarks, loss
from lensemble_node.worker.training.segments import Segment


class Whole(nn.Module):
    """Model, head and loss as one module, so that one call gathers and frees its layers."""

    def __init__(self, learner: Learner, device: torch.device) -> None:
        super().__init__()
        self.model = WorldModel(learner.task, device)
        self.head = ActionHead(learner.task, learner.head.input.in_features, 0, device)
        self._terms = learner.workload.objective

    def forward(
        self, batch: Batch, sketch: torch.Tensor, landmarks: Landmarks | None
    ) -> torch.Tensor:
        return loss((self.model, self.head), batch, sketch, self._terms, landmarks)


class Sharded:
    """A ``Part`` of ``learner``'s model, on the device of ``crew``."""

    def __init__(self, crew: Crew, learner: Learner) -> None:
        crew.require_divisible(learner.workload.inner.batch)
        # What comes out of a layer is never changed in place, see ``loss`` and ``WorldModel``.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
        self._crew, self._learner = crew, learner
        self._mesh = DeviceMesh.from_group(crew.group, crew.device.type)
        whole = Whole(learner, crew.device)
        self._names = {
            "shared": [(f"model.{each.name}", each.shape) for each in learner.model.layout.tensors],
            "head": [(f"head.{name}", tuple(p.shape)) for name, p in whole.head.named_parameters()],
        }
        for layer in (whole.model.encoder, whole.model.predictor, whole.head):
            fully_shard(layer, mesh=self._mesh)
        fully_shard(whole, mesh=self._mesh)
        self._whole = whole
        self._parameters = {name: _split(each) for name, each in whole.named_parameters()}
        self._optimizer = adamw(learner.workload.inner, list(whole.parameters()))

    # ---- in and out ----

    def load(self) -> None:
        learner = self._learner
        kept = learner.local_state()
        self._optimizer.state.clear()
        for group, flat in learner.flats.items():
            for parameter, piece in self._cut(group, values(flat)):
                parameter.to_local().detach().copy_(self._parted(piece).to_local())
            if f"{group}.{MOMENTS[0]}" not in kept.optimizer:
                continue
            taken = float(kept.optimizer.get(f"{group}.step", [kept.cursor])[0])
            for moment in MOMENTS:
                for parameter, piece in self._cut(group, kept.optimizer[f"{group}.{moment}"]):
                    state = self._optimizer.state[parameter]
                    state["step"] = torch.tensor(taken)
                    state[moment] = self._parted(piece)

    # ---- a step ----

    def step(self, segment: Segment, step: int) -> float:
        crew, learner = self._crew, self._learner
        learner.begin(segment, step)
        failure: DatasetError | None = None
        batch: Batch | None = None
        try:
            batch = learner.batch(crew.part(learner.numbers()), crew.device, crew.pooled)
        except DatasetError as error:
            failure = error
        if crew.any(batch is None)[0] or batch is None:
            raise failure or DatasetError("another process of the group cannot read the data")
        value: torch.Tensor = self._whole(batch, learner.sketch.to(crew.device), self._landmarks())
        (mean,) = crew.average(value.detach().cpu().double().reshape(1)).tolist()
        if not math.isfinite(mean):
            return float(mean)
        self._optimizer.zero_grad()
        torch.autograd.backward(value)
        for settings in self._optimizer.param_groups:
            settings["lr"] = learning_rate(learner.workload.inner, segment.global_step + step)
        self._optimizer.step()
        learner.cursor += 1
        return float(mean)

    def _landmarks(self) -> Landmarks | None:
        known, device = self._learner.landmarks, self._crew.device
        if known is None:
            return None
        return Landmarks(known.points.to(device), known.targets.to(device))

    # ---- out again ----

    def store(self) -> None:
        learner = self._learner
        moments = {}
        state = self._optimizer.state
        for group, flat in learner.flats.items():
            mine: list[torch.Tensor] = [self._parameters[name] for name, _ in self._names[group]]
            write(flat, _joined(mine))
            for moment in MOMENTS:
                moments[f"{group}.{moment}"] = _joined([state[each][moment] for each in mine])
            moments[f"{group}.step"] = np.array([float(state[mine[0]]["step"])], dtype=np.float32)
        learner.take_moments(moments)

    def _cut(self, group: str, flat: NDArray[np.float32]) -> list[tuple[DTensor, torch.Tensor]]:
        pieces, start = [], 0
        for name, shape in self._names[group]:
            stop = start + int(np.prod(shape))
            piece = torch.from_numpy(flat[start:stop].reshape(shape).copy())
            pieces.append((self._parameters[name], piece.to(self._crew.device)))
            start = stop
        return pieces

    def _parted(self, whole: torch.Tensor) -> DTensor:
        """This process's part of what all have."""
        return distribute_tensor(whole, self._mesh, [Shard(0)], src_data_rank=None)


def _split(parameter: torch.Tensor) -> DTensor:
    if not isinstance(parameter, DTensor):
        raise TypeError("this parameter is not split over processes")
    return parameter


def _joined(split: list[torch.Tensor]) -> NDArray[np.float32]:
    """The whole of several tensors, one after the other, from all processes."""
    whole: NDArray[np.float32] = torch.cat(
        [_split(each.detach()).full_tensor().flatten().cpu() for each in split]
    ).numpy()
    return whole
