"""Copies a node into one file, running or not; run by ``lensemblectl backup``.

Its data and the weights of models are left out: the first lie where their owner keeps them, the
second are fetched again.
"""

import sys
from pathlib import Path

from lensemble import backup
from lensemble.config import load
from lensemble.state_dir import CHARGES
from lensemble_node.config import NodeConfig

LEFT = ("models",)


def keep(config_file: Path, to: Path) -> tuple[backup.About, int]:
    """Write the backup ``to`` of the node of ``config_file``; returns its size in bytes too.

    Raises:
        ConfigError, StorageError: a file cannot be read or written.
    """
    config = load(config_file, NodeConfig)
    charged = any((config.state_dir / place).exists() for place in CHARGES)
    about = backup.about("node", config.state_dir, config_file, charged=charged)

    def gather(room: Path) -> list[backup.Member]:
        kept = backup.state_members(config.state_dir, LEFT, room)
        # A charge is written before what it is for; read last, no release is without its charge.
        charges = {f"{backup.STATE}/{place}" for place in CHARGES}
        ordered = sorted(kept, key=lambda member: member.name in charges)
        return [backup.Member(f"{backup.CONFIG}/{config_file.name}", config_file), *ordered]

    return about, backup.keep(to, about, gather)


def main(arguments: list[str] | None = None) -> int:
    """The program; returns its exit status."""
    return backup.written(keep, arguments)


if __name__ == "__main__":
    sys.exit(main())
