"""``lensemblectl models ls|verify|prune``: the weights that lie on a node.

Works on the cache alone, whether its daemon runs or not.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from lensemble.config import load
from lensemble.errors import ConfigError, LensembleError
from lensemble.wire.stages import MAX_TENSORS
from lensemble_node.config import NodeConfig
from lensemble_node.worker.inference import journal as log
from lensemble_node.worker.inference.cache import TENSORS, Cache, Held
from lensemble_node.worker.inference.shelf import Shelf

EXIT_REFUSED = 1
EXIT_DAMAGED = 4
DEFAULT_CONFIG = Path("node.toml")
"""Of the working directory."""

IDENTITY_CHARS = 12


def describe(held: Held) -> dict[str, Any]:
    """One model, as JSON has it."""
    return {
        "identity": held.identity,
        "name": held.about.name,
        "source": held.about.path or held.about.source,
        "in_place": bool(held.about.path),
        "tensors": held.tensors,
        "tensor_bytes": held.tensor_bytes,
        "file_bytes": held.about.file_bytes,
        "disk_bytes": held.disk_bytes,
        "used_s": held.used_s,
        "in_use": held.in_use,
    }


def verify(cache: Cache, held: Held) -> list[str]:
    """Compute every digest again; what is damaged is dropped, so that it is fetched anew.

    Returns:
        What is wrong, a sentence each.
    """
    pin = cache.pin(held.identity, held.about)
    path = Path(held.about.path) if held.about.path else None
    if path is None and not (pin.directory / TENSORS).exists():
        pin.close()
        return []
    try:
        shelf = Shelf(pin, held.about.file_bytes, path)
    except LensembleError as error:
        pin.close()
        return [error.message]
    try:
        return [
            f"{line.name} of {held.about.name} ({held.identity[:IDENTITY_CHARS]}) is damaged"
            for line in sorted(shelf.journal.verified.values(), key=lambda each: each.offset)
            if not _is_right(shelf, line)
        ]
    finally:
        shelf.close()


def _is_right(shelf: Shelf, line: log.Verified) -> bool:
    found = shelf.hashed(line.offset, line.offset + line.nbytes).hexdigest()
    if found != line.digest:
        shelf.journal.append(log.Dropped(line.offset))
    return found == line.digest


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    given = _parser().parse_args(arguments)
    try:
        cache = Cache(_directory(given))
        chosen = _chosen(cache, given.model)
        if given.mode == "ls":
            return _list(cache, chosen, given.json)
        if given.mode == "verify":
            return _verify(cache, chosen, given.json)
        return _prune(cache, chosen, given.json)
    except LensembleError as error:
        sys.stderr.write(f"Error: {error.message}\nTry: {error.remediation}\n")
        return EXIT_REFUSED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lensemblectl models", description=__doc__)
    modes = parser.add_subparsers(dest="mode", required=True)
    for mode, purpose in (
        ("ls", "list models, the longest unused first"),
        ("verify", "compute every digest again and drop what is damaged"),
        ("prune", "remove models that no stage uses"),
    ):
        verb = modes.add_parser(mode, help=purpose, description=purpose)
        verb.add_argument("model", nargs="?", default="", help="name, or start of the identity")
        place = verb.add_mutually_exclusive_group()
        place.add_argument("--state-dir", type=Path, help="the node's state directory")
        place.add_argument("--config", type=Path, default=DEFAULT_CONFIG, help="of the node")
        verb.add_argument("--json", action="store_true")
    return parser


def _directory(given: argparse.Namespace) -> Path:
    if given.state_dir is not None:
        place: Path = given.state_dir
        if not place.is_dir():
            raise ConfigError(f"{place} is not a directory", "Name the state directory of a node.")
        return place / "models"
    if not given.config.is_file():
        raise ConfigError(
            f"{given.config} is no file", "Name the node with --config FILE or --state-dir DIR."
        )
    return load(given.config, NodeConfig).models_dir


def _chosen(cache: Cache, wanted: str) -> list[Held]:
    found = [
        held
        for held in cache.held()
        if not wanted or held.identity.startswith(wanted) or held.about.name == wanted
    ]
    if wanted and not found:
        raise ConfigError(
            f"no model {wanted!r} lies in {cache.directory}", "See `lensemblectl models ls`."
        )
    return found


def _list(cache: Cache, chosen: list[Held], as_json: bool) -> int:
    if as_json:
        _say(json.dumps({"directory": str(cache.directory), "models": [*map(describe, chosen)]}))
        return 0
    if not chosen:
        _say(f"No models in {cache.directory}")
        return 0
    width = max(len(held.about.name) for held in chosen)
    _say(f"{'identity':<{IDENTITY_CHARS}}  {'name':<{width}}  tensors  on disk MB  state")
    for held in chosen:
        state = "in use" if held.in_use else "idle"
        where = f", in place: {held.about.path}" if held.about.path else ""
        _say(
            f"{held.identity[:IDENTITY_CHARS]}  {held.about.name:<{width}}  {held.tensors:>7}  "
            f"{held.disk_bytes / 1e6:>10.1f}  {state}{where}"
        )
    return 0


def _verify(cache: Cache, chosen: list[Held], as_json: bool) -> int:
    problems = [problem for held in chosen for problem in verify(cache, held)]
    tensors = sum(min(held.tensors, MAX_TENSORS) for held in chosen)
    if as_json:
        _say(json.dumps({"models": len(chosen), "tensors": tensors, "problems": problems}))
    else:
        for problem in problems:
            _say(problem)
        if not problems:
            _say(f"{tensors} tensors of {len(chosen)} models are what their digests say")
    if problems:
        sys.stderr.write(
            f"Error: {len(problems)} of {tensors} tensors are damaged\n"
            "Try: provision the model again; what is damaged was dropped and will be fetched.\n"
        )
    return EXIT_DAMAGED if problems else 0


def _prune(cache: Cache, chosen: list[Held], as_json: bool) -> int:
    freed, removed = 0, []
    for held in chosen:
        if not held.in_use:
            freed += cache.prune(identity=held.identity)
            removed.append(held.identity)
    kept = [held.identity for held in chosen if held.in_use]
    if as_json:
        _say(json.dumps({"removed": removed, "in_use": kept, "freed_bytes": freed}))
    else:
        _say(f"Removed {len(removed)} models, freed {freed / 1e6:.1f} MB; {len(kept)} are in use")
    return 0


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
