"""What members tell each other about each other, as datagrams.

A datagram is the schema version as u16 little-endian, then one message in msgpack, arrays instead
of maps; at most ``MAX_DATAGRAM_BYTES`` with ``MAX_UPDATES`` updates in it.  Every message says who
its sender is at this moment (``boot``, ``incarnation``), so hearing it is hearing that the sender
lives.  Who the sender is, is what the connection it came on says.
"""

import struct
from enum import StrEnum
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from lensemble.errors import ContractViolation, FrameError
from lensemble.wire.fence import Count, NodeKey

SCHEMA_VERSION = 1
MAX_DATAGRAM_BYTES = 1200
MAX_UPDATES = 6
_MAX_COMPLAINT_CHARS = 200

Boot = Annotated[str, Meta(pattern=r"\A([0-9a-f]{16})?\Z")]
"""Drawn at process start, tells restarts apart; empty of a member that was never heard of."""


class Standing(StrEnum):
    """What a member is held for."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"
    LEFT = "left"

    __hash__ = str.__hash__  # that of an Enum is slow, and standings are looked up all the time


class Update(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """``node``, in its life ``boot``, is held for ``standing`` as of its ``incarnation``."""

    node: NodeKey
    standing: Standing
    incarnation: Count
    boot: Boot
    by: NodeKey | None = None
    """Who suspects: its own probe had no answer.  None unless ``standing`` is suspect."""


Updates = Annotated[tuple[Update, ...], Meta(max_length=MAX_UPDATES)]


class _Said(
    msgspec.Struct,
    frozen=True,
    tag=True,
    array_like=True,
    forbid_unknown_fields=True,
    gc=False,
):
    boot: Boot
    """Of the sender."""
    incarnation: Count
    """Of the sender."""
    updates: Updates


class Probe(_Said, frozen=True, tag=True, array_like=True, gc=False):
    """Answer with ``Ack(sequence)``."""

    sequence: Count


class ProbeFor(_Said, frozen=True, tag=True, array_like=True, gc=False):
    """Probe ``target`` and pass its answer on as ``Ack(sequence)``, or say ``Nack(sequence)``."""

    sequence: Count
    target: NodeKey


class Ack(_Said, frozen=True, tag=True, array_like=True, gc=False):
    """The answer to the receiver's probe ``sequence``, given or passed on."""

    sequence: Count


class Nack(_Said, frozen=True, tag=True, array_like=True, gc=False):
    """The helper lives and its target has not answered it, as to ``ProbeFor(sequence)``."""

    sequence: Count


class Gossip(_Said, frozen=True, tag=True, array_like=True, gc=False):
    """Updates that shall not wait for a probe; nothing is answered."""


Message: TypeAlias = Probe | ProbeFor | Ack | Nack | Gossip

_VERSION = struct.Struct("<H")
_encoder = msgspec.msgpack.Encoder()
_decoder: "msgspec.msgpack.Decoder[Message]" = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """The datagram of ``message``.

    Raises:
        FrameError: it is over ``MAX_DATAGRAM_BYTES``; cannot be with fields in their limits.
    """
    datagram = _VERSION.pack(SCHEMA_VERSION) + _encoder.encode(message)
    if len(datagram) > MAX_DATAGRAM_BYTES:
        raise FrameError(
            f"a {type(message).__name__} of {len(datagram)} bytes is over {MAX_DATAGRAM_BYTES}"
        )
    return datagram


def decode(datagram: bytes) -> Message:
    """The message of ``datagram``: size first, then version, then fields.

    Raises:
        FrameError: too large, truncated, or not a message of this schema.
        ContractViolation: another schema version.
    """
    if len(datagram) > MAX_DATAGRAM_BYTES:
        raise FrameError(f"a datagram of {len(datagram)} bytes is over {MAX_DATAGRAM_BYTES}")
    if len(datagram) < _VERSION.size:
        raise FrameError(f"a datagram of {len(datagram)} bytes is too short for its version")
    (version,) = _VERSION.unpack_from(datagram)
    if version != SCHEMA_VERSION:
        raise ContractViolation(
            f"a membership datagram of schema {version}; this build speaks {SCHEMA_VERSION}"
        )
    try:
        return _decoder.decode(memoryview(datagram)[_VERSION.size :])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        complaint = str(error)[:_MAX_COMPLAINT_CHARS]
        printable = "".join(c if c.isprintable() else "?" for c in complaint)
        raise FrameError(f"not a membership message: {printable}") from error
