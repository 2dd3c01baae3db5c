"""The frame of a node's latents: how it has turned from the round's start, and turning it back.

Encoder and predictor may turn the latent space by any orthogonal Q without a change of what they
predict, so the updates of two nodes can differ by nothing but a Q and cancel in the mean.  Both the
round's prior and the trained weights encode the public probe, and

    Q = polar(S^T T + rho * v * P)        S trained, T prior, (points, d)

is the orthogonal matrix that fits S Q to T best, drawn by ``rho`` towards the one that changes the
weights least.  v is the mean variance of a latent dimension, tr(T^T T) / d, and P compares the
trained weights at the surface with the prior's as S^T T compares latents, scaled so that it is
about the identity where nothing has turned.  The plain form (rho = 0) turns directions of little
variance at random, which only makes the update longer.  A pull towards the identity itself would
do against that, but would not let a frame that has really turned come back; P turns with the
frame, so what is released does not depend on how far it had turned.  Reflections are allowed: any
Q in O(d) is a symmetry of the model.

The reference is the prior and not the warm start: all nodes of a round have it in common, and the
update is the difference to it.

Alignment is a stage on full weights, before clipping and noise.  Where the latents do not say how
to turn (a rank too low for it), the update is released as it is, with a warning: alignment is a
backstop, and a participant that is not aligned is worth more than none.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from lensemble.errors import DegenerateProcrustes, FrameDriftExceeded
from lensemble.params import FlatParameters, ParamLayout
from lensemble.workload import Gauge

SINGULAR_FLOOR = 1e-6
"""Of the largest singular value; below it a direction could turn anyhow."""
MAX_POINTS = 4096
"""Points of a probe that are encoded, spread evenly through it."""
_LEAST = 1e-30

Frame = NDArray[np.float64]
Latents = NDArray[np.float32] | Frame
Views: TypeAlias = Mapping[str, NDArray[np.float32]]


class Drift(msgspec.Struct, frozen=True, kw_only=True):
    """What a node's training did to the frame of the probe's latents.

    ``before``, ``after``: squared distance from the prior's latents, as released without and with
    turning, as a fraction of the latent variance.  Degrees: mean, root mean square and largest of
    the principal angles of Q.  ``dimension``: participation ratio of the latent spectrum, between
    1 and d.  ``std``: square root of the mean latent variance.
    """

    before: float
    after: float
    mean_degrees: float
    rms_degrees: float
    max_degrees: float
    dimension: float
    std: float
    aligned: bool = False
    warning: str = ""


def polar(matrix: Frame) -> Frame:
    """The orthogonal factor of ``matrix`` (d, d): the nearest orthogonal matrix.

    Raises:
        DegenerateProcrustes: it is not determined: a singular value is below ``SINGULAR_FLOOR`` of
            the largest.
    """
    if not np.isfinite(matrix).all():
        raise DegenerateProcrustes("the latents of the probe are not finite")
    left, spectrum, right = np.linalg.svd(matrix)
    if not spectrum[-1] > SINGULAR_FLOOR * spectrum[0]:
        raise DegenerateProcrustes(
            f"the probe does not say how the frame has turned: singular values from "
            f"{spectrum[-1]:.3g} to {spectrum[0]:.3g}, a ratio below {SINGULAR_FLOOR:g}",
            "Use a probe with more varied points; a collapsed latent needs more lambda_sig.",
        )
    turn: Frame = left @ right
    return turn


def procrustes(latents: Latents, reference: Latents, pull: Frame) -> Frame:
    """Q (d, d), float64, in O(d), fitting ``latents @ Q`` to ``reference``, both (n, d).

    ``pull`` (d, d) is in mean variances of a dimension of ``reference``.

    Raises:
        DegenerateProcrustes: see ``polar``.
    """
    moved, fixed = np.asarray(latents, np.float64), np.asarray(reference, np.float64)
    variance = float(np.square(fixed).sum()) / fixed.shape[1]
    return polar(moved.T @ fixed + variance * pull)


def kinship(trained: Views, prior: Views, history: int) -> Frame:
    """How the weights ``trained`` at the latent surface lie to those of ``prior``, (d, d), float64.

    Turning by the polar factor of this brings them closest.  It is scaled by the prior's: the
    identity, where no weight has changed and all dimensions have equal weights.
    """
    cross, own = _cross(trained, prior, history), _cross(prior, prior, history)
    mean = float(np.trace(own)) / len(own)
    return cross / mean if mean > 0 else np.eye(len(own))


def _cross(one: Views, other: Views, history: int) -> Frame:
    total = np.zeros((len(one["encoder.output.bias"]),) * 2)
    for a, b in zip(_surface(one, history), _surface(other, history), strict=True):
        total += a.astype(np.float64).T @ b.astype(np.float64)
    return total


def _surface(views: Views, history: int) -> Iterator[NDArray[np.float32]]:
    """What turns with the latents, each (anything, d), multiplied by Q from the right."""
    for name in ("encoder.output", "predictor.output"):
        yield views[f"{name}.weight"].T
        yield views[f"{name}.bias"][None, :]
    joint, width = views["predictor.input.weight"], len(views["encoder.output.bias"])
    for slot in range(history):
        yield joint[:, slot * width : (slot + 1) * width]


def misalignment(latents: Latents, reference: Latents) -> float:
    """Squared distance of ``latents`` from ``reference``, both (n, d), over the latter's variance.

    Unrelated latents of the same spread are about 2 apart.
    """
    fixed = np.asarray(reference, np.float64)
    apart = float(np.square(np.asarray(latents, np.float64) - fixed).sum())
    spread = float(np.square(fixed - fixed.mean(axis=0)).sum())
    return apart / max(spread, _LEAST)


def principal_angles(turn: Frame) -> Frame:
    """Degrees (d,) in [0, 180], one for each eigenvalue of the orthogonal ``turn`` (d, d)."""
    angles: Frame = np.degrees(np.abs(np.angle(np.linalg.eigvals(turn))))
    return angles


def participation_ratio(latents: Latents) -> float:
    """Effective dimension of ``latents`` (n, d): (sum of variances)^2 over the sum of squares.

    It is no alarm for collapse: of a latent that is all noise it is at its highest.
    """
    spectrum = np.linalg.eigvalsh(np.cov(np.asarray(latents, np.float64).T))
    squares = float(np.square(spectrum).sum())
    return float(spectrum.sum()) ** 2 / squares if squares > 0 else 0.0


def turn_weights(views: Views, turn: Frame, history: int) -> None:
    """Turn the latent space of the tensors ``views`` by ``turn`` (d, d), in place.

    Latents become ``z @ turn`` and what the model predicts turns with them, up to one rounding to
    float32 of each weight.  Turned are the encoder's last layer, what the predictor does with the
    latents of each of ``history`` slots, and its last layer; nothing else is written to.
    """
    for part in _surface(views, history):
        part[...] = part @ turn


@dataclass(frozen=True)
class Sight:
    """A model as seen on the probe: its latents (n, d), and its weights by name."""

    latents: Latents
    views: Views


class Alignment:
    """The gauge stage of one release, and what it found.

    Args:
        terms: of the workload.
        prior: the model that the round started from.
        trained: what became of it.
        history: slots of latents that the predictor takes.

    Raises:
        FrameDriftExceeded: the latents stay further from the frame than a ``terms.limit`` above 0.
    """

    def __init__(self, terms: Gauge, prior: Sight, trained: Sight, history: int) -> None:
        self._history = history
        latents, reference = trained.latents, prior.latents
        self._turn = np.eye(reference.shape[1])
        warning, measured = "", self._turn
        pull = terms.rho * kinship(trained.views, prior.views, history)
        try:
            measured = procrustes(latents, reference, pull)
        except DegenerateProcrustes as degenerate:
            warning = f"released without alignment: {degenerate.message}"
        angles = principal_angles(measured)
        rms = float(np.sqrt(np.square(angles).mean()))
        aligned = terms.align and not warning and rms > terms.threshold_degrees
        if aligned:
            self._turn = measured
        spread = np.asarray(latents, np.float64).var(axis=0).mean()
        self.drift = Drift(
            before=misalignment(latents, reference),
            after=misalignment(latents @ self._turn, reference),
            mean_degrees=float(angles.mean()),
            rms_degrees=rms,
            max_degrees=float(angles.max()),
            dimension=participation_ratio(latents),
            std=float(np.sqrt(spread)),
            aligned=aligned,
            warning=warning,
        )
        if terms.align and 0 < terms.limit < self.drift.after:
            raise FrameDriftExceeded(
                f"the latents of the probe are {self.drift.after:.3g} latent variances from the "
                f"round's prior after alignment; gauge.limit is {terms.limit:g}"
            )

    def stage(self, layout: ParamLayout) -> "Turning":
        """What turns full weights of ``layout``."""
        return Turning(layout, self._turn if self.drift.aligned else None, self._history)


@dataclass(frozen=True)
class Turning:
    """A stage on full weights; without ``turn`` they pass untouched."""

    layout: ParamLayout
    turn: Frame | None
    history: int

    def __call__(self, flat: FlatParameters) -> FlatParameters:
        if self.turn is not None:
            turn_weights(self.layout.views(flat), self.turn, self.history)
        return flat
