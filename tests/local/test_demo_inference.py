"""``lensemblectl demo-inference`` from end to end, on a tiny model."""

import json
from pathlib import Path

import pytest

from lensemble.errors import OperatorError
from lensemble_local import demo_inference
from lensemble_local.processes import own_directory
from tests.tiny_gguf import write_tiny

FIGURES = {
    "identical_to_unsplit",
    "split_over_unsplit_tokens_per_s",
    "hop_ms_p50",
    "tokens_per_s",
}


@pytest.mark.e2e
@pytest.mark.soak
def test_the_demo_ends_with_its_figures(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = write_tiny(tmp_path / "tiny.gguf", layers=4, ctx=512)
    place = tmp_path / "demo"
    arguments = ["--json", f"--model={model}", "--tokens=8", f"--dir={place}"]
    assert demo_inference.main(arguments) == 0
    said = capfd.readouterr()
    result = json.loads(said.out.splitlines()[-1])
    assert result.keys() >= FIGURES
    assert result["identical_to_unsplit"] is True
    assert result["teardown"] == ["clean", "clean"]
    assert result["hop_ms_p50"] > 0
    assert "stage 1, layers 2:4 on node-1: compiling" in said.err


def test_a_directory_that_exists_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept", encoding="utf-8")
    with pytest.raises(OperatorError, match="exists"):
        own_directory(tmp_path)
    assert (tmp_path / "mine").read_text(encoding="utf-8") == "kept"
    made = own_directory(tmp_path / "new")
    assert made.is_dir()
    assert made.is_absolute()
