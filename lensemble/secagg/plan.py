"""The field of one round: how wide the words of each tensor are, and where each lies in a blob.

A **wide** tensor has 32-bit words of the field's common ``k``, see ``field``.  A **narrow** one has
16-bit words of a ``k`` of its own, so that the sum of ``n_max`` coordinates of at most ``limit``
words cannot wrap in 16 bits.  A blob is the segments of the tensors in layout order, little endian,
each narrow one filled up to a multiple of four bytes with a word of nought.  If any tensor is
narrow, a tail of 32-bit words follows:

    1 | how many coordinates were cut off at the limit, one word for each narrow tensor

so that the sum of ``C`` updates begins its tail with ``C``, exactly, or is no sum of ``C`` updates.
Words add modulo 2**16 or 2**32, by the width of their segment.  The plan whose tensors are all wide
has no tail, and its blobs are flat vectors of 32-bit words.

The plan of a round is ``FieldPlan.code``, one byte for each tensor: 0 is wide, else ``k + 64``;
empty is all wide.  ``scale`` derives it from the sum of the round before.
"""

import hashlib
import struct
from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property

import msgspec
import numpy as np
from numpy.typing import NDArray

from lensemble.errors import ContractViolation
from lensemble.ids import Digest
from lensemble.params import ParamLayout
from lensemble.secagg.field import FieldTerms, FieldVector

WORD_BYTES = 4
NARROW_BYTES = 2
NARROW_HALF = (1 << 15) - 1
MIN_K, MAX_K = -40, 100
"""Of a narrow tensor; float32 holds these powers of two, and what they scale, with room."""
BIAS = 64
_TAG = b"lensemble/field-plan/v1\x00"


class Segment(msgspec.Struct, frozen=True):
    """Coordinates ``first`` to ``last`` of the layout, as words from byte ``start`` on.

    ``bits`` is 32 or 16; of a narrow segment ``clipped`` is the byte of its counter in the tail.
    """

    first: int
    last: int
    start: int
    stop: int
    bits: int
    k: int
    clipped: int = 0

    @property
    def word_bytes(self) -> int:
        return self.bits // 8

    def byte_of(self, coordinate: int) -> int:
        """Where the word of ``coordinate`` begins."""
        return self.start + (coordinate - self.first) * self.word_bytes


class Span(msgspec.Struct, frozen=True):
    """Bytes ``start`` to ``stop`` of a piece whose words have ``bits`` bits."""

    start: int
    stop: int
    bits: int


