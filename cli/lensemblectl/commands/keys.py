"""``lensemblectl revoke`` and ``rotate-key``."""

import sys
from typing import Annotated

import typer

from lensemble.ctl import replies, requests
from lensemblectl import places, programs, words
from lensemblectl.commands.setup import put_json_object
from lensemblectl.exits import say
from lensemblectl.options import TIMEOUT_S, Json, Socket, Timeout, connect, put_json


def revoke(
    node: Annotated[str, typer.Argument(metavar="NODE", help="A name, or the start of an id.")],
    reason: Annotated[str, typer.Option(help="Told to the node, and kept.")] = (
        "revoked by the operator"
    ),
    undo: Annotated[bool, typer.Option("--undo", help="Let it join again.")] = False,
    socket: Socket = None,
    timeout: Timeout = TIMEOUT_S,
    json: Json = False,
) -> None:
    """Put a node out, and admit it no more, whatever ticket it shows; what it gave stays.

    Example: lensemblectl revoke arm-1 --reason "its disk was stolen"
    """
    with connect(socket, timeout) as client:
        reply = client.ask(requests.Revoke(node=node, reason=reason, undo=undo))
    if json or not isinstance(reply, replies.Done):
        put_json(reply)
    else:
        say(reply.message)


def rotate_key(socket: Socket = None, json: Json = False) -> None:
    """Give a daemon that does not run another identity; the former key is removed.

    Example: lensemblectl rotate-key --socket arm-1
    """
    config = places.config_at(socket)
    part = places.part_of(config)
    made = programs.ask("lensemble.rotation", [str(places.state_dir_of(config))])
    if json:
        put_json_object(made)
        return
    former, drawn = made["former"], made["node"]
    say(f"{words.short(former)} is now {drawn}")
    sys.stdout.flush()
    if part == "node":
        sys.stderr.write(
            "Next: on the coordinator, lensemblectl revoke "
            f"{words.short(former)} and lensemblectl invite; here, lensemblectl join TICKET, "
            "then start the node.\n"
        )
    else:
        sys.stderr.write(
            "Next: start the coordinator, lensemblectl invite --uses N, and on every node "
            "lensemblectl join TICKET: the nodes do not know this key.\n"
        )
