"""The world model: encoder and predictor, federated, and the local action head.

The parameters of a module lie in one flat vector, in layout order, and its gradients in another, so
that loading, differencing and stepping are single operations and nothing is held twice.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from lensemble.params import FlatParameters, ParamLayout, layout_of
from lensemble.seeds import derive
from lensemble.workload import WorldModelTask, parameter_shapes
from lensemble_node.worker.training.encoders import Perceptron, encoder_of

ENCODED_AT_ONCE = 1024
CPU = torch.device("cpu")


class WorldModel(nn.Module):
    """Encoder and predictor; every parameter of it is federated."""

    def __init__(self, task: WorldModelTask, device: torch.device = CPU) -> None:
        super().__init__()
        joint = task.history * (task.latent_dim + task.action_embedding)
        self.encoder = encoder_of(task)
        self.predictor = Perceptron((joint, task.hidden, task.hidden, task.latent_dim))
        self.layout: ParamLayout = layout_of(parameter_shapes(task))
        self.flat = bind(self, [tensor.name for tensor in self.layout.tensors], device)

    def encode(self, observations: torch.Tensor) -> torch.Tensor:
        """Latents (..., latent_dim) of observations.

        These are float32 (..., observation_dim) or, where the encoder takes pictures, uint8 (...,
        height, width, channels).
        """
        latents: torch.Tensor = self.encoder(observations)
        return latents

    def predict(self, latents: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """The next latent (n, latent_dim), as a change of the last one.

        Args:
            latents: (n, history, latent_dim), oldest first.
            actions: their embeddings, (n, history, action_embedding).
        """
        joint = torch.cat([latents.flatten(1), actions.flatten(1)], dim=1)
        after: torch.Tensor = latents[:, -1] + self.predictor(joint)
        return after

    @torch.no_grad()
    def latents(self, observations: torch.Tensor) -> NDArray[np.float32]:
        """``encode`` without gradients, as numpy, a piece at a time."""
        pieces = [
            self.encode(observations[start : start + ENCODED_AT_ONCE].to(self.flat.device)).cpu()
            for start in range(0, len(observations), ENCODED_AT_ONCE)
        ]
        found: NDArray[np.float32] = torch.cat(pieces).numpy()
        return found

    def load(self, prior: FlatParameters) -> None:
        """Take over ``prior`` (float32, shape ``(layout.size,)``)."""
        write(self.flat, prior)

    def named(self) -> dict[str, FlatParameters]:
        """Every parameter by name: views, or copies of what is on an accelerator."""
        return {name: p.detach().cpu().numpy() for name, p in self.named_parameters()}


class ActionHead(nn.Module):
    """Embeds the actions of one embodiment.  Local to its node: in no layout, never sent."""

    def __init__(
        self, task: WorldModelTask, action_dim: int, seed: int, device: torch.device = CPU
    ) -> None:
        super().__init__()
        self.input = nn.Linear(action_dim, task.head_hidden)
        self.output = nn.Linear(task.head_hidden, task.action_embedding)
        drawn = {}
        for name, parameter in self.named_parameters():
            reach = 1.0 / float(
                np.sqrt(action_dim if name.startswith("input") else task.head_hidden)
            )
            draw = np.random.Generator(np.random.Philox(derive(seed, f"head:{name}")))
            drawn[name] = draw.uniform(-reach, reach, parameter.shape).astype(np.float32)
        self.flat = bind(self, list(drawn), device)
        self.load(drawn)

    def load(self, arrays: Mapping[str, NDArray[np.float32]]) -> None:
        """Take over every parameter by name."""
        order = [name for name, _ in self.named_parameters()]
        write(self.flat, np.concatenate([arrays[name].ravel() for name in order]))

    def forward(self, actions: torch.Tensor) -> torch.Tensor:
        """Embeddings (..., action_embedding) of actions (..., action_dim)."""
        embedded: torch.Tensor = self.output(functional.silu(self.input(actions)))
        return embedded

    def named(self) -> dict[str, NDArray[np.float32]]:
        """Every parameter by name: views, or copies of what is on an accelerator."""
        return {name: p.detach().cpu().numpy() for name, p in self.named_parameters()}


def bind(module: nn.Module, order: Sequence[str], device: torch.device = CPU) -> torch.Tensor:
    """Move the parameters of ``module`` into one flat vector on ``device``, gradients likewise.

    They lie in ``order``.

    The answer is that vector, a leaf with its gradient: what an optimiser steps.  As a plain tensor
    it is not itself a parameter of ``module``.
    """
    parameters = dict(module.named_parameters())
    flat = torch.zeros(sum(parameters[name].numel() for name in order), device=device)
    gradient = torch.zeros_like(flat)
    offset = 0
    for name in order:
        parameter = parameters[name]
        part = slice(offset, offset + parameter.numel())
        flat[part] = parameter.detach().flatten()
        parameter.data = flat[part].view(parameter.shape)
        parameter.grad = gradient[part].view(parameter.shape)
        offset = part.stop
    flat.requires_grad_(True)
    flat.grad = gradient
    return flat


def write(flat: torch.Tensor, numbers: NDArray[np.float32]) -> None:
    """Have ``flat``, a bound vector or its gradient, hold ``numbers`` of the same length."""
    if flat.device == CPU:
        # Not by way of a tensor, which would have to be writable.
        flat.detach().numpy()[...] = numbers
    else:
        flat.detach().copy_(torch.from_numpy(np.array(numbers, dtype=np.float32)))


def values(flat: torch.Tensor) -> NDArray[np.float32]:
    """The storage of ``flat`` as a numpy view, or a copy of what is on an accelerator."""
    view: NDArray[np.float32] = flat.detach().cpu().numpy()
    return view


def slope_of(flat: torch.Tensor) -> torch.Tensor:
    """The gradient of what ``bind`` answered."""
    if flat.grad is None:
        raise TypeError("this tensor was not bound: it has no gradient")
    return flat.grad
