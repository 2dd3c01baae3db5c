"""A task of the node's owner, made and called: the only place where that code runs.

What it raises becomes a ``TaskError`` that names the call, the kind of exception and its place, and
nothing of its message, which may quote the data; the traceback goes to standard error, which stays
on the node.
"""

import importlib
import math
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from lensemble import merkle
from lensemble.errors import ConfigError, LensembleError, TaskError
from lensemble.ids import Digest
from lensemble.merkle import DatasetFacts
from lensemble.params import FlatParameters, ParamLayout
from lensemble.seeds import derive
from lensemble.task import CUSTOM_GROUP
from lensemble.workload import CustomTask, Workload, layout
from lensemble_node import tasks
from lensemble_node.worker import guard
from lensemble_node.worker.training.inner_loop import Arrays, Descent
from lensemble_node.worker.training.model import bind, slope_of, write
from lensemble_node.worker.training.source import TaskCode

METHODS = ("shapes", "examples", "records", "local", "loss", "evaluate")
MAX_LOCAL_TENSORS = 10_000
MAX_FIGURES = 1000
Answer = TypeVar("Answer")


class Bound(nn.Module):
    """Tensors by name, in one flat vector (float32), in the order given."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> None:
        super().__init__()
        self._names = list(shapes)
        # The names may have dots, which a module takes for a path.
        self.tensors = nn.ParameterList(torch.zeros(shape) for shape in shapes.values())
        order = [f"tensors.{at}" for at in range(len(self._names))]
        self.flat = bind(self, order, device) if order else _nothing(device)

    def by_name(self) -> dict[str, torch.Tensor]:
        return dict(zip(self._names, self.tensors, strict=True))

    def named(self) -> dict[str, NDArray[np.float32]]:
        return {name: each.detach().cpu().numpy() for name, each in self.by_name().items()}


def _nothing(device: torch.device) -> torch.Tensor:
    flat = torch.zeros(0, device=device, requires_grad=True)
    flat.grad = torch.zeros_like(flat)
    return flat


class Federated(Bound):
    """The federated tensors of a layout."""

    def __init__(self, where: ParamLayout, device: torch.device) -> None:
        super().__init__({each.name: each.shape for each in where.tensors}, device)

    def load(self, prior: FlatParameters) -> None:
        write(self.flat, prior)


class Kept(Bound):
    """The tensors that stay on the node."""

    def load(self, arrays: Arrays) -> None:
        if self._names:
            write(self.flat, np.concatenate([arrays[name].ravel() for name in self._names]))


class Custom:
    """The object of the user's class, called with care.

    Args:
        workload: whose task it is.
        code: what this node's configuration names.
        node: its id; seeds what it draws locally.
        device: where its tensors are.

    Raises:
        ConfigError: other code than the node's, or it cannot be imported.
        TaskError: it does not do what ``lensemble_node.tasks`` says.
    """

    def __init__(self, workload: Workload, code: TaskCode, node: str, device: torch.device) -> None:
        if not isinstance(workload.task, CustomTask):
            raise TypeError(f"task {workload.task.kind} is none of the node's own")
        self._terms = workload.task
        seed = derive(workload.root_seed, f"task:{node}")
        setting = tasks.Setting(dict(workload.task.options), code.data, device, seed)
        kind = _imported(workload.task.entry, code)
        self._task: tasks.Task = self._call("__init__", lambda: kind(setting))
        self._require_shapes()
        count: object = self._call("examples", self._task.examples)
        if not isinstance(count, int) or count < 1:
            raise TaskError(f"{self.entry}: examples() is {count!r}, not a number of at least 1")
        self.count = count
        self.local = self._checked_local(device)

    @property
    def entry(self) -> str:
        return self._terms.entry

    def _require_shapes(self) -> None:
        said = self._call("shapes", self._task.shapes)
        found = {str(name): tuple(shape) for name, shape in dict(said).items()}
        wanted = self._terms.parameters
        differ = sorted(n for n in found.keys() | wanted if found.get(n) != wanted.get(n))
        if differ:
            name = differ[0]
            raise TaskError(
                f"{self.entry}: tensor {name!r} is {found.get(name, 'missing')} in its shapes() "
                f"and {wanted.get(name, 'missing')} in the workload's task.parameters",
                "Use the code that the workload was written for, or have its operator correct "
                "`task.parameters` and `task.options`.",
            )

    def _checked_local(self, device: torch.device) -> Kept:
        said: dict[str, object] = dict(self._call("local", self._task.local))
        if len(said) > MAX_LOCAL_TENSORS:
            raise TaskError(
                f"{self.entry}: local() has {len(said)} tensors, over {MAX_LOCAL_TENSORS}"
            )
        arrays: dict[str, NDArray[np.float32]] = {}
        for name, each in said.items():
            if name in self._terms.parameters or not name or "/" in name:
                raise TaskError(f"{self.entry}: local() may not name a tensor {name!r}")
            if not isinstance(each, torch.Tensor) or not bool(torch.isfinite(each).all()):
                raise TaskError(f"{self.entry}: local() has no finite tensor for {name!r}")
            arrays[name] = each.detach().cpu().to(torch.float32).numpy()
        kept = Kept({name: each.shape for name, each in arrays.items()}, device)
        kept.load(arrays)
        return kept

    def facts(self) -> DatasetFacts:
        """Root over the task's records and number of its examples.

        Raises:
            TaskError: there is no record, or one is not bytes.
        """
        leaves = list(self._call("records", lambda: list(self._leaves())))
        if not leaves:
            raise TaskError(f"{self.entry}: records() gives none; there is nothing to commit to")
        return DatasetFacts(Digest(merkle.root(leaves)), len(leaves), self.count, 0, 0)

    def _leaves(self) -> Iterator[bytes]:
        for record in self._task.records():
            column = merkle.array_column(np.frombuffer(record, dtype=np.uint8))
            yield merkle.leaf({"record": column})

    def loss(self, tensors: tasks.Tensors, numbers: torch.Tensor) -> torch.Tensor:
        """The task's loss, checked to be a scalar that depends on ``tensors``."""
        value: object = self._call("loss", lambda: self._task.loss(tensors, numbers))
        if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
            what = type(value).__name__
            if isinstance(value, torch.Tensor):
                what = f"a tensor of shape {tuple(value.shape)}"
            raise TaskError(f"{self.entry}: loss() is {what}, not a scalar with a gradient")
        return value

    def backward(self, value: torch.Tensor) -> None:
        """Gradients of ``value``; through the task's code, so with the same care."""
        self._call("loss", lambda: torch.autograd.backward(value))

    def evaluate(self, tensors: tasks.Tensors) -> dict[str, float]:
        """The task's figures."""

        def figures() -> dict[str, float]:
            with torch.no_grad():
                told = self._task.evaluate(tensors)
            return {str(name): float(each) for name, each in list(told.items())[:MAX_FIGURES]}

        return self._call("evaluate", figures)

    def _call(self, name: str, call: Callable[[], Answer]) -> Answer:
        return _called(f"{self.entry}.{name}", call)


