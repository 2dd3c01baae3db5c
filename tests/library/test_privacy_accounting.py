import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lensemble.errors import PrivacyBudgetExceeded
from lensemble.privacy import accountant, plan
from lensemble.privacy.accountant import Cost, Mechanism, epsilon, releases_left, sigma_for
from lensemble.workload import FieldTerms, Inner, Privacy, Workload, WorldModelTask

DELTA = 1e-5


def private(**terms: object) -> Workload:
    return Workload(
        field=FieldTerms(k=16), privacy=Privacy.model_validate({"enabled": True} | terms)
    )


# ---- what is known otherwise ----


def normal(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2.0))


def exact_gaussian(sigma: float, count: int, delta: float) -> float:
    """Balle and Wang's closed form for ``count`` Gaussian mechanisms, by bisection."""
    mu = math.sqrt(count) / sigma
    low, high = 0.0, 10.0 + 5.0 * mu * mu + 20.0 * mu
    for _ in range(200):
        middle = 0.5 * (low + high)
        tail = normal(-middle / mu - 0.5 * mu)
        risk = normal(-middle / mu + 0.5 * mu)
        risk -= math.exp(middle + math.log(tail)) if tail > 0 else 0.0
        low, high = (middle, high) if risk > delta else (low, middle)
    return high


def renyi(sigma: float, rate: float, count: int, delta: float) -> float:
    """An upper bound: integer orders of the sampled Gaussian, and the plain conversion."""
    best = math.inf
    for order in range(2, 257):
        terms = [
            math.lgamma(order + 1)
            - math.lgamma(k + 1)
            - math.lgamma(order - k + 1)
            + ((order - k) * math.log1p(-rate) if order > k else 0.0)
            + k * math.log(rate)
            + k * (k - 1) / (2 * sigma**2)
            for k in (range(order + 1) if rate < 1 else (order,))
        ]
        top = max(terms)
        loss = (top + math.log(sum(math.exp(t - top) for t in terms))) / (order - 1)
        best = min(best, count * loss + math.log(1 / delta) / (order - 1))
    return best


