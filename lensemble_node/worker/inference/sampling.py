"""Draws the next token: a pure function of logits and ``Sampling``.

The same logits, settings, seed and index give the same token on any machine: one uniform number per
index from a counter-based generator (Philox 4x64-10: Salmon et al., "Parallel random numbers: as
easy as 1, 2, 3", 2011), and cumulative sums in order of token ids.
"""

import math

import numpy as np
import numpy.typing as npt

from lensemble.errors import ChunkRefused
from lensemble.stage_chunk import MAX_RECENT, Sampling

Floats = npt.NDArray[np.floating]
_Doubles = npt.NDArray[np.float64]


def check(how: Sampling) -> None:
    """Raises ``ChunkRefused`` for settings by which no token can be drawn."""
    for name, value, good in (
        ("temperature", how.temperature, 0 <= how.temperature < math.inf),
        ("top_p", how.top_p, 0 < how.top_p <= 1),
        ("top_k", how.top_k, how.top_k >= 0),
        ("repeat_penalty", how.repeat_penalty, 0 < how.repeat_penalty < math.inf),
        ("recent", len(how.recent), len(how.recent) <= MAX_RECENT),
    ):
        if not good:
            raise ChunkRefused(f"no token can be drawn with {name} {value}")


def draw(logits: Floats, how: Sampling) -> tuple[int, float]:
    """Token and its log-probability under the model itself.

    Greedy at temperature 0, and of equals the lowest id.  Otherwise the penalty for recent tokens
    comes first, then temperature, ``top_k``, and ``top_p`` of what that left.

    Args:
        logits: (vocabulary,), any float dtype.
        how: the settings; see ``check``.

    Raises:
        ChunkRefused: a logit is not a finite number.
    """
    values = logits.astype(np.float64)
    peak = values.max()
    total = np.exp(values - peak).sum()
    if not math.isfinite(total):
        raise ChunkRefused("the logits are not finite: the weights or the activations are broken")
    penalised = _penalised(values, how)
    if how.temperature == 0:
        token = int(penalised.argmax())
    else:
        # Shifted first: so nothing overflows, however small the temperature.
        token = _drawn((penalised - penalised.max()) / how.temperature, how)
    return token, float(values[token] - peak - math.log(total))


def _penalised(values: _Doubles, how: Sampling) -> _Doubles:
    """Recent tokens made less likely (Keskar et al., "CTRL", 2019, section 4.1)."""
    if how.repeat_penalty == 1 or not how.recent:
        return values
    recent = np.unique(np.array(how.recent, np.int64))
    recent = recent[recent < len(values)]
    picked = values[recent]
    values = values.copy()
    values[recent] = np.where(picked > 0, picked / how.repeat_penalty, picked * how.repeat_penalty)
    return values


def _drawn(scaled: _Doubles, how: Sampling) -> int:
    weights = np.exp(scaled)
    if 0 < how.top_k < len(weights):
        weights = _only(weights, _largest(weights, how.top_k))
    if how.top_p < 1:
        weights = _only(weights, _nucleus(weights, how.top_p))
    below = weights.cumsum()
    # Beyond the last weight that counts only by rounding.
    at = min(_uniform(how) * below[-1], math.nextafter(float(below[-1]), 0.0))
    return int(below.searchsorted(at, side="right"))


def _only(weights: _Doubles, kept: npt.NDArray[np.intp]) -> _Doubles:
    cut = np.zeros_like(weights)
    cut[kept] = weights[kept]
    return cut


def _largest(weights: _Doubles, count: int) -> npt.NDArray[np.intp]:
    """Of the ``count`` largest; of equals the lowest ids."""
    least = np.partition(weights, -count)[-count]
    above = np.flatnonzero(weights > least)
    return np.concatenate([above, np.flatnonzero(weights == least)[: count - len(above)]])


def _nucleus(weights: _Doubles, share: float) -> npt.NDArray[np.intp]:
    """The fewest most likely tokens that hold ``share`` of the weight (Holtzman et al., 2020)."""
    total = weights.sum()
    # All that are smaller than this hold less than what is cut, so they need no sorting.
    candidates = np.flatnonzero(weights >= total * (1 - share) / len(weights))
    order = candidates[np.argsort(-weights[candidates], kind="stable")]
    held = weights[order].cumsum()
    return order[: int(held.searchsorted(total * share, side="left")) + 1]


def _uniform(how: Sampling) -> float:
    """In [0, 1), for this seed and index alone."""
    generator = np.random.Philox(key=how.seed, counter=[0, how.index, 0, 0])
    return float(np.random.Generator(generator).random())
