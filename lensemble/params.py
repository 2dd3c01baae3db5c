"""The federated parameters as one flat vector: names, shapes and where each lies.

Canonical order: every ``encoder.*`` tensor sorted by full name, then every ``predictor.*``; those
of a user's own task are ``shared.*``.  All are little-endian float32, contiguous, so the flat
vector is also the data section of a checkpoint and the data bytes of a state blob.  An action head
is never part of it.
"""

import hashlib
import json
import math
import sys
from collections.abc import Mapping
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from lensemble.errors import ContractViolation, ResidencyViolation
from lensemble.ids import Digest

GROUPS = ("encoder", "predictor", "shared")
PARAMETER_BYTES = 4
MAX_TENSORS = 65_536
MAX_PARAMETERS = 1 << 33
_DIGEST_TAG = b"lensemble/parameters/v1\x00"
_PIECE_BYTES = 1 << 20

FlatParameters = NDArray[np.float32]


class Shape(Protocol):
    """What a digest covers besides bytes, and of how many it is: a layout, or a plan of words."""

    @property
    def digest(self) -> Digest: ...

    @property
    def nbytes(self) -> int: ...


class TensorRef(msgspec.Struct, frozen=True):
    """One tensor of the flat vector; ``offset`` and ``size`` count parameters, not bytes."""

    name: str
    shape: tuple[int, ...]
    offset: int
    size: int


class ParamLayout(msgspec.Struct, frozen=True):
    """Names, shapes and offsets of all federated tensors, in canonical order.

    ``digest`` is the SHA-256 of the canonical JSON of names and shapes.
    """

    tensors: tuple[TensorRef, ...]
    size: int
    digest: Digest

    @property
    def nbytes(self) -> int:
        return self.size * PARAMETER_BYTES

    def views(self, flat: FlatParameters) -> dict[str, FlatParameters]:
        """Each tensor of ``flat`` (float32, shape ``(size,)``) as a view of its own shape."""
        if flat.shape != (self.size,):
            raise ContractViolation(
                f"flat vector has shape {flat.shape}, layout wants ({self.size},)"
            )
        return {t.name: flat[t.offset : t.offset + t.size].reshape(t.shape) for t in self.tensors}


def layout_of(shapes: Mapping[str, tuple[int, ...]]) -> ParamLayout:
    """The canonical layout of ``shapes``.

    Raises:
        ResidencyViolation: a name outside the federated groups, such as an action head's.
        ContractViolation: no tensor, too many, or a dimension below 1.
    """
    for name in shapes:
        if name.split(".", 1)[0] not in GROUPS or "." not in name:
            raise ResidencyViolation(
                f"tensor {name!r} is outside the federated groups {', '.join(GROUPS)}",
                "Keep local tensors out of the layout.",
            )
    if not 0 < len(shapes) <= MAX_TENSORS:
        raise ContractViolation(f"a layout holds 1 to {MAX_TENSORS} tensors, not {len(shapes)}")
    tensors: list[TensorRef] = []
    offset = 0
    for name in sorted(shapes, key=lambda n: (GROUPS.index(n.split(".", 1)[0]), n)):
        shape = tuple(shapes[name])
        if any(dim < 1 for dim in shape):
            raise ContractViolation(f"tensor {name!r} has the shape {shape}; dimensions start at 1")
        size = math.prod(shape)
        tensors.append(TensorRef(name, shape, offset, size))
        offset += size
    if offset > MAX_PARAMETERS:
        raise ContractViolation(f"{offset} parameters exceed the limit of {MAX_PARAMETERS}")
    text = json.dumps([[t.name, list(t.shape)] for t in tensors], separators=(",", ":"))
    return ParamLayout(tuple(tensors), offset, Digest(hashlib.sha256(text.encode()).hexdigest()))


class ParameterDigest:
    """SHA-256 over tag, layout digest and the flat little-endian bytes, fed piece by piece."""

    def __init__(self, layout: Shape) -> None:
        self._hash = hashlib.sha256(_DIGEST_TAG + bytes.fromhex(layout.digest))
        self._left = layout.nbytes

    def update(self, piece: bytes | memoryview) -> None:
        self._left -= len(piece)
        self._hash.update(piece)

    def hexdigest(self) -> Digest:
        """The digest, once exactly the layout's bytes were fed.

        Raises:
            ContractViolation: too few or too many bytes.
        """
        if self._left != 0:
            differ = "shorter" if self._left > 0 else "longer"
            raise ContractViolation(
                f"parameters are {abs(self._left)} bytes {differ} than their layout"
            )
        return Digest(self._hash.hexdigest())


def parameter_digest(layout: ParamLayout, flat: FlatParameters) -> Digest:
    """The one digest of a parameter vector (float32, shape ``(size,)``)."""
    running = ParameterDigest(layout)
    raw = np.ascontiguousarray(flat).data.cast("B")
    for start in range(0, len(raw), _PIECE_BYTES):
        running.update(raw[start : start + _PIECE_BYTES])
    return running.hexdigest()


if sys.byteorder != "little":
    raise ContractViolation("Lensemble runs on little-endian machines only")
