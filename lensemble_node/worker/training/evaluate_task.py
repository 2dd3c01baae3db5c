"""The program that gives the figures of a node's own task on parameters.

It runs the task that the node's configuration names, on the node's data, with the tensors that
this node keeps to itself as they are in its state directory.  It changes nothing there.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from safetensors.numpy import load

from lensemble import config, files
from lensemble.workload import Workload
from lensemble_node.config import NodeConfig
from lensemble_node.worker.training.arguments import (
    THREADS,
    ending_well,
    read_parameters,
    read_workload,
)
from lensemble_node.worker.training.custom import CustomDescent
from lensemble_node.worker.training.inner_loop import LocalState
from lensemble_node.worker.training.local_store import HEAD
from lensemble_node.worker.training.source import TaskCode

MAX_LOCAL_BYTES = 1 << 34


def figures(workload: Workload, node: NodeConfig, parameters: Path) -> dict[str, float]:
    """What the task's ``evaluate`` says of ``parameters``.

    Raises:
        ConfigError: the node's configuration names other code than the workload.
        ArtifactError, ContractViolation, StorageError: parameters that cannot be read.
        CheckpointIntegrityError: what the node keeps is of another task.
        TaskError: the task failed.
    """
    code = TaskCode(node.task.entry, node.data.path, node.task.folder)
    descent = CustomDescent.of(workload, code, node.name, torch.device("cpu"))
    kept = node.state_dir / "local" / HEAD
    local = load(files.read_limited(kept, MAX_LOCAL_BYTES)) if kept.is_file() else {}
    descent.mirror(read_parameters(parameters, workload), LocalState(local))
    return descent.custom.evaluate(descent.tensors)


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m lensemble_node.worker.training.evaluate_task", description=__doc__
    )
    parser.add_argument("--node", type=Path, required=True, help="the node's configuration")
    parser.add_argument("--workload", type=Path, required=True, help="TOML or canonical JSON")
    parser.add_argument("--parameters", type=Path, required=True, help="a checkpoint directory")
    given = parser.parse_args(arguments)

    def work() -> None:
        torch.set_num_threads(THREADS)
        node = config.load(given.node, NodeConfig)
        found = figures(read_workload(given.workload), node, given.parameters)
        sys.stdout.write(json.dumps(found) + "\n")

    return ending_well(work)


if __name__ == "__main__":
    sys.exit(main())
