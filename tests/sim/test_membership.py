"""Simulated memberships hold their bounds, and notice what is broken on purpose."""

from collections.abc import Iterator

import pytest

from lensemble.membership.machine import Membership
from lensemble.membership.profiles import LAN, RELAY, WAN, Profile
from tests.sim import broken_members
from tests.sim import membership_life as lives
from tests.sim.membership_swarm import Machine

SEEDS = range(3)
MUTANT_SEEDS = 40
SHOWS_FROM = {
    "one's own pause and bad health are others' silence": 25,
    "the dead are not spoken to": 8,
}
"""What shows in few lives is looked for where it does."""


def again(seed: int, size: int) -> str:
    return f"again with: python benchmarks/membership.py --seeds {seed + 1} --sizes {size}"


@pytest.mark.parametrize("profile", [WAN, LAN, RELAY], ids=lambda profile: profile.name)
@pytest.mark.parametrize("size", [2, 3, 16, 24])
def test_lives_hold_their_bounds(size: int, profile: Profile) -> None:
    weather = lives.WEATHER[profile.name]
    for seed in SEEDS:
        life = lives.live(seed, size, profile)
        assert life.broken == [], again(seed, size)
        assert life.first_s is not None
        assert life.first_s <= lives.first_bound(profile, weather), again(seed, size)


@pytest.mark.parametrize("size", [3, 16])
def test_the_slow_and_the_half_deaf_make_no_deaths(size: int) -> None:
    for seed in SEEDS:
        assert lives.limp(seed, size).broken == [], again(seed, size)


def test_a_hundred_joins_and_leaves_leave_nothing() -> None:
    for seed in SEEDS:
        assert lives.churn(seed).broken == [], f"lives.churn({seed})"


def test_equal_seeds_are_equal_lives() -> None:
    once, same, other = (lives.live(seed, 12) for seed in (5, 5, 6))
    assert once == same
    assert once.trace != other.trace


def test_load_does_not_grow_with_members() -> None:
    rates = [lives.live(1, size, calm=60).rate for size in (8, 64)]
    assert rates[1] < 1.25 * rates[0]


def complaints(machine: Machine, seed: int) -> Iterator[str]:
    yield from lives.live(seed, 8, machine=machine).broken
    yield from lives.limp(seed, 8, machine=machine).broken
    yield from lives.churn(seed, 6, 6, machine=machine).broken
    if lives.live(seed, 5, machine=machine) != lives.live(seed, 5, machine=machine):
        yield "equal seeds, other lives"


@pytest.mark.parametrize("rule", broken_members.FOUND)
def test_a_broken_rule_is_noticed(rule: str) -> None:
    first = SHOWS_FROM.get(rule, 0)
    for seed in range(first, first + MUTANT_SEEDS):
        found = next(complaints(broken_members.FOUND[rule], seed), None)
        if found is not None:
            print(f"{rule}: seed {seed}: {found}")
            return
    pytest.fail(f"{MUTANT_SEEDS} lives from {first} on do not notice: {rule}")


def test_the_right_machine_is_not_complained_of() -> None:
    for seed in range(3):
        assert list(complaints(Membership, seed)) == []
