"""What ``lensemblectl data inspect`` and ``data commit`` run: data as a node's worker sees them.

JSON lines on standard output: now and then ``{"progress": {"done", "total"}}`` in episodes, last
of all ``{"report": {...}}``.  Statistics are for the operator of this machine; nothing is sent.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lensemble import config, merkle
from lensemble.errors import ConfigError, DatasetError, LensembleError
from lensemble_node.config import DataSection, NodeConfig
from lensemble_node.worker.training import commitment
from lensemble_node.worker.training.containers.opening import AUTO, FORMATS, open_container
from lensemble_node.worker.training.containers.stored import Container
from lensemble_node.worker.training.dataset import Dataset, open_dataset
from lensemble_node.worker.training.source import DataSource
from lensemble_node.worker.training.statistics import Running

OK, REFUSED, USAGE = 0, 1, 2
PROGRESS_EVERY_S = 0.5
MOST_PROBLEMS = 20
WINDOW = 3
_BINS = 10


@dataclass
class Findings:
    """Problems, of which the first ``limit`` are kept in full."""

    limit: int
    problems: list[dict[str, str]] = field(default_factory=list)
    count: int = 0
    notes: list[str] = field(default_factory=list)

    def add(self, error: DatasetError) -> None:
        self.count += 1
        if len(self.problems) < self.limit:
            self.problems.append({"message": error.message, "remediation": error.remediation})


class Progress:
    """Says how many of ``total`` episodes are done, not too often."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._last = total, 0, time.monotonic()

    def step(self) -> None:
        self._done += 1
        if time.monotonic() - self._last >= PROGRESS_EVERY_S:
            self._last = time.monotonic()
            _say({"progress": {"done": self._done, "total": self._total}})


