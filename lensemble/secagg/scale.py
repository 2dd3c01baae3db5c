"""The field plan of the next round, from the revealed sum of this one: public, integer, exact.

A tensor is narrow in the next round if

- the workload says ``field.bits = "auto"`` and adds no noise of participants to updates,
- ``n_max`` is at most ``MAX_NARROW_UPDATES``: beyond, the steps of a word are too coarse,
- it has at least ``MIN_NARROW_SIZE`` coordinates, so that its mean square says something,
- its sum is not nought,
- and, where it was narrow, at most one of ``SATURATED_PART`` coordinates was cut off at the limit.

Its ``k`` is then the largest for which ``limit`` words reach ``REACH`` root mean squares of the
mean update.  With powers of two and whole numbers only, everyone who holds the sum gets the same.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lensemble.secagg.plan import BIAS, MAX_K, MIN_K, FieldPlan, Segment, signed_words

MAX_NARROW_UPDATES = 128
"""``n_max`` for which a coordinate still has 255 words to either side of nought."""
MIN_NARROW_SIZE = 256
REACH = 32
SATURATED_PART = 100
_PIECE = 1 << 18
_LOW = 16


class Bits(Protocol):
    """Of a workload's field."""

    @property
    def bits(self) -> str | int: ...

    @property
    def n_max(self) -> int: ...


class Noise(Protocol):
    """Of a workload's privacy."""

    @property
    def of_participants(self) -> bool: ...


class Scaled(Protocol):
    """What a workload says about the width of words."""

    @property
    def field(self) -> Bits: ...

    @property
    def privacy(self) -> Noise: ...


class Moments:
    """Sums of squares of the words of a revealed sum, tensor by tensor, in whole numbers.

    It is fed the words in order of coordinates, in any pieces, the last of them with the tail.
    """

    def __init__(self, plan: FieldPlan) -> None:
        self.plan = plan
        tensors = plan.layout.tensors
        self.squares = [0] * len(tensors)
        self.clipped = (0,) * len(plan.narrow)
        self._tensor = 0

    def include(self, first: int, count: int, raw: memoryview) -> None:
        """Take ``count`` coordinates from ``first`` on; ``raw`` begins at ``byte_of(first)``.

        With the last coordinates ``raw`` goes on to the end of the sum.
        """
        base, last = self.plan.byte_of(first), first + count
        tensors = self.plan.layout.tensors
        while first < last:
            tensor = tensors[self._tensor]
            end = min(last, tensor.offset + tensor.size, first + _PIECE)
            segment = self.plan.segment_of(first)
            words = signed_words(raw, segment.byte_of(first) - base, end - first, segment.bits)
            self.squares[self._tensor] += square_sum(words)
            if end == tensor.offset + tensor.size:
                self._tensor += 1
            first = end
        if last == self.plan.layout.size:
            counters = np.frombuffer(raw, dtype="<u4", offset=self.plan.tail - base)
            self.clipped = tuple(counters[1:].tolist())


def square_sum(words: NDArray[np.signedinteger]) -> int:
    """The sum of the squares of at most 2**18 ``words`` (int16 or int32), exact.

    All products and partial sums are whole numbers below 2**53, so float64 holds them in any order.
    """
    if words.dtype.itemsize == 2:
        wide = words.astype(np.float64)
        return int(np.dot(wide, wide))
    high = (words >> _LOW).astype(np.float64)
    low = (words & ((1 << _LOW) - 1)).astype(np.float64)
    upper, across, lower = np.dot(high, high), np.dot(high, low), np.dot(low, low)
    return (int(upper) << (2 * _LOW)) + (int(across) << (_LOW + 1)) + int(lower)


def why_wide(workload: Scaled) -> str:
    """Why all words of ``workload`` have 32 bits in every round; empty if they may have 16."""
    if workload.field.bits == 32:
        return "field.bits is 32"
    if workload.privacy.of_participants:
        return "updates carry noise, and what rounding leaves of that is not carried on"
    if workload.field.n_max > MAX_NARROW_UPDATES:
        return (
            f"field.n_max is {workload.field.n_max}; steps of 16 bits are fine enough for up to "
            f"{MAX_NARROW_UPDATES}"
        )
    return ""


def next_code(moments: Moments, contributors: int) -> bytes:
    """The plan for the round after the one whose sum of ``contributors`` gave ``moments``."""
    plan, narrow = moments.plan, iter(zip(moments.plan.narrow, moments.clipped, strict=True))
    code = bytearray()
    saturated: set[int] = set()
    for segment, count in narrow:
        if count * SATURATED_PART > contributors * (segment.last - segment.first):
            saturated.add(segment.first)
    for tensor, square in zip(plan.layout.tensors, moments.squares, strict=True):
        if tensor.size < MIN_NARROW_SIZE or square == 0 or tensor.offset in saturated:
            code.append(0)
            continue
        segment = plan.segment_of(tensor.offset)
        code.append(BIAS + _next_k(plan, segment, square, tensor.size * contributors**2))
    return bytes(code) if any(code) else b""


def _next_k(plan: FieldPlan, segment: Segment, square: int, weight: int) -> int:
    """The largest k with ``REACH * rms * 2**k <= limit``, where ``rms**2`` is that of the mean.

    ``rms**2 = square / weight * 2**(-2 * segment.k)``.
    """
    above = plan.limit**2 * weight
    below = REACH**2 * square
    if segment.k >= 0:
        above <<= 2 * segment.k
    else:
        below <<= -2 * segment.k
    return max(MIN_K, min(MAX_K, _log2(above, below) // 2))


def _log2(above: int, below: int) -> int:
    """The logarithm of ``above / below`` to base 2, rounded down."""
    found = above.bit_length() - below.bit_length()
    enough = above >= below << found if found >= 0 else above << -found >= below
    return found if enough else found - 1
