"""A node's directory, and which coordinator it belongs to.

Run by ``lensemblectl init node`` and, while the node is not running, ``lensemblectl join``.
"""

import argparse
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from lensemble import files, home, ticket
from lensemble.config import commented, load, validate
from lensemble.errors import LensembleError, OperatorError, StorageError
from lensemble.ids import FederationId, NodeId
from lensemble.ticket import Membership, Ticket
from lensemble_node.config import TITLE, NodeConfig

EXIT_USAGE = 2
CONFIG_NAME = "node.toml"
MEMBERSHIP_NAME = "coordinator.json"
MEMBERSHIP_MODE = 0o600
MAX_MEMBERSHIP_BYTES = 1 << 14


class _Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    coordinator: Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    addresses: Annotated[tuple[str, ...], Meta(min_length=1, max_length=ticket.MAX_ADDRESSES)]
    federation: Annotated[str, Meta(pattern=r"\A([0-9a-f]{32})?\Z")]
    invite: Annotated[str, Meta(pattern=r"\A[0-9a-f]{0,64}\Z")]


def membership(config: NodeConfig) -> Membership | None:
    """Whom this node belongs to: its configuration says so, or the ticket it joined by.

    Raises:
        StorageError: the file that ``join`` wrote is damaged.
    """
    named = config.coordinator
    joined = load_membership(config.state_dir)
    if not named.id:
        return joined
    if joined is not None and joined.coordinator == named.id:
        return Membership(joined.coordinator, named.addresses, joined.federation, joined.invite)
    return Membership(NodeId(named.id), named.addresses)


def load_membership(state_dir: Path) -> Membership | None:
    """What ``save_membership`` wrote, if anything.

    Raises:
        StorageError: the file is damaged.
    """
    path = state_dir / MEMBERSHIP_NAME
    if not path.exists():
        return None
    try:
        stored = msgspec.json.decode(files.read_limited(path, MAX_MEMBERSHIP_BYTES), type=_Stored)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StorageError(
            f"{path} is damaged: {error}", "Remove the file and join again with a new ticket."
        ) from error
    federation = FederationId(stored.federation) if stored.federation else None
    return Membership(
        NodeId(stored.coordinator), stored.addresses, federation, bytes.fromhex(stored.invite)
    )


def save_membership(state_dir: Path, belongs: Membership) -> None:
    """Remember ``belongs``, durably, readable by this user only.

    Raises:
        StorageError: the directory cannot be written.
    """
    stored = _Stored(
        belongs.coordinator, belongs.addresses, belongs.federation or "", belongs.invite.hex()
    )
    text = msgspec.json.format(msgspec.json.encode(stored), indent=2) + b"\n"
    files.write_durably(state_dir / MEMBERSHIP_NAME, text, MEMBERSHIP_MODE)


def forget_membership(state_dir: Path) -> None:
    """Belong to nobody again.

    Raises:
        StorageError: the file cannot be removed.
    """
    path = state_dir / MEMBERSHIP_NAME
    with files.storage(path):
        path.unlink(missing_ok=True)
        files.flush_directory(state_dir)


def usable_ticket(text: str, config: NodeConfig, now: float) -> Ticket:
    """The ticket in ``text``, if this node can follow it; ``now`` in Unix seconds.

    Raises:
        OperatorError: not a ticket, expired, or the configuration names another coordinator.
    """
    invite = ticket.decode(text)
    if invite.expires <= now:
        raise OperatorError(
            f"this ticket expired {_ago(now - invite.expires)} ago",
            "Ask for a new one (`lensemblectl invite`).",
        )
    if config.coordinator.id and config.coordinator.id != invite.coordinator:
        raise OperatorError(
            f"the configuration names coordinator {config.coordinator.id[:16]}, this ticket is "
            f"from {invite.coordinator[:16]}",
            "Remove id and addresses from [coordinator] in the node's configuration.",
        )
    return invite


def _ago(seconds: float) -> str:
    for unit, length in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def create(asked: home.Asked, data: Path | None) -> dict[str, str]:
    """Lay out what is ``asked``, for a node that reads ``data``.

    Returns:
        What was made: directory, config, data, node, socket.

    Raises:
        ConfigError: the directory has a configuration, or the name is not valid.
        StorageError: it cannot be written.
    """
    directory = asked.directory
    given = asked.given({} if data is None else {"data": {"path": str(data.absolute())}})
    config = validate(given, NodeConfig, path=directory / CONFIG_NAME)
    who = home.lay_out(directory, {CONFIG_NAME: commented(NodeConfig, TITLE, given)}, asked.system)
    return {
        "directory": str(directory),
        "config": str(directory / CONFIG_NAME),
        "data": str(config.data.path),
        "node": who.node,
        "socket": str(config.socket_path),
    }


def join(config_file: Path, text: str) -> dict[str, Any]:
    """Remember the coordinator of ticket ``text`` for the node of ``config_file``.

    Raises:
        OperatorError, ConfigError, StorageError: the ticket, the file or the directory is no good.
    """
    config = load(config_file, NodeConfig)
    invite = usable_ticket(text, config, datetime.now(tz=UTC).timestamp())
    with files.storage(config.state_dir):
        files.make_directory(config.state_dir, home.STATE_MODE)
    save_membership(config.state_dir, invite.membership())
    home.give_as(config.state_dir / MEMBERSHIP_NAME, config.state_dir)
    return {
        "coordinator": invite.coordinator,
        "addresses": list(invite.addresses),
        "federation": invite.federation,
        "config": str(config_file),
        "listen": list(config.listen.addresses),
    }


def main(arguments: list[str] | None = None) -> int:
    """The program; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    init = verbs.add_parser("init", parents=[home.arguments("node")])
    data = init.add_mutually_exclusive_group()
    data.add_argument("--data", type=Path)
    data.add_argument("--no-data", action="store_true")
    joining = verbs.add_parser("join")
    joining.add_argument("config", type=Path)
    options = parser.parse_args(arguments)
    try:
        if options.verb == "init":
            made: dict[str, Any] = create(home.asked(options), options.data)
            if options.no_data:
                made["data"] = ""
        else:
            # From standard input, so that the secret is in no process list.
            made = join(options.config, sys.stdin.read(ticket.MAX_TICKET_CHARACTERS * 2 + 1))
    except LensembleError as error:
        sys.stderr.write(f"Error: {error.message}\nTry: {error.remediation}\n")
        return EXIT_USAGE
    sys.stdout.write(json.dumps(made) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
