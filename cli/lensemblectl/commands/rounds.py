"""``lensemblectl rounds``, ``round`` and ``events``."""

from typing import Annotated

import typer

from lensemble.ctl import replies, requests
from lensemblectl import words
from lensemblectl.exits import say
from lensemblectl.options import TIMEOUT_S, Json, Socket, Timeout, connect, put_json


def rounds(
    limit: Annotated[
        int, typer.Option("--limit", "-n", help="How many.", min=1, max=requests.MAX_LISTED)
    ] = 20,
    socket: Socket = None,
    timeout: Timeout = TIMEOUT_S,
    json: Json = False,
) -> None:
    """List the latest closed rounds, newest last.

    Example: lensemblectl rounds --limit 5
    """
    with connect(socket, timeout) as client:
        reply = client.ask(requests.Rounds(limit=limit))
    if json or not isinstance(reply, replies.RoundList):
        put_json(reply)
    elif not reply.rounds:
        say("no round has closed yet; `lensemblectl run --rounds N` runs some")
    else:
        from lensemblectl import render  # noqa: PLC0415 - JSON needs no tables

        render.show(render.rounds(reply))


def one_round(
    index: Annotated[int, typer.Argument(metavar="T", help="Index of the round.", min=0)],
    socket: Socket = None,
    timeout: Timeout = TIMEOUT_S,
    json: Json = False,
) -> None:
    """Show one closed round in full, as the ledger has it.

    Example: lensemblectl round 3
    """
    with connect(socket, timeout) as client:
        reply = client.ask(requests.Round(index=index))
    if json or not isinstance(reply, replies.RoundDetail):
        put_json(reply)
    else:
        from lensemblectl import render  # noqa: PLC0415 - as above

        render.show(render.round_detail(reply))


def events(
    limit: Annotated[
        int, typer.Option("--limit", "-n", help="How many.", min=1, max=requests.MAX_LISTED)
    ] = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
    socket: Socket = None,
    timeout: Timeout = TIMEOUT_S,
    json: Json = False,
) -> None:
    """List the latest recorded events, oldest first.

    Example: lensemblectl events --follow
    """
    with connect(socket, timeout) as client:
        for reply in client.stream(requests.Events(limit=limit, follow=follow)):
            if json or not isinstance(reply, replies.EventRow):
                put_json(reply)
                continue
            told = " ".join(f"{name}={value}" for name, value in reply.fields.items())
            say(f"{words.moment(reply.unix_s)}  {reply.event:<20}  {told}".rstrip())
