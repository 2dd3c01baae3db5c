"""Messages to bytes and back: size first, then version, then fields.

A payload is the wire version as u16 little-endian, then the message in msgpack.
"""

import struct
from typing import TypeVar

import msgspec

from lensemble.errors import ContractViolation, FrameError
from lensemble.wire.messages import WIRE_VERSION, FromCoordinator, FromNode

MAX_MESSAGE_BYTES = 1 << 20
MAX_COMPLAINT_CHARS = 200
"""A decoder's complaint may repeat what a peer chose; no more of it is passed on."""

SPEAKS = (1, WIRE_VERSION)
_VERSION = struct.Struct("<H")
_encoder = msgspec.msgpack.Encoder()
_from_node: "msgspec.msgpack.Decoder[FromNode]" = msgspec.msgpack.Decoder(FromNode)
_from_coordinator: "msgspec.msgpack.Decoder[FromCoordinator]" = msgspec.msgpack.Decoder(
    FromCoordinator
)
Message = TypeVar("Message", bound=msgspec.Struct)


def encode(message: FromNode | FromCoordinator) -> bytes:
    """The payload of one control frame.

    Raises:
        FrameError: the message is over ``MAX_MESSAGE_BYTES``, or holds text or a number that
            msgpack cannot.
    """
    try:
        body = _encoder.encode(message)
    except (UnicodeEncodeError, OverflowError) as error:
        raise FrameError(f"a {type(message).__name__} cannot be encoded: {error}") from error
    if len(body) + _VERSION.size > MAX_MESSAGE_BYTES:
        raise FrameError(
            f"a {type(message).__name__} of {len(body)} bytes is over {MAX_MESSAGE_BYTES}"
        )
    return _VERSION.pack(WIRE_VERSION) + body


def decode_from_node(payload: bytes) -> FromNode:
    """What a node said.

    Raises:
        FrameError: too large, truncated, or not a message of this version.
        ContractViolation: another wire version.
    """
    return _decode(payload, _from_node)


def decode_from_coordinator(payload: bytes) -> FromCoordinator:
    """What the coordinator said; raises as ``decode_from_node``."""
    return _decode(payload, _from_coordinator)


def common_version(theirs: tuple[int, int]) -> int:
    """The highest wire version both sides speak.

    Raises:
        ContractViolation: there is none; names both ranges and which side to upgrade.
    """
    low, high = max(theirs[0], SPEAKS[0]), min(theirs[1], SPEAKS[1])
    if low > high:
        older = "node" if theirs[1] < SPEAKS[0] else "coordinator"
        raise ContractViolation(
            f"the node speaks wire versions {_span(theirs)}, the coordinator {_span(SPEAKS)}",
            f"Upgrade the {older}.",
        )
    return high


def _span(speaks: tuple[int, int]) -> str:
    return str(speaks[0]) if speaks[0] == speaks[1] else f"{speaks[0]} to {speaks[1]}"


def _decode(payload: bytes, decoder: "msgspec.msgpack.Decoder[Message]") -> Message:
    if len(payload) > MAX_MESSAGE_BYTES:
        raise FrameError(f"a message of {len(payload)} bytes is over {MAX_MESSAGE_BYTES}")
    if len(payload) < _VERSION.size:
        raise FrameError(f"a message of {len(payload)} bytes is too short to hold its version")
    (version,) = _VERSION.unpack_from(payload)
    if not SPEAKS[0] <= version <= SPEAKS[1]:
        raise ContractViolation(
            f"a message of wire version {version}; this build speaks {_span(SPEAKS)}"
        )
    try:
        return decoder.decode(memoryview(payload)[_VERSION.size :])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(f"not a message: {_printable(str(error))}") from error


def _printable(complaint: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in complaint[:MAX_COMPLAINT_CHARS])