def convolved(sigma: float, rate: float, count: int, delta: float, reach: float) -> float:
    """The losses of both directions on a grid, their distribution raised to ``count`` by FFT."""
    points = 1 << 18
    step = 2 * reach / points
    edges = (np.arange(points + 1) - points // 2 - 0.5) * step
    with np.errstate(divide="ignore", invalid="ignore"):
        at = sigma**2 * np.log((np.exp(edges) - (1 - rate)) / rate) + 0.5
    at = np.where(np.isnan(at), -np.inf, at)
    erf = np.frompyfunc(normal, 1, 1)
    without = erf(np.clip(at / sigma, -40, 40)).astype(float)
    entered = erf(np.clip((at - 1) / sigma, -40, 40)).astype(float)
    removed = np.diff((1 - rate) * without + rate * entered)
    added = np.diff(without)[::-1]
    values = (np.arange(points) - points // 2) * step
    worst = 0.0
    # Turned round, the grid of the other direction is shifted by one point.
    for mass, shift in ((removed, 0), (added, 1)):
        total = np.fft.irfft(np.fft.rfft(np.fft.ifftshift(np.roll(mass, shift))) ** count, points)
        total = np.fft.fftshift(total)
        low, high = 0.0, reach
        for _ in range(60):
            middle = 0.5 * (low + high)
            over = values > middle
            risk = float((total[over] * -np.expm1(middle - values[over])).sum())
            low, high = (middle, high) if risk > delta else (low, middle)
        worst = max(worst, high)
    return worst


@pytest.mark.parametrize("sigma", [0.3, 1.0, 4.0, 30.0])
@pytest.mark.parametrize("count", [1, 2, 10, 1000])
def test_full_participation_is_the_closed_form(sigma: float, count: int) -> None:
    found = epsilon({Mechanism(sigma): count}, DELTA)
    assert found == pytest.approx(exact_gaussian(sigma, count, DELTA), rel=1e-3)
    assert found <= renyi(sigma, 1.0, count, DELTA)


def test_the_figures_that_people_quote() -> None:
    quoted = {1: (5.30, 4.38), 2: (7.84, 6.57), 3: (9.84, 8.39), 10: (20.76, 17.86)}
    for count, (bound, exact) in quoted.items():
        assert renyi(1.0, 1.0, count, DELTA) == pytest.approx(bound, abs=0.006)
        assert epsilon({Mechanism(1.0): count}, DELTA) == pytest.approx(exact, abs=0.006)
    assert epsilon({Mechanism(1.0): 1000}, DELTA) == pytest.approx(633.93, abs=0.01)
    assert epsilon({Mechanism(1.0, 0.1): 1000}, DELTA) == pytest.approx(25.21, abs=0.01)


@pytest.mark.parametrize(
    ("sigma", "rate", "count"), [(1.0, 0.1, 1), (1.0, 0.01, 1000), (2.0, 0.1, 200), (0.8, 0.3, 5)]
)
def test_sampling_agrees_with_a_convolution_and_stays_under_the_bound(
    sigma: float, rate: float, count: int
) -> None:
    found = epsilon({Mechanism(sigma, rate): count}, DELTA)
    assert found == pytest.approx(convolved(sigma, rate, count, DELTA, 30.0), rel=0.01)
    assert found <= renyi(sigma, rate, count, DELTA)


# ---- how it behaves ----


def test_counts_of_different_mechanisms_compose() -> None:
    half, whole = Mechanism(math.sqrt(2.0)), Mechanism(1.0)
    assert epsilon({half: 2}, DELTA) == pytest.approx(epsilon({whole: 1}, DELTA))
    mixed = {whole: 1, Mechanism(1.0, 0.1): 10}
    parts = [epsilon({m: c}, DELTA) for m, c in mixed.items()]
    assert max(parts) < epsilon(mixed, DELTA) < sum(parts)
    assert epsilon({}, DELTA) == epsilon({whole: 0}, DELTA) == 0.0


def test_noise_too_narrow_to_be_sampled_counts_in_full() -> None:
    assert epsilon({Mechanism(0.1, 0.01): 3}, DELTA) == epsilon({Mechanism(0.1): 3}, DELTA)
    crowd = {Mechanism(1.0, 0.5): 1_000_000}
    assert epsilon(crowd, DELTA) == epsilon({Mechanism(1.0): 1_000_000}, DELTA)
    drowned = {Mechanism(0.02): 1, Mechanism(1.0, 0.1): 5}
    assert epsilon(drowned, DELTA) >= epsilon({Mechanism(0.02): 1}, DELTA)


@settings(max_examples=25, deadline=None)
@given(st.floats(0.5, 20.0), st.sampled_from([1.0, 0.1, 0.01]), st.integers(1, 300))
def test_more_is_never_less(sigma: float, rate: float, count: int) -> None:
    mechanism = Mechanism(sigma, rate)
    assert epsilon({mechanism: count}, DELTA) <= epsilon({mechanism: count + 1}, DELTA) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("cost", "budget"),
    [
        (Cost(Mechanism(1.0)), 8.0),
        (Cost(Mechanism(6.01)), 8.0),
        (Cost(Mechanism(1.0, 0.1), 10), 8),
        (Cost(Mechanism(1.0, 0.5), 6), 1e3),
        (Cost(Mechanism(1.0)), 1e-3),
    ],
)
def test_the_last_release_fits_and_one_more_does_not(cost: Cost, budget: float) -> None:
    left = releases_left({}, cost, budget, DELTA)
    assert accountant.spent_after({}, cost, left, DELTA, budget) <= budget
    assert accountant.spent_after({}, cost, left + 1, DELTA, budget) > budget
    used = {cost.mechanism: cost.steps}
    assert releases_left(used, cost, budget, DELTA) == max(0, left - 1)


@given(st.integers(0, 5000), st.integers(0, 5000))
def test_the_search_finds_the_last_from_anywhere(last: int, near: int) -> None:
    asked: list[int] = []
    assert accountant._last(lambda n: asked.append(n) or n <= last, near) == last
    assert len(asked) <= 4 + 4 * (abs(last - near) + 1).bit_length()


def test_defaults_allow_two_rounds() -> None:
    assert releases_left({}, accountant.cost_of(private()), 8.0, DELTA) == 2
    assert releases_left({Mechanism(1.0): 5}, Cost(Mechanism(1.0)), 8.0, DELTA) == 0


@pytest.mark.parametrize(("count", "wanted"), [(8, 1.70), (10, 1.898), (20, 2.684), (100, 6.002)])
def test_the_sigma_for_a_budget(count: int, wanted: float) -> None:
    found = sigma_for(8.0, DELTA, count, Cost(Mechanism(1.0)))
    assert found == pytest.approx(wanted, abs=0.005)
    assert epsilon({Mechanism(found): count}, DELTA) <= 8.0 + 1e-6


def test_the_sigma_for_a_budget_with_sampling() -> None:
    found = sigma_for(8.0, DELTA, 100, Cost(Mechanism(1.0, 0.1), 10))
    assert found == pytest.approx(2.05, abs=0.01)
    assert epsilon({Mechanism(found, 0.1): 1000}, DELTA) <= 8.0


# ---- plans ----


def test_a_plan_says_what_a_budget_needs_and_what_it_does_to_learning() -> None:
    made = plan.make(private(placement="distributed", cohort=330), 100, participants=330)
    assert (made.private, made.covered, made.rounds_within_budget) == (False, False, 2)
    assert made.epsilon == pytest.approx(91.8, abs=0.1)
    assert made.sigma_needed == pytest.approx(6.00, abs=0.005)
    assert made.participants_needed == 332
    assert made.noise_in_mean == pytest.approx(0.5, abs=0.01)
    local = plan.make(private(), 2, participants=330)
    assert local.noise_in_mean == pytest.approx(0.5 * math.sqrt(330), rel=0.01)
    assert (local.covered, local.private) == (True, True)


def test_episodes_are_charged_for_every_step() -> None:
    workload = Workload(
        task=WorldModelTask(),
        inner=Inner(steps=10),
        privacy=Privacy(enabled=True, unit="episode", sample_rate=0.1, noise_multiplier=2.0),
    )
    made = plan.make(workload, 100)
    assert made.steps_per_round == 10
    assert made.epsilon == pytest.approx(8.28, abs=0.01)
    assert (made.noise_in_mean, made.participants_needed) == (None, None)


def test_a_run_is_refused_with_the_numbers() -> None:
    plan.require_covered(private(), 0, 2)
    with pytest.raises(
        PrivacyBudgetExceeded, match=r"100 rounds .* epsilon 91\.82 .* 2 more"
    ) as no:
        plan.require_covered(private(), 0, 100)
    assert "noise_multiplier 6.01" in no.value.remediation
    with pytest.raises(PrivacyBudgetExceeded, match=r"after the 2 that closed before.*for 0 more"):
        plan.require_covered(private(), 2, 1)
    plan.require_covered(Workload(), 1000, 1000)


@pytest.mark.parametrize(
    ("sigma", "rate", "steps", "prv", "opacus"),
    [
        (1.0, 1.0, 1, 4.3772, 4.3874),
        (1.0, 1.0, 10, 17.8566, 17.8673),
        (6.002, 1.0, 100, 8.0005, 8.0109),
        (2.0, 0.1, 1000, 8.2793, 8.2897),
        (4.0, 0.1, 1000, 3.4443, 3.4545),
        (1.0, 0.01, 1000, 1.8282, 1.8384),
        (1.0, 0.1, 100, 7.0473, 7.0571),
    ],
)
def test_two_other_libraries_say_the_same_to_one_percent(
    sigma: float, rate: float, steps: int, prv: float, opacus: float
) -> None:
    """At delta 1e-5, as prv-accountant 0.2.0 and the PRV accountant of opacus 1.6.0 print it."""
    ours = epsilon({Mechanism(sigma, rate): steps}, 1e-5)
    assert ours == pytest.approx(prv, rel=0.01)
    assert ours == pytest.approx(opacus, rel=0.01)
