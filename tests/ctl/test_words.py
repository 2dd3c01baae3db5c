"""Figures as people read them."""

import pytest

from lensemble.ctl import replies
from lensemblectl import words


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
