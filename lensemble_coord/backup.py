"""Copies a coordinator into one file, running or not; run by ``lensemblectl backup``.

What is rebuilt by itself is left out: spools, and headers of models.
"""

import sys
from functools import partial
from pathlib import Path

from lensemble import backup
from lensemble.config import load
from lensemble_coord.config import CoordinatorConfig
from lensemble_coord.training.commit import named
from lensemble_coord.training.directory import StateDirectory
from lensemble_coord.training.ledger import Ledger

LEFT = ("spool", "models")


def keep(config_file: Path, to: Path) -> tuple[backup.About, int]:
    """Write the backup ``to`` of the coordinator of ``config_file``; returns its size in bytes too.

    Raises:
        ConfigError, StorageError: a file cannot be read or written.
    """
    config = load(config_file, CoordinatorConfig)
    about = backup.about("coord", config.state_dir, config_file)
    configs = tuple(each for each in (config_file, config.workload) if each is not None)
    return about, backup.keep(to, about, partial(_gather, config.state_dir, configs))


def _gather(state: Path, configs: tuple[Path, ...], room: Path) -> list[backup.Member]:
    found = list(backup.state_members(state, LEFT, room))
    directory = StateDirectory(state)
    for each in found:
        if state / each.name.removeprefix(f"{backup.STATE}/") == directory.ledger:
            _require(directory, each.path, {other.path for other in found})
    return [*(backup.Member(f"{backup.CONFIG}/{each.name}", each) for each in configs), *found]


def _require(directory: StateDirectory, copied: Path, found: set[Path]) -> None:
    """All that the copied ledger names; a round that closes meanwhile may have retired some."""
    there = found | {path.parent for path in found}
    ledger = Ledger(copied, check=False)
    try:
        for place, names in named(directory, ledger):
            if any(place / name not in there for name in names):
                raise backup.Changing
    finally:
        ledger.close()


def main(arguments: list[str] | None = None) -> int:
    """The program; returns its exit status."""
    return backup.written(keep, arguments)


if __name__ == "__main__":
    sys.exit(main())
