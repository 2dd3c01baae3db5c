"""``lensemblectl init``, ``invite``, ``join`` and ``leave``."""

import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from lensemble.addresses import is_loopback
from lensemble.ctl import replies, requests
from lensemble.ctl.client import DaemonUnreachable
from lensemble.errors import OperatorError
from lensemblectl import places, programs, words
from lensemblectl.exits import say
from lensemblectl.options import TIMEOUT_S, Json, Socket, Timeout, connect, put_json

MAX_TTL_S = 31_536_000
UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}
LAST_TICKET_CHARACTER = 2048

SystemDaemon = Annotated[
    bool,
    typer.Option(
        "--system",
        help="For the unit that systemd runs: state in /var/lib/lensemble, socket in "
        "/run/lensemble. As root, with /etc/lensemble/coord or /etc/lensemble/node as DIRECTORY.",
    ),
]

Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A setting that is not at its default, such as rounds.min_participants=2; repeatable.",
    ),
]

init = typer.Typer(no_args_is_help=True, help="Make the directory of a new daemon.")


@init.command("coord")
def init_coord(
    directory: Annotated[Path, typer.Argument(help="Directory to make.")],
    name: Annotated[str | None, typer.Option(help="Its name; default: of the directory.")] = None,
    workload: Annotated[
        Path | None, typer.Option(help="Workload file; default: one is written.", exists=True)
    ] = None,
    no_training: Annotated[
        bool, typer.Option("--no-training", help="Only run models that nodes share; no workload.")
    ] = False,
    system: SystemDaemon = False,
    settings: Settings = None,
    json: Json = False,
) -> None:
    """Write a commented coord.toml and a workload.toml, and draw an identity.

    Example: lensemblectl init coord lab
    """
    asked = [str(directory), "--name", name or _name_of(directory)]
    asked += ["--workload", str(workload)] if workload else []
    asked += ["--no-training"] if no_training else []
    asked += ["--system"] if system else []
    asked += [word for each in settings or () for word in ("--set", each)]
    made = programs.ask("lensemble_coord.home", asked)
    edit = " and ".join(made[part] for part in ("config", "workload") if made[part])
    _tell_made(
        made,
        f"Edit {edit}, then: {_start(made, 'coord', system=system)}",
        json=json,
    )


@init.command("node")
def init_node(
    directory: Annotated[Path, typer.Argument(help="Directory to make.")],
    name: Annotated[str | None, typer.Option(help="Its name; default: of the directory.")] = None,
    data: Annotated[Path | None, typer.Option(help="HDF5 file of its trajectories.")] = None,
    no_data: Annotated[
        bool, typer.Option("--no-data", help="It only computes stages of models.")
    ] = False,
    system: SystemDaemon = False,
    settings: Settings = None,
    json: Json = False,
) -> None:
    """Write a commented node.toml, and draw an identity.

    Example: lensemblectl init node arm-1 --data arm-1.hdf5
    """
    asked = ["init", str(directory), "--name", name or _name_of(directory)]
    asked += ["--data", str(data)] if data else []
    asked += ["--no-data"] if no_data else []
    asked += ["--system"] if system else []
    asked += [word for each in settings or () for word in ("--set", each)]
    made = programs.ask("lensemble_node.home", asked)
    _tell_made(
        made,
        f"lensemblectl join TICKET --socket {directory}, "
        f"then: {_start(made, 'node', system=system)}",
        json=json,
    )


def invite(
    uses: Annotated[int, typer.Option(help="How many nodes it admits.", min=1, max=4096)] = 1,
    ttl: Annotated[str, typer.Option(help="How long it is good for: 90s, 30min, 24h, 7d.")] = "24h",
    socket: Socket = None,
    timeout: Timeout = TIMEOUT_S,
    json: Json = False,
) -> None:
    """Make a ticket that admits a new node; it is all that standard output gets.

    Example: lensemblectl invite --ttl 2h --socket coord
    """
    with connect(socket, timeout) as client:
        reply = client.ask(requests.Invite(uses=uses, ttl_s=_seconds(ttl)))
    if json or not isinstance(reply, replies.Invited):
        put_json(reply)
        return
    say(reply.ticket)
    _tell(
        f"Good for {words.counted(reply.uses, 'node')} within "
        f"{words.duration(reply.expires_in_s)}. On the node: lensemblectl join TICKET"
    )
    for warning in reply.warnings:
        _tell(f"warning: {warning}")


