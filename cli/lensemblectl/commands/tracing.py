"""``lensemblectl trace``: where the time of a run's latest tokens went."""

import json as encoding
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from lensemble.ctl import replies, requests
from lensemble.errors import StorageError
from lensemblectl.exits import say
from lensemblectl.options import TIMEOUT_S, Json, Socket, Timeout, connect, put_json

RunId: TypeAlias = Annotated[
    str,
    typer.Argument(metavar="[RUN]", help="The beginning of its id.", show_default="the only one"),
]


def trace(
    run: RunId = "",
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write a file that ui.perfetto.dev opens, instead of tables.", show_default=False
        ),
    ] = None,
    last: Annotated[int, typer.Option(help="Tokens.", min=1, max=128)] = 32,
    socket: Socket = None,
    timeout: Timeout = TIMEOUT_S,
    json: Json = False,
) -> None:
    """Show where the latest tokens of a run were when.

    Waiting, computing and handing over are measured by the clock of their host. What lies between
    two hosts is between two clocks, and is given with what it may be off by.

    Example: lensemblectl trace 3f2a --out trace.json
    """
    with connect(socket, timeout) as client:
        reply = client.ask(requests.TraceRun(run=run, last=last))
    if out is not None and isinstance(reply, replies.RunTrace):
        from lensemblectl import trace_file  # noqa: PLC0415 - only where it is written

        _write(out, encoding.dumps(trace_file.document(reply)))
    if json or not isinstance(reply, replies.RunTrace):
        put_json(reply)
    elif out is not None:
        say(f"{len(reply.trips)} tokens are in {out}; open it at https://ui.perfetto.dev")
    elif not reply.trips:
        say(f"no token of run {reply.run} has come round yet")
    else:
        from lensemblectl import render, trace_render  # noqa: PLC0415 - JSON needs no tables

        render.show(trace_render.trace(reply))


def _write(out: Path, text: str) -> None:
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(
            f"{out} cannot be written: {error.strerror}", "Name a file that you may write."
        ) from error
