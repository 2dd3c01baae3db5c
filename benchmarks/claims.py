"""The claims A1 to A9 of ``learning.py``: ratios within each seed, and the worst of all seeds."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

Seed = dict[str, Any]
"""``scores`` of a seed: run, then ``mix`` or ``unseen``, then ``Scores``."""


class Ratios:
    """Figures of one seed, by run."""

    def __init__(self, seed: Seed) -> None:
        self._scores = seed["scores"]
        self.locals = [name for name in self._scores if name.startswith("local")]

    def of(self, run: str, figure: str, where: str = "mix") -> float:
        return float(getattr(self._scores[run][where], figure))

    def mean_local(self, figure: str, where: str = "mix") -> float:
        return statistics.fmean(self.of(name, figure, where) for name in self.locals)

    def best_local(self, figure: str) -> float:
        return min(self.of(name, figure) for name in self.locals)

    def collapsed(self, run: str) -> bool:
        return bool(self._scores[run]["mix"].collapsed)


Measure = Callable[[Ratios], float]


def _over_local(run: str, figure: str) -> Measure:
    return lambda r: r.of(run, figure) / r.mean_local(figure)


def _over(run: str, other: str, figure: str) -> Measure:
    return lambda r: r.of(run, figure) / r.of(other, figure)


def _apart(run: str, other: str) -> Measure:
    """By how much the two differ in latent or state error, whichever is more."""
    return lambda r: max(
        abs(r.of(run, figure) / r.of(other, figure) - 1) for figure in ("latent", "state5")
    )


SHORT, LONG = "federated 10", "federated 50"
HEALTHY = (SHORT, LONG, "warm", "centralised", "one absent", "int8")
AT_MOST: dict[str, dict[str, tuple[Measure, float]]] = {
    "A1": {
        "latent, H=10": (_over_local(SHORT, "latent"), 0.80),
        "state, H=10": (_over_local(SHORT, "state5"), 0.80),
        "latent, H=50": (_over_local(LONG, "latent"), 0.80),
        "state, H=50": (_over_local(LONG, "state5"), 0.80),
    },
    "A2": {
        "state, H=10": (lambda r: r.of(SHORT, "state5") / r.best_local("state5"), 1.0),
    },
    "A3": {
        "latent, H=10": (_over(SHORT, "centralised", "latent"), 1.5),
        "latent, H=50": (_over(LONG, "centralised", "latent"), 1.5),
    },
    "A4": {
        "latent, H=10": (_over(SHORT, "warm", "latent"), 0.65),
        "state, H=10": (_over(SHORT, "warm", "state5"), 0.5),
    },
    "A5": {
        f"unseen state, H={run.split()[1]}": (
            lambda r, run=run: r.of(run, "state5", "unseen") / r.mean_local("state5", "unseen"),
            0.85,
        )
        for run in (SHORT, LONG)
    },
    "A6": {
        "latent": (_over("one absent", LONG, "latent"), 1.3),
        "state": (_over("one absent", LONG, "state5"), 1.3),
    },
    "A7": {
        "field": (_apart(LONG, "exact"), 0.01),
        "int8": (_apart("int8", "exact"), 0.01),
    },
    "turned": {"aligned": (_apart("turned, aligned", "aligned"), 0.01)},
}
"""Claim, then what is measured, and the most it may be on any seed."""

CONTROLS = ("flipped", "noise 0.1", "apart")


def _bounded(ratios: Sequence[Ratios], claim: str) -> dict[str, Any]:
    worst, holds = {}, True
    for name, (measure, most) in AT_MOST[claim].items():
        worst[name] = max(measure(each) for each in ratios)
        holds = holds and worst[name] <= most
    return {
        "holds": holds,
        "worst": worst,
        "at_most": {n: m for n, (_, m) in AT_MOST[claim].items()},
    }


def _alarm(ratios: Sequence[Ratios]) -> dict[str, Any]:
    fires = [each.collapsed("no sigreg") for each in ratios]
    false = [run for each in ratios for run in HEALTHY if each.collapsed(run)]
    return {
        "holds": all(fires) and not false,
        "worst": {
            "collapsed std": max(each.of("no sigreg", "std") for each in ratios),
            "collapsed R2": max(each.of("no sigreg", "linear_r2") for each in ratios),
            "healthy std": min(each.of(run, "std") for each in ratios for run in HEALTHY),
            "healthy R2": min(each.of(run, "linear_r2") for each in ratios for run in HEALTHY),
        },
    }


def _controls(ratios: Sequence[Ratios]) -> dict[str, Any]:
    """A control fails A1 when either of its ratios is above the bound; the nearest to passing."""
    nearest = {
        run: min(
            max(_over_local(run, figure)(each) for figure in ("latent", "state5"))
            for each in ratios
        )
        for run in CONTROLS
    }
    return {"holds": all(value > 0.80 for value in nearest.values()), "worst": nearest}


def judge(seeds: Sequence[Seed]) -> dict[str, Any]:
    """Mean errors, every claim with its worst ratio, and the figures of each run."""
    ratios = [Ratios(seed) for seed in seeds]
    found = {claim: _bounded(ratios, claim) for claim in AT_MOST}
    found |= {"A8": _alarm(ratios), "A9": _controls(ratios)}
    runs = list(seeds[0]["scores"])

    def mean(figure: Callable[[Ratios], float]) -> float:
        return statistics.fmean(figure(each) for each in ratios)

    return {
        "federated": mean(lambda r: r.of(SHORT, "state5")),
        "federated_50": mean(lambda r: r.of(LONG, "state5")),
        "local_only": mean(lambda r: r.mean_local("state5")),
        "centralised": mean(lambda r: r.of("centralised", "state5")),
        "warm": mean(lambda r: r.of("warm", "state5")),
        "holds": all(claim["holds"] for claim in found.values()),
        "claims": dict(sorted(found.items())),
        "runs": {
            run: {
                figure: [round(each.of(run, figure), 4) for each in ratios]
                for figure in ("latent", "state5", "linear_r2", "std", "dimension")
            }
            for run in runs
        },
        "cpu_s": [round(seed["cpu_s"], 1) for seed in seeds],
        "seeds": len(seeds),
    }


def show(result: dict[str, Any]) -> None:
    """The claims as a table."""
    for claim, found in result["claims"].items():
        print(f"{claim:<7} {'holds' if found['holds'] else 'FAILS'}")
        for name, value in found["worst"].items():
            most = found.get("at_most", {}).get(name)
            print(f"    {name:<22} {value:8.3f}" + ("" if most is None else f"  at most {most:g}"))
