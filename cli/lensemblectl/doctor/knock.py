"""Whether a QUIC endpoint listens behind an address, without an identity and without a handshake.

A packet of a version that is reserved for this purpose has to be answered by Version Negotiation
(RFC 9000 sections 6.1 and 15), so an answer shows that UDP passes in both directions and that QUIC
is spoken there.  No state is made at the other end.
"""

import os
import select
import socket
import time
from typing import Literal

from lensemble.addresses import family, split_address

LEAST_DATAGRAM = 1200
"""An endpoint ignores a first packet that is shorter (RFC 9000 section 14.1)."""

RESERVED_VERSION = bytes.fromhex("1a2a3a4a")
ID_BYTES = 8
ATTEMPTS = 3
MAX_ANSWER = 2048

Answer = Literal["quic", "refused", "silent", "unroutable"]


def knock(address: str, within_s: float = 2.0) -> Answer:
    """What is behind ``address`` ("host:port", an IP address).

    Returns:
        "quic": an endpoint answers; "refused": the host says that nobody listens on the port;
        "silent": no answer within ``within_s`` seconds and ``ATTEMPTS`` packets, so it is filtered
        or the host is not there; "unroutable": this host has no way there.

    Raises:
        ValueError: not an address.
    """
    host, port = split_address(address)
    version = socket.AF_INET6 if family(address) == 6 else socket.AF_INET
    own = os.urandom(ID_BYTES)
    packet = _packet(own)
    with socket.socket(version, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect((host, port))
        except OSError:
            return "unroutable"
        for attempt in range(ATTEMPTS):
            until = time.monotonic() + within_s / ATTEMPTS
            try:
                asking.send(packet)
                while _readable(asking, until):
                    if _negotiates(asking.recv(MAX_ANSWER), own):
                        return "quic"
            except ConnectionRefusedError:
                # A refusal may be left from an endpoint that is just being started again.
                if attempt + 1 == ATTEMPTS:
                    return "refused"
            except OSError:
                return "unroutable"
    return "silent"


def _packet(own: bytes) -> bytes:
    ids = bytes([ID_BYTES]) + os.urandom(ID_BYTES) + bytes([ID_BYTES]) + own
    return (b"\xc0" + RESERVED_VERSION + ids).ljust(LEAST_DATAGRAM, b"\x00")


def _readable(asking: socket.socket, until: float) -> bool:
    left = until - time.monotonic()
    return left > 0 and bool(select.select([asking], [], [], left)[0])


def _negotiates(answer: bytes, own: bytes) -> bool:
    """A long header, version 0, and our own id as its destination."""
    ahead = bytes([ID_BYTES]) + own
    return (
        len(answer) > 6
        and answer[0] >= 0x80
        and answer[1:5] == bytes(4)
        and answer[5:].startswith(ahead)
    )
