"""An invite, as one line of text to hand to the operator of a node.

``lensemble1:`` and then base64url of a msgpack array and four bytes of its SHA-256, so that a
ticket that was cut short or mistyped is told apart from one that was refused.
"""

import base64
import binascii
import hashlib
from typing import Annotated

import msgspec
from msgspec import Meta

from lensemble.addresses import split_address
from lensemble.errors import OperatorError
from lensemble.ids import FederationId, NodeId

PREFIX = "lensemble1:"
MAX_TICKET_CHARACTERS = 1024
MAX_ADDRESSES = 8
MAX_ADDRESS_CHARACTERS = 64
SECRET_BYTES = 16
CHECK_BYTES = 4
LAST_SECOND = (1 << 53) - 1

_AGAIN = "Copy the whole line that `lensemblectl invite` printed, or ask for a new one."


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """Whom to join, and the secret that admits one node; ``expires`` in Unix seconds."""

    coordinator: NodeId
    federation: FederationId
    addresses: tuple[str, ...]
    secret: bytes
    expires: int

    def membership(self) -> "Membership":
        """What a node keeps of it."""
        return Membership(self.coordinator, self.addresses, self.federation, self.secret)

    def __repr__(self) -> str:
        return f"Ticket(coordinator={self.coordinator}, expires={self.expires})"


class Membership(msgspec.Struct, frozen=True):
    """Which coordinator a node belongs to: from a ticket, or from its configuration.

    Without a ticket ``federation`` is not known before the first welcome, and ``invite`` is empty.
    """

    coordinator: NodeId
    addresses: tuple[str, ...]
    federation: FederationId | None = None
    invite: bytes = b""

    def __repr__(self) -> str:
        return f"Membership({self.coordinator}, {self.addresses}, {self.federation})"


class _Body(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    coordinator: Annotated[bytes, Meta(min_length=32, max_length=32)]
    federation: Annotated[bytes, Meta(min_length=16, max_length=16)]
    secret: Annotated[bytes, Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
    expires: Annotated[int, Meta(ge=0, le=LAST_SECOND)]
    addresses: Annotated[
        tuple[Annotated[str, Meta(max_length=MAX_ADDRESS_CHARACTERS)], ...],
        Meta(min_length=1, max_length=MAX_ADDRESSES),
    ]


_decoder = msgspec.msgpack.Decoder(_Body)


def encode(ticket: Ticket) -> str:
    """The line of text.

    Raises:
        OperatorError: an address that is not ``host:port``, or more than ``MAX_ADDRESSES``.
    """
    _check_addresses(ticket.addresses)
    body = msgspec.msgpack.encode(
        _Body(
            bytes.fromhex(ticket.coordinator),
            bytes.fromhex(ticket.federation),
            ticket.secret,
            ticket.expires,
            ticket.addresses,
        )
    )
    return PREFIX + base64.urlsafe_b64encode(body + _check(body)).rstrip(b"=").decode()


def decode(text: str) -> Ticket:
    """The ticket in ``text``; blanks and line breaks around and within it do not matter.

    Raises:
        OperatorError: not a ticket, cut short, mistyped, or of another version.
    """
    if len(text) > 2 * MAX_TICKET_CHARACTERS:
        raise OperatorError(
            f"a ticket is no longer than {MAX_TICKET_CHARACTERS} characters", _AGAIN
        )
    line = "".join(text.split())
    if not line.startswith(PREFIX):
        raise OperatorError(_why_not_ours(line), _AGAIN)
    raw = _unarmoured(line.removeprefix(PREFIX))
    body, check = raw[:-CHECK_BYTES], raw[-CHECK_BYTES:]
    if check != _check(body):
        raise OperatorError("this ticket is cut short or mistyped: its check fails", _AGAIN)
    try:
        read = _decoder.decode(body)
    except msgspec.DecodeError as error:
        raise OperatorError(f"this ticket holds something else: {error}", _AGAIN) from error
    _check_addresses(read.addresses)
    return Ticket(
        coordinator=NodeId(read.coordinator.hex()),
        federation=FederationId(read.federation.hex()),
        addresses=read.addresses,
        secret=read.secret,
        expires=read.expires,
    )


def _why_not_ours(line: str) -> str:
    if line.startswith("lensemble") and ":" in line[:20]:
        return f"this ticket is of kind {line.partition(':')[0]}; this version reads {PREFIX[:-1]}"
    return f"this is not a ticket: it does not begin with {PREFIX}"


def _unarmoured(text: str) -> bytes:
    try:
        raw = text.encode("ascii")
        return base64.b64decode(raw + b"=" * (-len(raw) % 4), altchars=b"-_", validate=True)
    except (UnicodeEncodeError, binascii.Error) as error:
        raise OperatorError("this ticket is cut short or mistyped", _AGAIN) from error


def _check(body: bytes) -> bytes:
    return hashlib.sha256(b"lensemble ticket" + body).digest()[:CHECK_BYTES]


def _check_addresses(addresses: tuple[str, ...]) -> None:
    if not 1 <= len(addresses) <= MAX_ADDRESSES:
        raise OperatorError(f"a ticket has 1 to {MAX_ADDRESSES} addresses, not {len(addresses)}")
    for address in addresses:
        try:
            split_address(address)
        except ValueError as error:
            raise OperatorError(f"a ticket with the address {error}", _AGAIN) from error
