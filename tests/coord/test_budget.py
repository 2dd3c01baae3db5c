import pytest

from lensemble.errors import ConfigError, PrivacyBudgetExceeded
from lensemble.workload import FieldTerms, Privacy, Workload
from lensemble_coord.config import RoundsSection
from lensemble_coord.training.budget import alert, require_covered


def private(**terms: object) -> Workload:
    return Workload(
        field=FieldTerms(k=16), privacy=Privacy.model_validate({"enabled": True} | terms)
    )


def masked(threshold: int) -> RoundsSection:
    return RoundsSection(
        aggregation="masked", min_participants=threshold, secure_agg_threshold=threshold
    )


PLAIN = RoundsSection(aggregation="plain", min_participants=2)


def test_what_the_budget_covers_may_run() -> None:
    require_covered(Workload(), PLAIN, 500, 500)
    require_covered(private(), PLAIN, 0, 2)
    require_covered(private(), PLAIN, 1, 1)
    with pytest.raises(PrivacyBudgetExceeded, match=r"1 rounds after the 2 .* room for 0 more"):
        require_covered(private(), PLAIN, 2, 1)


def test_noise_sized_for_a_cohort_needs_sums_of_as_many() -> None:
    spread = private(placement="distributed", cohort=3)
    require_covered(spread, masked(3), 0, 2)
    for rules in (PLAIN, RoundsSection(aggregation="plain", min_participants=9)):
        with pytest.raises(ConfigError, match=r"cohort of 3.* sum of 1"):
            require_covered(spread, rules, 0, 1)
    with pytest.raises(ConfigError, match=r"cohort of 4.* sum of 3"):
        require_covered(private(placement="distributed", cohort=4), masked(3), 0, 1)


def test_a_budget_that_promises_nothing_is_called_so() -> None:
    assert alert(Workload()) == alert(private()) == ""
    assert "is 51: above 50 it is no privacy" in alert(private(epsilon=51.0))
