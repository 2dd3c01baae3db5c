"""``lensemblectl probe build|pin|verify``: public points, and where the warm start puts some.

The hash of a probe covers points, landmark indices and targets, and the file names the algorithm
of it.  A round names the hash; a node whose probe hashes otherwise takes no part.  Other points, or
another warm start, make another probe, which is another workload: it never changes during a run.
"""

import argparse
import hashlib
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from lensemble import files
from lensemble.errors import ConfigError, ProbeError
from lensemble.ids import Digest
from lensemble.params import FlatParameters
from lensemble.workload import Workload, initial_parameters
from lensemble_node.worker.training.arguments import (
    THREADS,
    ending_well,
    read_parameters,
    read_workload,
    world_task,
)
from lensemble_node.worker.training.dataset import Dataset, open_dataset
from lensemble_node.worker.training.gauge import MAX_POINTS
from lensemble_node.worker.training.model import WorldModel
from lensemble_node.worker.training.objective import Landmarks
from lensemble_node.worker.training.source import DataSource
from lensemble_node.worker.training.storage import write_atomically

ALGORITHM = "lensemble/probe/v1"
_TAG = f"{ALGORITHM}\x00".encode()
TARGETS_AGREE = 1e-3
"""Part of the latents' spread that targets may differ by between machines."""
DEFAULT_LANDMARKS = 256
MAX_PICTURES = 1024
_PINNED = re.compile(r'^(\s*probe_hash\s*=\s*)"[^"\n]*"', re.MULTILINE)
_NAMES = ("points", "landmarks", "targets")


@dataclass(frozen=True)
class Probe:
    """``points`` (p, observation_dim) and ``targets`` (k, latent_dim), float32.

    Where the encoder takes pictures, points are those, uint8 (p, height, width, channels).
    ``landmarks`` (k,), int64, are the rows of ``points`` that the targets belong to.
    """

    points: NDArray[np.float32] | NDArray[np.uint8]
    landmarks: NDArray[np.int64]
    targets: NDArray[np.float32]

    @property
    def digest(self) -> Digest:
        """SHA-256 over the three arrays: name, dtype, shape and little-endian bytes of each."""
        running = hashlib.sha256(_TAG)
        for name, array in zip(_NAMES, self._arrays(), strict=True):
            running.update(f"{name} {array.dtype.name} {array.shape}\x00".encode())
            running.update(np.ascontiguousarray(array).tobytes())
        return Digest(running.hexdigest())

    def _arrays(self) -> tuple[NDArray[np.generic], ...]:
        return self.points, self.landmarks, self.targets

    def expect(self, digest: Digest) -> None:
        """Refuse to go on with another probe than the round's.

        Raises:
            ProbeError: the digests differ.
        """
        if self.digest != digest:
            raise ProbeError(
                f"this node's probe hashes to {self.digest}, the round's is {digest}",
                "Fetch the federation's probe; it never changes during a run.",
            )

    def anchor(self) -> Landmarks:
        """The landmarks as the objective takes them."""
        return Landmarks(
            torch.from_numpy(self.points[self.landmarks]), torch.from_numpy(self.targets)
        )

    def spread(self) -> torch.Tensor:
        """At most ``MAX_POINTS`` of the points, evenly through all of them."""
        count = min(len(self.points), MAX_POINTS)
        return torch.from_numpy(
            self.points[np.linspace(0, len(self.points) - 1, count).astype(np.int64)]
        )

    def write(self, path: Path) -> None:
        arrays = dict(zip(_NAMES, self._arrays(), strict=True))
        about: dict[str, str] = {"algorithm": ALGORITHM, "digest": self.digest}
        write_atomically(path, save(arrays, metadata=about))


def build(
    source: DataSource, workload: Workload, warm_start: FlatParameters, landmarks: int
) -> Probe:
    """A probe of the states in a public file, ``landmarks`` of them spread evenly through it.

    Raises:
        DatasetError: data that cannot be used.
        ProbeError: fewer landmarks than latent dimensions, or than there are states.
    """
    task = world_task(workload)
    with open_dataset(source) as data:
        data.fit(task, workload.normalize)
        points = _pictures(data) if task.pictures else _states(data)
    if not task.latent_dim <= landmarks <= len(points):
        raise ProbeError(
            f"{landmarks} landmarks; a latent of {task.latent_dim} dimensions and {len(points)} "
            f"states allow {task.latent_dim} to {len(points)}"
        )
    chosen = np.linspace(0, len(points) - 1, landmarks).astype(np.int64)
    model = WorldModel(task)
    model.load(warm_start)
    targets = model.latents(torch.from_numpy(points[chosen]))
    return Probe(points, chosen, targets)


def _states(data: Dataset) -> NDArray[np.float32]:
    return np.concatenate([data.episode(index).observations for index in range(len(data.lengths))])


