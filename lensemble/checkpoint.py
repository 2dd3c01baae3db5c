"""Parameters at rest: a content-named directory of ``weights.safetensors`` and ``header.json``.

The data section of the safetensors file is the flat vector itself, since its tensors stand in
canonical order; other programs load it by name.  ``header.json`` says what the bytes cannot: the
round that made them, their parent, the terms; it carries its own digest.  The outer momentum is a
checkpoint of the same form.  Nothing but safetensors is ever read.

A checkpoint appears whole or not at all::

    .part-*/weights.safetensors, flushed -> .part-*/header.json, flushed -> rename to <digest>/
    -> flush of the directory that holds it
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Container, Iterator
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, TypeAlias

import msgspec
import numpy as np

from lensemble import files
from lensemble.crash_points import reached
from lensemble.errors import (
    CheckpointIntegrityError,
    ContractViolation,
    SchemaVersionMismatch,
    StorageError,
)
from lensemble.files import PART_PREFIX, PIECE_BYTES
from lensemble.ids import Digest
from lensemble.params import FlatParameters, ParameterDigest, ParamLayout, layout_of
from lensemble.version import BUILD
from lensemble.weights_file import (
    MAX_HEADER_BYTES,
    read_weights,
    refuse_pickle,
    safetensors_header,
)

SCHEMA_VERSION = 1
WEIGHTS_NAME = "weights.safetensors"
HEADER_NAME = "header.json"
_HEADER_TAG = b"lensemble/checkpoint-header/v1\x00"

Kind: TypeAlias = Literal["weights", "momentum"]


class Lineage(msgspec.Struct, frozen=True):
    """Where a checkpoint comes from; ``round_index`` is the round that made it, -1 at the start."""

    kind: Kind
    round_index: int
    config_hash: Digest
    parent_digest: Digest | None = None


class Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of ``header.json``; ``layout`` is a list of (name, shape) in canonical order."""

    schema_version: int
    kind: Kind
    digest: Digest
    parent_digest: Digest | None
    round_index: int
    config_hash: Digest
    layout_digest: Digest
    layout: tuple[tuple[str, tuple[int, ...]], ...]
    written_by: str
    header_digest: str

    @property
    def lineage(self) -> Lineage:
        return Lineage(self.kind, self.round_index, self.config_hash, self.parent_digest)


def _encode_header(header: Header) -> bytes:
    """Canonical JSON, with ``header_digest`` over the same JSON in which it is empty."""
    blank = msgspec.json.encode(msgspec.structs.replace(header, header_digest=""), order="sorted")
    seal = hashlib.sha256(_HEADER_TAG + blank).hexdigest()
    sealed = msgspec.structs.replace(header, header_digest=seal)
    return msgspec.json.encode(sealed, order="sorted")


