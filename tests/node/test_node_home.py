"""Whom a node belongs to, and how it remembers."""

from pathlib import Path

import pytest

from lensemble.errors import OperatorError, StorageError
from lensemble.ids import FederationId, NodeId
from lensemble.ticket import Membership, Ticket, encode
from lensemble_node import home
from lensemble_node.config import CoordinatorSection, NodeConfig

TICKET = Ticket(
    coordinator=NodeId("ab" * 32),
    federation=FederationId("cd" * 16),
    addresses=("192.0.2.1:7707", "[2001:db8::1]:7707"),
    secret=b"sixteen bytes ok",
    expires=1000,
)


def test_what_is_saved_is_loaded_and_can_be_forgotten(tmp_path: Path) -> None:
    assert home.load_membership(tmp_path) is None
    for belongs in (TICKET.membership(), Membership(NodeId("12" * 32), ("127.0.0.1:1",))):
        home.save_membership(tmp_path, belongs)
        assert home.load_membership(tmp_path) == belongs
    home.forget_membership(tmp_path)
    home.forget_membership(tmp_path)
    assert home.load_membership(tmp_path) is None


def test_the_configuration_has_the_last_word(tmp_path: Path) -> None:
    home.save_membership(tmp_path, TICKET.membership())
    plain = NodeConfig(state_dir=tmp_path)
    assert home.membership(plain) == TICKET.membership()
    moved = CoordinatorSection(id="ab" * 32, addresses=("192.0.2.9:1",))
    assert home.membership(NodeConfig(state_dir=tmp_path, coordinator=moved)) == Membership(
        TICKET.coordinator, ("192.0.2.9:1",), TICKET.federation, TICKET.secret
    )
    other = CoordinatorSection(id="12" * 32, addresses=("192.0.2.9:1",))
    assert home.membership(NodeConfig(state_dir=tmp_path, coordinator=other)) == Membership(
        NodeId("12" * 32), ("192.0.2.9:1",)
    )


@pytest.mark.parametrize("text", ["", "{}", "[1", '{"coordinator":"x"}', "\udcff" * 3])
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / home.MEMBERSHIP_NAME).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(StorageError, match=home.MEMBERSHIP_NAME):
        home.load_membership(tmp_path)


def test_a_ticket_must_be_fresh_and_from_the_named_coordinator() -> None:
    text, config = encode(TICKET), NodeConfig()
    assert home.usable_ticket(text, config, 999.0) == TICKET
    with pytest.raises(OperatorError, match="expired 2 hours ago"):
        home.usable_ticket(text, config, 1000 + 7200.0)
    other = CoordinatorSection(id="12" * 32, addresses=("192.0.2.9:1",))
    with pytest.raises(OperatorError, match="names coordinator 1212"):
        home.usable_ticket(text, NodeConfig(coordinator=other), 0.0)
