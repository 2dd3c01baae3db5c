"""A bounded memory of what was decoded last."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from numpy.typing import NDArray

CACHE_BYTES = 64 << 20


class Blocks:
    """The most recently used blocks, ``limit_bytes`` of them; a larger one is not kept."""

    def __init__(self, limit_bytes: int = CACHE_BYTES) -> None:
        self._limit = limit_bytes
        self._held = 0
        self._blocks: OrderedDict[Hashable, NDArray[Any]] = OrderedDict()

    @property
    def held_bytes(self) -> int:
        return self._held

    def get(self, name: Hashable, decode: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        """The block ``name``, decoded unless it is held."""
        block = self._blocks.get(name)
        if block is not None:
            self._blocks.move_to_end(name)
            return block
        block = decode()
        if block.nbytes <= self._limit:
            self._blocks[name] = block
            self._held += block.nbytes
            while self._held > self._limit:
                self._held -= self._blocks.popitem(last=False)[1].nbytes
        return block
