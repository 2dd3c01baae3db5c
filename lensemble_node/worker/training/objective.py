"""The loss: predict the next latent, keep latents spread as a standard normal, stay at the anchor.

``lambda_pred * mean((g - z')**2) + lambda_sig * SIGReg + lambda_anc * anchor``, gradients flowing
into the target too.  SIGReg compares the empirical characteristic function along random unit
directions with that of N(0, 1): the squared distance, weighted with exp(-t**2 / 2), integrated
over [-3, 3] and averaged over directions, uncentred.  On this scale a weight near 5 holds the
latent up at batch 64; with a hundredth of it the latent collapses.

Directions come from a counter-based numpy generator, the same bits on every machine.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from lensemble.workload import Objective
from lensemble_node.worker.training.model import ActionHead, WorldModel

SKETCH_STEPS = 10
"""Steps that share one set of directions."""
_REACH = 3.0


@dataclass(frozen=True)
class Landmarks:
    """Public points (k, observation_dim) and where the warm start put them (k, latent_dim)."""

    points: torch.Tensor
    targets: torch.Tensor


@dataclass(frozen=True)
class Batch:
    """``observations`` (n, history + 1, observation_dim), ``actions`` (n, history, action_dim)."""

    observations: torch.Tensor
    actions: torch.Tensor


def directions(seed: int, step: int, latent_dim: int, count: int) -> NDArray[np.float32]:
    """``count`` unit columns (latent_dim, count) for ``step`` of the round with sketch ``seed``."""
    block = seed.to_bytes(8, "little") + (step // SKETCH_STEPS).to_bytes(8, "little")
    key = int.from_bytes(hashlib.sha256(block).digest()[:16], "little")
    draw = np.random.Generator(np.random.Philox(key=key)).standard_normal((latent_dim, count))
    unit: NDArray[np.float32] = (draw / np.sqrt(np.square(draw).sum(axis=0))).astype(np.float32)
    return unit


def sigreg(latents: torch.Tensor, sketch: torch.Tensor, knots: int) -> torch.Tensor:
    """Distance of ``latents`` (n, d) from N(0, I) along ``sketch`` (d, count); a scalar >= 0."""
    at = torch.linspace(0.0, _REACH, knots)
    normal = torch.exp(-0.5 * at.square())
    # Trapezoid over [0, 3], doubled: the integrand is even.
    weights = torch.full((knots,), 2.0 * _REACH / (knots - 1))
    weights[0] *= 0.5
    weights[-1] *= 0.5
    angles = (latents @ sketch).unsqueeze(-1) * at
    distance = (angles.cos().mean(0) - normal).square() + angles.sin().mean(0).square()
    return (distance @ (weights * normal)).mean()


def loss(
    parts: tuple[WorldModel, ActionHead],
    batch: Batch,
    sketch: torch.Tensor,
    terms: Objective,
    landmarks: Landmarks | None = None,
) -> torch.Tensor:
    """The loss of ``batch``, a scalar; ``parts`` are the model and the node's head."""
    model, head = parts
    latents = model.encode(batch.observations)
    after = model.predict(latents[:, :-1], head(batch.actions))
    total = terms.lambda_pred * (after - latents[:, -1]).square().mean()
    # The ends of a window; the states between are much like them and would only cost time.
    ends = torch.cat([latents[:, 0], latents[:, -1]])
    total = total + terms.lambda_sig * sigreg(ends, sketch, terms.knots)
    if landmarks is not None and terms.lambda_anc > 0:
        drift = model.encode(landmarks.points) - landmarks.targets
        total = total + terms.lambda_anc * drift.square().sum(-1).mean()
    return total
