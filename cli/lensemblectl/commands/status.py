"""``lensemblectl status``."""

import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from lensemble.ctl import replies, requests
from lensemblectl.exits import say
from lensemblectl.options import TIMEOUT_S, Json, Socket, Timeout, connect, put_json
from lensemblectl.words import round_line


def status(
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on until Ctrl-C.")] = False,
    interval: Annotated[
        float, typer.Option(help="Seconds between two looks; a change shows at once.", min=0.1)
    ] = 1.0,
    socket: Socket = None,
    timeout: Timeout = TIMEOUT_S,
    json: Json = False,
) -> None:
    """Show what a daemon does, what it waits for, on whom and for how long.

    Example: lensemblectl status --watch --socket coord
    """
    with connect(socket, timeout) as client:
        answers = client.stream(requests.Status(watch=watch, interval_s=interval))
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
    from lensemblectl import render  # noqa: PLC0415 - JSON needs no tables

    match reply:
        case replies.CoordinatorStatus():
            render.show(render.coordinator(reply, render.console().width))
        case replies.NodeStatus():
            render.show(render.node(reply))
        case _:
            put_json(reply)


def _live(answers: Iterator[replies.Reply]) -> None:
    from rich.live import Live  # noqa: PLC0415 - as above

    from lensemblectl import render  # noqa: PLC0415

    console = render.console()
    with Live(console=console, auto_refresh=False, screen=True) as live:
        for reply in answers:
            match reply:
                case replies.CoordinatorStatus():
                    live.update(render.coordinator(reply, console.width), refresh=True)
                case replies.NodeStatus():
                    live.update(render.node(reply), refresh=True)
                case _:
                    continue


def _lines(answers: Iterator[replies.Reply]) -> None:
    """One line for each change, for those who pipe."""
    said = ""
    for reply in answers:
        match reply:
            case replies.CoordinatorStatus():
                line = round_line(reply.round)
            case replies.NodeStatus(round=replies.NodeRoundStatus() as now):
                line = f"round {now.index} {now.activity}: {now.reason}".rstrip(": ")
            case replies.NodeStatus():
                line = f"{reply.link.state}: {reply.link.reason}".rstrip(": ")
            case _:
                continue
        if line != said:
            said = line
            say(line)
