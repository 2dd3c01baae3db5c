"""Notes between members, sealed and unsealed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lensemble.errors import FrameError
from lensemble.ids import NodeId
from lensemble.wire import letters
from lensemble.wire.letters import Letter, Way
from lensemble.wire.membership import MAX_DATAGRAM_BYTES

nodes = st.binary(min_size=32, max_size=32).map(lambda key: NodeId(key.hex()))


@given(node=nodes, message=st.binary(max_size=MAX_DATAGRAM_BYTES))
def test_what_is_sealed_is_unsealed(node: NodeId, message: bytes) -> None:
    assert letters.unseal(letters.seal(message)) == Letter(Way.NEIGHBOUR, None, message)
    assert letters.unseal(letters.pass_on(node, message)) == Letter(Way.PASS_ON, node, message)
    assert letters.unseal(letters.passed_on(node, message)) == Letter(Way.PASSED_ON, node, message)


@pytest.mark.parametrize(
    ("note", "complaint"),
    [
        (b"", "no known way"),
        (b"\x03", "no known way"),
        (b"\xff" * 100, "no known way"),
        (b"\x01" + bytes(31), "too short"),
        (b"\x02", "too short"),
        (bytes(letters.MAX_LETTER_BYTES + 1), "is over"),
    ],
)
def test_anything_else_is_refused(note: bytes, complaint: str) -> None:
    with pytest.raises(FrameError, match=complaint):
        letters.unseal(note)


@given(st.binary(max_size=100))
def test_no_bytes_do_more_than_be_refused(note: bytes) -> None:
    try:
        letter = letters.unseal(note)
    except FrameError:
        return
    assert letter.way in Way
