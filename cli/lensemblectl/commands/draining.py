"""``lensemblectl drain``: leave a node alone, before it is switched off or updated."""

import sys
from typing import Annotated

import typer

from lensemble.ctl import replies, requests
from lensemblectl.exits import FAILED, INTERRUPTED, complain, printable, say, stop
from lensemblectl.options import TIMEOUT_S, Json, Socket, Timeout, connect, put_json


def drain(
    node: Annotated[str, typer.Argument(metavar="NODE", help="A name, or the start of an id.")],
    undo: Annotated[bool, typer.Option("--undo", help="Use the node again.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Stop runs that cannot leave it, their answers too.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Until nothing is left on it; Ctrl-C takes nothing back.")
    ] = False,
    reason: Annotated[str, typer.Option(help="Told to whom it concerns.")] = (
        "drained by the operator"
    ),
    socket: Socket = None,
    timeout: Timeout = TIMEOUT_S,
    json: Json = False,
) -> None:
    """Give a node no further stages and rounds; a restart of the coordinator keeps that.

    Runs with --on-fault replace move off it; others end by themselves, or with --force.

    Example: lensemblectl drain node-b --wait
    """
    if undo and (force or wait):
        raise typer.BadParameter("--undo goes with neither --force nor --wait")
    request = requests.Drain(node=node, undo=undo, force=force, wait=wait, reason=reason)
    last: replies.DrainStatus | None = None
    with connect(socket, timeout) as client:
        try:
            for reply in client.stream(request):
                if isinstance(reply, replies.DrainStatus):
                    _see(last, reply, json=json)
                    last = reply
        except KeyboardInterrupt:
            client.close()
            sys.stderr.write("\nIt stays drained.\n")
            stop(INTERRUPTED)
    if last is None:
        complain("the coordinator did not say what became of it", "lensemblectl status")
        stop(FAILED)


def _see(before: replies.DrainStatus | None, status: replies.DrainStatus, *, json: bool) -> None:
    if status == before:
        return
    if json:
        put_json(status)
        return
    say(line(status))
    if before is None and status.stays:
        for each in status.stays:
            sys.stderr.write(f"Note: {printable(each)}\n")
        sys.stderr.write(f"Try: lensemblectl drain {printable(status.name)} --force\n")


def line(status: replies.DrainStatus) -> str:
    """``node-b is draining: runs 3f2a..., a round``."""
    left = [f"run {run}" for run in status.runs] + (["a round"] if status.in_round else [])
    still = f": {', '.join(left)}" if left and status.state == "draining" else ""
    return f"{status.name} is {status.state}{still}"
