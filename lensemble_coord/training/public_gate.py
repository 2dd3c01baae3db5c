"""What figures on public data say about a global state: alarms, and whether to adopt it.

Bounds are of two kinds.  Absolute ones (spread of the latent, collapse) excuse a state that is
nearer to them than its prior was, so that an untrained start is not held where it is.  Relative
ones compare with the prior; where that has nothing to lose (an R2 that is not above zero, figures
that are not known) they do not apply.
"""

import msgspec


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Of one state, as the testing program gives them; None is not known or not finite.

    Drift is against the prior state, on the same points: squared distance in latent variances, as
    it is (``drift_before``) and turned back (``drift_after``); degrees of the principal angles.
    """

    finite: bool
    std: float | None = None
    probe_r2: float | None = None
    latent_error: float | None = None
    state_error: float | None = None
    dimension: float | None = None
    drift_before: float | None = None
    drift_after: float | None = None
    mean_degrees: float | None = None
    rms_degrees: float | None = None
    max_degrees: float | None = None
    warning: str = ""


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """What a state is held to; see the keys of the same names in the configuration."""

    std_min: float = 0.3
    std_max: float = 2.0
    r2_ratio: float = 0.8
    latent_ratio: float = 1.2
    collapse_std: float = 0.1
    collapse_r2: float = 0.5


class Alarm(msgspec.Struct, frozen=True):
    """One thing that is wrong; ``excused`` if the prior state was no better."""

    name: str
    text: str
    excused: bool = False


def judge(figures: Figures, prior: Figures | None, bounds: Bounds) -> tuple[Alarm, ...]:
    """All that is wrong with a state of ``figures`` after one of ``prior``."""
    std, r2, error = figures.std, figures.probe_r2, figures.latent_error
    if not figures.finite or std is None or r2 is None or error is None:
        return (Alarm("finite", "a figure on public data is not finite"),)
    found = (
        _spread(std, prior, bounds),
        _collapse(std, r2, prior, bounds),
        _probe(r2, prior, bounds),
        _latent(error, prior, bounds),
    )
    return tuple(alarm for alarm in found if alarm is not None)


def reasons(alarms: tuple[Alarm, ...]) -> str:
    """Why a state is not adopted; empty if it is."""
    return "; ".join(alarm.text for alarm in alarms if not alarm.excused)


def _outside(std: float, bounds: Bounds) -> float:
    """How far outside the range, 0 within it."""
    return max(bounds.std_min - std, std - bounds.std_max, 0.0)


def _spread(std: float, prior: Figures | None, bounds: Bounds) -> Alarm | None:
    if not _outside(std, bounds):
        return None
    before = None if prior is None else prior.std
    excused = before is not None and _outside(std, bounds) < _outside(before, bounds)
    text = f"std {std:.3g} is outside {bounds.std_min:g} to {bounds.std_max:g}"
    return Alarm("std", text, excused)


def _collapse(std: float, r2: float, prior: Figures | None, bounds: Bounds) -> Alarm | None:
    if not _is_collapsed(std, r2, bounds):
        return None
    excused = (
        prior is not None
        and prior.std is not None
        and prior.probe_r2 is not None
        and _is_collapsed(prior.std, prior.probe_r2, bounds)
        and (std > prior.std or r2 > prior.probe_r2)
    )
    text = f"the latent has collapsed: std {std:.3g}, linear R2 {r2:.3g}"
    return Alarm("collapse", text, excused)


def _is_collapsed(std: float, r2: float, bounds: Bounds) -> bool:
    return std < bounds.collapse_std and r2 < bounds.collapse_r2


def _probe(r2: float, prior: Figures | None, bounds: Bounds) -> Alarm | None:
    before = None if prior is None else prior.probe_r2
    if before is None or before <= 0 or r2 >= bounds.r2_ratio * before:
        return None
    text = f"linear R2 {r2:.3g} is below {bounds.r2_ratio:g} x {before:.3g}, the prior state's"
    return Alarm("probe_r2", text)


def _latent(error: float, prior: Figures | None, bounds: Bounds) -> Alarm | None:
    before = None if prior is None else prior.latent_error
    if before is None or error <= bounds.latent_ratio * before:
        return None
    text = f"latent error {error:.3g} is above {bounds.latent_ratio:g} x {before:.3g}, the prior's"
    return Alarm("latent_error", text)
