"""The frame of a node's latents: how it has turned from the round's start, and turning it back.

Encoder and predictor may turn the latent space by any orthogonal Q without a change of what they
predict, so the updates of two nodes can differ by nothing but a Q and cancel in the mean.  Both the
round's prior and the trained weights encode the public probe, and

    Q = polar(S^T T + rho * tr(T^T T) / d * I)        S trained, T prior, (points, d)

is the orthogonal matrix that fits S Q to T best, drawn towards the identity by ``rho``.  The plain
form (rho = 0) turns directions of little variance at random, which only makes the update longer.
Where a pull of ``rho`` leaves much more than the plain form does, the frame has really turned, and
the plain form is taken.  Reflections are allowed: any Q in O(d) is a symmetry of the model.

The reference is the prior and not the warm start: all nodes of a round have it in common, and the
update is the difference to it.

Alignment is a stage on full weights, before clipping and noise.  Where the latents do not say how
to turn (a rank too low for it), the update is released as it is, with a warning: alignment is a
backstop, and a participant that is not aligned is worth more than none.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from lensemble.errors import DegenerateProcrustes, FrameDriftExceeded
from lensemble.params import FlatParameters, ParamLayout
from lensemble.workload import Gauge

SINGULAR_FLOOR = 1e-6
"""Of the largest singular value; below it a direction could turn anyhow."""
TURNED = 1.25
"""The pull leaves this many times what the plain form leaves: the frame has really turned."""
MAX_POINTS = 4096
"""Points of a probe that are encoded, spread evenly through it."""
_EXACT = 1e-6

Frame = NDArray[np.float64]
Latents = NDArray[np.float32] | Frame


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


def procrustes(latents: Latents, reference: Latents, rho: float) -> Frame:
    """Q (d, d), float64, in O(d), fitting ``latents @ Q`` to ``reference``, both (n, d).

    Raises:
        DegenerateProcrustes: see ``polar``.
    """
    moved, fixed = np.asarray(latents, np.float64), np.asarray(reference, np.float64)
    width = fixed.shape[1]
    pull = rho * float(np.square(fixed).sum()) / width
    return polar(moved.T @ fixed + pull * np.eye(width))


def fitted(latents: Latents, reference: Latents, rho: float) -> Frame:
    """``procrustes`` with a pull of ``rho``, without it where the frame has really turned.

    Raises:
        DegenerateProcrustes: see ``polar``.
    """
    try:
        plain = procrustes(latents, reference, 0.0)
    except DegenerateProcrustes:
        return procrustes(latents, reference, rho)
    try:
        pulled = procrustes(latents, reference, rho)
    except DegenerateProcrustes:
        # A frame turned right over cancels against the pull.
        return plain
    least = misalignment(latents @ plain, reference)
    turned = misalignment(latents @ pulled, reference) > TURNED * least + _EXACT
    return plain if turned else pulled


def misalignment(latents: Latents, reference: Latents) -> float:
    """Squared distance of ``latents`` from ``reference``, both (n, d), over the latter's variance.

    Unrelated latents of the same spread are about 2 apart; 0 where neither varies nor differs.
    """
    fixed = np.asarray(reference, np.float64)
    apart = float(np.square(np.asarray(latents, np.float64) - fixed).sum())
    spread = float(np.square(fixed - fixed.mean(axis=0)).sum())
    return apart / spread if spread > 0 else (np.inf if apart > 0 else 0.0)


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


def turn_weights(
    views: Mapping[str, NDArray[np.float32]], turn: Frame, history: int
) -> Mapping[str, NDArray[np.float32]]:
    """Turn the latent space of the tensors ``views`` by ``turn`` (d, d) in place; answers them.

    Latents become ``z @ turn`` and what the model predicts turns with them, up to one rounding to
    float32 of each weight.  Turned are the encoder's last layer, what the predictor does with the
    latents of each of ``history`` slots, and its last layer; nothing else is written to.
    """
    width = len(turn)
    for name in ("encoder.output", "predictor.output"):
        weight, bias = views[f"{name}.weight"], views[f"{name}.bias"]
        weight[...] = turn.T @ weight
        bias[...] = bias @ turn
    joint = views["predictor.input.weight"]
    for slot in range(history):
        part = slice(slot * width, (slot + 1) * width)
        joint[:, part] = joint[:, part] @ turn
    return views


class Alignment:
    """The gauge stage of one release, and what it found.

    Args:
        terms: of the workload.
        reference: the prior's latents of the probe, (n, d).
        latents: the trained weights' latents of it.
        history: slots of latents that the predictor takes.

    Raises:
        FrameDriftExceeded: the latents stay further from the frame than a ``terms.limit`` above 0.
    """

    def __init__(self, terms: Gauge, reference: Latents, latents: Latents, history: int) -> None:
        self._history = history
        self._turn = np.eye(reference.shape[1])
        warning, measured = "", self._turn
        try:
            measured = fitted(latents, reference, terms.rho)
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