def _pictures(data: Dataset) -> NDArray[np.uint8]:
    """At most ``MAX_PICTURES``, the same number of each episode, evenly through it."""
    each = max(1, MAX_PICTURES // len(data.lengths))
    found = []
    for index, length in enumerate(data.lengths):
        numbers = np.unique(np.linspace(0, length, each).astype(np.int64)).tolist()
        found += [data.images(index, number, number + 1) for number in numbers]
    return np.concatenate(found)


def read(path: Path) -> Probe:
    """The probe stored at ``path``.

    Raises:
        ProbeError: missing, damaged, inconsistent, or hashed by another algorithm.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            algorithm = (file.metadata() or {}).get("algorithm", "none")
            points, landmarks, targets = (file.get_tensor(name) for name in _NAMES)
    except (OSError, SafetensorError) as error:
        raise ProbeError(f"probe {path} cannot be read: {error}", "Fetch it again.") from error
    if algorithm != ALGORITHM:
        raise ProbeError(
            f"probe {path} names the hash algorithm {algorithm!r}, this build has {ALGORITHM!r}",
            "Build the probe with the build of Lensemble that uses it.",
        )
    kinds = (points.dtype, landmarks.dtype, targets.dtype)
    whole = (landmarks.ndim, targets.ndim) == (1, 2) and (kinds, points.ndim) in (
        ((np.float32, np.int64, np.float32), 2),
        ((np.uint8, np.int64, np.float32), 4),
    )
    if (
        not whole
        or len(landmarks) != len(targets)
        or not np.isin(landmarks, np.arange(len(points))).all()
        or not (np.isfinite(points).all() and np.isfinite(targets).all())
    ):
        raise ProbeError(f"probe {path} is inconsistent: its arrays do not belong together")
    return Probe(points, landmarks, targets)


def verify(probe: Probe, workload: Workload, warm_start: FlatParameters | None) -> None:
    """Refuse a probe that does not belong to ``workload``, or to ``warm_start`` if there is one.

    Raises:
        ProbeError: says what does not fit.
    """
    task = world_task(workload)
    if workload.objective.probe_hash:
        probe.expect(Digest(workload.objective.probe_hash))
    point = task.image_shape if task.pictures else (task.observation_dim,)
    if (probe.points.shape[1:], probe.targets.shape[1]) != (point, task.latent_dim):
        raise ProbeError(
            f"the probe has points of {probe.points.shape[1:]} and targets of "
            f"{probe.targets.shape[1]}; the workload's model has {point} and {task.latent_dim}"
        )
    distinct = len(np.unique(probe.landmarks))
    if distinct < task.latent_dim:
        raise ProbeError(
            f"{distinct} distinct landmarks cannot hold a latent of {task.latent_dim} dimensions"
        )
    if warm_start is None:
        return
    model = WorldModel(task)
    model.load(warm_start)
    expected = model.latents(torch.from_numpy(probe.points[probe.landmarks]))
    apart = float(np.abs(expected - probe.targets).max()) / max(float(expected.std()), 1e-30)
    if not apart <= TARGETS_AGREE:
        raise ProbeError(
            f"the targets are {apart:.2g} latent spreads from where these parameters put the "
            "landmarks",
            "Build the probe from the warm start that round 0 begins with.",
        )


def pin(path: Path, digest: Digest) -> Workload:
    """Write ``digest`` as ``probe_hash`` into the workload file at ``path``, which has that key.

    Raises:
        ConfigError: no TOML file of a workload, or one without exactly one such line.
    """
    read_workload(path)
    with files.storage(path):
        text = path.read_text()
    pinned, count = _PINNED.subn(lambda found: f'{found[1]}"{digest}"', text)
    if path.suffix == ".json" or count != 1:
        raise ConfigError(
            f"{path} has {count} lines `probe_hash = ...`, one is needed to write to",
            f'Write probe_hash = "{digest}" into its section [objective].',
        )
    write_atomically(path, pinned.encode())
    return read_workload(path)


def _build(given: argparse.Namespace) -> None:
    workload = read_workload(given.workload)
    start = read_parameters(given.start, workload) if given.start else initial_parameters(workload)
    made = build(DataSource(given.data), workload, start, given.landmarks)
    made.write(given.out)
    _say({"probe": str(given.out), "probe_hash": made.digest})


def _pin(given: argparse.Namespace) -> None:
    digest = read(given.probe).digest
    workload = pin(given.workload, digest)
    _say({"probe_hash": digest, "workload": str(given.workload), "config_hash": workload.digest})


def _verify(given: argparse.Namespace) -> None:
    workload, found = read_workload(given.workload), read(given.probe)
    verify(found, workload, read_parameters(given.start, workload) if given.start else None)
    _say(
        {
            "probe_hash": found.digest,
            "named_by_workload": bool(workload.objective.probe_hash),
            "points": len(found.points),
            "landmarks": len(found.landmarks),
            "targets_recomputed": given.start is not None,
        }
    )


def _say(answer: dict[str, str | int | bool]) -> None:
    print(json.dumps(answer))  # noqa: T201  # this command's answer


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="lensemblectl probe", description=__doc__)
    modes = parser.add_subparsers(dest="mode", required=True)
    made = modes.add_parser("build", help="make a probe of public data and print its hash")
    held = modes.add_parser("pin", help="write the hash of a probe into a workload file")
    seen = modes.add_parser("verify", help="test a probe against a workload and its warm start")
    for mode in (made, held, seen):
        mode.add_argument("--workload", type=Path, required=True, help="TOML or canonical JSON")
    for mode in (held, seen):
        mode.add_argument("probe", type=Path)
    for mode in (made, seen):
        mode.add_argument("--start", type=Path, help="the warm start; build: default the seed's")
    made.add_argument("--data", type=Path, required=True, help="public trajectories")
    made.add_argument("--landmarks", type=int, default=DEFAULT_LANDMARKS)
    made.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(arguments)
    torch.set_num_threads(THREADS)
    work = {"build": _build, "pin": _pin, "verify": _verify}[given.mode]
    return ending_well(lambda: work(given))


if __name__ == "__main__":
    sys.exit(main())
