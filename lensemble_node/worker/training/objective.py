"""The loss: predict the next latent, keep latents spread as a standard normal, stay at the anchor.

``lambda_pred * mean((g - z')**2) + lambda_sig * SIGReg + lambda_anc * anchor``, gradients flowing
into the target too.  The anchor is the squared distance of public landmarks from where the warm
start put them, or that from the identity of the rotation between the two, which costs turning
only.  SIGReg compares the empirical characteristic function along random unit
directions with that of N(0, 1): the squared distance, weighted with exp(-t**2 / 2), integrated
over [-3, 3] and averaged over directions, uncentred.  On this scale a weight near 5 holds the
latent up at batch 64; with a hundredth of it the latent collapses.

Directions come from a counter-based numpy generator, the same bits on every machine.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from lensemble.workload import Objective
from lensemble_node.worker.training.model import ActionHead, WorldModel

SKETCH_STEPS = 10
"""Steps that share one set of directions."""
PULL = 0.01
"""Towards the identity in the rotation anchor, in mean variances of a latent dimension."""
_REACH = 3.0


@dataclass(frozen=True)
class Landmarks:
    """Public points (k, ...), states or pictures, and the warm start's latents (k, latent_dim)."""

    points: torch.Tensor
    targets: torch.Tensor


Pool: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""A mean over a part of a batch made the mean over all of it."""


def alone(mean: torch.Tensor) -> torch.Tensor:
    """The pool of a batch that is in one part."""
    return mean


@dataclass(frozen=True)
class Batch:
    """``observations`` (n, history + 1, ...) of states or pictures, ``actions`` (n, history, a).

    ``pool``: where this is a part of a batch, of which other processes hold the others.
    """

    observations: torch.Tensor
    actions: torch.Tensor
    pool: Pool = alone


def directions(seed: int, step: int, latent_dim: int, count: int) -> NDArray[np.float32]:
    """``count`` unit columns (latent_dim, count) for ``step`` of the round with sketch ``seed``."""
    block = seed.to_bytes(8, "little") + (step // SKETCH_STEPS).to_bytes(8, "little")
    key = int.from_bytes(hashlib.sha256(block).digest()[:16], "little")
    draw = np.random.Generator(np.random.Philox(key=key)).standard_normal((latent_dim, count))
    unit: NDArray[np.float32] = (draw / np.sqrt(np.square(draw).sum(axis=0))).astype(np.float32)
    return unit


def sigreg(
    latents: torch.Tensor, sketch: torch.Tensor, knots: int, pool: Pool = alone
) -> torch.Tensor:
    """Distance of ``latents`` (n, d) from N(0, I) along ``sketch`` (d, count); a scalar >= 0."""
    at = torch.linspace(0.0, _REACH, knots, device=latents.device)
    normal = torch.exp(-0.5 * at.square())
    # Trapezoid over [0, 3], doubled: the integrand is even.
    weights = torch.full((knots,), 2.0 * _REACH / (knots - 1), device=latents.device)
    weights[0] *= 0.5
    weights[-1] *= 0.5
    angles = (latents @ sketch).unsqueeze(-1) * at
    cosine, sine = pool(torch.stack([angles.cos().mean(0), angles.sin().mean(0)]))
    distance = (cosine - normal).square() + sine.square()
    found: torch.Tensor = (distance @ (weights * normal)).mean()
    return found


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
    total = total + terms.lambda_sig * sigreg(ends, sketch, terms.knots, batch.pool)
    if landmarks is not None and terms.lambda_anc > 0:
        total = total + terms.lambda_anc * anchor(model.encode(landmarks.points), landmarks, terms)
    return total


def anchor(latents: torch.Tensor, landmarks: Landmarks, terms: Objective) -> torch.Tensor:
    """How far the landmarks' ``latents`` (k, d) are from the targets, a scalar >= 0."""
    if terms.anchor == "rotation":
        return turned(latents, landmarks.targets)
    return (latents - landmarks.targets).square().sum(-1).mean()


def turned(latents: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """``||Q - I||^2`` of the Q in O(d) that fits ``latents @ Q`` to ``targets``, both (k, d).

    Q is drawn towards the identity a little, as in alignment, so that directions of no variance
    count as not turned.
    """
    eye = torch.eye(targets.shape[1], dtype=torch.float64, device=targets.device)
    fixed = targets.double()
    pull = PULL * fixed.square().sum() / len(eye)
    fit = latents.double().T @ fixed + pull * eye
    # The derivative of the polar factor divides by sums of singular values; that of the
    # decomposition divides by their differences and is lost where two are equal.
    with torch.no_grad():
        left, spectrum, right = torch.linalg.svd(fit)
        turn = left @ right
        inner = left.T @ (2 * (turn - eye)) @ right.T
        sums = (spectrum.unsqueeze(0) + spectrum.unsqueeze(1)).clamp_min(1e-9 * float(spectrum[0]))
        slope = left @ ((inner - inner.T) / sums) @ right
        value = (turn - eye).square().sum()
    # Of this value and slope: what follows is nought.
    cost: torch.Tensor = value + (slope * (fit - fit.detach())).sum()
    return cost.to(latents.dtype)
