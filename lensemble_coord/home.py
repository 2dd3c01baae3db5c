"""Makes a coordinator's directory; run by ``lensemblectl init coord``, which shows what it says."""

import argparse
import json
import sys
from pathlib import Path

from lensemble import home
from lensemble.config import commented, load, validate
from lensemble.errors import LensembleError
from lensemble.workload import Workload
from lensemble_coord.config import TITLE, CoordinatorConfig

EXIT_USAGE = 2
CONFIG_NAME = "coord.toml"
WORKLOAD_NAME = "workload.toml"
WORKLOAD_TITLE = (
    "The workload: what is trained, and every term the participants must share. The ledger of a "
    "federation begins with it, so change it before the first start of the coordinator."
)

# Learns best in tens of rounds of 50 steps; the defaults of the schema are the published values.
SHIPPED = {"outer": {"lr": 0.7, "momentum": 0.5}}


def create(asked: home.Asked, workload: Path | None, *, trains: bool = True) -> dict[str, str]:
    """Lay out what is ``asked``; without ``workload`` the default one is written into it.

    A federation that does not train has none.

    Returns:
        What was made: directory, config, workload (empty: none), node, socket.

    Raises:
        ConfigError: the directory has a configuration, or the name or the workload is not valid.
        StorageError: it cannot be written.
    """
    directory = asked.directory
    texts: dict[str, str] = {}
    more: dict[str, str] = {}
    made = str(workload or directory / WORKLOAD_NAME)
    if not trains:
        more["workload"] = made = ""
    elif workload is None:
        texts[WORKLOAD_NAME] = commented(Workload, WORKLOAD_TITLE, SHIPPED)
    else:
        load(workload, Workload)
        more["workload"] = str(workload.absolute())
    given = asked.given(more)
    config = validate(given, CoordinatorConfig, path=directory / CONFIG_NAME)
    texts[CONFIG_NAME] = commented(CoordinatorConfig, TITLE, given)
    who = home.lay_out(directory, texts, asked.system)
    return {
        "directory": str(directory),
        "config": str(directory / CONFIG_NAME),
        "workload": made,
        "node": who.node,
        "socket": str(config.socket_path),
    }


def main(arguments: list[str] | None = None) -> int:
    """The program; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, parents=[home.arguments("coord")])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--workload", type=Path)
    what.add_argument("--no-training", action="store_true")
    options = parser.parse_args(arguments)
    try:
        made = create(home.asked(options), options.workload, trains=not options.no_training)
    except LensembleError as error:
        sys.stderr.write(f"Error: {error.message}\nTry: {error.remediation}\n")
        return EXIT_USAGE
    sys.stdout.write(json.dumps(made) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
