"""``lensemblectl plan`` and ``provision``: a model and the nodes it goes to."""

import sys
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, Self, TypeAlias

import typer

from lensemble.ctl import replies, requests
from lensemblectl import model_words
from lensemblectl.exits import INTERRUPTED, NOT_PROVISIONED, complain, say, stop
from lensemblectl.options import TIMEOUT_S, Json, Socket, Timeout, connect, put_json

Model: TypeAlias = Annotated[
    str, typer.Argument(metavar="MODEL.gguf", help="A GGUF file of the coordinator's host, or URL.")
]
Ctx: TypeAlias = Annotated[
    int,
    typer.Option(
        help="Tokens of prompt and answer together.",
        min=0,
        max=1 << 20,
        show_default="what the model was trained for, up to 2048",
    ),
]
Sessions: TypeAlias = Annotated[
    int, typer.Option(help="Answers that are computed at the same time.", min=1, max=256)
]
Rows: TypeAlias = Annotated[
    int, typer.Option(help="Tokens of a prompt that are computed at once.", min=1, max=1024)
]
Split: TypeAlias = Annotated[
    str, typer.Option(help="Layers by hand: 0:12,12:30@NODE.", show_default="by the planner")
]
Fetch: TypeAlias = Annotated[
    Literal["edge", "path"],
    typer.Option(help="The coordinator sends weights, or each node has the same path."),
]
OnFault: TypeAlias = Annotated[
    Literal["fail", "replace"] | None,
    typer.Option(
        help="When a stage is lost: end, or plan again without its node and go on.",
        show_default="as the coordinator is configured",
    ),
]
Measure: TypeAlias = Annotated[
    bool,
    typer.Option("--measure", help="Measure the links between its nodes before (1 MiB each)."),
]
Replacements: TypeAlias = Annotated[
    int | None,
    typer.Option(
        help="Replace lost stages so often, then end.",
        min=0,
        max=64,
        show_default="as the coordinator is configured",
    ),
]


def plan(
    model: Model,
    ctx: Ctx = 0,
    sessions: Sessions = 1,
    rows: Rows = 32,
    split: Split = "",
    measure: Measure = False,
    socket: Socket = None,
    timeout: Timeout = TIMEOUT_S,
    json: Json = False,
) -> None:
    """Show where the layers of a model would go; nothing is fetched.

    Example: lensemblectl plan model.gguf --ctx 4096 --measure
    """
    wish = _wish(model, ctx=ctx, sessions=sessions, rows=rows, split=split, measure=measure)
    with connect(socket, timeout) as client:
        reply = client.ask(requests.PlanModel(**wish))
    if json or not isinstance(reply, replies.ModelPlan):
        put_json(reply)
    else:
        from lensemblectl import model_render, render  # noqa: PLC0415 - JSON needs no tables

        render.show(model_render.plan(reply))


def provision(
    model: Model,
    ctx: Ctx = 0,
    sessions: Sessions = 1,
    rows: Rows = 32,
    split: Split = "",
    fetch: Fetch = "edge",
    measure: Measure = False,
    on_fault: OnFault = None,
    max_replacements: Replacements = None,
    detach: Annotated[bool, typer.Option("--detach", help="Start it, and do not watch.")] = False,
    socket: Socket = None,
    timeout: Timeout = TIMEOUT_S,
    json: Json = False,
) -> None:
    """Put a model on the nodes and wait until it takes requests.

    Ctrl-C stops it while it is not ready yet.

    Example: lensemblectl provision model.gguf --ctx 4096 --sessions 2
    """
    wish = _wish(model, ctx=ctx, sessions=sessions, rows=rows, split=split, fetch=fetch)
    wish |= {"on_fault": on_fault or "", "max_replacements": max_replacements, "measure": measure}
    last: replies.ModelRunStatus | None = None
    with connect(socket, timeout) as client, _view(json) as view:
        try:
            for reply in client.stream(requests.ProvisionModel(**wish, detach=detach)):
                if isinstance(reply, replies.ModelRunStatus):
                    last = reply
                    view.see(reply)
        except KeyboardInterrupt:
            client.close()
            sys.stderr.write("\nThe run is stopped.\n")
            stop(INTERRUPTED)
    _judge(last, detach=detach, json=json)


def _judge(last: replies.ModelRunStatus | None, *, detach: bool, json: bool) -> None:
    if last is None:
        stop(NOT_PROVISIONED)
    if last.takes_requests or (detach and not last.outcome):
        if not json:
            say(model_words.started_line(last))
        return
    if last.fault is None:
        complain(
            f"run {last.run} was {last.outcome}: {last.reason}", f"lensemblectl inspect {last.run}"
        )
    else:
        model_words.complain_of(last.run, last.fault)
    stop(NOT_PROVISIONED)


def _wish(model: str, **terms: Any) -> dict[str, Any]:  # noqa: ANN401 - fields of a request
    """``model`` by its whole path: the daemon may work in another directory."""
    if not model.startswith(("http://", "https://")):
        model = str(Path(model).absolute())
    return {"model": model, **terms}


class _View(Protocol):
    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...
    def see(self, status: replies.ModelRunStatus) -> None: ...


def _view(json: bool) -> _View:
    return _Live() if sys.stdout.isatty() and not json else _Lines(json=json)


class _Lines:
    """A line for each stage that comes into another phase."""

    def __init__(self, *, json: bool) -> None:
        self._json = json
        self._said: dict[int, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def see(self, status: replies.ModelRunStatus) -> None:
        if self._json:
            put_json(status)
            return
        for stage in status.stages:
            if self._said.get(stage.index) != stage.phase:
                self._said[stage.index] = stage.phase
                say(model_words.stage_line(stage))


class _Live:
    """A bar for each stage, which goes when all are ready."""

    def __init__(self) -> None:
        from rich.live import Live  # noqa: PLC0415 - lines need no terminal

        from lensemblectl import model_render, render  # noqa: PLC0415

        self._stages = model_render.stages
        self._live = Live(console=render.console(), auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def see(self, status: replies.ModelRunStatus) -> None:
        self._live.update(self._stages(status), refresh=True)
