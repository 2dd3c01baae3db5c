"""How a membership message travels as a note: to a neighbour, or by way of the coordinator.

One byte says which, 32 bytes name the member at the far end where it is not the neighbour, and the
rest is the message.  Whose link a note came on is what says who its neighbour is; only the
coordinator may say that it passes on what another has sent, and what was passed on once is never
passed on again.
"""

from enum import IntEnum

import msgspec

from lensemble.errors import FrameError
from lensemble.ids import NodeId
from lensemble.wire.membership import MAX_DATAGRAM_BYTES

NODE_BYTES = 32
MAX_LETTER_BYTES = 1 + NODE_BYTES + MAX_DATAGRAM_BYTES


class Way(IntEnum):
    """First byte of a note."""

    NEIGHBOUR = 0
    """From its sender to its receiver."""

    PASS_ON = 1
    """To the coordinator: send it to ``node``."""

    PASSED_ON = 2
    """From the coordinator: ``node`` has sent it."""


class Letter(msgspec.Struct, frozen=True):
    """``node`` is None for a neighbour's."""

    way: Way
    node: NodeId | None
    message: bytes


def seal(message: bytes) -> bytes:
    """A note to a neighbour."""
    return bytes([Way.NEIGHBOUR]) + message


def pass_on(to: NodeId, message: bytes) -> bytes:
    """A note to the coordinator, for ``to``."""
    return bytes([Way.PASS_ON]) + bytes.fromhex(to) + message


def passed_on(sender: NodeId, message: bytes) -> bytes:
    """A note of the coordinator, from ``sender``."""
    return bytes([Way.PASSED_ON]) + bytes.fromhex(sender) + message


def unseal(note: bytes) -> Letter:
    """What a note holds; the message is not looked at.

    Raises:
        FrameError: too long, too short, or of no known way.
    """
    if len(note) > MAX_LETTER_BYTES:
        raise FrameError(f"a note of {len(note)} bytes is over {MAX_LETTER_BYTES}")
    if not note or note[0] > max(Way):
        raise FrameError(f"a note of {len(note)} bytes goes no known way")
    way = Way(note[0])
    if way is Way.NEIGHBOUR:
        return Letter(way, None, note[1:])
    if len(note) < 1 + NODE_BYTES:
        raise FrameError(f"a note of {len(note)} bytes is too short to name a member")
    return Letter(way, NodeId(note[1 : 1 + NODE_BYTES].hex()), note[1 + NODE_BYTES :])
