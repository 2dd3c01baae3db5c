"""Options that every verb has, and the connection they lead to."""

from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec
import typer

from lensemble.ctl import replies
from lensemble.ctl.client import DEFAULT_TIMEOUT_S, Client
from lensemble.version import VERSION
from lensemblectl import places
from lensemblectl.exits import say

Socket: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--socket",
        "--config",
        "-s",
        help="Socket, configuration file or directory of the daemon.",
        show_default="the daemon of this directory, or of the system",
    ),
]
Timeout: TypeAlias = Annotated[
    float,
    typer.Option(
        "--timeout", help="Seconds of silence after which the daemon is given up.", min=0.05
    ),
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")]

TIMEOUT_S = DEFAULT_TIMEOUT_S


def connect(socket: Path | None, timeout_s: float) -> Client:
    """A connection to the daemon meant by ``--socket``.

    Raises:
        ConfigError, DaemonUnreachable, Declined: see ``places.socket_at`` and ``Client``.
    """
    return Client(places.socket_at(socket), version=VERSION, timeout_s=timeout_s)


def put_json(reply: replies.Reply) -> None:
    """One line of JSON on standard output."""
    say(msgspec.json.encode(reply).decode())
