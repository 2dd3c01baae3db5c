"""Reading what the commands of this package are pointed at."""

import tomllib
from pathlib import Path

import numpy as np
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open

from lensemble.errors import ArtifactError, ConfigError
from lensemble.params import FlatParameters
from lensemble.workload import Workload, WorldModelTask, layout

THREADS = 1
"""Of torch, in commands whose results are compared."""
WEIGHTS = "weights.safetensors"


def read_workload(path: Path) -> Workload:
    """A workload from TOML (by its suffix) or JSON.

    Raises:
        ConfigError: missing, malformed, or not a workload.
    """
    try:
        raw = path.read_bytes()
        if path.suffix == ".toml":
            return Workload.model_validate(tomllib.loads(raw.decode()))
        return Workload.model_validate_json(raw)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, ValidationError) as error:
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
        ArtifactError: missing, damaged, or of another layout.
    """
    where = layout(workload)
    file = path / WEIGHTS if path.is_dir() else path
    try:
        if file.suffix != ".safetensors":
            flat = np.fromfile(file, dtype="<f4")
            if flat.shape != (where.size,):
                raise ArtifactError(f"{file} holds {flat.size} parameters, not {where.size}")
            return flat
        flat = np.empty(where.size, dtype=np.float32)
        with safe_open(file, framework="numpy") as stored:
            for name, view in where.views(flat).items():
                value = stored.get_tensor(name)
                if value.shape != view.shape or value.dtype != np.float32:
                    raise ArtifactError(
                        f"{file}: {name} is {value.dtype} of {value.shape}, not {view.shape}"
                    )
                view[...] = value
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"{file} cannot be read: {error}") from error
    return flat
