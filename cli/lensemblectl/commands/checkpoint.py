"""``lensemblectl checkpoint ls`` and ``checkpoint export``."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from lensemble.ctl import replies, requests
from lensemble.errors import OperatorError, StorageError
from lensemblectl import words
from lensemblectl.exits import say
from lensemblectl.options import TIMEOUT_S, Json, Socket, Timeout, connect, put_json

verbs = typer.Typer(no_args_is_help=True, help="List and copy the checkpoints of the coordinator.")


@verbs.command("ls")
def ls(socket: Socket = None, timeout: Timeout = TIMEOUT_S, json: Json = False) -> None:
    """List the checkpoints that are kept.

    Example: lensemblectl checkpoint ls
    """
    with connect(socket, timeout) as client:
        reply = client.ask(requests.Checkpoints())
    if json or not isinstance(reply, replies.CheckpointList):
        put_json(reply)
    else:
        from lensemblectl import render  # noqa: PLC0415 - JSON needs no tables

        render.show(render.checkpoints(reply))


@verbs.command("export")
def export(
    to: Annotated[Path, typer.Argument(help="Directory to make.")],
    which: Annotated[
        str, typer.Option(help="latest, a round, or a digest or its beginning.")
    ] = "latest",
    socket: Socket = None,
    timeout: Timeout = TIMEOUT_S,
    json: Json = False,
) -> None:
    """Copy a checkpoint (weights.safetensors and header.json) out of the state directory.

    Example: lensemblectl checkpoint export ./arm-round-3 --which 3
    """
    if to.exists():
        raise OperatorError(f"{to} exists already", "Name a directory that does not exist yet.")
    with connect(socket, timeout) as client:
        reply = client.ask(requests.CheckpointExport(which=which))
    if not isinstance(reply, replies.CheckpointLocation):
        put_json(reply)
        return
    _copy(Path(reply.checkpoint.path), to)
    if json:
        put_json(reply)
    else:
        entry = reply.checkpoint
        of = "the warm start" if entry.round < 0 else f"round {entry.round}"
        say(f"{to}: state {entry.digest} of {of}, {words.size(entry.bytes)}")


def _copy(source: Path, to: Path) -> None:
    part = to.with_name(f".part-{to.name}")
    try:
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(source, part)
        part.rename(to)
    except (OSError, shutil.Error) as error:
        shutil.rmtree(part, ignore_errors=True)
        why = error.strerror or str(error)
        raise StorageError(
            f"cannot copy {source} to {to}: {why}",
            "Run this on the coordinator's host, as a user who may read its state directory.",
        ) from error
