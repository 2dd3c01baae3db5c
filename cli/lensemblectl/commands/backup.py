"""``lensemblectl backup`` and ``restore``."""

from pathlib import Path
from typing import Annotated

import typer

from lensemblectl import places, programs, words
from lensemblectl.commands.setup import put_json_object
from lensemblectl.exits import say
from lensemblectl.options import Json, Socket

PARTS = {"coordinator": "lensemble_coord.backup", "node": "lensemble_node.backup"}


def backup(
    archive: Annotated[Path, typer.Argument(help="File to write; it holds the identity key.")],
    socket: Socket = None,
    json: Json = False,
) -> None:
    """Copy a daemon's configuration and state into one file, whether it runs or not.

    Example: lensemblectl backup lab-2026-11-30.tar --socket lab
    """
    config = places.config_at(socket)
    made = programs.ask(PARTS[places.part_of(config)], [str(config), str(archive)])
    if json:
        put_json_object(made)
    else:
        say(f"{archive}: {made['part']} {words.short(made['node'])}, {words.size(made['bytes'])}")


def restore(
    archive: Annotated[Path, typer.Argument(help="What `backup` wrote.")],
    directory: Annotated[Path, typer.Argument(help="Directory for its configuration.")],
    none_since: Annotated[
        bool,
        typer.Option(
            "--none-since",
            help="The node has released nothing since; asked for where it counts a privacy budget.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Lay a backup out again; nothing that exists is replaced. The daemon it is of must not run.

    Example: lensemblectl restore lab-2026-11-30.tar lab
    """
    asked = [str(archive), str(directory), *(["--none-since"] if none_since else [])]
    made = programs.ask("lensemble.backup", asked)
    if json:
        put_json_object(made)
    else:
        say(f"{made['config']} as of {made['made']}; state in {made['state_dir']}")
