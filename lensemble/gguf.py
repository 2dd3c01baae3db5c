"""The header of a GGUF file: its metadata, and where each tensor lies.

Read front to back through a ``read(offset, length)`` callable, so that a file, HTTP ranges and the
first bytes of a file do equally.  Every count, length and depth has a limit; whatever the bytes
are, the outcome is a ``Header`` or a ``ModelFileError``.  Layout: the GGUF specification of ggml,
little-endian versions 2 and 3.
"""

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import msgspec
from blake3 import blake3

from lensemble import files
from lensemble.errors import ModelFileError, UnsupportedModel
from lensemble.ids import Digest

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 128 << 20
MAX_KEYS = 1 << 12
MAX_KEY_BYTES = 256
MAX_STRING_BYTES = 4 << 20
MAX_ELEMENTS = 1 << 22
MAX_NESTING = 3
MAX_TENSORS = 1 << 14
MAX_TENSOR_NAME_BYTES = 64
MAX_DIMENSIONS = 4
MAX_DIMENSION = 1 << 40
MAX_ALIGNMENT = 1 << 16
DEFAULT_ALIGNMENT = 32
_FIRST_READ_BYTES = 64 << 10
_LAST_READ_BYTES = 4 << 20
_SMALLEST_TENSOR_ENTRY = 32
_SMALLEST_KEY_ENTRY = 13

_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip

Read: TypeAlias = Callable[[int, int], bytes]
"""``read(offset, length)``: so many bytes of the file, fewer only where it ends."""

Value: TypeAlias = "bool | int | float | str | tuple[Value, ...]"


class GgmlType(msgspec.Struct, frozen=True):
    """``nbytes`` stored bytes hold ``elements`` values."""

    name: str
    elements: int
    nbytes: int


TYPES: dict[int, GgmlType] = {
    number: GgmlType(name, elements, nbytes)
    for number, name, elements, nbytes in (
        (0, "F32", 1, 4), (1, "F16", 1, 2), (2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20),
        (6, "Q5_0", 32, 22), (7, "Q5_1", 32, 24), (8, "Q8_0", 32, 34), (9, "Q8_1", 32, 40),
        (10, "Q2_K", 256, 84), (11, "Q3_K", 256, 110), (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176), (14, "Q6_K", 256, 210), (15, "Q8_K", 256, 292),
        (16, "IQ2_XXS", 256, 66), (17, "IQ2_XS", 256, 74), (18, "IQ3_XXS", 256, 98),
        (19, "IQ1_S", 256, 50), (20, "IQ4_NL", 32, 18), (21, "IQ3_S", 256, 110),
        (22, "IQ2_S", 256, 82), (23, "IQ4_XS", 256, 136), (24, "I8", 1, 1), (25, "I16", 1, 2),
        (26, "I32", 1, 4), (27, "I64", 1, 8), (28, "F64", 1, 8), (29, "IQ1_M", 256, 56),
        (30, "BF16", 1, 2), (34, "TQ1_0", 256, 54), (35, "TQ2_0", 256, 66), (39, "MXFP4", 32, 17),
        (40, "NVFP4", 64, 36), (41, "Q1_0", 128, 18),
    )
}  # fmt: skip
"""Every ggml type by its number in the file; whether an engine computes it is another matter."""


class StoredTensor(msgspec.Struct, frozen=True):
    """``nbytes`` bytes from ``offset`` of the file on; ``shape`` is innermost first."""

    name: str
    ggml_type: int
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Header(msgspec.Struct, frozen=True):
    """Tensors are in order of their offsets and do not overlap."""

    version: int
    file_bytes: int
    alignment: int
    metadata: dict[str, Value]
    tensors: tuple[StoredTensor, ...]
    data_offset: int
    """Where the header and its padding end."""

    tokenizer_digest: Digest
    """BLAKE3 over every ``tokenizer.*`` key with its type and stored bytes, sorted by key."""


