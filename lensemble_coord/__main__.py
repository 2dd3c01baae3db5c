"""``lensemble-coord CONFIG`` serves; ``lensemble-coord check CONFIG`` only looks."""

import sys
from pathlib import Path

from lensemble import service
from lensemble.config import load
from lensemble_coord import daemon
from lensemble_coord.config import CoordinatorConfig


def _read(path: Path) -> CoordinatorConfig:
    config = load(path, CoordinatorConfig)
    daemon.workload_of(config)
    return config


PROGRAM = service.Program(
    "coordinator",
    "lensemble-coord",
    "The coordinator of a Lensemble federation.",
    _read,
    daemon.serve,
)


def main(arguments: list[str] | None = None) -> int:
    """The daemon's command; returns its exit status."""
    return PROGRAM.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
