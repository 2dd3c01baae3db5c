"""What happens to a difference before it is encoded: clip, enter or not, noise, quantise.

In this order only.  Noise hides what was clipped, so nothing may grow after it was measured;
quantising after the noise changes nothing about the guarantee, before it the noise would show.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lensemble.errors import InvariantError
from lensemble.params import FlatParameters
from lensemble.workload import Privacy, Workload
from lensemble_node.worker.training.noise import SecretNoise
from lensemble_node.worker.training.release import Extent, Pipeline
from lensemble_node.worker.training.stops import Diverged

BLOCK = 256
STEPS = 127
_PIECE = BLOCK << 10


def norm(flat: NDArray[np.float32]) -> float:
    """The L2 norm, summed in float64."""
    extent = Extent()
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, len(flat), _PIECE):
            extent.include(flat[start : start + _PIECE])
    return extent.l2_norm


def clip(flat: FlatParameters, limit: float) -> float:
    """Scale ``flat`` (float32) in place to a norm of at most ``limit``; the factor used.

    Rounding to float32 can overshoot by a little, so that is looked at and scaled again.

    Raises:
        Diverged: a coordinate is not finite.
        InvariantError: the norm is over the limit after all.
    """
    before = norm(flat)
    if not math.isfinite(before):
        raise Diverged("the update has a coordinate that is not finite")
    factor = 1.0
    while (now := norm(flat)) > limit:
        step = np.float32(min(limit / now, 1.0 - 2.0**-23))
        flat *= step
        factor *= float(step)
    if not norm(flat) <= limit:
        raise InvariantError(f"an update clipped to {limit:g} has the norm {norm(flat)!r}")
    return factor


def quantize(flat: FlatParameters) -> FlatParameters:
    """``flat`` as 8-bit numbers hold it, in place: blocks of 256, each on 255 steps of its largest.

    No coordinate moves by more than half a step of its block, and none grows past the largest.
    """
    whole = len(flat) - len(flat) % BLOCK
    for start in range(0, whole, _PIECE):
        _round_blocks(flat[start : min(start + _PIECE, whole)].reshape(-1, BLOCK))
    if whole < len(flat):
        _round_blocks(flat[whole:].reshape(1, -1))
    return flat


def _round_blocks(blocks: NDArray[np.float32]) -> None:
    step = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(STEPS)
    safe = np.where(step > 0, step, np.float32(1))
    small = np.clip(np.rint(blocks / safe), -STEPS, STEPS).astype(np.int8)
    np.multiply(small, step, out=blocks, casting="unsafe")


@dataclass
class Protection:
    """The stages that ``workload`` asks for, for one release, and what they did."""

    workload: Workload
    noise: SecretNoise
    clip_factor: float | None = None
    """By which the difference was scaled; None where nothing is clipped."""

    def pipeline(self) -> Pipeline:
        stages = []
        private = self.workload.privacy
        if private.of_participants:
            stages += [self._clip, self._enter, self._add_noise]
        if self.workload.release.quantize == "int8":
            stages.append(quantize)
        return Pipeline(on_difference=tuple(stages))

    @property
    def _terms(self) -> Privacy:
        return self.workload.privacy

    def _clip(self, flat: FlatParameters) -> FlatParameters:
        self.clip_factor = clip(flat, self._terms.clip_norm)
        return flat

    def _enter(self, flat: FlatParameters) -> FlatParameters:
        """Take the update out of the round, unless the coin says otherwise.

        What is released looks the same to everyone else; that is what the accountant credits.
        """
        if self._terms.sample_rate < 1.0 and not self.noise.coins(1, self._terms.sample_rate)[0]:
            flat[...] = 0.0
        return flat

    def _add_noise(self, flat: FlatParameters) -> FlatParameters:
        self.noise.add_to(flat, self._terms.noise_sd)
        return flat
