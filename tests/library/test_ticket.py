"""Tickets: what goes in comes out, and everything else is refused with a reason."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lensemble import ticket
from lensemble.errors import OperatorError
from lensemble.ids import FederationId, NodeId

ADDRESSES = st.sampled_from(["127.0.0.1:7707", "[::1]:7707", "192.0.2.1:0", "[2001:db8::1]:65535"])
TICKETS = st.builds(
    ticket.Ticket,
    coordinator=st.binary(min_size=32, max_size=32).map(lambda raw: NodeId(raw.hex())),
    federation=st.binary(min_size=16, max_size=16).map(lambda raw: FederationId(raw.hex())),
    addresses=st.lists(ADDRESSES, min_size=1, max_size=8).map(tuple),
    secret=st.binary(min_size=16, max_size=16),
    expires=st.integers(0, ticket.LAST_SECOND),
)
ONE = ticket.Ticket(
    coordinator=NodeId("ab" * 32),
    federation=FederationId("cd" * 16),
    addresses=("127.0.0.1:7707", "[::1]:7707"),
    secret=b"sixteen bytes ok",
    expires=2_000_000_000,
)


@given(made=TICKETS)
def test_a_ticket_survives_the_trip(made: ticket.Ticket) -> None:
    text = ticket.encode(made)
    assert len(text) <= ticket.MAX_TICKET_CHARACTERS
    assert ticket.decode(text) == made
    assert ticket.decode(f"  {text[:30]}\n  {text[30:]}\n") == made


@given(made=TICKETS, where=st.integers(0, 10_000), put=st.characters(codec="ascii"))
def test_one_wrong_character_is_noticed(made: ticket.Ticket, where: int, put: str) -> None:
    text = ticket.encode(made)
    where %= len(text)
    changed = text[:where] + put + text[where + 1 :]
    # The last character may carry bits that no byte uses, and blanks are skipped.
    if "".join(changed.split()) == text or where == len(text) - 1:
        return
    with pytest.raises(OperatorError):
        ticket.decode(changed)


@given(text=st.text() | st.text(alphabet="abcdefghAZ09-_=", max_size=80).map("lensemble1:".__add__))
def test_any_text_is_refused_or_read(text: str) -> None:
    with contextlib.suppress(OperatorError):
        ticket.decode(text)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "not a ticket"),
        ("hello", "does not begin with lensemble1:"),
        ("lensemble9:abcd", "of kind lensemble9"),
        ("lensemble1:", "cut short"),
        ("lensemble1:\N{SNOWMAN}", "mistyped"),
        (ticket.encode(ONE)[:-9], "cut short"),
        ("lensemble1:" + "A" * 4000, "no longer than"),
    ],
)
def test_a_refusal_says_why_and_what_to_do(text: str, part: str) -> None:
    with pytest.raises(OperatorError) as caught:
        ticket.decode(text)
    assert part in caught.value.message
    assert "lensemblectl invite" in caught.value.remediation


def test_the_secret_is_not_shown() -> None:
    assert "sixteen" not in repr(ONE)


def test_an_address_must_be_one() -> None:
    with pytest.raises(OperatorError, match="IP address"):
        ticket.encode(ticket.Ticket(**{**to_dict(ONE), "addresses": ("host:1",)}))
    with pytest.raises(OperatorError, match="not 0"):
        ticket.encode(ticket.Ticket(**{**to_dict(ONE), "addresses": ()}))


def to_dict(made: ticket.Ticket) -> dict[str, object]:
    return {name: getattr(made, name) for name in made.__struct_fields__}
