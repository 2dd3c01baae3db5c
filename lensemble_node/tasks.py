"""A task of your own: what a class must have to be trained by a federation.

The workload names it (``kind = "custom"``, ``entry = "my_package.tasks:Letters"``) with the shapes
of the federated tensors, and every node's configuration must name the same entry, for it is code
that runs there.  The worker process makes one object of the class and calls it; nothing else of a
node changes: the inner AdamW steps, the schedule, clipping, noise, masks and retries are as for the
world model.

Nothing is sent but the change of the federated tensors.  Tensors that ``local`` names are trained
with them and stay on the node, in ``local/`` of its state directory.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch

Tensors: TypeAlias = Mapping[str, torch.Tensor]
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Setting:
    """What a task is made with.

    ``options``: of the workload; they come from the coordinator, so take nothing from them that
    names a place on this machine.  ``data``: this node's own ``data.path``.  ``device``: where the
    tensors of ``loss`` and ``evaluate`` are.  ``seed``: of this node, for what is drawn locally.
    """

    options: Mapping[str, Any]
    data: Path
    device: torch.device
    seed: int


class Task(Protocol):
    """What a node trains.  Derive from it, or write a class with the same methods.

    Whatever they raise ends the round for this node, not for the others: its type and place are
    reported, its message and the traceback stay in the node's own log.
    """

    def __init__(self, setting: Setting) -> None:
        """Open the data.  Raise ``lensemble.errors.DatasetError`` when they cannot be used."""

    def shapes(self) -> Shapes:
        """Name to shape of every federated tensor; the workload's ``task.parameters``."""
        ...

    def examples(self) -> int:
        """How many examples this node has, at least one; ``loss`` is given their numbers."""
        ...

    def records(self) -> Iterable[bytes]:
        """The stored data, record by record, in any order; the node commits to their hash."""
        ...

    def local(self) -> Tensors:
        """Names and first values (float32) of tensors that stay on this node; none by default."""
        return {}

    def loss(self, parameters: Tensors, examples: torch.Tensor) -> torch.Tensor:
        """The mean loss over ``examples``, a scalar with a gradient.

        Args:
            parameters: federated and local tensors by name, float32; with a module of yours,
                ``torch.func.functional_call(module, parameters, ...)``.
            examples: their numbers, int64 (batch,), drawn with repetition.  They are a function of
                the workload's seed, the node and its cursor, which an aborted round rolls back, so
                keep no position of your own and draw nothing at random here.
        """
        ...

    def evaluate(self, parameters: Tensors) -> Mapping[str, float]:
        """Figures by name, on data that ``loss`` never sees; called without gradients."""
        ...
