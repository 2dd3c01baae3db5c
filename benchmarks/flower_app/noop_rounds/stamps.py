"""One line for each round that closed."""

import json
import time
from pathlib import Path


def stamp(path: str, index: int, contributors: int) -> None:
    """Append when the round closed, on the clock that all processes of a machine share."""
    closed = {"round": index, "at": time.monotonic(), "contributors": contributors}
    with Path(path).open("a", encoding="ascii") as file:
        file.write(json.dumps(closed) + "\n")
