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
_Indices = npt.NDArray[np.intp]


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
    peak = float(logits.max())
    if not math.isfinite(peak):
        raise ChunkRefused("the logits are not finite: the weights or the activations are broken")
    # Exponentials of the logits as they are: several times as fast as of doubles, and as good.
    total = float(np.exp(logits - logits.max()).sum(dtype=np.float64))
    penalised = _penalised(logits, how)
    if how.temperature == 0:
        token = int(penalised.argmax())
    else:
        token = _drawn(penalised.astype(np.float64), how)
    return token, float(logits[token]) - peak - math.log(total)


def _penalised(logits: Floats, how: Sampling) -> Floats:
    """Recent tokens made less likely (Keskar et al., "CTRL", 2019, section 4.1)."""
    if how.repeat_penalty == 1 or not how.recent:
        return logits
    recent = np.unique(np.array(how.recent, np.int64))
    recent = recent[recent < len(logits)]
    picked = logits[recent].astype(np.float64)
    penalised = logits.astype(np.float64)
    penalised[recent] = np.where(
        picked > 0, picked / how.repeat_penalty, picked * how.repeat_penalty
    )
    return penalised


def _drawn(values: _Doubles, how: Sampling) -> int:
    """A token by ``values``, its cuts as ``draw`` says; ``tokens`` are what is left, ascending."""
    tokens = np.arange(len(values))
    if 0 < how.top_k < len(values):
        tokens = _largest(values, how.top_k)
        values = values[tokens]
    # Shifted first: so nothing overflows, however small the temperature.
    weights = np.exp((values - values.max()) / how.temperature)
    if how.top_p < 1:
        kept = _nucleus(weights, how.top_p)
        tokens, weights = tokens[kept], weights[kept]
    below = weights.cumsum()
    # Rounding must not lead beyond the last weight that counts.
    at = min(_uniform(how) * below[-1], math.nextafter(float(below[-1]), 0.0))
    return int(tokens[below.searchsorted(at, side="right")])


def _largest(values: _Doubles, count: int) -> _Indices:
    """The ``count`` largest, ascending by index; of equals the lowest indices."""
    least = np.partition(values, -count)[-count]
    above = np.flatnonzero(values > least)
    equal = np.flatnonzero(values == least)[: count - len(above)]
    return np.sort(np.concatenate([above, equal]))


def _nucleus(weights: _Doubles, share: float) -> _Indices:
    """The fewest most likely that hold ``share`` of the weight (Holtzman et al., 2020)."""
    total = weights.sum()
    # All that are smaller than this hold less than what is cut, so they need no sorting.
    candidates = np.flatnonzero(weights >= total * (1 - share) / len(weights))
    order = candidates[np.argsort(-weights[candidates], kind="stable")]
    held = weights[order].cumsum()
    return np.sort(order[: int(held.searchsorted(total * share, side="left")) + 1])


def _uniform(how: Sampling) -> float:
    """In [0, 1), for this seed and index alone."""
    generator = np.random.Philox(key=how.seed, counter=[0, how.index, 0, 0])
    return float(np.random.Generator(generator).random())
