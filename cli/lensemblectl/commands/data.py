"""``lensemblectl data inspect`` and ``data commit``: what is in a data set, and its Merkle root.

The work is done by a program of the node, which alone may read private data; it prints JSON lines.
"""

from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from lensemblectl import programs, words
from lensemblectl.commands.setup import put_json_object
from lensemblectl.exits import FAILED, complain, say, stop
from lensemblectl.options import Json

SURVEY = "lensemble_node.worker.training.survey"

verbs = typer.Typer(no_args_is_help=True, help="Look into a data set, or commit to it.")

Place: TypeAlias = Annotated[
    Path | None,
    typer.Argument(help="A file or directory of episodes.", show_default="what --config names"),
]
Config: TypeAlias = Annotated[
    Path | None,
    typer.Option("--config", help="A node's configuration, for what its [data] says."),
]
Keys: TypeAlias = Annotated[
    list[str] | None, typer.Option("--observation-key", help="A column to use; repeat in order.")
]
ImageKeys: TypeAlias = Annotated[
    list[str] | None, typer.Option("--image-key", help="A picture column; repeat in order.")
]
ActionKeys: TypeAlias = Annotated[
    list[str] | None, typer.Option("--action-key", help="An action column; repeat in order.")
]
Format: TypeAlias = Annotated[
    str,
    typer.Option("--format", help="robomimic, minari, flat, d4rl, lerobot or zarr; else found."),
]
Embodiment: TypeAlias = Annotated[
    str, typer.Option("--embodiment", help="Whose episodes, where the data name several.")
]


@verbs.command("inspect")
def inspect(
    path: Place = None,
    config: Config = None,
    observation_key: Keys = None,
    image_key: ImageKeys = None,
    action_key: ActionKeys = None,
    format_: Format = "",
    embodiment: Embodiment = "",
    window: Annotated[
        int, typer.Option(help="Transitions that one window of the model needs.", min=1, max=10_000)
    ] = 3,
    problems: Annotated[int, typer.Option(help="Name at most so many.", min=1, max=10_000)] = 20,
    json: Json = False,
) -> None:
    """Show columns, episodes, statistics, problems and Merkle root; every value is read.

    Example: lensemblectl data inspect arm-1.hdf5
    """
    asked = _asked(path, config, format_, embodiment)
    asked += _keys(observation_key, image_key, action_key)
    asked += [f"--window={window}", f"--problems={problems}"]
    status, report = _watched(["inspect", *asked], quiet=json)
    if json:
        put_json_object(report)
        stop(status)
    from lensemblectl import render_data  # noqa: PLC0415 - JSON needs no tables

    render_data.show_inspected(report)
    if status:
        found = words.counted(report["problem_count"], "problem")
        complain(f"{found} in {report['path']}", report["problems"][0]["remediation"])
        stop(status)


@verbs.command("commit")
def commit(
    path: Place = None,
    config: Config = None,
    observation_key: Keys = None,
    image_key: ImageKeys = None,
    action_key: ActionKeys = None,
    format_: Format = "",
    embodiment: Embodiment = "",
    full: Annotated[
        bool, typer.Option("--full", help="Read everything, and hold the node's note to it.")
    ] = False,
    prove: Annotated[
        int | None,
        typer.Option(help="Also prove that this episode, counted from 0, is in it.", min=0),
    ] = None,
    json: Json = False,
) -> None:
    """Show the Merkle root that a node commits to; with --config, as noted since it was computed.

    Example: lensemblectl data commit --config node.toml --full
    """
    asked = _asked(path, config, format_, embodiment)
    asked += _keys(observation_key, image_key, action_key)
    asked += ["--full"] if full else []
    asked += [] if prove is None else [f"--prove={prove}"]
    status, report = _watched(["commit", *asked], quiet=json)
    if json:
        put_json_object(report)
        stop(status)
    for line in words.committed_lines(report):
        say(line)


def _asked(path: Path | None, config: Path | None, format_: str, embodiment: str) -> list[str]:
    asked = [] if config is None else [f"--config={config}"]
    asked += [f"--format={format_}"] if format_ else []
    asked += [f"--embodiment={embodiment}"] if embodiment else []
    # Last, so that it is no option whatever it begins with.
    return asked if path is None else [*asked, str(path) if path.is_absolute() else f"./{path}"]


def _keys(*keys: list[str] | None) -> list[str]:
    asked = []
    for which, named in zip(("observation", "image", "action"), keys, strict=True):
        asked += [f"--{which}-key={key}" for key in named or ()]
    return asked


def _watched(arguments: list[str], *, quiet: bool) -> tuple[int, dict[str, Any]]:
    """Exit status and report of the survey, its progress shown meanwhile."""
    from lensemblectl.watching import Bar  # noqa: PLC0415 - JSON needs no bar

    report: dict[str, Any] | None = None
    with Bar(hidden=quiet) as bar:
        running = programs.Lines(SURVEY, arguments)
        for line in running:
            report = line.get("report", report)
            if "progress" in line:
                bar.at(line["progress"]["done"], line["progress"]["total"])
    if report is None:
        stop(running.status or FAILED)
    return running.status, report
