"""The checks of simulated lives can fail: every promise that is broken on purpose is found."""

import pytest

from tests.sim import broken, broken_stages, soak
from tests.sim.model_life import ModelLife
from tests.sim.parts import Parts

SEEDS = 1000
"""By when a broken promise shows."""

REDUNDANT_SEEDS = 100

RARE = (
    "node: a second sum is consented to",
    "coordinator: who was dropped counts",
    "coordinator: a done run goes on",
    "coordinator: late words count",
    "coordinator: any blob counts",
    "node: no fence of attempts",
    "node: no fence of sessions",
    "worker: spent before and sent again",
)
"""What shows in one life of a hundred or so."""


def first_violation(parts: Parts, seeds: int) -> soak.Violation | None:
    for seed in range(seeds):
        life, violation = soak.live(seed, parts)
        soak.dismantle(life)
        if violation is not None:
            return violation
    return None


@pytest.mark.parametrize(
    "promise",
    [pytest.param(each, marks=pytest.mark.soak) if each in RARE else each for each in broken.FOUND],
)
def test_a_broken_promise_is_found(promise: str) -> None:
    found = first_violation(broken.FOUND[promise], SEEDS)
    assert found is not None, f"{SEEDS} lives do not notice: {promise}"
    # A check has failed, not the broken part itself.
    assert found.what.startswith("AssertionError"), found.what
    print(f"{promise}: seed {found.seed}: {found.what}")


@pytest.mark.soak
@pytest.mark.parametrize("promise", broken.REDUNDANT)
def test_what_is_kept_twice_may_break_once(promise: str) -> None:
    found = first_violation(broken.REDUNDANT[promise], REDUNDANT_SEEDS)
    assert found is None, f"not redundant any more: {promise}\n{found.what}"


@pytest.mark.parametrize("promise", broken_stages.FOUND)
def test_a_broken_promise_of_stages_is_found(promise: str) -> None:
    for seed in range(SEEDS):
        found = soak.violation_of(ModelLife(seed, broken_stages.FOUND[promise]))
        if found is not None:
            break
    assert found is not None, f"{SEEDS} lives do not notice: {promise}"
    assert found.what.startswith("AssertionError"), found.what
