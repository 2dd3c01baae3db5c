from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch

from lensemble.checkpoint import import_weights
from lensemble.errors import CheckpointIntegrityError, ContractViolation, StorageError
from lensemble.params import layout_of

LAYOUT = layout_of({"encoder.weight": (3, 4), "predictor.bias": (5,), "encoder.gain": ()})


def tensors(dtype: type[np.floating] = np.float32) -> dict[str, NDArray[np.floating]]:
    flat = np.linspace(-2, 2, LAYOUT.size).astype(np.float32)
    return {name: view.astype(dtype) for name, view in LAYOUT.views(flat).items()}


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_file_of_another_program_is_read_in_canonical_order(
    tmp_path: Path, dtype: type[np.floating]
) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({**tensors(dtype), "head.extra": np.zeros(9)}, path, {"format": "pt"})
    flat = import_weights(path, LAYOUT)
    for name, view in LAYOUT.views(flat).items():
        assert np.array_equal(view, tensors(dtype)[name].astype(np.float32))


def test_bfloat16_is_widened_exactly(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    given = {name: torch.tensor(view).to(torch.bfloat16) for name, view in tensors().items()}
    save_torch(given, path)
    for name, view in LAYOUT.views(import_weights(path, LAYOUT)).items():
        assert np.array_equal(view, given[name].float().numpy())


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    wrong = {
        "no tensor 'encoder.gain'": {k: v for k, v in tensors().items() if k != "encoder.gain"},
        r"'predictor.bias' is F32 of shape \(4,\)": {
            **tensors(),
            "predictor.bias": np.zeros(4, "f"),
        },
        "'predictor.bias' is I32": {**tensors(), "predictor.bias": np.zeros(5, dtype=np.int32)},
    }
    for sentence, content in wrong.items():
        save_file(content, path)
        with pytest.raises(ContractViolation, match=sentence):
            import_weights(path, LAYOUT)
    save_file({**tensors(), "predictor.bias": np.array([0, 1, np.nan, 2, 3], dtype="f")}, path)
    with pytest.raises(CheckpointIntegrityError, match=r"'predictor.bias' is not finite"):
        import_weights(path, LAYOUT)
    with pytest.raises(StorageError, match="absent"):
        import_weights(tmp_path / "absent.safetensors", LAYOUT)
    with pytest.raises(CheckpointIntegrityError, match="pickle"):
        import_weights(tmp_path / "model.bin", LAYOUT)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_bytes_are_weights_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("weights") / "w.safetensors"
    save_file(tensors(), path)
    sound = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        sound[data.draw(st.integers(0, len(sound) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(sound)))
    path.write_bytes(data.draw(st.sampled_from([bytes(sound), bytes(sound[:cut])])))
    try:
        assert np.isfinite(import_weights(path, LAYOUT)).all()
    except (CheckpointIntegrityError, ContractViolation):
        return


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_any_header_is_refused_in_order(
    tmp_path_factory: pytest.TempPathFactory, text: bytes
) -> None:
    path = tmp_path_factory.mktemp("weights") / "w.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises((CheckpointIntegrityError, ContractViolation)):
        import_weights(path, LAYOUT)
