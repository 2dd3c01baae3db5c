"""The rows of a roster in bytes: what everybody is told of everybody, as small as it can be.

A row is a node's id, its dataset root, the three parts of its masking keys, and its signature; ids
and roots are hexadecimal elsewhere, and half as long here.
"""

import struct
from collections.abc import Iterable, Iterator
from typing import TypeAlias

_ROW = struct.Struct("32s32s32s32s32s64s")
ROW_BYTES = _ROW.size

Row: TypeAlias = tuple[str, str, bytes, bytes, bytes, bytes]
"""Node, dataset root, mask key, share key, self commitment, signature."""


def packed(rows: Iterable[Row]) -> bytes:
    """All of ``rows``, 224 bytes each."""
    return b"".join(
        _ROW.pack(bytes.fromhex(node), bytes.fromhex(root), *rest) for node, root, *rest in rows
    )


def unpacked(raw: bytes) -> Iterator[Row]:
    """The rows of ``raw``, whose length is a multiple of ``ROW_BYTES``."""
    for node, root, mask_key, share_key, self_commitment, signature in _ROW.iter_unpack(raw):
        yield node.hex(), root.hex(), mask_key, share_key, self_commitment, signature
