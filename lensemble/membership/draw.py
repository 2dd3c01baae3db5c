"""A small seeded generator: the same numbers on every machine and with every library."""

from collections.abc import Sequence
from typing import TypeVar

_MASK = (1 << 64) - 1
Item = TypeVar("Item")


class Draw:
    """SplitMix64 (Steele, Lea, Flood 2014); not for secrets."""

    __slots__ = ("_state",)

    def __init__(self, seed: int) -> None:
        self._state = seed & _MASK

    def below(self, bound: int) -> int:
        """A number from 0 to ``bound - 1``; uneven by less than ``bound / 2**64``."""
        self._state = mixed = (self._state + 0x9E3779B97F4A7C15) & _MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        return (mixed ^ (mixed >> 31)) % bound

    def shuffled(self, items: Sequence[Item]) -> list[Item]:
        """The items in an order that depends on their order here and on the draws so far."""
        order = list(items)
        for last in range(len(order) - 1, 0, -1):
            other = self.below(last + 1)
            order[last], order[other] = order[other], order[last]
        return order
