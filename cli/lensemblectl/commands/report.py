"""``lensemblectl report``: a program of its own, because it draws."""

from pathlib import Path
from typing import Annotated

import typer

from lensemble.errors import ConfigError
from lensemblectl import places, programs
from lensemblectl.options import Json, Socket


def report(
    run: Annotated[
        str, typer.Argument(help="Only this run; `latest` is the newest.", show_default="all")
    ] = "",
    state_dir: Annotated[
        Path | None,
        typer.Option(help="A coordinator's state directory, or a copy of it, on any machine."),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")] = Path(
        "report.html"
    ),
    verify: Annotated[bool, typer.Option(help="Whether to verify the directory, too.")] = True,
    socket: Socket = None,
    json: Json = False,
) -> None:
    """Write what a federation has done into one HTML file, with plots.

    Example: lensemblectl report --state-dir /srv/copy/state --out report.html
    """
    place = state_dir or places.state_dir_of(places.config_at(socket))
    if not place.is_dir():
        raise ConfigError(
            f"{place} is not a directory", "Name the state directory of a coordinator, or a copy."
        )
    asked = [f"--state-dir={place}", f"--out={out}"]
    asked += [] if verify else ["--no-verify"]
    asked += ["--json"] if json else []
    # Behind the dashes, so that it is no option whatever it begins with.
    programs.become("lensemble_report", [*asked, "--", *([run] if run else [])])
