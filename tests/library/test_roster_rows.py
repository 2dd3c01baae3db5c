"""A roster of the largest federation fits into one control frame, and comes out as it went in."""

import os

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lensemble.errors import FrameError
from lensemble.ids import Digest, NodeId
from lensemble.wire import codec, messages, roster_rows

FENCE = {"federation": "ab" * 16, "epoch": 1, "round": 0, "attempt": 0}


def entry() -> messages.RosterEntry:
    raw = os.urandom(roster_rows.ROW_BYTES)
    keys = messages.MaskKeys(
        mask_key=raw[64:96], share_key=raw[96:128], self_commitment=raw[128:160]
    )
    return messages.RosterEntry(
        node=NodeId(raw[:32].hex()),
        dataset_root=Digest(raw[32:64].hex()),
        keys=keys,
        signature=raw[160:],
    )


@given(st.integers(0, 40))
def test_members_come_out_as_they_went_in(count: int) -> None:
    members = tuple(entry() for _ in range(count))
    told = messages.Roster(**FENCE, rows=messages.rows_of(members), threshold=1)
    heard = codec.decode_from_coordinator(codec.encode(told))
    assert isinstance(heard, messages.Roster)
    assert (heard.members, heard.count) == (members, count)


def test_a_roster_of_the_largest_federation_fits() -> None:
    members = [entry()] * messages.MAX_PARTICIPANTS
    told = messages.Roster(**FENCE, rows=messages.rows_of(members), threshold=2049)
    assert len(codec.encode(told)) < codec.MAX_MESSAGE_BYTES


@pytest.mark.parametrize("length", [1, roster_rows.ROW_BYTES - 1, roster_rows.ROW_BYTES + 1])
def test_a_broken_row_is_refused(length: int) -> None:
    fields = {"type": "Roster", **FENCE, "rows": bytes(length), "threshold": 1}
    payload = codec.encode(messages.Roster(**FENCE, rows=bytes(roster_rows.ROW_BYTES), threshold=1))
    with pytest.raises(FrameError, match="rows"):
        codec.decode_from_coordinator(payload[:2] + msgspec.msgpack.encode(fields))
