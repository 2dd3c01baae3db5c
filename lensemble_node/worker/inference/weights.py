"""The stored tensors of a stage: brought to this node, then mapped where they lie."""

import mmap
from collections.abc import Callable, Generator
from contextlib import closing
from typing import TypeAlias

from lensemble import files
from lensemble.errors import WeightsUnasked
from lensemble.wire.stages import TensorPart
from lensemble_node.worker.inference.fetch import (
    MAX_PASSES,
    Order,
    Watch,
    begin,
    fetch,
    wait_for_others,
)
from lensemble_node.worker.inference.intake import Intake, Weights
from lensemble_node.worker.inference.model import Stored

OFFSET_BYTES = 8
"""Each chunk of a weights edge begins with the offset of its bytes in the file."""

Ranges: TypeAlias = tuple[tuple[int, int], ...]
Supply: TypeAlias = Callable[[Ranges], Generator[memoryview, None, None]]
"""Asks for ranges of the file, also when there are none, and yields chunks until the edge ends."""


def obtain(order: Order, watch: Watch, supply: Supply) -> Weights:
    """All tensors of ``order``, verified.

    Raises:
        WeightsError: by its subclass; see ``fetch.begin`` and ``Intake.take``.
        StorageError: the cache cannot be used.
    """
    if order.source != "edge":
        return fetch(order, watch)
    intake = begin(order, watch)
    try:
        for _ in range(MAX_PASSES):
            _take_in(intake, supply)
            wait_for_others(intake, watch)
            if not intake.ranges:
                break
        return intake.finish()
    except BaseException:
        intake.close()
        raise


def _take_in(intake: Intake, supply: Supply) -> None:
    with closing(supply(intake.ranges)) as chunks:
        for chunk in chunks:
            if len(chunk) <= OFFSET_BYTES:
                raise WeightsUnasked(f"a chunk of weights of {len(chunk)} bytes")
            offset = int.from_bytes(chunk[:OFFSET_BYTES], "little")
            intake.take(offset, chunk[OFFSET_BYTES:])
            if intake.is_complete:
                return


def mapped(weights: Weights, tensors: tuple[TensorPart, ...]) -> dict[str, Stored]:
    """``tensors`` by name, each a view of one mapping, which ends with the last of them."""
    with files.storage(weights.path), weights.path.open("rb") as file:
        whole = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    return {
        part.name: Stored(
            whole[part.offset : part.offset + part.nbytes], part.ggml_type, part.shape
        )
        for part in tensors
    }
