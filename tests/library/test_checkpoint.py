import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from lensemble.checkpoint import (
    HEADER_NAME,
    WEIGHTS_NAME,
    CheckpointWriter,
    Lineage,
    open_checkpoint,
    sweep_orphans,
    write_flat,
)
from lensemble.errors import (
    ArtifactError,
    CheckpointIntegrityError,
    ContractViolation,
    SchemaVersionMismatch,
    StorageError,
)
from lensemble.ids import Digest
from lensemble.params import FlatParameters, ParamLayout, layout_of, parameter_digest
from lensemble.weights_file import safetensors_header

LAYOUT = layout_of(
    {"predictor.weight": (3, 2), "encoder.weight": (5, 7), "encoder.bias": (5,), "encoder.gain": ()}
)
LINEAGE = Lineage("weights", 4, Digest("c" * 64), Digest("d" * 64))


def vector(layout: ParamLayout = LAYOUT, seed: int = 1) -> FlatParameters:
    return np.random.default_rng(seed).standard_normal(layout.size).astype(np.float32)


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    flat = vector()
    written = write_flat(tmp_path / "checkpoints", LAYOUT, LINEAGE, flat)
    assert written.digest == parameter_digest(LAYOUT, flat)
    again = open_checkpoint(written.path)
    again.verify()
    assert again.header.lineage == LINEAGE
    assert again.layout == LAYOUT
    assert np.array_equal(again.read(), flat)
    for start in (0, 4, LAYOUT.nbytes - 4, LAYOUT.nbytes):
        pieces = b"".join(bytes(piece) for piece in again.pieces(start, piece_bytes=12))
        assert pieces == flat.tobytes()[start:]


def test_safetensors_reads_it_by_name(tmp_path: Path) -> None:
    flat = vector()
    written = write_flat(tmp_path, LAYOUT, LINEAGE, flat)
    loaded = load_file(written.weights)
    views = LAYOUT.views(flat)
    assert set(loaded) == set(views)
    for name, view in views.items():
        assert loaded[name].shape == view.shape
        assert np.array_equal(loaded[name], view)
    assert written.data_offset % 8 == 0


def test_pieces_must_come_in_order_and_fill_the_layout(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path, LAYOUT, LINEAGE) as writer:
        writer.write(0, bytes(8))
        with pytest.raises(ContractViolation, match="stands at 8"):
            writer.write(4, bytes(4))
        with pytest.raises(ContractViolation):
            writer.write(8, bytes(LAYOUT.nbytes))
        with pytest.raises(ContractViolation):
            writer.commit()
    assert list(tmp_path.iterdir()) == []


def test_a_crash_leaves_only_what_the_sweep_removes(tmp_path: Path) -> None:
    kept = write_flat(tmp_path, LAYOUT, LINEAGE, vector())
    unnamed = write_flat(tmp_path, LAYOUT, LINEAGE, vector(seed=2))
    CheckpointWriter(tmp_path, LAYOUT, LINEAGE).write(0, bytes(12))
    (tmp_path / "stray").write_text("x")
    assert len(list(tmp_path.iterdir())) == 4
    removed = sweep_orphans(tmp_path, {kept.digest})
    assert len(removed) == 3
    assert unnamed.digest in removed
    assert [p.name for p in tmp_path.iterdir()] == [kept.digest]
    open_checkpoint(kept.path).verify()
    assert sweep_orphans(tmp_path / "absent", set()) == ()


def test_the_same_content_again_keeps_a_sound_one_and_replaces_a_damaged_one(
    tmp_path: Path,
) -> None:
    first = write_flat(tmp_path, LAYOUT, LINEAGE, vector())
    later = Lineage("weights", 9, Digest("c" * 64), Digest("e" * 64))
    assert write_flat(tmp_path, LAYOUT, later, vector()).header.round_index == 4
    flip(first.weights, -1)
    assert write_flat(tmp_path, LAYOUT, later, vector()).header.round_index == 9
    open_checkpoint(first.path).verify()
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("name", [HEADER_NAME, WEIGHTS_NAME])
def test_every_flipped_byte_is_named(tmp_path: Path, name: str) -> None:
    written = write_flat(tmp_path, LAYOUT, LINEAGE, vector())
    path = written.path / name
    sound = path.read_bytes()
    for at in range(len(sound)):
        for bit in (1, 0x20, 0x80):
            path.write_bytes(sound[:at] + bytes([sound[at] ^ bit]) + sound[at + 1 :])
            with pytest.raises(ArtifactError, match=name):
                open_checkpoint(written.path).verify()
    path.write_bytes(sound)
    open_checkpoint(written.path).verify()


