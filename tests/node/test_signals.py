import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lensemble.errors import WorkerFault
from lensemble_node import signals

COMMANDS: list[signals.Command] = [
    signals.Configure(workload="{}", federation="f", node="n", state_dir="/s", path=""),
    signals.Attach(edge=1, direction="rx", offset=0, capacity_bytes=10, slots=2),
    signals.Detach(edge=1),
    signals.Ready(edge=1, slot=0, extent=9),
    signals.Released(edge=1, slot=0),
    signals.Bind(round=0, attempt=0, prior_digest="0" * 64),
    signals.Train(round=0, attempt=0, prior_digest="0" * 64, sketch_seed=1, global_step=0),
    signals.Send(edge=1, round=0, attempt=0, signature="0" * 128),
    signals.Abandon(round=0, attempt=0),
    signals.Close(round=0, digest="0" * 64, adopt=True),
    signals.Stop(),
]
EVENTS: list[signals.Event] = [
    signals.Attached(edge=1),
    signals.Spoiled(edge=1, reason="frame"),
    signals.Filled(edge=1, slot=0, extent=1),
    signals.Bound(round=0, attempt=0, holds_bytes=0),
    signals.StateHeld(digest="0" * 64),
    signals.Worked(round=0, attempt=0, phase="training", done=1, total=2),
    signals.Failed(code="x", message="y", round=1, attempt=2, fatal=True),
]


def test_every_line_says_what_was_meant() -> None:
    for command in COMMANDS:
        assert signals.parse_command(signals.line(command)) == command
    for event in EVENTS:
        assert signals.parse_event(signals.line(event)) == event


def test_the_two_directions_do_not_mix() -> None:
    for command in COMMANDS:
        with pytest.raises(WorkerFault):
            signals.parse_event(signals.line(command))


@given(raw=st.binary(max_size=400))
def test_noise_is_a_worker_fault(raw: bytes) -> None:
    for parse in (signals.parse_command, signals.parse_event):
        with pytest.raises(WorkerFault):
            parse(raw)


@given(
    at=st.integers(0, len(COMMANDS + EVENTS) - 1),
    data=st.data(),
)
def test_a_damaged_line_is_the_same_message_or_a_worker_fault(at: int, data: st.DataObject) -> None:
    message = (*COMMANDS, *EVENTS)[at]
    parse = signals.parse_command if at < len(COMMANDS) else signals.parse_event
    raw = bytearray(signals.line(message))
    position = data.draw(st.integers(0, len(raw) - 1))
    raw[position] = data.draw(st.integers(0, 255))
    with contextlib.suppress(WorkerFault):
        assert type(parse(bytes(raw))) is not None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


@given(
    kind=st.sampled_from([type(m).__name__ for m in (*COMMANDS, *EVENTS)]),
    fields=st.dictionaries(
        st.sampled_from(["edge", "slot", "extent", "round", "attempt", "digest", "code", "x"]),
        json_values,
    ),
)
def test_well_formed_nonsense_is_a_worker_fault_or_a_message(
    kind: str, fields: dict[str, object]
) -> None:
    raw = json.dumps({"type": kind, **fields}).encode()
    for parse in (signals.parse_command, signals.parse_event):
        with contextlib.suppress(WorkerFault):
            assert type(parse(raw)).__name__ == kind


def test_deep_nesting_and_long_lines_are_worker_faults() -> None:
    for raw in (b"[" * 100_000, b'"' + b"x" * signals.MAX_LINE_BYTES + b'"'):
        with pytest.raises(WorkerFault):
            signals.parse_event(raw)