def parse(read: Read, file_bytes: int) -> Header:
    """The header of a file of ``file_bytes`` bytes.

    Raises:
        ModelFileError: not GGUF, cut short, beyond a limit, or contradicting itself.
        UnsupportedModel: a version, byte order or tensor type that nothing here reads.
    """
    cursor = _Cursor(read, file_bytes)
    version, tensors, keys = _preamble(cursor)
    metadata: dict[str, Value] = {}
    raw: dict[str, bytes] = {}
    for _ in range(keys):
        key = cursor.text("a key", MAX_KEY_BYTES)
        if key in metadata:
            raise ModelFileError(f"the key {key} is there twice")
        begin = cursor.position
        metadata[key] = _value(cursor, key, cursor.scalar("I"), 0)
        if key.startswith("tokenizer."):
            raw[key] = cursor.span(begin)
    entries = [_entry(cursor) for _ in range(tensors)]
    alignment = _alignment(metadata)
    start = -(-cursor.position // alignment) * alignment
    return Header(
        version,
        file_bytes,
        alignment,
        metadata,
        _placed(entries, start, alignment, file_bytes),
        start,
        _digest_of(raw),
    )


def parse_file(path: Path) -> Header:
    """As ``parse``.

    Raises:
        StorageError: ``path`` cannot be read.
    """
    with files.storage(path), path.open("rb") as file:

        def read(offset: int, length: int) -> bytes:
            file.seek(offset)
            return file.read(length)

        return parse(read, file.seek(0, 2))


class _Cursor:
    """A position in the header; bytes come in ever larger pieces as they are needed."""

    def __init__(self, read: Read, file_bytes: int) -> None:
        self._read = read
        self._file_bytes = file_bytes
        self._bytes = bytearray()
        self._piece = _FIRST_READ_BYTES
        self.position = 0

    @property
    def left(self) -> int:
        """Bytes of the file after the position."""
        return self._file_bytes - self.position

    def scalar(self, kind: str) -> int:
        """One integer of ``struct`` kind ``kind``."""
        return int(self.numbers(kind, 1)[0])

    def numbers(self, kind: str, count: int) -> tuple[int | float | bool, ...]:
        form = f"<{count}{kind}"
        size = struct.calcsize(form)
        self._need(size)
        values = struct.unpack_from(form, self._bytes, self.position)
        self.position += size
        return values

    def text(self, what: str, limit: int) -> str:
        """A string of at most ``limit`` bytes; ``what`` it is, for the message."""
        length = self.scalar("Q")
        if length > limit:
            raise ModelFileError(f"{what} of {length} bytes; {limit} are the most")
        self._need(length)
        piece = self._bytes[self.position : self.position + length]
        self.position += length
        try:
            return piece.decode()
        except UnicodeDecodeError as error:
            raise ModelFileError(f"{what} is not UTF-8: {bytes(piece[:40])!r}") from error

    def span(self, begin: int) -> bytes:
        """What was read from ``begin`` to here."""
        return bytes(self._bytes[begin : self.position])

    def _need(self, length: int) -> None:
        end = self.position + length
        if end <= len(self._bytes):
            return
        if end > self._file_bytes:
            raise ModelFileError(
                f"the file ends after {self._file_bytes} bytes, inside its header",
                "Copy or download it again.",
            )
        if end > MAX_HEADER_BYTES:
            raise ModelFileError(f"a header of over {MAX_HEADER_BYTES} bytes")
        while len(self._bytes) < end:
            begin = len(self._bytes)
            wanted = min(max(end - begin, self._piece), self._file_bytes - begin)
            piece = self._read(begin, wanted)
            if len(piece) < min(wanted, end - begin):
                raise ModelFileError(
                    f"bytes {begin} to {begin + wanted} were asked for, {len(piece)} came",
                    "Copy or download it again.",
                )
            self._bytes += piece[:wanted]
            self._piece = min(self._piece * 2, _LAST_READ_BYTES)


def _preamble(cursor: _Cursor) -> tuple[int, int, int]:
    """Version, number of tensors, number of keys."""
    magic = struct.pack("<I", cursor.scalar("I"))
    if magic != MAGIC:
        raise ModelFileError(
            f"begins with {magic!r}, a GGUF file with {MAGIC!r}", "Name a GGUF file."
        )
    version = cursor.scalar("I")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        kind = f"big-endian version {swapped}" if swapped in VERSIONS else f"version {version}"
        raise UnsupportedModel(
            f"GGUF {kind}; little-endian 2 and 3 are read",
            "Convert the model again with a current converter.",
        )
    tensors, keys = cursor.scalar("Q"), cursor.scalar("Q")
    for what, count, limit, least in (
        ("tensors", tensors, MAX_TENSORS, _SMALLEST_TENSOR_ENTRY),
        ("keys", keys, MAX_KEYS, _SMALLEST_KEY_ENTRY),
    ):
        if count > limit:
            raise ModelFileError(f"{count} {what}; {limit} are the most")
        if count * least > cursor.left:
            raise ModelFileError(f"{count} {what} do not fit a file of {cursor.left} more bytes")
    return version, tensors, keys


def _value(cursor: _Cursor, key: str, kind: int, depth: int) -> Value:
    if kind in _SCALARS:
        return _numbers(cursor, key, kind, 1)[0]
    if kind == _STRING:
        return cursor.text(f"the value of {key}", MAX_STRING_BYTES)
    if kind != _ARRAY:
        raise ModelFileError(f"the value of {key} is of unknown type {kind}")
    if depth == MAX_NESTING:
        raise ModelFileError(f"the value of {key} nests deeper than {MAX_NESTING} arrays")
    element, count = cursor.scalar("I"), cursor.scalar("Q")
    if count > MAX_ELEMENTS:
        raise ModelFileError(f"{key} has {count} elements; {MAX_ELEMENTS} are the most")
    if element in _SCALARS:
        return _numbers(cursor, key, element, count)
    if count * 8 > cursor.left:
        raise ModelFileError(f"{key} has {count} elements, more than fit the file")
    return tuple(_value(cursor, key, element, depth + 1) for _ in range(count))


def _numbers(cursor: _Cursor, key: str, kind: int, count: int) -> tuple[Value, ...]:
    if kind != 7:
        return cursor.numbers(_SCALARS[kind], count)
    values = cursor.numbers("B", count)
    if any(value > 1 for value in values):
        raise ModelFileError(f"the value of {key} is neither true nor false")
    return tuple(bool(value) for value in values)


def _entry(cursor: _Cursor) -> StoredTensor:
    """One line of the tensor table; its offset counts from the data section."""
    name = cursor.text("a tensor name", MAX_TENSOR_NAME_BYTES)
    dimensions = cursor.scalar("I")
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise ModelFileError(f"{name} has {dimensions} dimensions, not 1 to {MAX_DIMENSIONS}")
    shape = tuple(int(size) for size in cursor.numbers("Q", dimensions))
    if not all(1 <= size <= MAX_DIMENSION for size in shape):
        raise ModelFileError(f"{name} has the shape {shape}")
    number, offset = cursor.scalar("I"), cursor.scalar("Q")
    kind = TYPES.get(number)
    if kind is None:
        raise UnsupportedModel(
            f"{name} is of ggml type {number}, which is unknown here",
            "Take the model in a common quantisation: Q8_0, Q4_K_M, Q4_0.",
        )
    if shape[0] % kind.elements:
        raise ModelFileError(f"{name} has rows of {shape[0]}, {kind.name} blocks {kind.elements}")
    return StoredTensor(
        name, number, shape, offset, math.prod(shape) // kind.elements * kind.nbytes
    )


def _alignment(metadata: dict[str, Value]) -> int:
    given = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if isinstance(given, bool) or not isinstance(given, int):
        raise ModelFileError(f"general.alignment is {given!r}, not a number")
    if not 8 <= given <= MAX_ALIGNMENT or given & (given - 1):
        raise ModelFileError(
            f"general.alignment is {given}, not a power of two from 8 to {MAX_ALIGNMENT}"
        )
    return given


def _placed(
    entries: list[StoredTensor], start: int, alignment: int, file_bytes: int
) -> tuple[StoredTensor, ...]:
    """``entries`` with offsets of the file, in their order; refuses what cannot be."""
    names: set[str] = set()
    placed = []
    end, before = start, "the header"
    for entry in sorted(entries, key=lambda each: (each.offset, each.name)):
        name, begin = entry.name, start + entry.offset
        if name in names:
            raise ModelFileError(f"the tensor {name} is there twice")
        if entry.offset % alignment:
            raise ModelFileError(f"{name} lies at {entry.offset}, not a multiple of {alignment}")
        if begin < end:
            raise ModelFileError(f"{name} overlaps {before}")
        if begin + entry.nbytes > file_bytes:
            raise ModelFileError(
                f"{name} ends at byte {begin + entry.nbytes}, the file at {file_bytes}",
                "The file is cut short: copy or download it again.",
            )
        names.add(name)
        placed.append(msgspec.structs.replace(entry, offset=begin))
        end, before = begin + entry.nbytes, name
    return tuple(placed)


def _digest_of(raw: dict[str, bytes]) -> Digest:
    running = blake3(b"lensemble/tokenizer/v1\x00")
    for key in sorted(raw):
        running.update(struct.pack("<QQ", len(key.encode()), len(raw[key])))
        running.update(key.encode())
        running.update(raw[key])
    return Digest(running.hexdigest())
