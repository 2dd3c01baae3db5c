"""The stored tensors of a stage, mapped where they lie on this machine."""

import mmap
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias

from lensemble import files
from lensemble_node import stage_signals
from lensemble_node.worker.inference.model import Stored, Weights

Advance: TypeAlias = Callable[[stage_signals.Phase, int, int], None]


class Weighing:
    def __init__(self, host: stage_signals.Host, advance: Advance) -> None:
        self.fetched_bytes = 0
        path = Path(host.place)
        with files.storage(path), path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        view = memoryview(self._map)
        self.weights: Weights = {
            part.name: Stored(
                view[part.offset : part.offset + part.nbytes], part.ggml_type, part.shape
            )
            for part in host.tensors
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.weights = {}
