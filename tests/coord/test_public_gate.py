"""What figures on public data mean; a table, since all of it is arithmetic."""

import msgspec
import pytest

from lensemble_coord.config import GateSection
from lensemble_coord.training.public_gate import Bounds, Figures, judge, reasons

BOUNDS = Bounds()


def figures(std: float = 1.0, r2: float = 0.9, error: float = 0.3) -> Figures:
    return Figures(finite=True, std=std, probe_r2=r2, latent_error=error)


GOOD = figures()


@pytest.mark.parametrize(
    ("state", "prior", "alarms", "refused"),
    [
        (GOOD, None, [], []),
        (GOOD, GOOD, [], []),
        (Figures(finite=False), GOOD, ["finite"], ["finite"]),
        (Figures(finite=True), GOOD, ["finite"], ["finite"]),
        (Figures(finite=False), None, ["finite"], ["finite"]),
        (figures(std=0.3), GOOD, [], []),
        (figures(std=0.29), GOOD, ["std"], ["std"]),
        (figures(std=2.0), GOOD, [], []),
        (figures(std=2.1), GOOD, ["std"], ["std"]),
        (figures(std=2.1), None, ["std"], ["std"]),
        # Outside, but on the way in: a start that is not trained yet must be able to leave.
        (figures(std=0.2), figures(std=0.1), ["std"], []),
        (figures(std=0.1), figures(std=0.1), ["std"], ["std"]),
        (figures(std=3.0), figures(std=0.1), ["std"], ["std"]),
        (figures(r2=0.73), GOOD, [], []),
        (figures(r2=0.71), GOOD, ["probe_r2"], ["probe_r2"]),
        (figures(r2=-3.0), figures(r2=-0.1), [], []),
        (figures(r2=-3.0), figures(r2=0.0), [], []),
        (figures(error=0.36), GOOD, [], []),
        (figures(error=0.37), GOOD, ["latent_error"], ["latent_error"]),
        (figures(error=9.0), None, [], []),
        (figures(std=0.04, r2=0.95), GOOD, ["std"], ["std"]),
        (
            figures(std=0.04, r2=0.1),
            GOOD,
            ["std", "collapse", "probe_r2"],
            ["std", "collapse", "probe_r2"],
        ),
        (figures(std=0.05, r2=0.2), figures(std=0.04, r2=0.1), ["std", "collapse"], []),
        (figures(std=0.04, r2=0.1), figures(std=0.04, r2=0.1), ["std", "collapse"], None),
        (figures(std=0.04, r2=0.1), None, ["std", "collapse"], ["std", "collapse"]),
    ],
)
def test_alarms(
    state: Figures, prior: Figures | None, alarms: list[str], refused: list[str] | None
) -> None:
    found = judge(state, prior, BOUNDS)
    assert [alarm.name for alarm in found] == alarms
    refused = alarms if refused is None else refused
    assert [alarm.name for alarm in found if not alarm.excused] == refused
    assert reasons(found) == "; ".join(alarm.text for alarm in found if not alarm.excused)


def test_bounds_are_those_of_the_configuration() -> None:
    assert msgspec.convert(GateSection(), Bounds, from_attributes=True) == BOUNDS
    strict = Bounds(std_min=0.5, std_max=0.9, r2_ratio=1.0, latent_ratio=1.0)
    found = judge(figures(std=1.0, r2=0.89, error=0.31), GOOD, strict)
    assert [alarm.name for alarm in found] == ["std", "probe_r2", "latent_error"]
    assert "0.5 to 0.9" in found[0].text
