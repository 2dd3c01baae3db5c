"""One message for many sessions: the bytes are those of a message of its own, and encoded once."""

import pytest
from msgspec.structs import replace

from lensemble.errors import FrameError
from lensemble.wire import codec, messages
from lensemble.wire.fanout import Fanout

FEDERATION, NODE = "ab" * 16, "c" * 64
CLOSE = messages.RoundClose(
    federation=FEDERATION,
    epoch=0,
    round=1,
    attempt=2,
    outcome="aborted",
    digest="d" * 64,
    contributors=(NODE,),
    reason="\u00a5epoch, epoch and \x00 epoch",
)
EPOCHS = (0, 1, 127, 128, 255, 256, 65_535, 65_536, 1 << 32, 1 << 62)


@pytest.mark.parametrize("first", EPOCHS)
def test_the_bytes_are_those_of_a_message_for_that_session(first: int) -> None:
    told = Fanout(replace(CLOSE, epoch=first))
    for epoch in EPOCHS:
        assert told.payload(epoch) == codec.encode(replace(CLOSE, epoch=epoch))
    assert told.kind == "RoundClose"


def test_sessions_of_one_epoch_share_the_bytes() -> None:
    told = Fanout(CLOSE)
    assert told.payload(3) is told.payload(3)


def test_one_that_is_too_large_is_refused_before_anybody_is_told() -> None:
    with pytest.raises(FrameError, match="over"):
        Fanout(replace(CLOSE, contributors=(NODE,) * 16_384))


def test_a_message_without_an_epoch_is_none_for_many() -> None:
    with pytest.raises(TypeError, match="Refused"):
        Fanout(messages.Refused(code="stale", reason="late"))
