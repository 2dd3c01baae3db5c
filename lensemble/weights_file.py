"""The safetensors format: writing its header for a layout, reading weights that others made.

A file is a u64 little-endian length, that many bytes of JSON (name -> dtype, shape, data_offsets)
and the data section.
"""

import json
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from lensemble import files
from lensemble.errors import CheckpointIntegrityError, ContractViolation
from lensemble.params import MAX_TENSORS, FlatParameters, ParamLayout

MAX_HEADER_BYTES = 32 << 20
_LENGTH_BYTES = 8
_ALIGNMENT = 8
_METADATA = "__metadata__"
_SIZES = {"F32": 4, "F16": 2, "BF16": 2}
_PICKLES = {".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt"}


class Entry(msgspec.Struct, frozen=True):
    """One tensor of a file; ``data_offsets`` are bytes of the data section."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def safetensors_header(layout: ParamLayout) -> bytes:
    """Everything before the data section: length, JSON, spaces up to 8-byte alignment."""
    entries: dict[str, object] = {_METADATA: {"lensemble.layout": layout.digest}}
    for tensor in layout.tensors:
        entries[tensor.name] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [4 * tensor.offset, 4 * (tensor.offset + tensor.size)],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def refuse_pickle(path: Path) -> None:
    """Refuse a file whose kind can run code when it is loaded.

    Raises:
        CheckpointIntegrityError: the name ends like a pickle's.
    """
    if path.suffix.lower() in _PICKLES:
        raise CheckpointIntegrityError(
            f"{path} is a pickle by its name; loading one runs code",
            "Convert it to safetensors where it comes from.",
        )


def read_entries(file: BinaryIO, path: Path) -> tuple[dict[str, Entry], int]:
    """The tensors of the file at ``path`` by name, and the byte at which its data starts.

    Raises:
        CheckpointIntegrityError: not a safetensors file, or one over its limits.
    """
    size = path.stat().st_size
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if size < _LENGTH_BYTES or length > min(MAX_HEADER_BYTES, size - _LENGTH_BYTES):
        raise CheckpointIntegrityError(
            f"{path}: a header of {length} bytes in a file of {size}",
            "Give a safetensors file; nothing else is read.",
        )
    try:
        raw = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
        raw.pop(_METADATA, None)
        entries = {name: msgspec.json.decode(text, type=Entry) for name, text in raw.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointIntegrityError(f"{path}: its header does not parse: {error}") from error
    if len(entries) > MAX_TENSORS:
        raise CheckpointIntegrityError(f"{path}: {len(entries)} tensors; at most {MAX_TENSORS}")
    data = _LENGTH_BYTES + length
    for name, entry in entries.items():
        start, stop = entry.data_offsets
        if not 0 <= start <= stop <= size - data:
            raise CheckpointIntegrityError(
                f"{path}: tensor {name!r} lies at bytes {start} to {stop} of {size - data}"
            )
    return entries, data


def read_weights(path: Path, layout: ParamLayout) -> FlatParameters:
    """The tensors of ``layout`` from any safetensors file, float32 of shape ``(layout.size,)``.

    float16 and bfloat16 are widened, which is exact.  Other tensors in the file are left out.

    Raises:
        CheckpointIntegrityError: a pickle, malformed, or not finite; names file and tensor.
        ContractViolation: a tensor of the layout is missing or has another shape or kind.
        StorageError: missing or unreadable.
    """
    refuse_pickle(path)
    flat = np.empty(layout.size, dtype=np.float32)
    with files.storage(path), path.open("rb") as file:
        entries, data = read_entries(file, path)
        for tensor in layout.tensors:
            entry = _fitting(entries, tensor.name, tensor.shape, path)
            into = flat[tensor.offset : tensor.offset + tensor.size]
            _read_tensor(file, data + entry.data_offsets[0], entry.dtype, into)
            if not np.isfinite(into).all():
                raise CheckpointIntegrityError(f"{path}: tensor {tensor.name!r} is not finite")
    return flat


def _fitting(entries: dict[str, Entry], name: str, shape: tuple[int, ...], path: Path) -> Entry:
    entry = entries.get(name)
    if entry is None:
        raise ContractViolation(
            f"{path} has no tensor {name!r}, which the workload's model has",
            "Name the tensors encoder.* and predictor.* as the workload does.",
        )
    if entry.shape != shape or entry.dtype not in _SIZES:
        raise ContractViolation(
            f"{path}: tensor {name!r} is {entry.dtype} of shape {entry.shape}; the workload wants "
            f"F32, F16 or BF16 of shape {shape}",
            "Give weights of this workload's model.",
        )
    count = int(np.prod(shape, dtype=np.int64))
    start, stop = entry.data_offsets
    if stop - start != count * _SIZES[entry.dtype]:
        raise CheckpointIntegrityError(
            f"{path}: tensor {name!r} has {stop - start} bytes for {count} {entry.dtype}"
        )
    return entry


def _read_tensor(file: BinaryIO, at: int, dtype: str, into: FlatParameters) -> None:
    if dtype == "F32":
        files.read_exactly(file.fileno(), into.data.cast("B"), at)
        return
    words = np.empty(len(into), dtype=np.uint16)
    files.read_exactly(file.fileno(), words.data.cast("B"), at)
    if dtype == "F16":
        into[...] = words.view(np.float16)
    else:
        into.view(np.uint32)[...] = words
        np.left_shift(into.view(np.uint32), 16, out=into.view(np.uint32))
