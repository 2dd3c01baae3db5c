"""Whether the privacy that a workload asks for can be kept by the rounds that are asked for."""

from lensemble.errors import ConfigError
from lensemble.privacy import accountant, plan
from lensemble.workload import Workload
from lensemble_coord.config import RoundsSection


def require_covered(workload: Workload, rules: RoundsSection, committed: int, asked: int) -> None:
    """Refuse ``asked`` rounds after ``committed`` that the budget or the noise does not cover.

    Blocks, and imports much at its first use with a private workload; call it in a thread.

    Raises:
        ConfigError: noise sized for sums of more updates than these rules reveal, or the accounting
            library is missing.
        PrivacyBudgetExceeded: with the numbers.
    """
    private = workload.privacy
    if private.of_participants and private.placement == "distributed":
        least = rules.secure_agg_threshold if rules.masked else 1
        if least < private.cohort:
            raise ConfigError(
                f'privacy.placement is "distributed" for a cohort of {private.cohort}; these '
                f"rounds can reveal the sum of {least}",
                'Set `rounds.aggregation = "masked"` and `rounds.secure_agg_threshold` to '
                f"{private.cohort} or more.",
            )
    plan.require_covered(workload, committed, asked)


def alert(workload: Workload) -> str:
    """A sentence if the budget is too large to promise anything; empty otherwise."""
    private = workload.privacy
    if not private.enabled or private.epsilon <= accountant.PRIVATE_BELOW:
        return ""
    return (
        f"privacy.epsilon is {private.epsilon:g}: above {accountant.PRIVATE_BELOW:g} it is no "
        "privacy to speak of, whatever noise is added"
    )
