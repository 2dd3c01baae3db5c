"""``lensemblectl runs``, ``inspect``, ``stop`` and ``teardown``: runs of models."""

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from lensemble.ctl import replies, requests
from lensemblectl import model_words
from lensemblectl.exits import NOT_TORN_DOWN, complain, say, stop
from lensemblectl.options import TIMEOUT_S, Json, Socket, Timeout, connect, put_json

RunId: TypeAlias = Annotated[
    str,
    typer.Argument(metavar="[RUN]", help="The beginning of its id.", show_default="the only one"),
]


def runs(socket: Socket = None, timeout: Timeout = TIMEOUT_S, json: Json = False) -> None:
    """List the models that are provisioned, and runs that are over.

    Example: lensemblectl runs
    """
    with connect(socket, timeout) as client:
        reply = client.ask(requests.ModelRuns())
    if json or not isinstance(reply, replies.ModelRunList):
        put_json(reply)
    elif not reply.runs:
        say("no model is provisioned; `lensemblectl provision MODEL.gguf` does that")
    else:
        from lensemblectl import model_render, render  # noqa: PLC0415 - JSON needs no tables

        render.show(model_render.runs(reply))


def inspect(
    run: RunId = "", socket: Socket = None, timeout: Timeout = TIMEOUT_S, json: Json = False
) -> None:
    """Show one run: its stages, what they take, its speed, and why it ended.

    Example: lensemblectl inspect 3f2a
    """
    with connect(socket, timeout) as client:
        reply = client.ask(requests.InspectRun(run=run))
    if json or not isinstance(reply, replies.ModelRunStatus):
        put_json(reply)
    else:
        from lensemblectl import model_render, render  # noqa: PLC0415 - as above

        render.show(model_render.run(reply))


def stop_run(
    run: RunId = "",
    reason: Annotated[str, typer.Option(help="Told to the stages.")] = "stopped by the operator",
    socket: Socket = None,
    timeout: Timeout = TIMEOUT_S,
    json: Json = False,
) -> None:
    """End a run at once, its answers with it.

    Example: lensemblectl stop 3f2a
    """
    _end(requests.StopRun(run=run, reason=reason), socket, timeout, json=json)


def teardown(
    run: RunId = "",
    reason: Annotated[str, typer.Option(help="Told to the stages.")] = "torn down by the operator",
    socket: Socket = None,
    timeout: Timeout = TIMEOUT_S,
    json: Json = False,
) -> None:
    """End a run once its answers have ended.

    Example: lensemblectl teardown 3f2a
    """
    _end(requests.TeardownRun(run=run, reason=reason), socket, timeout, json=json)


def _end(
    request: requests.StopRun | requests.TeardownRun,
    socket: Path | None,
    timeout: float,
    *,
    json: bool,
) -> None:
    with connect(socket, timeout) as client:
        reply = client.ask(request)
    if json or not isinstance(reply, replies.ModelRunStatus):
        put_json(reply)
    else:
        say(model_words.over_line(reply))
    if isinstance(reply, replies.ModelRunStatus) and reply.teardown != "clean":
        complain(
            f"the teardown of run {reply.run} was not clean ({reply.teardown}): "
            f"{'; '.join(reply.complaints)}",
            "Look at the status of the nodes: a daemon that lost its coordinator frees its stages.",
        )
        stop(NOT_TORN_DOWN)
