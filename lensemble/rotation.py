"""Gives a daemon that does not run another identity: ``python -m lensemble.rotation STATE_DIR``.

The former key is removed, not kept: it is rotated because somebody else may have it, or could.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from lensemble import files, home, identity, state_dir
from lensemble.errors import LensembleError, OperatorError
from lensemble.ids import NodeId
from lensemble.state_dir import IDENTITY_NAME

EXIT_FAILED = 1
PART = f".{IDENTITY_NAME}.next"


def rotate(state: Path) -> tuple[NodeId, NodeId]:
    """Draw another identity for the daemon of ``state``; returns the former node id and the next.

    Raises:
        StorageError: the daemon runs, or the file system refuses.
        OperatorError: there is no identity yet.
    """
    path = state / IDENTITY_NAME
    if not path.exists():
        raise OperatorError(
            f"there is no identity in {state}",
            "Name the daemon with --socket; its first start draws an identity.",
        )
    with state_dir.held(state):
        former = identity.load(path).node
        drawn = identity.load_or_create(state / PART).node
        home.give_as(state / PART, state)
        with files.storage(path):
            os.replace(state / PART, path)
            files.flush_directory(state)
    return former, drawn


def main(arguments: list[str] | None = None) -> int:
    """The program; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("state_dir", type=Path)
    options = parser.parse_args(arguments)
    try:
        former, drawn = rotate(options.state_dir)
    except LensembleError as error:
        sys.stderr.write(f"Error: {error.message}\nTry: {error.remediation}\n")
        return EXIT_FAILED
    sys.stdout.write(json.dumps({"former": former, "node": drawn}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