def join(
    ticket: Annotated[str, typer.Argument(help="The ticket, or - to read it from standard input.")],
    socket: Socket = None,
    timeout: Timeout = TIMEOUT_S,
    json: Json = False,
) -> None:
    """Make a node belong to the coordinator that gave the ticket, whether it runs or not.

    Example: lensemblectl join lensemble1:... --socket arm-1
    """
    text = sys.stdin.read(LAST_TICKET_CHARACTER + 1) if ticket == "-" else ticket
    try:
        with connect(socket, timeout) as client:
            reply = client.ask(requests.Join(ticket=text.strip()[:LAST_TICKET_CHARACTER]))
    except DaemonUnreachable:
        _join_on_file(places.config_at(socket), text, json=json)
        return
    if json or not isinstance(reply, replies.Joined):
        put_json(reply)
        return
    say(f"joined {words.short(reply.coordinator)} at {', '.join(reply.addresses)}")
    for warning in reply.warnings:
        _tell(f"warning: {warning}")
    _tell("`lensemblectl status` shows how the dialing goes.")


def leave(
    reason: Annotated[str, typer.Option(help="Told to the coordinator.")] = "left by the operator",
    socket: Socket = None,
    timeout: Timeout = TIMEOUT_S,
    json: Json = False,
) -> None:
    """Make a node leave its federation; it stays idle until it joins again.

    Example: lensemblectl leave --socket arm-1
    """
    with connect(socket, timeout) as client:
        reply = client.ask(requests.Leave(reason=reason))
    if json or not isinstance(reply, replies.Done):
        put_json(reply)
    else:
        say(reply.message)


def _join_on_file(config: Path, text: str, *, json: bool) -> None:
    made = programs.ask("lensemble_node.home", ["join", str(config)], said=text)
    listen = made.pop("listen")
    if json:
        put_json_object(made)
        return
    say(f"joined {words.short(made['coordinator'])} at {', '.join(made['addresses'])}")
    if all(map(is_loopback, listen)) and not any(map(is_loopback, made["addresses"])):
        _tell(
            f"warning: {config} listens on {', '.join(listen)}, which reaches this machine only; "
            'set addresses = ["0.0.0.0:0", "[::]:0"] in [listen]'
        )
    _tell(f"Start it: lensemble-node {config}")


def _tell_made(made: dict[str, Any], then: str, *, json: bool) -> None:
    if json:
        put_json_object(made)
        return
    say(f"made {made['directory']}, node id {made['node']}")
    _tell(f"Next: {then}")


def put_json_object(made: dict[str, Any]) -> None:
    """One line of JSON on standard output."""
    import json  # noqa: PLC0415 - the options are called so

    say(json.dumps(made))


def _start(made: dict[str, Any], part: str, *, system: bool) -> str:
    if system:
        return f"systemctl enable --now lensemble-{part}"
    return f"lensemble-{part} {made['config']}"


def _tell(text: str) -> None:
    """To the person, not into the pipe."""
    sys.stdout.flush()
    sys.stderr.write(text + "\n")


def _name_of(directory: Path) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", directory.absolute().name).strip("-._")[:64] or "node"


def _seconds(text: str) -> float:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([a-z]+)", text.strip())
    if match is None or match[2] not in UNITS:
        raise OperatorError(f"{text!r} is not a duration", "Write it as 90s, 30min, 24h or 7d.")
    seconds = float(match[1]) * UNITS[match[2]]
    if not 0 < seconds <= MAX_TTL_S:
        raise OperatorError(f"a ticket is good for up to 365d, not for {text}", "Choose less.")
    return seconds
