"""A plan: what noise a budget needs, what it leaves of the update, and whether a run fits in it."""

import math

import msgspec

from lensemble.errors import PrivacyBudgetExceeded
from lensemble.privacy import accountant
from lensemble.secagg.scale import why_wide
from lensemble.workload import Workload, layout

_USEFUL = 0.5
"""Noise in the mean, as a part of the largest update, up to which learning is expected to go on."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """``rounds`` of a workload under a budget, for ``participants``.

    ``noise_in_mean`` is the expected norm of the noise in the mean of their updates, as a part of
    the greatest norm that the mean of clipped updates can have; at ``unit = "episode"``, None.
    """

    unit: str
    placement: str
    rounds: int
    budget: float
    delta: float
    sigma: float
    sample_rate: float
    steps_per_round: int
    clip_norm: float
    parameters: int
    epsilon: float
    """After all the rounds at ``sigma``."""
    private: bool
    covered: bool
    rounds_within_budget: int
    sigma_needed: float
    """For all the rounds within the budget."""
    wide: str = ""
    """Why updates take four bytes a parameter; empty if mostly two."""
    participants: int | None = None
    noise_in_mean: float | None = None
    participants_needed: int | None = None
    """For ``noise_in_mean`` up to one half at ``sigma``; distributed: with a cohort of as many."""


def make(
    workload: Workload,
    rounds: int,
    *,
    participants: int | None = None,
    budget: float | None = None,
    delta: float | None = None,
) -> Plan:
    """Plan ``rounds`` from a fresh budget.

    Raises:
        ConfigError: the accounting library is not installed.
    """
    terms = workload.privacy
    allowed = terms.epsilon if budget is None else budget
    risk = terms.delta if delta is None else delta
    cost = accountant.cost_of(workload)
    total = accountant.spent_after({}, cost, rounds, risk, allowed)
    size = layout(workload).size
    whole = terms.unit == "participant"
    return Plan(
        unit=terms.unit,
        placement=terms.placement,
        rounds=rounds,
        budget=allowed,
        delta=risk,
        sigma=terms.noise_multiplier,
        sample_rate=terms.sample_rate,
        steps_per_round=cost.steps,
        clip_norm=terms.clip_norm,
        parameters=size,
        epsilon=total,
        private=total <= accountant.PRIVATE_BELOW,
        covered=total <= allowed,
        rounds_within_budget=accountant.releases_left({}, cost, allowed, risk),
        sigma_needed=accountant.sigma_for(allowed, risk, rounds, cost),
        wide=why_wide(workload),
        participants=participants,
        noise_in_mean=_noise_in_mean(workload, size, participants)
        if whole and participants
        else None,
        participants_needed=_needed(workload, size) if whole else None,
    )


def _noise_in_mean(workload: Workload, size: int, participants: int) -> float:
    terms = workload.privacy
    noise = terms.noise_sd * math.sqrt(participants * size)
    return noise / (terms.clip_norm * participants * terms.sample_rate)


def _needed(workload: Workload, size: int) -> int:
    terms = workload.privacy
    root = terms.noise_multiplier * math.sqrt(size) / (_USEFUL * terms.sample_rate)
    return math.ceil(root if terms.placement == "distributed" else root**2)


def require_covered(workload: Workload, committed: int, asked: int) -> None:
    """Refuse a run whose rounds, with those ``committed`` before, the budget cannot cover.

    Raises:
        PrivacyBudgetExceeded: with the numbers.
        ConfigError: the accounting library is not installed.
    """
    if not workload.privacy.enabled:
        return
    plan = make(workload, committed + asked)
    if plan.covered:
        return
    before = f" after the {committed} that closed before" if committed else ""
    left = max(0, plan.rounds_within_budget - committed)
    # Rounded up: a little less would not do.
    sigma = math.ceil(plan.sigma_needed * 100) / 100
    raise PrivacyBudgetExceeded(
        f"{asked} rounds{before} at noise_multiplier {plan.sigma:g} spend epsilon "
        f"{plan.epsilon:.2f} at delta {plan.delta:g}; the budget is {plan.budget:g} and has room "
        f"for {left} more",
        f"Run at most {left} rounds, or begin with noise_multiplier {sigma:.2f}; "
        "`lensemblectl privacy plan` shows what that does to learning."
        if left
        else f"Begin with noise_multiplier {sigma:.2f}; `lensemblectl privacy plan` "
        "shows what that does to learning.",
    )
