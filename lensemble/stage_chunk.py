"""What one chunk of an edge between stages is: a header, then tokens or activations.

A chunk is a command: the stage that receives it computes it and passes the outcome on, nobody
acknowledges.  Rows are positions of one session's sequence, ``start`` first.  Payload is u32 token
ids (rows,) towards the first stage, float32 activations (rows, hidden) between stages, and one u32
token with its float32 log-probability back to the coordinator.  Everything is little-endian, and
the payload begins at a multiple of ``ALIGNMENT``, so that it is computed on where it lies.
"""

import struct
from enum import IntEnum

import msgspec

from lensemble.errors import FrameError

MAX_RECENT = 64
"""Tokens before this one that the repeat penalty looks at."""

ALIGNMENT = 64
"""In bytes; slots begin at a multiple of it too."""

_FIXED = struct.Struct("<BBHHHIQQIffIfI")
_VERSION = 1
RESULT = struct.Struct("<If")
"""Token id and its log-probability under the model, before temperature."""


class Kind(IntEnum):
    TOKENS = 1
    ACTIVATIONS = 2
    RESULT = 3


class Sampling(msgspec.Struct, frozen=True):
    """How the next token is drawn; a pure function of logits, these, and ``index``.

    ``temperature`` 0 is greedy.  ``top_k`` 0 and ``top_p`` 1 cut nothing; a ``repeat_penalty`` of 1
    changes nothing.  ``index`` counts the tokens drawn in this request, ``recent`` are the tokens
    before, oldest first.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repeat_penalty: float = 1.0
    seed: int = 0
    index: int = 0
    recent: tuple[int, ...] = ()


class Chunk(msgspec.Struct, frozen=True):
    """The header.  ``step`` grows with every chunk of a run and comes back with the result.

    Without ``sampling`` the last stage only computes, and nothing comes back.
    """

    kind: Kind
    session: int
    rows: int
    start: int
    step: int
    sampling: Sampling | None = None

    @property
    def header_bytes(self) -> int:
        """Where the payload begins."""
        return _begin(0 if self.sampling is None else len(self.sampling.recent))


def _begin(recent: int) -> int:
    return -(-(_FIXED.size + 4 * recent) // ALIGNMENT) * ALIGNMENT


MAX_HEADER_BYTES = _begin(MAX_RECENT)


def capacity_bytes(rows: int, hidden: int) -> int:
    """Room for any chunk of up to ``rows`` rows of ``hidden`` float32 values."""
    return MAX_HEADER_BYTES + rows * max(hidden, 2) * 4


def write(chunk: Chunk, into: memoryview) -> int:
    """Put the header at the start of ``into``; where the payload begins, in bytes."""
    how = chunk.sampling or Sampling()
    _FIXED.pack_into(
        into,
        0,
        _VERSION,
        int(chunk.kind),
        chunk.session,
        chunk.rows,
        len(how.recent),
        chunk.start,
        chunk.step,
        how.seed,
        0 if chunk.sampling is None else how.index + 1,
        how.temperature,
        how.top_p,
        how.top_k,
        how.repeat_penalty,
        0,
    )
    tokens = struct.pack(f"<{len(how.recent)}I", *how.recent)
    begin = chunk.header_bytes
    into[_FIXED.size : begin] = tokens.ljust(begin - _FIXED.size, b"\x00")
    return begin


def read(raw: memoryview) -> tuple[Chunk, memoryview]:
    """The header of ``raw`` and its payload.

    Raises:
        FrameError: shorter than its header, of another version, or of an unknown kind.
    """
    if len(raw) < _FIXED.size:
        raise FrameError(f"a stage chunk of {len(raw)} bytes is shorter than its header")
    version, kind, session, rows, recent, start, step, seed, drawn, heat, top_p, top_k, pen, _ = (
        _FIXED.unpack_from(raw)
    )
    if version != _VERSION:
        raise FrameError(f"a stage chunk of version {version}; this build reads {_VERSION}")
    if kind not in Kind.__members__.values():
        raise FrameError(f"a stage chunk of kind {kind}")
    begin = _begin(recent)
    if recent > MAX_RECENT or len(raw) < begin:
        raise FrameError(f"a stage chunk of {len(raw)} bytes names {recent} recent tokens")
    sampling = None
    if drawn:
        tokens = struct.unpack_from(f"<{recent}I", raw, _FIXED.size)
        sampling = Sampling(heat, top_p, top_k, pen, seed, drawn - 1, tokens)
    return Chunk(Kind(kind), session, rows, start, step, sampling), raw[begin:]
