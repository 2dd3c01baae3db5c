"""What the commands of this package share: reading their inputs, ending with a reason."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from lensemble import config, files, weights_file
from lensemble.errors import ArtifactError, ConfigError, LensembleError
from lensemble.params import FlatParameters
from lensemble.workload import Workload, WorldModelTask, layout

THREADS = 1
"""Of torch, in commands whose results are compared."""
WEIGHTS = "weights.safetensors"
RAW = ".f32"
MAX_WORKLOAD_BYTES = 1 << 20


def read_workload(path: Path) -> Workload:
    """A workload from TOML, or from canonical JSON when the name ends in ``.json``.

    Raises:
        ConfigError: missing, malformed, or not a workload.
        StorageError: JSON that cannot be read.
    """
    if path.suffix != ".json":
        return config.load(path, Workload)
    try:
        return Workload.model_validate_json(files.read_limited(path, MAX_WORKLOAD_BYTES))
    except ValidationError as error:
        raise ConfigError(f"workload {path} cannot be used: {error}") from error


def world_task(workload: Workload) -> WorldModelTask:
    """The task, when it is a world model.

    Raises:
        ConfigError: it is another.
    """
    if not isinstance(workload.task, WorldModelTask):
        raise ConfigError(f"workload {workload.name!r} has no model: its task is no world model")
    return workload.task


def read_parameters(path: Path, workload: Workload) -> FlatParameters:
    """A flat vector from a ``.f32`` file, a safetensors file, or a checkpoint directory.

    Raises:
        ArtifactError: damaged, or of another size.
        ContractViolation: tensors that are not the workload's.
        StorageError: missing or unreadable.
    """
    where = layout(workload)
    if path.suffix != RAW:
        return weights_file.read_weights(path / WEIGHTS if path.is_dir() else path, where)
    with files.storage(path):
        size = path.stat().st_size
        if size != where.nbytes:
            raise ArtifactError(
                f"{path} has {size} bytes; the workload's model has {where.nbytes}",
                "Give the parameters of this workload's model.",
            )
        return np.fromfile(path, dtype="<f4")


def ending_well(work: Callable[[], None]) -> int:
    """Do ``work`` and answer the exit status; a failure is told on standard error."""
    try:
        work()
    except LensembleError as error:
        sys.stderr.write(f"Error: {error.message}\nTry: {error.remediation}\n")
        return 1
    return 0
