"""Verbs that are programs of their own: ``verify``, ``probe``, ``simulate``, ``demo``."""

from pathlib import Path
from typing import Annotated

import typer

from lensemble.ctl.client import DaemonUnreachable
from lensemble.errors import ConfigError
from lensemble.version import VERSION
from lensemblectl import places, programs, words
from lensemblectl.exits import complain, say, stop
from lensemblectl.options import TIMEOUT_S, Json, Socket, Timeout, connect

PASSED_ON = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}
"""The program reads its own options, ``--help`` among them."""


def verify(
    state_dir: Annotated[
        Path | None,
        typer.Argument(help="A coordinator's state directory, or a copy of it, on any machine."),
    ] = None,
    socket: Socket = None,
    json: Json = False,
) -> None:
    """Re-derive the ledger, every signature, checkpoint and outer step from files alone.

    Example: lensemblectl verify /srv/copy/state
    """
    place = state_dir or places.state_dir_of(places.config_at(socket))
    if not place.is_dir():
        raise ConfigError(
            f"{place} is not a directory", "Name the state directory of a coordinator, or a copy."
        )
    if json:
        programs.become("lensemble_coord.training.verify", [str(place), "--json"])
    status, report = programs.report("lensemble_coord.training.verify", [str(place), "--json"])
    from lensemblectl import render  # noqa: PLC0415 - JSON needs no tables

    render.show(render.verified(report))
    if status:
        complain(
            f"{words.counted(len(report['problems']), 'problem')} in {place}",
            "Restore what is named from another copy of the state directory.",
        )
        stop(status)


def probe(context: typer.Context) -> None:
    """Make, pin or test a federation's public probe: probe build, probe pin, probe verify.

    Example: lensemblectl probe build --workload arm.toml --data public.h5 --out probe.safetensors
    """
    programs.become("lensemble_node.worker.training.probe", context.args)


def models(context: typer.Context) -> None:
    """The weights that lie on a node: models ls, models verify, models prune.

    Example: lensemblectl models ls --config node.toml
    """
    programs.become("lensemble_node.worker.inference.models", context.args)


def simulate(context: typer.Context) -> None:
    """Run a whole federation in one process, over an in-process network.

    Example: lensemblectl simulate simulation.toml --rounds 3
    """
    programs.become("lensemble_local.simulate", context.args)


def demo(context: typer.Context) -> None:
    """Run a coordinator and nodes as real processes on this machine, on data made for it.

    Example: lensemblectl demo --nodes 3 --rounds 5
    """
    programs.become("lensemble_local.demo", context.args)


def demo_inference(context: typer.Context) -> None:
    """Split a packaged model over two nodes on this machine, and ask it.

    Example: lensemblectl demo-inference --tokens 32
    """
    programs.become("lensemble_local.demo_inference", context.args)


def version(socket: Socket = None, timeout: Timeout = TIMEOUT_S, json: Json = False) -> None:
    """Print the release of this command, and of the daemon if one answers.

    Example: lensemblectl version
    """
    daemon = ""
    try:
        with connect(socket, timeout) as client:
            daemon = client.greeting.version
            kind = client.greeting.daemon
    except (DaemonUnreachable, ConfigError):
        if socket is not None:
            raise
    if json:
        fields = f'"lensemblectl":"{VERSION}"' + (f',"{kind}":"{daemon}"' if daemon else "")
        say(f"{{{fields}}}")
        return
    say(f"lensemblectl {VERSION}")
    if daemon:
        say(f"{kind} {daemon}")
