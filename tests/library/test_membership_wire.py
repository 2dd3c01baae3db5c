"""Datagrams of the membership: their size, what is refused, and bytes at random."""

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lensemble.errors import ContractViolation, FrameError
from lensemble.ids import NodeId
from lensemble.wire import membership as w

A, B = NodeId("a" * 64), NodeId("b" * 64)
TOP = 1 << 62
LONGEST = w.Update(B, w.Standing.SUSPECT, TOP, "f" * 16, A)
FULL = {"boot": "0" * 16, "incarnation": TOP, "updates": (LONGEST,) * w.MAX_UPDATES}
SAMPLES: tuple[w.Message, ...] = (
    w.Probe(**FULL, sequence=TOP),
    w.ProbeFor(**FULL, sequence=TOP, target=B),
    w.Ack("0" * 16, 3, (w.Update(B, w.Standing.ALIVE, 0, ""),), 7),
    w.Nack("0" * 16, 1, (w.Update(B, w.Standing.LEFT, 9, "f" * 16),), 0),
    w.Gossip(**FULL),
)


def body_of(message: w.Message) -> list[Any]:
    fields: list[Any] = msgspec.msgpack.decode(w.encode(message)[2:])
    return fields


def datagram(body: Any) -> bytes:
    return b"\x01\x00" + msgspec.msgpack.encode(body)


def test_samples_are_of_every_kind() -> None:
    assert {type(sample) for sample in SAMPLES} == set(get_args(w.Message))


@pytest.mark.parametrize("message", SAMPLES, ids=lambda m: type(m).__name__)
def test_a_message_at_its_limits_comes_back_and_fits(message: w.Message) -> None:
    encoded = w.encode(message)
    assert len(encoded) <= w.MAX_DATAGRAM_BYTES
    assert w.decode(encoded) == message


def test_more_updates_than_the_limit_are_refused() -> None:
    message = w.Gossip("0" * 16, 1, (w.Update(B, w.Standing.DEAD, 1, "f" * 16),) * 7)
    with pytest.raises(FrameError, match="not a membership message"):
        w.decode(w.encode(message))


def test_a_datagram_that_is_too_large_is_neither_made_nor_read() -> None:
    with pytest.raises(FrameError, match="over 1200"):
        w.encode(w.Gossip("0" * 16, TOP, (LONGEST,) * 7))
    with pytest.raises(FrameError, match="of 1201 bytes is over"):
        w.decode(b"\x01\x00" + bytes(1199))


@pytest.mark.parametrize("version", [b"\x00\x00", b"\x02\x00", b"\x01\x01"])
def test_another_schema_is_refused_before_its_fields(version: bytes) -> None:
    with pytest.raises(ContractViolation, match="this build speaks 1"):
        w.decode(version + b"whatever")


@pytest.mark.parametrize("message", SAMPLES, ids=lambda m: type(m).__name__)
def test_a_field_too_many_or_too_few_is_refused(message: w.Message) -> None:
    body = body_of(message)
    for wrong in ([*body, 1], body[:-1], ["Other", *body[1:]]):
        with pytest.raises(FrameError):
            w.decode(datagram(wrong))


UPDATE = [B, "suspect", 1, "f" * 16, A]


@pytest.mark.parametrize(
    ("position", "value"),
    [
        (0, "B" * 64),
        (0, B[1:]),
        (0, B + "\n"),
        (1, "gone"),
        (2, -1),
        (2, TOP + 1),
        (3, "f"),
        (4, ""),
    ],
)
def test_values_beyond_their_limits_are_refused(position: int, value: Any) -> None:
    right = ["Gossip", "0" * 16, 1, [UPDATE]]
    assert isinstance(w.decode(datagram(right)), w.Gossip)
    update = [*UPDATE[:position], value, *UPDATE[position + 1 :]]
    with pytest.raises(FrameError):
        w.decode(datagram([*right[:3], [update]]))


@given(st.binary(max_size=1300), st.booleans())
def test_random_bytes_end_in_a_refusal(body: bytes, versioned: bool) -> None:
    with pytest.raises((FrameError, ContractViolation)):
        w.decode(b"\x01\x00" + body if versioned else body)


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=70),
    st.binary(max_size=70),
    st.sampled_from([A, B, "f" * 16, "suspect", UPDATE, [UPDATE]]),
)


@given(st.sampled_from(SAMPLES), st.data())
@settings(max_examples=300)
def test_fields_of_any_value_are_messages_or_refused(
    sample: w.Message, data: st.DataObject
) -> None:
    body = body_of(sample)
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(
            LEAVES | st.lists(LEAVES, max_size=6)
        )
    try:
        heard = w.decode(datagram(body))
    except FrameError:
        return
    assert w.decode(w.encode(heard)) == heard


@given(
    st.sampled_from(SAMPLES),
    st.lists(st.tuples(st.integers(2, 1 << 16), st.binary(max_size=5)), min_size=1, max_size=4),
)
@settings(max_examples=300)
def test_mutated_datagrams_are_messages_or_refused(
    sample: w.Message, patches: list[tuple[int, bytes]]
) -> None:
    encoded = bytearray(w.encode(sample))
    for position, patch in patches:
        start = position % len(encoded)
        encoded[start : start + 2] = patch
    try:
        heard = w.decode(bytes(encoded))
    except (FrameError, ContractViolation):
        return
    assert w.decode(w.encode(heard)) == heard
