"""``lensemblectl members``."""

import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from lensemble.ctl import replies, requests
from lensemblectl.exits import say
from lensemblectl.options import TIMEOUT_S, Json, Socket, Timeout, connect, put_json
from lensemblectl.words import member_line


def members(
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on until Ctrl-C.")] = False,
    interval: Annotated[
        float, typer.Option(help="Seconds between two looks; a change shows at once.", min=0.1)
    ] = 1.0,
    socket: Socket = None,
    timeout: Timeout = TIMEOUT_S,
    json: Json = False,
) -> None:
    """Show who lives, as one daemon sees it: state, since when, by which path, how far away.

    A member that answers neither a probe nor those of others is suspect, and dead if it does not
    object in time. FLAPS counts how often it was suspect or dead and then alive again.

    Example: lensemblectl members --watch --socket coord
    """
    with connect(socket, timeout) as client:
        answers = client.stream(requests.Members(watch=watch, interval_s=interval))
        if json:
            for reply in answers:
                put_json(reply)
        elif watch and sys.stdout.isatty():
            _live(answers)
        elif watch:
            _lines(answers)
        else:
            for reply in answers:
                _show(reply)


def _show(reply: replies.Reply) -> None:
    from lensemblectl import render, render_members  # noqa: PLC0415 - JSON needs no tables

    if isinstance(reply, replies.MemberList):
        render.show(*render_members.table(reply))
    else:
        put_json(reply)


def _live(answers: Iterator[replies.Reply]) -> None:
    from rich.console import Group  # noqa: PLC0415 - as above
    from rich.live import Live  # noqa: PLC0415

    from lensemblectl import render, render_members  # noqa: PLC0415

    with Live(console=render.console(), auto_refresh=False, screen=True) as live:
        for reply in answers:
            if isinstance(reply, replies.MemberList):
                live.update(Group(*render_members.table(reply)), refresh=True)


def _lines(answers: Iterator[replies.Reply]) -> None:
    """One line for each change of a member, for those who pipe."""
    said: dict[str, str] = {}
    for reply in answers:
        if not isinstance(reply, replies.MemberList):
            continue
        for each in reply.members:
            if said.get(each.node) != each.state:
                said[each.node] = each.state
                say(member_line(each, reply))
