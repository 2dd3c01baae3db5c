"""The integer field of updates: ``rint(x * 2**k) mod 2**32``, stored as little-endian uint32.

Sums in it are exact and do not depend on their order.  That no sum wraps is checked, not hoped:
``encode`` refuses a coordinate which ``n_max`` equal summands would carry past 31 bits,
``check_sum`` refuses a sum that no ``contributors`` honest updates can give.
"""

import math
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from lensemble.errors import AggregationError, ContractViolation, SecureAggregationError

FieldVector = NDArray[np.uint32]

_PIECE = 1 << 16
_HALF = (1 << 31) - 1
_NOISE_RMS = float(1 << 28)
"""Uniform words have a root mean square of 2**30.2; an honest sum stays far below."""
_NOISE_WORDS = 64
"""With fewer words the root mean square says too little."""


class FieldTerms(Protocol):
    """What both a workload and ``RoundOpen`` say about the field."""

    @property
    def k(self) -> int: ...

    @property
    def n_max(self) -> int: ...


@runtime_checkable
class NoisyTerms(FieldTerms, Protocol):
    """Terms of updates that carry noise.

    Noise adds up by its variance, so a coordinate may be larger than what ``n_max`` times as much
    leaves room for; the sum of so many still does not wrap.
    """

    @property
    def coordinate_bound(self) -> float: ...

    def sum_bound(self, contributors: int) -> float: ...


class FieldBoundExceeded(AggregationError):
    """A coordinate too large for the field, or not finite; the update is not released."""

    code = "field_bound_exceeded"
    default_remediation = "Lower `field.k` or `field.n_max`, or look at why training diverges."


def limit(terms: FieldTerms) -> int:
    """Largest absolute field value of one coordinate."""
    if isinstance(terms, NoisyTerms):
        return min(_HALF, math.floor(terms.coordinate_bound * float(1 << terms.k)))
    return _HALF // terms.n_max


def reach(terms: FieldTerms, contributors: int) -> int:
    """Largest absolute field value of a coordinate of the sum of ``contributors`` updates."""
    if isinstance(terms, NoisyTerms):
        return min(_HALF, math.floor(terms.sum_bound(contributors) * float(1 << terms.k)))
    return contributors * limit(terms)


def bound(terms: FieldTerms) -> float:
    """Largest absolute value of one coordinate before encoding."""
    return float(limit(terms)) / float(1 << terms.k)


def encode(
    values: NDArray[np.float32],
    terms: FieldTerms,
    out: FieldVector | None = None,
    *,
    at: int = 0,
) -> FieldVector:
    """``values`` (float32, shape ``(n,)``) as field elements (uint32, shape ``(n,)``).

    Scaling by a power of two is exact in float32, so rounding there, half to even, is exact too.

    Args:
        values: the coordinates.
        terms: the field.
        out: where to write, of the same length; allocated when absent.
        at: number of the first coordinate, for the error.

    Raises:
        FieldBoundExceeded: names index and value of the first coordinate over the bound.
        ContractViolation: wrong dtype or shape.
    """
    if values.dtype != np.float32 or values.ndim != 1:
        raise ContractViolation(
            f"the field encodes flat float32, not {values.dtype} of {values.shape}"
        )
    result = np.empty(values.shape, dtype=np.uint32) if out is None else out
    if result.dtype != np.uint32 or result.shape != values.shape:
        raise ContractViolation(f"encoding {values.shape} into {result.dtype} of {result.shape}")
    scale, most = np.float32(1 << terms.k), limit(terms)
    for start in range(0, len(values), _PIECE):
        piece = values[start : start + _PIECE]
        # An overflow to infinity here is caught by the comparison below.
        with np.errstate(over="ignore", invalid="ignore"):
            steps = np.rint(piece * scale)
            peak = max(float(steps.max()), -float(steps.min()))
        if not peak <= most:
            raise over_bound(values[start : start + _PIECE], at + start, terms)
        result[start : start + _PIECE] = steps.astype(np.int32).view(np.uint32)
    return result


def over_bound(values: NDArray[np.float32], first: int, terms: FieldTerms) -> FieldBoundExceeded:
    """The error for the first of ``values`` (float32, from coordinate ``first`` on) over it."""
    # In float64, where every float32 times 2**k is exact and the limit is not rounded up.
    steps = np.rint(values.astype(np.float64) * float(1 << terms.k))
    index = int(np.argmax(~(np.abs(steps) <= limit(terms))))
    value = float(values[index])
    return FieldBoundExceeded(
        f"coordinate {first + index} of the update is {value!r}; the field of k={terms.k} "
        f"and n_max={terms.n_max} holds at most {bound(terms)!r}"
    )


def fold(accumulator: FieldVector, update: FieldVector) -> None:
    """Add ``update`` into ``accumulator`` (both uint32, same shape) modulo 2**32.

    Raises:
        ContractViolation: dtype or shape differ.
    """
    if not (accumulator.dtype == update.dtype == np.uint32 and accumulator.shape == update.shape):
        raise ContractViolation(
            f"cannot fold {update.dtype} of {update.shape} into "
            f"{accumulator.dtype} of {accumulator.shape}"
        )
    np.add(accumulator, update, out=accumulator)


def decode(total: FieldVector, terms: FieldTerms) -> NDArray[np.float64]:
    """The sum that ``total`` (uint32) stands for, float64, same shape; exact."""
    return np.multiply(total.view(np.int32), 1.0 / float(1 << terms.k), dtype=np.float64)


def check_sum(total: FieldVector, terms: FieldTerms, contributors: int) -> None:
    """Refuse a ``total`` (uint32, shape ``(n,)``) that ``contributors`` updates cannot have given.

    Raises:
        SecureAggregationError: too many contributors, a coordinate out of their reach, or words
            that look uniform, as a mask left in the sum makes them.
    """
    if not 1 <= contributors <= terms.n_max:
        raise SecureAggregationError(
            f"{contributors} contributors in a field for 1 to {terms.n_max}"
        )
    most = reach(terms, contributors)
    square = 0.0
    for start in range(0, len(total), _PIECE):
        words = total[start : start + _PIECE].view(np.int32).astype(np.float64)
        peak = max(float(words.max()), -float(words.min()))
        if peak > most:
            raise SecureAggregationError(
                f"the sum reaches {peak:.0f} near coordinate {start}; {contributors} contributors "
                f"reach at most {most}"
            )
        square += float(np.square(words).sum())
    if len(total) >= _NOISE_WORDS and math.sqrt(square / len(total)) > _NOISE_RMS:
        raise SecureAggregationError("the sum looks uniform: a mask was not removed from it")