class CheckpointWriter:
    """Writes one checkpoint under ``root``, piece by piece in order; leaving it early removes it.

    Every piece is read back from the file and compared before it counts.

    Raises:
        StorageError: the file system refuses, or has no room for the whole of it.
    """

    def __init__(self, root: Path, layout: ParamLayout, lineage: Lineage) -> None:
        self._root = root
        self._layout = layout
        self._lineage = lineage
        self._running = ParameterDigest(layout)
        self._position = 0
        self._back = memoryview(bytearray())
        preamble = safetensors_header(layout)
        self._data_offset = len(preamble)
        size = len(preamble) + layout.nbytes
        with files.storage(root, size):
            files.make_directory(root)
            self._part = Path(tempfile.mkdtemp(prefix=PART_PREFIX, dir=root))
            reached("checkpoint.begun", lineage.kind)
            self._fd = os.open(self._part / WEIGHTS_NAME, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            with files.storage(root, size):
                os.posix_fallocate(self._fd, 0, size)
            self._put(0, memoryview(preamble))
        except (StorageError, CheckpointIntegrityError):
            self.abandon()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        self.abandon()

    def write(self, offset: int, piece: bytes | memoryview) -> None:
        """Append the flat vector's bytes from ``offset`` on.

        Raises:
            ContractViolation: out of order, or past the end of the layout.
            CheckpointIntegrityError: the file gives back something else.
            StorageError: the file system refuses.
        """
        raw = memoryview(piece)
        size = raw.nbytes
        if offset != self._position or offset + size > self._layout.nbytes:
            raise ContractViolation(
                f"bytes {offset} to {offset + size} of a checkpoint that stands at "
                f"{self._position} of {self._layout.nbytes}"
            )
        self._put(self._data_offset + offset, raw)
        self._running.update(raw)
        self._position += size

    def _put(self, at: int, piece: memoryview) -> None:
        if len(self._back) < len(piece):
            self._back = memoryview(bytearray(len(piece)))
        back = self._back[: len(piece)]
        with files.storage(self._part, self._layout.nbytes):
            files.write_all(self._fd, piece, at)
            files.read_exactly(self._fd, back, at)
        if not _same(piece, back):
            raise CheckpointIntegrityError(
                f"{self._part / WEIGHTS_NAME}: bytes {at} to {at + len(piece)} are read back as "
                "something else than was written"
            )

    def commit(self) -> Digest:
        """Make it durable under its digest.

        A sound checkpoint of the same content is left as it is; a damaged one is replaced.

        Raises:
            ContractViolation: bytes are missing.
            StorageError: the file system refuses.
        """
        digest = self._running.hexdigest()
        target = self._root / digest
        with files.storage(target, self._layout.nbytes):
            reached("checkpoint.written", self._lineage.kind)
            os.fsync(self._fd)
            reached("checkpoint.flushed", self._lineage.kind)
            files.write_durably(self._part / HEADER_NAME, self._header(digest))
            if target.exists() and not _is_sound(target):
                shutil.rmtree(target)
            if not target.exists():
                self._part.rename(target)
            reached("checkpoint.named", self._lineage.kind)
            files.flush_directory(self._root)
            reached("checkpoint.listed", self._lineage.kind)
        self.abandon()
        return digest

    def _header(self, digest: Digest) -> bytes:
        header = Header(
            schema_version=SCHEMA_VERSION,
            kind=self._lineage.kind,
            digest=digest,
            parent_digest=self._lineage.parent_digest,
            round_index=self._lineage.round_index,
            config_hash=self._lineage.config_hash,
            layout_digest=self._layout.digest,
            layout=tuple((t.name, t.shape) for t in self._layout.tensors),
            written_by=BUILD,
            header_digest="",
        )
        return _encode_header(header)

    def abandon(self) -> None:
        """Remove what was not committed; does nothing the second time."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        shutil.rmtree(self._part, ignore_errors=True)


class Checkpoint:
    """An opened checkpoint: ``header``, ``layout`` and its bytes, read in pieces."""

    def __init__(self, path: Path, header: Header, layout: ParamLayout, preamble: bytes) -> None:
        self.path = path
        self.header = header
        self.layout = layout
        self._preamble = preamble

    @property
    def digest(self) -> Digest:
        return self.header.digest

    @property
    def weights(self) -> Path:
        return self.path / WEIGHTS_NAME

    @property
    def data_offset(self) -> int:
        """Byte of the weights file at which the flat vector starts."""
        return len(self._preamble)

    def pieces(
        self, start: int = 0, piece_bytes: int = PIECE_BYTES, kept: int = 1
    ) -> Iterator[memoryview]:
        """The flat vector from byte ``start``; a piece is valid until the ``kept``-th after it."""
        with files.storage(self.weights), self.weights.open("rb") as file:
            begin, end = self.data_offset + start, self.data_offset + self.layout.nbytes
            yield from files.read_pieces(file.fileno(), begin, end, piece_bytes, kept)

    def read(self) -> FlatParameters:
        """The whole vector in memory, float32 of shape ``(layout.size,)``; for small models."""
        flat = np.empty(self.layout.size, dtype=np.float32)
        raw = flat.data.cast("B")
        position = 0
        for piece in self.pieces():
            raw[position : position + len(piece)] = piece
            position += len(piece)
        return flat

    def verify(self) -> None:
        """Re-derive the digest from every byte.

        Raises:
            CheckpointIntegrityError: names the file and what differs.
        """
        with files.storage(self.weights), self.weights.open("rb") as file:
            found = file.read(len(self._preamble))
        if found != self._preamble:
            raise CheckpointIntegrityError(
                f"{self.weights}: the safetensors header is not the one of its layout from byte "
                f"{_first_difference(found, self._preamble)} on"
            )
        running = ParameterDigest(self.layout)
        for piece in self.pieces():
            running.update(piece)
        if running.hexdigest() != self.header.digest:
            raise CheckpointIntegrityError(
                f"{self.weights}: its bytes have the digest {running.hexdigest()}, "
                f"{HEADER_NAME} and the directory say {self.header.digest}"
            )


def _same(left: memoryview, right: memoryview) -> bool:
    """Whether two pieces of one length are equal; ``memoryview`` compares byte by byte."""
    words = np.uint64 if len(left) % 8 == 0 else np.uint8
    return np.array_equal(np.frombuffer(left, dtype=words), np.frombuffer(right, dtype=words))


def _first_difference(left: bytes, right: bytes) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(left), len(right)))


def _is_sound(path: Path) -> bool:
    try:
        open_checkpoint(path).verify()
    except (CheckpointIntegrityError, SchemaVersionMismatch, StorageError):
        return False
    return True


def open_checkpoint(path: Path) -> Checkpoint:
    """Open the checkpoint directory ``path``; reads its header, not its data.

    Raises:
        CheckpointIntegrityError: not a checkpoint, or header, layout, size or name disagree.
        SchemaVersionMismatch: written by a newer version.
        StorageError: missing or unreadable.
    """
    refuse_pickle(path)
    header = _read_header(path / HEADER_NAME)
    if path.name != header.digest:
        raise CheckpointIntegrityError(
            f"{path / HEADER_NAME}: digest is {header.digest}, the directory says {path.name}"
        )
    try:
        layout = layout_of(dict(header.layout))
    except ContractViolation as error:
        raise CheckpointIntegrityError(f"{path / HEADER_NAME}: {error.message}") from error
    if layout.digest != header.layout_digest:
        raise CheckpointIntegrityError(
            f"{path / HEADER_NAME}: layout_digest is {header.layout_digest}, the layout's own "
            f"is {layout.digest}"
        )
    preamble = safetensors_header(layout)
    weights = path / WEIGHTS_NAME
    with files.storage(weights):
        size = weights.stat().st_size
    if size != len(preamble) + layout.nbytes:
        raise CheckpointIntegrityError(
            f"{weights}: {size} bytes instead of {len(preamble) + layout.nbytes}"
        )
    return Checkpoint(path, header, layout, preamble)


def _read_header(path: Path) -> Header:
    text = files.read_limited(path, MAX_HEADER_BYTES)
    try:
        version = msgspec.json.decode(text, type=_Versioned).schema_version
        if version > SCHEMA_VERSION:
            raise SchemaVersionMismatch(f"{path}: schema {version}, this is {SCHEMA_VERSION}")
        header = msgspec.json.decode(text, type=Header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointIntegrityError(f"{path}: {error}") from error
    if _encode_header(header) != text:
        raise CheckpointIntegrityError(
            f"{path}: its content does not have the header_digest {header.header_digest}"
        )
    return header


class _Versioned(msgspec.Struct):
    schema_version: int


def import_weights(path: Path, layout: ParamLayout) -> FlatParameters:
    """Weights that another program wrote as safetensors; see ``weights_file.read_weights``."""
    return read_weights(path, layout)


def write_flat(
    root: Path, layout: ParamLayout, lineage: Lineage, flat: FlatParameters
) -> Checkpoint:
    """Write a vector that is in memory, float32 of shape ``(layout.size,)``."""
    if flat.shape != (layout.size,) or flat.dtype != np.float32:
        raise ContractViolation(
            f"a {flat.dtype} vector of shape {flat.shape} for a layout of {layout.size} float32"
        )
    raw = np.ascontiguousarray(flat).data.cast("B")
    with CheckpointWriter(root, layout, lineage) as writer:
        for start in range(0, len(raw), PIECE_BYTES):
            writer.write(start, raw[start : start + PIECE_BYTES])
        digest = writer.commit()
    return open_checkpoint(root / digest)


def sweep_orphans(root: Path, keep: Container[str]) -> tuple[str, ...]:
    """Remove everything under ``root`` that is not named in ``keep``; returns its names.

    Raises:
        StorageError: the file system refuses.
    """
    removed = []
    with files.storage(root):
        if not root.is_dir():
            return ()
        for entry in sorted(root.iterdir()):
            if entry.name in keep:
                continue
            if entry.is_dir() and not entry.is_symlink():
                # A name that no reader takes for a checkpoint, should we die half-way.
                doomed = root / f"{PART_PREFIX}doomed-{entry.name}"
                entry.rename(doomed)
                reached("sweep.doomed", root)
                shutil.rmtree(doomed)
            else:
                entry.unlink()
            reached("sweep.removed", root)
            removed.append(entry.name)
        files.flush_directory(root)
    return tuple(removed)