class FieldPlan:
    """Widths, scales and places of all words of an update, and of a sum, in one round.

    Args:
        layout: the federated parameters.
        terms: ``k`` of the wide tensors and ``n_max``.
        code: the plan as messages and records carry it; empty is all wide.

    Raises:
        ContractViolation: the code is not of this layout, or not in its one form.
    """

    def __init__(self, layout: ParamLayout, terms: FieldTerms, code: bytes = b"") -> None:
        self.layout = layout
        self.k = terms.k
        self.n_max = terms.n_max
        self.code = code
        if code:
            self._check(code)
        self.segments, end = self._lay(code)
        self.narrow = tuple(each for each in self.segments if each.bits == 16)
        self.tail = end
        """Byte at which the tail begins; the end of an all-wide blob."""
        self.nbytes = end + (WORD_BYTES * (1 + len(self.narrow)) if self.narrow else 0)
        self._firsts = [each.first for each in self.segments]
        self._stops = [each.stop for each in self.segments]
        self._runs = self._merged()
        self._starts = [each.start for each in self._runs]

    def _check(self, code: bytes) -> None:
        tensors = len(self.layout.tensors)
        if len(code) != tensors:
            raise ContractViolation(
                f"a field plan for {len(code)} tensors; the layout has {tensors}"
            )
        if not any(code):
            raise ContractViolation("a field plan of which all tensors are wide is the empty one")
        for byte, tensor in zip(code, self.layout.tensors, strict=True):
            if byte and not MIN_K <= byte - BIAS <= MAX_K:
                raise ContractViolation(
                    f"a field plan with k={byte - BIAS} for {tensor.name}; {MIN_K} to {MAX_K} can "
                    "be"
                )

    def _lay(self, code: bytes) -> tuple[tuple[Segment, ...], int]:
        if not code:
            size = self.layout.size
            return (Segment(0, size, 0, size * WORD_BYTES, 32, self.k),), size * WORD_BYTES
        laid: list[tuple[int, int, int, int, int, int]] = []
        at = 0
        for byte, tensor in zip(code, self.layout.tensors, strict=True):
            last = tensor.offset + tensor.size
            if byte:
                stop = at + NARROW_BYTES * (tensor.size + tensor.size % 2)
                laid.append((tensor.offset, last, at, stop, 16, byte - BIAS))
            else:
                stop = at + WORD_BYTES * tensor.size
                first, start = tensor.offset, at
                if laid and laid[-1][4] == 32:
                    first, _, start, *_ = laid.pop()
                laid.append((first, last, start, stop, 32, self.k))
            at = stop
        segments, counter = [], at + WORD_BYTES
        for each in laid:
            segments.append(Segment(*each, clipped=counter if each[4] == 16 else 0))
            counter += WORD_BYTES if each[4] == 16 else 0
        return tuple(segments), at

    def _merged(self) -> list[Span]:
        """The blob as the fewest spans of one width."""
        spans = [Span(each.start, each.stop, each.bits) for each in self.segments]
        if self.narrow:
            spans.append(Span(self.tail, self.nbytes, 32))
        runs = spans[:1]
        for each in spans[1:]:
            if each.bits == runs[-1].bits:
                runs[-1] = Span(runs[-1].start, each.stop, each.bits)
            else:
                runs.append(each)
        return runs

    # ---- what it is ----

    @property
    def all_wide(self) -> bool:
        return not self.narrow

    @property
    def limit(self) -> int:
        """Largest absolute word of one narrow coordinate."""
        return NARROW_HALF // self.n_max

    @cached_property
    def digest(self) -> Digest:
        """What digests of updates and sums cover besides their words.

        The digest of the layout for the all-wide plan, else a SHA-256 over it, ``k``, ``n_max`` and
        the code.
        """
        if self.all_wide:
            return self.layout.digest
        terms = struct.pack("<II", self.k, self.n_max)
        whole = _TAG + bytes.fromhex(self.layout.digest) + terms + self.code
        return Digest(hashlib.sha256(whole).hexdigest())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FieldPlan):
            return NotImplemented
        mine = (self.layout.digest, self.k, self.n_max, self.code)
        return mine == (other.layout.digest, other.k, other.n_max, other.code)

    def __hash__(self) -> int:
        return hash((self.layout.digest, self.k, self.n_max, self.code))

    # ---- where things are ----

    def byte_of(self, coordinate: int) -> int:
        """Where the words of the coordinates from ``coordinate`` on begin; ``size`` is their end.

        What lies from ``byte_of(a)`` to ``byte_of(b)`` are the words of a to b, and filling words.
        """
        if coordinate >= self.layout.size:
            return self.tail
        return self.segment_of(coordinate).byte_of(coordinate)

    def segment_of(self, coordinate: int) -> Segment:
        """The segment in which ``coordinate`` lies."""
        return self.segments[bisect_right(self._firsts, coordinate) - 1]

    def coordinate_at(self, byte: int) -> int:
        """The coordinate to whose word ``byte`` belongs; the layout's size for one of the tail."""
        index = bisect_right(self._stops, byte)
        if index == len(self.segments):
            return self.layout.size
        segment = self.segments[index]
        return min(segment.first + (byte - segment.start) // segment.word_bytes, segment.last)

    def parts(self, first: int, last: int) -> Iterator[tuple[Segment, int, int]]:
        """The segments that the coordinates ``first`` to ``last`` lie in, with the part of each."""
        index = bisect_right(self._firsts, first) - 1
        while first < last:
            segment = self.segments[index]
            end = min(last, segment.last)
            yield segment, first, end
            first, index = end, index + 1

    def spans(self, start: int, stop: int) -> Iterator[Span]:
        """Bytes ``start`` to ``stop`` of a blob, by width, counted from ``start``."""
        index = bisect_right(self._starts, start) - 1
        at = start
        while at < stop:
            run = self._runs[index]
            end = min(stop, run.stop)
            yield Span(at - start, end - start, run.bits)
            at, index = end, index + 1

    # ---- arithmetic ----

    def add(self, start: int, into: FieldVector, other: FieldVector) -> None:
        """Add ``other`` to ``into``, both a piece of a blob from byte ``start`` on, in place.

        Pieces are uint32 arrays of the blob's bytes, whatever the widths of the words in them, and
        ``start`` is a multiple of four.
        """
        self.combine(np.add, start, into, other)

    def subtract(self, start: int, into: FieldVector, other: FieldVector) -> None:
        """Take ``other`` from ``into``, as ``add`` does."""
        self.combine(np.subtract, start, into, other)

    def combine(self, ufunc: np.ufunc, start: int, into: FieldVector, other: FieldVector) -> None:
        """Do ``ufunc`` to every word of ``into`` with that of ``other``; see ``add``."""
        if self.all_wide:
            ufunc(into, other, out=into)
            return
        for span in self.spans(start, start + into.nbytes):
            mine = words_of(into, span)
            ufunc(mine, words_of(other, span), out=mine)

    def decode(self, first: int, raw: memoryview, out: NDArray[np.float64]) -> None:
        """What the words of the coordinates from ``first`` on stand for, into ``out``; exact.

        Args:
            first: the first coordinate.
            raw: the blob from ``byte_of(first)`` on.
            out: float64, one element for each coordinate.
        """
        base = self.byte_of(first)
        for segment, lo, hi in self.parts(first, first + len(out)):
            signed = signed_words(raw, segment.byte_of(lo) - base, hi - lo, segment.bits)
            target = out[lo - first : hi - first]
            np.copyto(target, signed)
            np.multiply(target, np.float64(2.0**-segment.k), out=target)


def words_of(piece: FieldVector, span: Span) -> NDArray[np.unsignedinteger]:
    """The words of ``span`` in ``piece`` (uint32, contiguous), as a view of their own width."""
    inside = piece[span.start // WORD_BYTES : span.stop // WORD_BYTES]
    return inside if span.bits == 32 else inside.view(np.uint16)


def signed_of(piece: FieldVector, span: Span) -> NDArray[np.signedinteger]:
    """The words of ``span`` in ``piece``, as the signed numbers that they stand for."""
    words = words_of(piece, span)
    return words.view(np.int32) if span.bits == 32 else words.view(np.int16)


def signed_words(raw: memoryview, start: int, count: int, bits: int) -> NDArray[np.signedinteger]:
    """``count`` words from byte ``start`` of ``raw``, as the signed numbers that they stand for."""
    dtype = "<i4" if bits == 32 else "<i2"
    return np.frombuffer(raw, dtype=dtype, count=count, offset=start)
