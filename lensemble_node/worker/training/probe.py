"""The public probe: points everyone may see, and where the warm start puts some of them.

Its hash covers points, landmark indices and targets.  A round names the hash; a node whose probe
hashes otherwise does not train with an anchor.
"""

import argparse
import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from lensemble.errors import ProbeError
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
from lensemble_node.worker.training.dataset import open_dataset
from lensemble_node.worker.training.gauge import MAX_POINTS
from lensemble_node.worker.training.model import WorldModel
from lensemble_node.worker.training.objective import Landmarks
from lensemble_node.worker.training.source import DataSource
from lensemble_node.worker.training.storage import write_atomically

_TAG = b"lensemble/probe/v1\x00"
DEFAULT_LANDMARKS = 256
_NAMES = ("points", "landmarks", "targets")


@dataclass(frozen=True)
class Probe:
    """``points`` (p, observation_dim) and ``targets`` (k, latent_dim), float32.

    ``landmarks`` (k,), int64, are the rows of ``points`` that the targets belong to.
    """

    points: NDArray[np.float32]
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

    @property
    def landmark_digests(self) -> tuple[Digest, ...]:
        """For each landmark, the SHA-256 over its point and its target."""
        pairs = zip(self.points[self.landmarks], self.targets, strict=True)
        return tuple(
            Digest(hashlib.sha256(point.tobytes() + target.tobytes()).hexdigest())
            for point, target in pairs
        )

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
        write_atomically(path, save(arrays))


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
        data.expect(task.observation_dim)
        data.normalize(workload.normalize)
        count = len(data.lengths)
        points = np.concatenate([data.episode(index).observations for index in range(count)])
    if not task.latent_dim <= landmarks <= len(points):
        raise ProbeError(
            f"{landmarks} landmarks; a latent of {task.latent_dim} dimensions and {len(points)} "
            f"states allow {task.latent_dim} to {len(points)}"
        )
    chosen = np.linspace(0, len(points) - 1, landmarks).astype(np.int64)
    model = WorldModel(task)
    model.load(warm_start)
    with torch.no_grad():
        targets = model.encode(torch.from_numpy(points[chosen])).numpy()
    return Probe(points, chosen, targets)


def read(path: Path) -> Probe:
    """The probe stored at ``path``.

    Raises:
        ProbeError: missing, damaged, or inconsistent.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            points, landmarks, targets = (file.get_tensor(name) for name in _NAMES)
    except (OSError, SafetensorError) as error:
        raise ProbeError(f"probe {path} cannot be read: {error}", "Fetch it again.") from error
    kinds = (points.dtype, landmarks.dtype, targets.dtype)
    whole = kinds == (np.float32, np.int64, np.float32) and (
        (points.ndim, landmarks.ndim, targets.ndim) == (2, 1, 2)
    )
    if (
        not whole
        or len(landmarks) != len(targets)
        or not np.isin(landmarks, np.arange(len(points))).all()
        or not (np.isfinite(points).all() and np.isfinite(targets).all())
    ):
        raise ProbeError(f"probe {path} is inconsistent: its arrays do not belong together")
    return Probe(points, landmarks, targets)


def _build(given: argparse.Namespace) -> None:
    torch.set_num_threads(THREADS)
    workload = read_workload(given.workload)
    start = read_parameters(given.start, workload) if given.start else initial_parameters(workload)
    made = build(DataSource(given.data), workload, start, given.landmarks)
    made.write(given.out)
    print(json.dumps({"probe": str(given.out), "probe_hash": made.digest}))  # noqa: T201  # answer


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m lensemble_node.worker.training.probe",
        description="Make a probe file and print the hash that a workload's `probe_hash` names.",
    )
    parser.add_argument("--workload", type=Path, required=True, help="TOML or canonical JSON")
    parser.add_argument("--data", type=Path, required=True, help="public trajectories")
    parser.add_argument("--start", type=Path, help="the warm start; default: the seed's")
    parser.add_argument("--landmarks", type=int, default=DEFAULT_LANDMARKS)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(arguments)
    return ending_well(lambda: _build(given))


if __name__ == "__main__":
    sys.exit(main())