def _say(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


# ---- inspect ----


def inspect(source: DataSource, window: int, limit: int) -> dict[str, Any]:
    """All there is to say about the data at ``source``; every value that is trained on is read.

    Of pictures, the first and last of an episode are decoded.
    """
    began, found = time.monotonic(), Findings(limit)
    told: dict[str, Any] = {"path": str(source.path)}
    try:
        told |= _schema(source)
        with open_dataset(source, 0, found.add) as data:
            told |= _inspected(data, window, found)
    except DatasetError as error:
        found.add(error)
    return told | {
        "problems": found.problems,
        "problem_count": found.count,
        "notes": found.notes,
        "seconds": round(time.monotonic() - began, 3),
    }


def _schema(source: DataSource) -> dict[str, Any]:
    container = open_container(source.path, source.format)
    try:
        labels = Counter(container.embodiment(index) for index in range(len(container)))
        return {
            "layout": str(container.layout),
            "episodes_in_all": len(container),
            "embodiments": dict(sorted(labels.items())),
            "columns": _columns(container),
        }
    finally:
        container.close()


def _columns(container: Container) -> list[dict[str, Any]]:
    made = []
    for key, column in sorted(container.columns(0).items()):
        kind = column.kind
        dtype = "text" if kind.text else "coded picture" if kind.coded else str(kind.dtype)
        shape = None if kind.row_shape is None else list(kind.row_shape)
        made.append({"key": key, "dtype": dtype, "shape": shape})
    return made


def _inspected(data: Dataset, window: int, found: Findings) -> dict[str, Any]:
    used = data.selection
    running = {key: Running(used.kinds[key].width) for key in (*used.observations, *used.actions)}
    progress = Progress(len(data.lengths))
    leaves: list[bytes] = []
    for index in range(len(data.lengths)):
        if index not in data.unusable:
            leaves += _episode(data, index, running, found)
        progress.step()
    _window_notes(data, window, found)
    told = {
        "embodiment": data.embodiment,
        "observation_keys": list(used.observations),
        "image_keys": list(used.images),
        "action_keys": list(used.actions),
        "observation_dim": used.observation_dim,
        "action_dim": used.action_dim,
        "image_shape": None if used.image_shape is None else list(used.image_shape),
        "episodes": len(data.lengths),
        "steps": data.steps,
        "lengths": _lengths(data.lengths),
        "statistics": {key: each.told() for key, each in running.items()},
        "normalize": _normalize([running[key] for key in used.observations]),
    }
    whole = leaves and not found.count
    return told | {"root": merkle.root(leaves) if whole else ""}


def _episode(
    data: Dataset, index: int, running: dict[str, Running], found: Findings
) -> Iterator[bytes]:
    """The leaf of an episode, unless something is wrong with it."""
    before, rows = found.count, data.lengths[index]
    try:
        data.container.check(index)
    except DatasetError as error:
        found.add(error)
        return
    for key, statistics in running.items():
        states = rows + (key in data.selection.observations)
        try:
            statistics.add(data.rows(index, key, 0, states))
        except DatasetError as error:
            found.add(error)
    try:
        if data.selection.images:
            data.images(index, 0, 1)
            data.images(index, rows, rows + 1)
        leaf = commitment.leaf(data.container, index, data.container.embodiment(index))
    except DatasetError as error:
        found.add(error)
        return
    if found.count == before:
        yield leaf


def _window_notes(data: Dataset, window: int, found: Findings) -> None:
    short = sum(length < window for length in data.lengths)
    if short == len(data.lengths):
        try:
            data.windows(window)
        except DatasetError as error:
            found.add(error)
    elif short:
        found.notes.append(
            f"{short} of {len(data.lengths)} episodes are shorter than a window of {window} "
            "transitions, and are not trained on"
        )


def _lengths(lengths: list[int]) -> dict[str, Any]:
    held = np.array(lengths)
    counts, edges = np.histogram(held, bins=min(_BINS, int(held.max() - held.min()) + 1))
    return {
        "shortest": int(held.min()),
        "mean": float(held.mean()),
        "median": float(np.median(held)),
        "longest": int(held.max()),
        "histogram": {"edges": edges.tolist(), "counts": counts.tolist()},
    }


def _normalize(running: list[Running]) -> dict[str, list[float]]:
    """Offset and scale as a workload takes them; a dimension that never changes is left alone."""
    offset = [float(value) for each in running for value in each.mean]
    spread = [float(value) for each in running for value in each.std]
    return {"offset": offset, "scale": [value if value > 0 else 1.0 for value in spread]}


# ---- commit ----


def commit(
    source: DataSource, state_dir: Path | None, prove: int | None, *, full: bool
) -> dict[str, Any]:
    """The Merkle root that a node commits to.

    Args:
        source: the data.
        state_dir: of the node, whose note of the root spares reading everything; none, no note.
        prove: an episode whose inclusion to prove, by its index.
        full: read everything, and hold the note to it.

    Raises:
        DatasetError: data that cannot be used, or that have changed under an unchanged file.
    """
    began = time.monotonic()
    with open_dataset(source, 0) as data:
        noted = None if state_dir is None else data.noted(state_dir)
        told: dict[str, Any] = {"path": str(source.path), "layout": str(data.layout)}
        if noted is not None and not full and prove is None:
            facts = noted
        else:
            progress, leaves = Progress(len(data.lengths)), []
            for each in data.leaves():
                leaves.append(each)
                progress.step()
            facts = data.facts(leaves)
            _hold(source, noted, facts)
            if state_dir is not None:
                data.note(state_dir, facts)
            if prove is not None:
                told["proof"] = _proof(leaves, prove)
        return told | {
            "root": facts.root,
            "embodiment": data.embodiment,
            "episodes": facts.episodes,
            "steps": facts.steps,
            "observation_dim": facts.observation_dim,
            "action_dim": facts.action_dim,
            "noted": facts is noted,
            "seconds": round(time.monotonic() - began, 3),
        }


def _hold(
    source: DataSource, noted: merkle.DatasetFacts | None, facts: merkle.DatasetFacts
) -> None:
    if noted is not None and noted.root != facts.root:
        raise DatasetError(
            f"{source.path} has the root {facts.root}; {noted.root} is noted for the same size, "
            "date and inode of every file",
            "A disk that loses bits, or a tool that hides its changes: compare with a copy.",
        )


def _proof(leaves: list[bytes], episode: int) -> dict[str, Any]:
    if not 0 <= episode < len(leaves):
        raise DatasetError(
            f"there is no episode of index {episode}; there are {len(leaves)}",
            "Count episodes from 0.",
        )
    leaf = leaves[episode]
    steps = merkle.proof(leaves, leaf)
    return {
        "episode": episode,
        "leaf": leaf.hex(),
        "steps": [{"side": step.side, "digest": step.digest.hex()} for step in steps],
    }


# ---- the command ----


def _source(given: argparse.Namespace, section: DataSection | None) -> DataSource:
    if section is None and given.path is None:
        raise ConfigError(
            "no data set is named", "Give its path, or a node's configuration with --config."
        )
    held = section or DataSection()
    return DataSource(
        path=given.path or held.path,
        observation_keys=tuple(given.observation_key) or held.observation_keys,
        embodiment=given.embodiment or held.embodiment,
        image_keys=tuple(given.image_key) or held.image_keys,
        action_keys=tuple(given.action_key) or held.action_keys,
        format=given.format or held.format,
    )


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="survey", description=__doc__)
    modes = parser.add_subparsers(dest="mode", required=True)
    for mode in ("inspect", "commit"):
        verb = modes.add_parser(mode)
        verb.add_argument("path", type=Path, nargs="?")
        verb.add_argument("--config", type=Path)
        verb.add_argument("--format", default="", help=f"{AUTO}, or one of {FORMATS}")
        verb.add_argument("--embodiment", default="")
        for which in ("observation", "image", "action"):
            verb.add_argument(f"--{which}-key", action="append", default=[])
    inspected, committed = modes.choices["inspect"], modes.choices["commit"]
    inspected.add_argument("--window", type=int, default=WINDOW)
    inspected.add_argument("--problems", type=int, default=MOST_PROBLEMS)
    committed.add_argument("--full", action="store_true")
    committed.add_argument("--prove", type=int)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    given = _arguments(arguments)
    try:
        node = None if given.config is None else config.load(given.config, NodeConfig)
        source = _source(given, None if node is None else node.data)
        if given.mode == "inspect":
            report = inspect(source, given.window, given.problems)
        else:
            of_node = None if node is None or given.path is not None else node.state_dir
            noting = of_node if of_node is not None and of_node.is_dir() else None
            report = commit(source, noting, given.prove, full=given.full)
    except LensembleError as error:
        sys.stderr.write(f"Error: {error.message}\nTry: {error.remediation}\n")
        return USAGE if isinstance(error, ConfigError) else REFUSED
    _say({"report": report})
    return REFUSED if report.get("problem_count") else OK


if __name__ == "__main__":
    sys.exit(main())
