"""The Merkle root that binds a participant to its dataset.

A leaf commits to the stored columns of one episode: key, dtype, shape and little-endian bytes,
sorted by key; so it survives recompression and a change of container.  Leaves are sorted, pairs
hashed left to right, an odd node is promoted.  Every hash is a SHA-256 over a one-byte tag and its
payload.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from lensemble.errors import ProvenanceError
from lensemble.ids import Digest

_EPISODE, _LEAF, _NODE, _ROOT = b"\x00", b"\x01", b"\x02", b"\x03"
_VERSION = b"lensemble/episode/v1\x00"
TEXT = "utf8"
"""Dtype name of a column of strings, stored as the bytes of a JSON list."""


class DatasetFacts(msgspec.Struct, frozen=True):
    """What a node says about its data: the root and counts, nothing from inside."""

    root: Digest
    episodes: int
    steps: int
    observation_dim: int
    action_dim: int


class Column(msgspec.Struct, frozen=True):
    """One stored column of an episode; ``pieces`` are its little-endian bytes in order."""

    dtype: str
    shape: tuple[int, ...]
    pieces: Iterable[bytes | memoryview]
    nbytes: int


def array_column(values: NDArray[np.generic]) -> Column:
    """``values`` (any shape, numeric) as a column; big-endian storage gives the same one."""
    little = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
    return Column(little.dtype.name, values.shape, (little.tobytes(),), little.nbytes)


def text_column(values: list[str]) -> Column:
    """Strings as a column."""
    data = json.dumps(values, separators=(",", ":")).encode()
    return Column(TEXT, (len(values),), (data,), len(data))


def leaf(columns: Mapping[str, Column]) -> bytes:
    """The 32-byte leaf of an episode with these columns.

    Raises:
        ProvenanceError: no column, or a column whose pieces are not ``nbytes`` long.
    """
    if not columns:
        raise ProvenanceError("an episode without a column cannot be committed to")
    running = hashlib.sha256(_EPISODE + _VERSION)
    for key in sorted(columns):
        column = columns[key]
        head = [key, column.dtype, list(column.shape), column.nbytes]
        framed = json.dumps(head, separators=(",", ":"), ensure_ascii=True).encode()
        running.update(len(framed).to_bytes(4, "little") + framed)
        left = column.nbytes
        for piece in column.pieces:
            running.update(piece)
            left -= len(piece)
        if left:
            raise ProvenanceError(f"column {key!r} differs from its stated size by {-left} bytes")
    return _hash(_LEAF, running.digest())


class Step(msgspec.Struct, frozen=True):
    """One level of a proof: what is hashed beside the node below, and on which side of it."""

    side: Literal["left", "right"]
    digest: bytes


def root(leaves: Iterable[bytes]) -> Digest:
    """The root over ``leaves`` (32 bytes each), in any order.

    Raises:
        ProvenanceError: no leaf.
    """
    level = sorted(leaves)
    if not level:
        raise ProvenanceError("a dataset without an episode has no root")
    while len(level) > 1:
        level = _above(level)
    return _sealed(level[0])


def proof(leaves: Iterable[bytes], of: bytes) -> tuple[Step, ...]:
    """That ``of`` is among ``leaves``: the siblings on its way up, levels without one left out.

    Raises:
        ProvenanceError: it is not.
    """
    level = sorted(leaves)
    if of not in level:
        raise ProvenanceError(f"the leaf {of.hex()} is not of this dataset")
    at, steps = level.index(of), []
    while len(level) > 1:
        beside = at ^ 1
        if beside < len(level):
            steps.append(Step("left" if beside < at else "right", level[beside]))
        level, at = _above(level), at // 2
    return tuple(steps)


def proves(claimed: Digest, of: bytes, steps: Iterable[Step]) -> bool:
    """Whether ``steps`` lead from the leaf ``of`` to the root ``claimed``."""
    node = of
    for step in steps:
        pair = step.digest + node if step.side == "left" else node + step.digest
        node = _hash(_NODE, pair)
    return _sealed(node) == claimed


def _above(level: list[bytes]) -> list[bytes]:
    pairs = zip(level[0::2], level[1::2], strict=False)
    above = [_hash(_NODE, left + right) for left, right in pairs]
    return [*above, level[-1]] if len(level) % 2 else above


def _sealed(top: bytes) -> Digest:
    return Digest(_hash(_ROOT, top).hex())


def _hash(tag: bytes, payload: bytes) -> bytes:
    return hashlib.sha256(tag + payload).digest()
