"""Model files of this host and behind a URL."""

import os
from pathlib import Path

import pytest
from blake3 import blake3

from lensemble import errors
from lensemble.http_ranges import Patience, Stopped
from lensemble_coord.inference import models
from tests.node.range_server import serving, status, whole_file
from tests.tiny_gguf import write_tiny

QUICK = Patience(tries=2, first_wait_s=0.01, most_wait_s=1, silence_s=2)


def test_digests_are_computed_once_per_state_of_the_file(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf")
    whole, seen = path.read_bytes(), []
    model = models.with_digests(
        models.read(str(path)), tmp_path / "d", lambda *done: seen.append(done)
    )
    assert seen[-1][0] == seen[-1][1] == sum(each.nbytes for each in model.tensors)
    for each in model.tensors:
        assert each.digest == blake3(whole[each.offset : each.offset + each.nbytes]).hexdigest()
    seen.clear()
    again = models.with_digests(
        models.read(str(path)), tmp_path / "d", lambda *done: seen.append(done)
    )
    assert (again.tensors, again.digest, seen) == (model.tensors, model.digest, [])
    path.write_bytes(whole[:-1] + b"!")
    other = models.with_digests(models.read(str(path)), tmp_path / "d")
    assert other.digest != model.digest
    (kept,) = (tmp_path / "d").iterdir()
    kept.write_bytes(b"{")
    assert models.with_digests(models.read(str(path)), tmp_path / "d").digest == other.digest


def test_a_file_that_changes_after_its_header_was_read_is_refused(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf")
    model = models.read(str(path))
    os.utime(path, ns=(1, 1))
    with pytest.raises(errors.WeightsChanged):
        models.with_digests(model, tmp_path / "d")
    with pytest.raises(Stopped):
        models.with_digests(models.read(str(path)), tmp_path / "d", should_stop=lambda: True)


def test_a_url_gives_the_same_model_for_its_header_alone(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", layers=40, quant="F32")
    with serving(path.read_bytes()) as origin:
        model = models.read(origin.url, patience=QUICK)
        assert (model.url, model.path) == (origin.url, None)
        here = models.read(str(path))
        assert (model.facts, model.tensors, model.digest) == (
            here.facts,
            here.tensors,
            here.digest,
        )
        assert origin.sent < 200_000 < len(origin.content) / 20
        assert models.with_digests(model, tmp_path / "d") == model
        origin.faults = [status(404)]
        with pytest.raises(errors.WeightsUnreachable):
            models.read(origin.url, patience=QUICK)
        origin.faults = [whole_file]
        with pytest.raises(errors.WeightsUnranged):
            models.read(origin.url, patience=QUICK)


@pytest.mark.parametrize("nbytes", [0, 3, 4, 100])
def test_a_url_of_something_else_is_refused(nbytes: int) -> None:
    with (
        serving(b"GGUF"[:nbytes] + bytes(max(nbytes - 4, 0))) as origin,
        pytest.raises((errors.ModelFileError, errors.UnsupportedModel, errors.WeightsError)),
    ):
        models.read(origin.url, patience=QUICK)


def test_a_place_that_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigError, match="whole path"):
        models.read("m.gguf")
    with pytest.raises(errors.ConfigError, match="no file"):
        models.read(str(tmp_path))
