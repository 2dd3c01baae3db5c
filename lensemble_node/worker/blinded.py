"""A release as it leaves in a masked attempt: under its masks, read a piece at a time."""

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np

from lensemble.secagg.field import FieldVector
from lensemble.secagg.masks import MaskStream, Term
from lensemble.secagg.plan import WORD_BYTES, FieldPlan

_PIECE_WORDS: Final = 1 << 16
"""Words and masks of one piece stay in a core's cache."""


class Blinded:
    """``words`` (a blob of ``plan`` as uint32, flat) with the masks of ``terms`` added.

    A piece gets its masks in memory of this process only: bare words are never written where a
    caller, or who shares its memory, could read them.
    """

    def __init__(
        self, words: FieldVector, terms: Iterable[Term], plan: FieldPlan | None = None
    ) -> None:
        self.nbytes = words.nbytes
        self._words = words
        self._masks = MaskStream(terms, plan)
        self._scratch = np.empty(min(_PIECE_WORDS, len(words)), dtype=np.uint32)

    def read_into(self, start: int, into: memoryview) -> None:
        """Fill ``into`` (whole words, in bytes) from byte ``start``, a multiple of four."""
        target = np.frombuffer(into, dtype=np.uint32)
        first = start // WORD_BYTES
        for done in range(0, len(target), _PIECE_WORDS):
            piece = self._scratch[: min(_PIECE_WORDS, len(target) - done)]
            piece[:] = self._words[first + done : first + done + len(piece)]
            self._masks.add(first + done, piece)
            target[done : done + len(piece)] = piece

    def pieces(self) -> Iterator[memoryview]:
        """All of it, from its start; each piece is valid until the next one is asked for."""
        room = memoryview(bytearray(self._scratch.nbytes))
        for start in range(0, self.nbytes, len(room) or 1):
            piece = room[: min(len(room), self.nbytes - start)]
            self.read_into(start, piece)
            yield piece
