"""Figures as people read them."""

from collections.abc import Iterator

import msgspec
import pytest

from lensemble.ctl import replies
from lensemble.errors import LensembleError
from lensemblectl import exits, words


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.0, "0.0 s"),
        (0.34, "0.3 s"),
        (42.4, "42 s"),
        (59.7, "1 min 00 s"),
        (192, "3 min 12 s"),
        (7500, "2 h 05 min"),
        (86_400, "24 h 00 min"),
        (356_400, "4 d 3 h"),
    ],
)
def test_durations(seconds: float, said: str) -> None:
    assert words.duration(seconds) == said


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.41, "0.4s"), (73, "73s"), (720, "12min"), (10_800, "3h"), (1e6, "12d")]
)
def test_brief_durations(seconds: float, said: str) -> None:
    assert words.brief(seconds) == said


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (12_345_678, "12.3 MB"),
        (999_600, "1 MB"),
        (10**15, "1e+03 TB"),
    ],
)
def test_sizes(count: int, said: str) -> None:
    assert words.size(count) == said


def test_a_round_line_says_what_is_waited_for_and_on_whom() -> None:
    status = replies.RoundStatus(
        index=0,
        attempt=2,
        state="open",
        reason="waiting for 1 more participant (have 1, quorum 2)",
        since_s=12,
        deadline_in_s=48,
        waiting_on=("a", "b", "c", "d", "e", "f", "g"),
    )
    assert words.round_line(status) == (
        "round 0, attempt 2 OPEN: waiting for 1 more participant (have 1, quorum 2); "
        "on a, b, c, d, e and 2 more"
    )
    rest = replies.RoundStatus(
        index=0, attempt=0, state="closed", reason="at rest: no round is asked for", since_s=1
    )
    assert words.round_line(rest) == "At rest: no round is asked for"
    assert words.clock_line(status) == "for 12 s, 48 s left"


def test_a_budget_is_told_with_what_is_left() -> None:
    whole = replies.PrivacyStatus(
        unit="participant", spent=6.573, epsilon=8.0, delta=1e-5, releases=2, rounds_left=0,
        clip_factor=0.25,
    )  # fmt: skip
    text = "\n".join(words.budget_lines(whole))
    for part in ("this node as a whole, at delta 1e-05", "6.573 of 8, by 2 releases",
                 "left    epsilon 1.427: 0 rounds", "clipped to 0.25"):  # fmt: skip
        assert part in text
    episodes = replies.PrivacyStatus(
        unit="episode", spent=0.0, epsilon=8.0, delta=1e-5, releases=0, rounds_left=7
    )
    assert words.budget_lines(episodes)[0].startswith("about each episode of this node")


PLAN = {
    "unit": "participant", "placement": "distributed", "rounds": 100, "budget": 8.0,
    "delta": 1e-5, "sigma": 1.0, "sample_rate": 1.0, "steps_per_round": 1, "clip_norm": 1.0,
    "parameters": 27480, "epsilon": 91.82, "private": False, "covered": False,
    "rounds_within_budget": 2, "sigma_needed": 6.0023, "participants": 4, "noise_in_mean": 41.4,
    "participants_needed": 332,
}  # fmt: skip


def test_a_plan_is_told_with_its_price() -> None:
    text = "\n".join(words.plan_lines(PLAN))
    for part in (
        "epsilon 91.82", "that is not private", "covers 2 rounds", "need sigma 6.01",
        "41.4 times the largest update", "expect no learning", "332 participants",
    ):  # fmt: skip
        assert part in text
    generous = "\n".join(words.plan_lines(PLAN | {"budget": 100.0}))
    assert "a budget of 100 is not private" in generous
    good = PLAN | {"private": True, "epsilon": 7.9, "noise_in_mean": 0.4}
    assert "not private" not in "\n".join(words.plan_lines(good))
    assert "no learning" not in "\n".join(words.plan_lines(good))
    inside = PLAN | {"participants_needed": None, "noise_in_mean": None, "unit": "episode"}
    assert "about each episode" in "\n".join(words.plan_lines(inside))


def test_a_drift_line_says_how_far_and_what_was_done() -> None:
    drift = replies.DriftStatus(
        before=0.402,
        after=0.128,
        mean_degrees=20.0,
        rms_degrees=22.1,
        max_degrees=39.7,
        dimension=5.13,
        std=0.97,
        aligned=True,
    )
    assert words.drift_line(drift) == (
        "0.4 latent variances off the round's start, turned by 22.1 degrees rms, 39.7 at most; "
        "0.13 after turning back; effective dimension 5.1, std 0.97"
    )
    left = msgspec.structs.replace(drift, aligned=False, warning="released without alignment")
    assert words.drift_line(left).endswith("std 0.97 (released without alignment)")
    assert "turning back" not in words.drift_line(left)


def test_whatever_is_complained_about_comes_with_what_to_try(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for remedy, said in (("start the daemon", "start the daemon"), ("", exits.ASK)):
        exits.complain("it broke", remedy)
        assert capsys.readouterr().err == f"Error: it broke\nTry: {said}\n"


def kinds(of: type[LensembleError]) -> Iterator[type[LensembleError]]:
    for kind in of.__subclasses__():
        yield kind
        yield from kinds(kind)


def test_every_kind_of_error_has_something_to_try() -> None:
    found = list(kinds(LensembleError))
    assert len(found) > 40
    assert [kind.__name__ for kind in found if not kind.default_remediation.strip()] == []
