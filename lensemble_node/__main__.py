"""``lensemble-node CONFIG`` serves; ``lensemble-node check CONFIG`` only looks."""

import sys
from pathlib import Path

from lensemble import service
from lensemble.config import load
from lensemble_node import daemon, home
from lensemble_node.config import NodeConfig


def _read(path: Path) -> NodeConfig:
    config = load(path, NodeConfig)
    home.membership(config)
    return config


PROGRAM = service.Program(
    "node", "lensemble-node", "A node of a Lensemble federation.", _read, daemon.serve
)


def main(arguments: list[str] | None = None) -> int:
    """The daemon's command; returns its exit status."""
    return PROGRAM.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
