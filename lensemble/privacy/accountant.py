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


def epsilon(counts: Mapping[Mechanism, int], delta: float) -> float:
    """The epsilon at ``delta`` of all of ``counts`` together; 0 if nothing was released.

    Raises:
        ConfigError: the accounting library is not installed.
    """
    full, sampled = 0.0, dict[Mechanism, int]()
    for mechanism, count in counts.items():
        if mechanism.rate >= 1.0 or mechanism.sigma < _NARROW:
            full += count / mechanism.sigma**2
        elif count:
            sampled[mechanism] = count
    if sampled and full > 1.0 / _NARROW**4:
        full += sum(count / each.sigma**2 for each, count in sampled.items())
        sampled = {}
    if not sampled:
        return _gaussian(full, delta)
    return _composed(full, sampled, delta)


def _gaussian(information: float, delta: float) -> float:
    """Of Gaussian mechanisms whose ``1 / sigma**2`` add up to ``information``."""
    if information <= 0.0:
        return 0.0
    exact = _library("dp_accounting.gaussian_mechanism").get_epsilon_gaussian
    return float(exact(1.0 / math.sqrt(information), delta))


def _composed(full: float, sampled: Mapping[Mechanism, int], delta: float) -> float:
    parts = [_loss(mechanism).self_compose(count) for mechanism, count in sampled.items()]
    if full > 0.0:
        parts.append(_loss(Mechanism(1.0 / math.sqrt(full))))
    whole = parts[0]
    for part in parts[1:]:
        whole = whole.compose(part)
    return float(whole.get_epsilon_for_delta(delta))


@lru_cache(maxsize=64)
def _loss(mechanism: Mechanism):  # type: ignore[no-untyped-def]  # noqa: ANN202  # untyped library
    distributions = _library("dp_accounting.pld.privacy_loss_distribution")
    return distributions.from_gaussian_mechanism(mechanism.sigma, sampling_prob=mechanism.rate)


def _library(module: str) -> ModuleType:
    import importlib  # noqa: PLC0415  # scipy comes with it: only where something is accounted

    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"accounting for privacy needs the package dp-accounting ({error})",
            "Install it: pip install 'lensemble[privacy]'.",
        ) from error


def spent_after(counts: Mapping[Mechanism, int], cost: Cost, releases: int, delta: float) -> float:
    """The epsilon of ``counts`` and ``releases`` more of ``cost``."""
    total = dict(counts)
    total[cost.mechanism] = total.get(cost.mechanism, 0) + releases * cost.steps
    return epsilon(total, delta)


def releases_left(counts: Mapping[Mechanism, int], cost: Cost, budget: float, delta: float) -> int:
    """How many more releases of ``cost`` keep the epsilon within ``budget``."""
    return _last(lambda more: spent_after(counts, cost, more, delta) <= budget, MAX_RELEASES)


def _last(holds: Callable[[int], bool], most: int) -> int:
    """The greatest number up to ``most`` that ``holds``, which all smaller ones then do; 0 if none.

    Steps out from 1 by doubling, so that large numbers are tried only where they may be answers.
    """
    low, high = 0, 1
    while high <= most and holds(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
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
        enough = epsilon({Mechanism(middle, cost.mechanism.rate): steps}, delta) <= budget
        low, high = (low, middle) if enough else (middle, high)
    return high
