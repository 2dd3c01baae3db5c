import json
from pathlib import Path

import h5py
import numpy as np
import pytest

from lensemble_local import arm
from lensemble_node.worker.training import survey


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    arm.make(tmp_path, arm.Order(1, 2, "numpy", 0, unseen=False))
    return tmp_path / "node0.h5"


def test_inspect_counts_and_commit_roots(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert survey.main(["inspect", str(recorded), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["episodes"], facts["observation_dim"], facts["action_dim"]) == (2, 6, 2)
    assert survey.main(["commit", str(recorded), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["root"]) == 64


def test_a_refusal_names_the_place_and_holds_no_observation(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with h5py.File(recorded, "r+") as file:
        column = next(iter(file["data/demo_1/obs"]))
        rows = file[f"data/demo_1/obs/{column}"]
        rows[7, 1] = np.nan
        seen = [f"{value:.3f}"[:5] for value in np.ravel(rows[7]) if np.isfinite(value)]
    assert survey.main(["inspect", str(recorded)]) == 1
    said = capsys.readouterr().err
    assert f"column {column!r}" in said or column in said
    assert "row 7 is NaN at component 1" in said
    assert "Try:" in said
    assert not any(value in said for value in seen if value not in ("0.000", "1.000"))
