"""Chunks of integer words made small: zigzag, byte shuffle, zstd; each chunk stands by itself.

A packed chunk is one byte and a body.  The byte is the width of the words in bytes, whose body is
one zstd frame; or 0, where packing would gain next to nothing: then the body is the chunk itself.

Zigzag turns a small word of either sign into a small unsigned one, so that its upper bytes are
zero.  The shuffle puts equal bytes of all words together: those that are zero vanish, those that
vary little are Huffman-coded, and the noise of the lowest ones is stored as it is.  Of normal
words with a standard deviation of 1000 remain 1.5 bytes each, be they of 16 bits or of 32; a
higher level than 1 is slower and gains nothing on them, a lower one has no Huffman coding.

How large a chunk is when unpacked is known to the receiver before it unpacks, and no frame makes
it write, or keep in memory, more than that.
"""

import numpy as np
from backports import zstd
from numpy.typing import NDArray

from lensemble.errors import ContractViolation

OVERHEAD_BYTES = 1
"""By how much a packed chunk may be longer than what is in it."""

WIDTHS = (4, 2)
_LEVEL = 1
_WORTH = 0.97
"""A chunk that packing leaves larger than this part of it is sent as it is."""
_SAMPLE_BYTES = 1 << 13
_MIN_WINDOW_LOG = 10
_WORDS = {2: (np.uint16, np.int16), 4: (np.uint32, np.int32)}

Bytes = NDArray[np.uint8]


def pack(raw: memoryview) -> bytes:
    """``raw`` (bytes) packed; at most ``OVERHEAD_BYTES`` longer.

    The width of its words is found by trial on its beginning, so that a sum of words of several
    widths needs no map.
    """
    widths = [width for width in WIDTHS if raw.nbytes and raw.nbytes % width == 0]
    if widths:
        sample = raw[: min(raw.nbytes, _SAMPLE_BYTES)]
        width = min(widths, key=lambda each: len(_frame(sample, each)))
        frame = _frame(raw, width)
        if len(frame) < raw.nbytes * _WORTH:
            return bytes([width]) + frame
    return bytes([0]) + raw


def unpack(chunk: memoryview, into: memoryview) -> None:
    """Fill ``into`` (writable bytes) with what was packed into ``chunk``.

    Raises:
        ContractViolation: it is not a packed chunk of exactly that size.
    """
    if chunk.nbytes < OVERHEAD_BYTES:
        raise ContractViolation("an empty chunk where a packed one is due")
    width, body = chunk[0], chunk[1:]
    if width == 0:
        _require_size(body.nbytes, into.nbytes)
        into[:] = body
        return
    if width not in WIDTHS or into.nbytes % width:
        raise ContractViolation(f"a chunk of {into.nbytes} bytes packed in words of {width}")
    planes = np.frombuffer(_thaw(body, into.nbytes), dtype=np.uint8)
    _require_size(len(planes), into.nbytes)
    _unshuffle(planes, width, np.frombuffer(into, dtype=np.uint8))


def _require_size(found: int, due: int) -> None:
    if found != due:
        raise ContractViolation(f"a packed chunk holds {found} bytes where {due} are due")


def _frame(raw: memoryview, width: int) -> bytes:
    """One zstd frame; each plane ends a block of it, so that no two share a Huffman table."""
    planes = _shuffle(np.frombuffer(raw, dtype=np.uint8), width)
    size = len(planes) // width
    compressor = zstd.ZstdCompressor(_LEVEL)
    compressor.set_pledged_input_size(len(planes))
    blocks = [
        compressor.compress(planes[start : start + size], zstd.ZstdCompressor.FLUSH_BLOCK)
        for start in range(0, len(planes), size)
    ]
    return b"".join((*blocks, compressor.flush()))


def _thaw(frame: memoryview, size: int) -> bytes:
    """The content of ``frame``; of a larger one no more than a byte more than ``size``."""
    window = max(_MIN_WINDOW_LOG, size.bit_length())
    bounded = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: window})
    try:
        content = bounded.decompress(frame, max_length=size + 1)
    except zstd.ZstdError as error:
        raise ContractViolation(f"a packed chunk that is not zstd: {error}") from error
    if len(content) <= size and (not bounded.eof or bounded.unused_data):
        raise ContractViolation("a packed chunk that is not one whole zstd frame")
    return content


def _shuffle(raw: Bytes, width: int) -> memoryview:
    unsigned, signed = _WORDS[width]
    words = raw.view(unsigned)
    zigzag = np.left_shift(words, 1)
    sign = np.right_shift(raw.view(signed), 8 * width - 1).view(unsigned)
    np.bitwise_xor(zigzag, sign, out=zigzag)
    # Casts and shifts of whole words: several times as fast as to transpose bytes.
    planes = np.empty((width, len(words)), dtype=np.uint8)
    np.copyto(planes[0], zigzag, casting="unsafe")
    for plane in planes[1:]:
        np.right_shift(zigzag, 8, out=zigzag)
        np.copyto(plane, zigzag, casting="unsafe")
    return planes.reshape(-1).data


def _unshuffle(planes: Bytes, width: int, out: Bytes) -> None:
    unsigned, _ = _WORDS[width]
    *lower, upper = planes.reshape(width, -1)
    zigzag = upper.astype(unsigned)
    for plane in reversed(lower):
        np.left_shift(zigzag, 8, out=zigzag)
        np.bitwise_or(zigzag, plane, out=zigzag)
    words = out.view(unsigned)
    np.right_shift(zigzag, 1, out=words)
    np.bitwise_and(zigzag, 1, out=zigzag)
    # 0 stays 0, and 1 becomes all ones: the unsigned way to spread a sign.
    np.negative(zigzag, out=zigzag)
    np.bitwise_xor(words, zigzag, out=words)
