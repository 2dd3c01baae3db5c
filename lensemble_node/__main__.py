"""``lensemble-node CONFIG`` serves; ``lensemble-node check CONFIG`` only looks."""

import argparse
import sys
from pathlib import Path

from lensemble import service
from lensemble.config import load
from lensemble.errors import LensembleError
from lensemble.version import BUILD
from lensemble_node import daemon, home
from lensemble_node.config import NodeConfig


def main(arguments: list[str] | None = None) -> int:
    """The daemon's command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="lensemble-node", description="A node of a Lensemble federation."
    )
    parser.add_argument("--version", action="version", version=BUILD)
    parser.add_argument("words", nargs="+", metavar="[check] CONFIG")
    words = parser.parse_args(arguments).words
    if len(words) > 2 or (len(words) == 2 and words[0] != "check"):
        parser.error("give one configuration file, or `check` and one")
    try:
        config = load(Path(words[-1]), NodeConfig)
        home.membership(config)
    except LensembleError as error:
        return service.refuse(error)
    if len(words) == 2:
        sys.stdout.write(f"{words[-1]} is a valid configuration of a node.\n")
        return 0
    return service.run("node", config, daemon.serve)


if __name__ == "__main__":
    sys.exit(main())
