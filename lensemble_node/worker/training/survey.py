"""``lensemblectl data inspect FILE`` and ``data commit FILE``: a node's data as its worker sees it.

Nothing of the data is printed but names, counts, shapes and the Merkle root.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from lensemble.errors import LensembleError
from lensemble_node.worker.training.dataset import Dataset, open_dataset
from lensemble_node.worker.training.source import DataSource

EXIT_REFUSED = 1


def describe(data: Dataset) -> dict[str, Any]:
    """Layout, columns, dimensions and lengths; every value is read and checked on the way."""
    for index in range(len(data.lengths)):
        data.episode(index)
    lengths = np.array(data.lengths)
    return {
        "file": str(data.source.path),
        "layout": str(data.layout),
        "observation_keys": list(data.observation_keys),
        "observation_dim": data.observation_dim,
        "action_dim": data.action_dim,
        "episodes": len(data.lengths),
        "steps": int(lengths.sum()),
        "shortest_episode": int(lengths.min()),
        "median_episode": float(np.median(lengths)),
        "longest_episode": int(lengths.max()),
        "held_in_memory": data.resident,
    }


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="lensemblectl data", description=__doc__)
    modes = parser.add_subparsers(dest="mode", required=True)
    for mode, purpose in (
        ("inspect", "say what is in a file, and the first thing that is wrong with it"),
        ("commit", "compute the Merkle root that a node commits to"),
    ):
        verb = modes.add_parser(mode, help=purpose, description=purpose)
        verb.add_argument("file", type=Path)
        verb.add_argument("--keys", nargs="*", default=(), help="observation columns, in order")
        verb.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    try:
        with open_dataset(DataSource(given.file, tuple(given.keys))) as data:
            facts = describe(data)
            if given.mode == "commit":
                facts = {"file": facts["file"], "root": data.commitment().root, **facts}
    except LensembleError as error:
        sys.stderr.write(f"Error: {error.message}\nTry: {error.remediation}\n")
        return EXIT_REFUSED
    if given.json:
        sys.stdout.write(json.dumps(facts) + "\n")
    else:
        width = max(map(len, facts))
        for name, value in facts.items():
            shown = ", ".join(value) if isinstance(value, list) else value
            sys.stdout.write(f"{name.replace('_', ' '):<{width}}  {shown}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
