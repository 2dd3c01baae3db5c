"""``lensemble-coord CONFIG`` serves; ``lensemble-coord check CONFIG`` only looks."""

import argparse
import sys
from pathlib import Path

from lensemble import service
from lensemble.config import load
from lensemble.errors import LensembleError
from lensemble.version import BUILD
from lensemble_coord import daemon
from lensemble_coord.config import CoordinatorConfig


def main(arguments: list[str] | None = None) -> int:
    """The daemon's command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="lensemble-coord", description="The coordinator of a Lensemble federation."
    )
    parser.add_argument("--version", action="version", version=BUILD)
    parser.add_argument("words", nargs="+", metavar="[check] CONFIG")
    words = parser.parse_args(arguments).words
    if len(words) > 2 or (len(words) == 2 and words[0] != "check"):
        parser.error("give one configuration file, or `check` and one")
    try:
        config = load(Path(words[-1]), CoordinatorConfig)
        daemon.workload_of(config)
    except LensembleError as error:
        return service.refuse(error)
    if len(words) == 2:
        sys.stdout.write(f"{words[-1]} is a valid configuration of a coordinator.\n")
        return 0
    return service.run("coordinator", config, daemon.serve)


if __name__ == "__main__":
    sys.exit(main())
