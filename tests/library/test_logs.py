"""What a log record may hold."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from lensemble import logs
from lensemble.errors import ResidencyViolation


@pytest.fixture
def out() -> io.StringIO:
    return io.StringIO()


@pytest.fixture(autouse=True)
def _restored_structlog() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def records(out: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_a_record_is_one_json_line_with_bound_values(out: io.StringIO) -> None:
    logs.configure(style="json", stream=out)
    logs.logger("rounds", node="ab" * 32, round=3).info(
        "round.closed", shape=(3, 4), path=Path("/x")
    )
    (record,) = records(out)
    assert record.pop("time")
    assert record == {
        "event": "round.closed",
        "level": "info",
        "part": "rounds",
        "node": "ab" * 32,
        "round": 3,
        "shape": [3, 4],
        "path": "/x",
    }


def test_levels_below_the_configured_one_are_silent(out: io.StringIO) -> None:
    logs.configure("warning", "json", out)
    logs.logger().info("quiet")
    logs.logger().warning("loud")
    assert [record["event"] for record in records(out)] == ["loud"]


@pytest.mark.parametrize(
    "value",
    [
        np.zeros(3),
        np.float32(1.0),
        b"bytes",
        bytearray(b"x"),
        memoryview(b"x"),
        float("nan"),
        float("inf"),
        [0.5, 0.25],
        (1, 0.5),
        {"a": 1},
        object(),
        1 << 80,
        list(range(100)),
        "see lensemble1:abcdef",
        [[1]],
    ],
)
def test_payload_is_refused_counted_and_said(out: io.StringIO, value: object) -> None:
    redactor = logs.configure(style="json", stream=out)
    logs.logger().info("update", weights=value)
    (record,) = records(out)
    assert record["event"] == "log record refused"
    assert str(record["reason"]).startswith("weights: ")
    assert redactor.refused == 1


@pytest.mark.parametrize("key", ["secret", "seed", "ticket"])
def test_secrets_are_refused_by_name(out: io.StringIO, key: str) -> None:
    redactor = logs.configure(style="json", stream=out)
    logs.logger().info("joined", **{key: "hunter2"})
    assert redactor.refused == 1
    assert "hunter2" not in out.getvalue()


def test_an_array_formatted_into_the_event_is_refused(out: io.StringIO) -> None:
    redactor = logs.configure(style="json", stream=out)
    logs.logger().info("weights are %s", np.arange(3))
    assert redactor.refused == 1
    assert "[0 1 2]" not in out.getvalue()


def test_long_text_is_cut_and_kept_on_one_line(out: io.StringIO) -> None:
    logs.configure(style="json", stream=out)
    logs.logger().error("failed", reason="a\nb\x1b[31m" + "x" * 9999)
    (record,) = records(out)
    assert str(record["reason"]).startswith("a b [31mxxx")
    assert len(str(record["reason"])) == logs.MAX_TEXT + 3


def test_an_exception_is_told_by_place_type_and_message(out: io.StringIO) -> None:
    logs.configure(style="json", stream=out)
    try:
        int("lensemble1:abc")
    except ValueError:
        logs.logger().exception("task failed")
    (record,) = records(out)
    assert str(record["exception"]).endswith("'abc'")
    assert "test_logs.py:" in str(record["exception"])


def test_a_console_line_holds_the_same_values(out: io.StringIO) -> None:
    logs.configure(style="console", stream=out)
    logs.logger(round=3).info("round closed", contributors=2)
    assert "round closed" in out.getvalue()
    assert "contributors=2" in out.getvalue()


def test_a_closed_stream_does_not_stop_the_daemon(out: io.StringIO) -> None:
    logs.configure(style="json", stream=out)
    out.close()
    logs.logger().info("still here")


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
VALUES = SCALARS | st.lists(SCALARS, max_size=4) | st.dictionaries(st.text(), SCALARS, max_size=3)


@given(fields=st.dictionaries(st.text(max_size=8), VALUES, max_size=6))
def test_what_is_admitted_is_small_json_without_fractions_in_lists(
    fields: dict[str, object],
) -> None:
    try:
        kept = logs.admit({**fields, "event": "something"})
    except ResidencyViolation:
        return
    for value in kept.values():
        assert isinstance(value, bool | int | float | str | list | None)
        if isinstance(value, list):
            assert all(isinstance(part, int | str) for part in value)
    assert json.loads(json.dumps(kept, allow_nan=False)) == kept
