"""Masks as streams of words, added to an update or taken from a sum as it passes.

A mask is the keystream of AES-128 in counter mode, read as little-endian words of the width that
the update has in that place: byte ``i`` depends on key and ``i`` alone, so that a mask can be had
from any offset.  Arithmetic is modulo 2**32, or 2**16 where a plan says so.  The calls release the
GIL for nearly all of their time.
"""

from collections.abc import Iterable
from typing import Final

import msgspec
import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR

from lensemble.errors import ContractViolation
from lensemble.secagg.field import FieldVector
from lensemble.secagg.plan import WORD_BYTES, FieldPlan

_BLOCK_BYTES = 16
_PIECE_WORDS = 1 << 16
"""Small enough that words and keystream stay in a core's cache."""
_ZEROS: Final = memoryview(bytes(_PIECE_WORDS * WORD_BYTES))


class Term(msgspec.Struct, frozen=True):
    """One mask of a sum of masks: its key (32 bytes, secret), and whether it is taken away."""

    key: bytes
    negative: bool = False

    def __repr__(self) -> str:
        return f"Term(..., negative={self.negative})"


class _Keystream:
    def __init__(self, key: bytes) -> None:
        self._start = int.from_bytes(key[_BLOCK_BYTES:], "big")
        self._cipher = AES(key[:_BLOCK_BYTES])
        self._position = 0
        self._context: CipherContext | None = None

    def read(self, position: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes from ``position``."""
        if self._context is None or position != self._position:
            self._context = self._at(position)
        self._context.update_into(_ZEROS[: len(into)], into)
        self._position = position + len(into)

    def _at(self, position: int) -> CipherContext:
        block, skip = divmod(position, _BLOCK_BYTES)
        counter = (self._start + block) % (1 << 128)
        context = Cipher(self._cipher, CTR(counter.to_bytes(_BLOCK_BYTES, "big"))).encryptor()
        context.update(_ZEROS[:skip])
        return context


class MaskStream:
    """The sum of ``terms``, from any offset, in any order of offsets.

    It holds 256 KiB of its own, however long the update is.  Use it from one thread at a time; two
    streams of the same terms are independent and equal.

    Args:
        terms: the masks.
        plan: where words are of 16 bits; without one, nowhere.
    """

    def __init__(self, terms: Iterable[Term], plan: FieldPlan | None = None) -> None:
        self._terms = [(_Keystream(term.key), term.negative) for term in terms]
        self._plan = None if plan is None or plan.all_wide else plan
        self._scratch = np.empty(_PIECE_WORDS, dtype=np.uint32)

    def add(self, offset: int, words: FieldVector) -> None:
        """Add the masks of what lies from ``offset`` on to ``words`` (uint32, flat), in place.

        Both count in four bytes, whatever the width of the words there.

        Raises:
            ContractViolation: a negative offset, or not flat contiguous uint32.
        """
        self._apply(offset, words, taken=False)

    def subtract(self, offset: int, words: FieldVector) -> None:
        """Undo ``add``: take the same masks from ``words`` (uint32, flat), in place.

        Raises:
            ContractViolation: a negative offset, or not flat contiguous uint32.
        """
        self._apply(offset, words, taken=True)

    def _apply(self, offset: int, words: FieldVector, *, taken: bool) -> None:
        if words.dtype != np.uint32 or words.ndim != 1 or not words.flags.c_contiguous:
            raise ContractViolation(
                f"masks are for flat contiguous uint32, not {words.dtype} of {words.shape}"
            )
        if offset < 0:
            raise ContractViolation(f"no mask begins at word {offset}")
        for start in range(0, len(words), _PIECE_WORDS):
            piece = words[start : start + _PIECE_WORDS]
            mask = self._scratch[: len(piece)]
            raw = mask.data.cast("B")
            for stream, negative in self._terms:
                position = WORD_BYTES * (offset + start)
                stream.read(position, raw)
                ufunc = np.add if negative == taken else np.subtract
                if self._plan is None:
                    ufunc(piece, mask, out=piece)
                else:
                    self._plan.combine(ufunc, position, piece, mask)