@pytest.mark.parametrize("change", [lambda b: b[:-1], lambda b: b + b"\0", lambda _: b""])
@pytest.mark.parametrize("name", [HEADER_NAME, WEIGHTS_NAME])
def test_a_short_or_long_file_is_named(tmp_path: Path, name: str, change: object) -> None:
    assert callable(change)
    written = write_flat(tmp_path, LAYOUT, LINEAGE, vector())
    (written.path / name).write_bytes(change((written.path / name).read_bytes()))
    with pytest.raises(CheckpointIntegrityError, match=name):
        open_checkpoint(written.path).verify()


def test_a_checkpoint_under_another_name_is_refused(tmp_path: Path) -> None:
    written = write_flat(tmp_path, LAYOUT, LINEAGE, vector())
    other = tmp_path / ("0" * 64)
    written.path.rename(other)
    with pytest.raises(CheckpointIntegrityError, match="the directory says 0000"):
        open_checkpoint(other)


def test_a_newer_schema_is_refused_before_its_fields(tmp_path: Path) -> None:
    written = write_flat(tmp_path, LAYOUT, LINEAGE, vector())
    (written.path / HEADER_NAME).write_text(json.dumps({"schema_version": 2, "new": []}))
    with pytest.raises(SchemaVersionMismatch, match="schema 2"):
        open_checkpoint(written.path)


def test_pickles_are_refused_by_name(tmp_path: Path) -> None:
    for name in ("model.pt", "pytorch_model.bin", "x.PKL"):
        with pytest.raises(CheckpointIntegrityError, match="pickle"):
            open_checkpoint(tmp_path / name)


def test_a_missing_file_is_a_storage_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=HEADER_NAME):
        open_checkpoint(tmp_path / ("a" * 64))


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file"):
        CheckpointWriter(tmp_path / "file", LAYOUT, LINEAGE)


def test_a_model_larger_than_the_disk_is_refused_with_both_figures(tmp_path: Path) -> None:
    huge = layout_of({"encoder.weight": (1 << 33,)})
    if huge.nbytes < os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize:
        huge = ParamLayout(huge.tensors, 1 << 44, huge.digest)
    with pytest.raises(StorageError, match=r"no room for .* bytes, .* are free"):
        CheckpointWriter(tmp_path, huge, LINEAGE)
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_any_header_bytes_are_refused_in_order(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.mktemp("any") / ("a" * 64)
    path.mkdir()
    (path / HEADER_NAME).write_bytes(content)
    with pytest.raises(ArtifactError):
        open_checkpoint(path)


def test_the_header_of_a_layout_is_canonical() -> None:
    header = safetensors_header(LAYOUT)
    length = int.from_bytes(header[:8], "little")
    assert len(header) == 8 + length
    assert list(json.loads(header[8:]))[1:] == [t.name for t in LAYOUT.tensors]


def test_a_file_that_gives_back_something_else_is_named(tmp_path: Path) -> None:
    """Whatever lies between a process and its file, a piece counts only as it is read back."""
    with CheckpointWriter(tmp_path, LAYOUT, LINEAGE) as writer:
        writer.write(0, bytes(8))
        # The file of the part is one that swallows what is written to it.
        zero = os.open("/dev/zero", os.O_RDWR)
        (part,) = tmp_path.iterdir()
        target = str(part / WEIGHTS_NAME)
        (held,) = (
            int(each.name) for each in Path("/proc/self/fd").iterdir() if _leads_to(each, target)
        )
        os.dup2(zero, held)
        os.close(zero)
        with pytest.raises(CheckpointIntegrityError, match=r"bytes \d+ to \d+ are read back"):
            writer.write(8, b"\x01" * 8)
    assert list(tmp_path.iterdir()) == []


def _leads_to(link: Path, target: str) -> bool:
    try:
        return os.readlink(link) == target
    except OSError:
        return False
