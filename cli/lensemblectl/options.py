"""Options that every verb has, and the connection they lead to."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec
import typer

from lensemble.ctl import replies, requests
from lensemble.ctl.client import DEFAULT_TIMEOUT_S, Client
from lensemble.version import VERSION
from lensemblectl import places
from lensemblectl.exits import printable, say, shown

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


class Listener(Client):
    """A client whose replies hold only what is printable.

    Names and reasons come from other machines; an escape sequence in one must not reach a terminal.
    """

    def stream(self, request: requests.Request) -> Iterator[replies.Reply]:
        for reply in super().stream(request):
            if isinstance(reply, replies.TokenText):
                yield msgspec.structs.replace(reply, text=shown(reply.text))
                continue
            clean = msgspec.convert(_printable(msgspec.to_builtins(reply)), type(reply))
            if isinstance(reply, replies.Answered):
                clean = msgspec.structs.replace(clean, text=shown(reply.text))
            yield clean


def _printable(tree: Any) -> Any:  # noqa: ANN401 - any JSON
    match tree:
        case str():
            return printable(tree)
        case list() | tuple():
            return [_printable(part) for part in tree]
        case dict():
            return {_printable(key): _printable(value) for key, value in tree.items()}
        case _:
            return tree


def connect(socket: Path | None, timeout_s: float) -> Client:
    """A connection to the daemon meant by ``--socket``.

    Raises:
        ConfigError, DaemonUnreachable, Declined: see ``places.socket_at`` and ``Client``.
    """
    return Listener(places.socket_at(socket), version=VERSION, timeout_s=timeout_s)


def put_json(reply: replies.Reply) -> None:
    """One line of JSON on standard output."""
    say(msgspec.json.encode(reply).decode())