class CustomDescent(Descent):
    """The inner steps of a task of the node's own."""

    def __init__(self, workload: Workload, custom: Custom, node: str, device: torch.device) -> None:
        self.layout = layout(workload)
        self.custom = custom
        self.shared = Federated(self.layout, device)
        super().__init__(workload, self.shared, custom.local, node, custom.count)
        strip = len(CUSTOM_GROUP) + 1
        federated = {name[strip:]: each for name, each in self.shared.by_name().items()}
        self.tensors: dict[str, torch.Tensor] = federated | custom.local.by_name()

    @classmethod
    def of(
        cls, workload: Workload, code: TaskCode, node: str, device: torch.device
    ) -> "CustomDescent":
        """With a fresh object of ``code``; raises as ``Custom``."""
        return cls(workload, Custom(workload, code, node, device), node, device)

    def backward(self, numbers: NDArray[np.int64], sketch: torch.Tensor) -> float:
        del sketch
        for flat in self.flats.values():
            slope_of(flat).zero_()
        value = self.custom.loss(self.tensors, torch.from_numpy(numbers).to(self._device))
        if math.isfinite(found := float(value.detach())):
            self.custom.backward(value)
        return found


def _imported(entry: str, code: TaskCode) -> type[tasks.Task]:
    """The class ``entry``, which has to be the one that ``code`` names."""
    if code.entry != entry:
        raise ConfigError(
            f"the workload is trained by the code of {entry!r}; this node's task.entry is "
            f"{code.entry!r}",
            f'If you have that code and trust it, set `task.entry = "{entry}"`.',
        )
    if code.folder is not None:
        _require_folder(code.folder)
        # Last, so that no file in it stands in for a module that the worker runs on.
        sys.path.append(str(code.folder))
    module, _, name = entry.partition(":")
    try:
        found = _called(f"import of {module}", lambda: importlib.import_module(module))
    except TaskError as error:
        cause = error.__cause__
        if not isinstance(cause, ModuleNotFoundError):
            raise
        raise ConfigError(
            f"task.entry is {entry!r}, and there is no module {cause.name!r} here",
            "Install its package into this node's environment, or name its directory in "
            "`task.folder`.",
        ) from error
    kind = getattr(found, name, None)
    if not isinstance(kind, type):
        raise ConfigError(f"task.entry is {entry!r}, and module {module!r} has no class {name!r}")
    missing = [name for name in METHODS if not callable(getattr(kind, name, None))]
    if missing:
        raise ConfigError(
            f"task.entry is {entry!r}, and that class has no method {missing[0]!r}",
            "Derive it from `lensemble_node.tasks.Task` and write its methods.",
        )
    return kind


def _require_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(f"task.folder {folder} is not a directory")


def _called(what: str, call: Callable[[], Answer]) -> Answer:
    """What ``call`` answers; whatever it raises, as a ``TaskError``."""
    try:
        return call()
    except LensembleError:
        raise
    # Code of somebody else's: any exception of it ends its round and must not end the worker.
    except (Exception, SystemExit) as error:
        if isinstance(error, Exception) and guard.is_out_of_memory(error):
            raise
        traceback.print_exc(file=sys.stderr)
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(last.filename).name}:{last.lineno}"
        raise TaskError(f"{what} raised {type(error).__name__} at {place}") from error
