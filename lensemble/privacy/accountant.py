"""How much privacy a count of releases has spent.

Counts of identical mechanisms are composed at once.  Without sampling the composition of Gaussian
mechanisms is Gaussian and its epsilon exact; with it, the privacy loss distribution is discretised
pessimistically, so that what is said is never too little.
"""

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import ModuleType
from typing import NamedTuple

from lensemble.errors import ConfigError
from lensemble.workload import Workload

MAX_RELEASES = 100_000
"""Further releases that are counted; what a budget allows beyond is as good as unlimited."""
PRIVATE_BELOW = 50.0
"""An epsilon above this promises nothing worth the name."""
_NARROW = 0.3
"""Noise multiplier under which sampling is not credited: epsilon is in the hundreds there, and the
loss distribution too wide to be discretised.  Sampling never spends more than none."""
_CROWDED = 400.0
"""Information (the sum of ``(rate / sigma)**2``) above which sampling is not credited either."""
_FINE = 1e-4
_FINE_PART = 1e-5
"""Grid of the loss distributions: this part of the epsilon that matters, and not below ``_FINE``.
Measured: within 0.4 % at a noise multiplier of 10, far closer at less."""
_COARSE = 30.0
_FAR = 3.0
"""How many times the epsilon that matters is far enough beyond for the coarse grid."""
_SIGMA_TOLERANCE = 1e-3


class Mechanism(NamedTuple):
    """Gaussian noise of ``sigma`` times the sensitivity on what enters with probability ``rate``.

    Neighbouring data sets differ by one unit, added or removed.
    """

    sigma: float
    rate: float = 1.0


class Cost(NamedTuple):
    """What one release of a workload spends: ``steps`` times ``mechanism``."""

    mechanism: Mechanism
    steps: int = 1


def cost_of(workload: Workload) -> Cost:
    """The cost of one release of ``workload``, whose privacy is enabled.

    In both placements the noise that counts is ``noise_multiplier``: of each release, or of the sum
    which is all that is revealed.
    """
    private = workload.privacy
    mechanism = Mechanism(private.noise_multiplier, private.sample_rate)
    return Cost(mechanism, workload.inner.steps if private.unit == "episode" else 1)


def epsilon(counts: Mapping[Mechanism, int], delta: float, upto: float = 10.0) -> float:
    """The epsilon at ``delta`` of all of ``counts`` together; 0 if nothing was released.

    ``upto`` is the epsilon that matters; where much more is spent, it is told less finely.

    Raises:
        ConfigError: the accounting library is not installed.
    """
    full, sampled = _split(counts)
    if not sampled:
        return _gaussian(full, delta)
    grid = max(_FINE, _FINE_PART * upto)
    rough = _composed(full, sampled, delta, grid * _COARSE)
    return rough if rough > _FAR * upto else _composed(full, sampled, delta, grid)


def _split(counts: Mapping[Mechanism, int]) -> tuple[float, dict[Mechanism, int]]:
    """The information of what counts in full, and the counts of what is credited as sampled."""
    sampled = {
        each: count
        for each, count in counts.items()
        if count and each.rate < 1.0 and each.sigma >= _NARROW
    }
    full = sum(count / m.sigma**2 for m, count in counts.items() if m not in sampled)
    crowd = sum(count * (m.rate / m.sigma) ** 2 for m, count in sampled.items())
    if full + crowd > _CROWDED:
        return sum(count / m.sigma**2 for m, count in counts.items()), {}
    return full, sampled


def _gaussian(information: float, delta: float) -> float:
    """Of Gaussian mechanisms whose ``1 / sigma**2`` add up to ``information``."""
    if information <= 0.0:
        return 0.0
    exact = _library("dp_accounting.gaussian_mechanism").get_epsilon_gaussian
    return float(exact(1.0 / math.sqrt(information), delta))


def _composed(full: float, sampled: Mapping[Mechanism, int], delta: float, grid: float) -> float:
    parts = [_loss(mechanism, grid).self_compose(count) for mechanism, count in sampled.items()]
    if full > 0.0:
        parts.append(_loss(Mechanism(1.0 / math.sqrt(full)), grid))
    whole = parts[0]
    for part in parts[1:]:
        whole = whole.compose(part)
    return float(whole.get_epsilon_for_delta(delta))


@lru_cache(maxsize=16)
def _loss(mechanism: Mechanism, grid: float):  # type: ignore[no-untyped-def]  # noqa: ANN202  # untyped library
    distributions = _library("dp_accounting.pld.privacy_loss_distribution")
    return distributions.from_gaussian_mechanism(
        mechanism.sigma, sampling_prob=mechanism.rate, value_discretization_interval=grid
    )


def _library(module: str) -> ModuleType:
    import importlib  # noqa: PLC0415  # scipy comes with it: only where something is accounted

    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"accounting for privacy needs the package dp-accounting ({error})",
            "Install it: pip install 'lensemble[privacy]'.",
        ) from error


def spent_after(
    counts: Mapping[Mechanism, int], cost: Cost, releases: int, delta: float, upto: float = 10.0
) -> float:
    """The epsilon of ``counts`` and ``releases`` more of ``cost``; see ``epsilon``."""
    total = dict(counts)
    total[cost.mechanism] = total.get(cost.mechanism, 0) + releases * cost.steps
    return epsilon(total, delta, upto)


def releases_left(counts: Mapping[Mechanism, int], cost: Cost, budget: float, delta: float) -> int:
    """How many more releases of ``cost`` keep the epsilon within ``budget``."""

    def within(more: int, upto: float) -> bool:
        return spent_after(counts, cost, more, delta, upto) <= budget

    # On a coarse grid first, which says a little too much: the true number is that or a few more.
    rough = _last(lambda more: within(more, budget * _COARSE), 0)
    return _last(lambda more: within(more, budget), rough)


def _last(holds: Callable[[int], bool], near: int) -> int:
    """The greatest number up to ``MAX_RELEASES`` that ``holds``, as all smaller ones do; or 0.

    Looks around ``near`` in steps that double, so that it costs little where that is close.
    """
    low, step = near, 1
    while low > 0 and not holds(low):
        low, step = max(0, low - step), 2 * step
    high = near if low < near else low + (step := 1)
    while low >= near and high <= MAX_RELEASES and holds(high):
        low, step = high, 2 * step
        high = low + step
    high = min(high, MAX_RELEASES + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def sigma_for(budget: float, delta: float, releases: int, cost: Cost) -> float:
    """The least noise multiplier with which ``releases`` keep within ``budget``.

    Only rate and steps of ``cost`` matter.  The answer is at most 0.1 % above the least.
    """
    steps = releases * cost.steps
    full = _library("dp_accounting.gaussian_mechanism").get_sigma_gaussian(budget, delta)
    high = float(full) * math.sqrt(steps)
    if cost.mechanism.rate >= 1.0:
        return high
    low = min(_NARROW, high)
    while high > low * (1.0 + _SIGMA_TOLERANCE):
        middle = math.sqrt(low * high)
        mechanism = Mechanism(middle, cost.mechanism.rate)
        enough = epsilon({mechanism: steps}, delta, budget) <= budget
        low, high = (low, middle) if enough else (middle, high)
    return high
