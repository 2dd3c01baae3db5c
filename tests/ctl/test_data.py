"""``lensemblectl data`` as a user runs it, and its tables."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from lensemblectl import render_data
from tests.ctl.test_cli import COMMAND, ENVIRONMENT


def data(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, "data", *map(str, arguments)], cwd=cwd, env=ENVIRONMENT,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    draw = np.random.Generator(np.random.Philox(3))
    with h5py.File(tmp_path / "-arm.h5", "w") as file:
        for index in range(3):
            file[f"episode_{index}/observations"] = draw.normal(size=(8, 2)).astype("f4")
            file[f"episode_{index}/actions"] = draw.normal(size=(7, 1)).astype("f4")
    return tmp_path / "-arm.h5"


def test_a_data_set_is_shown_and_committed_to(recorded: Path) -> None:
    shown = data("inspect", "--window=2", "--", recorded.name, cwd=recorded.parent)
    assert (shown.returncode, shown.stderr) == (0, "")
    for part in ("minari", "3 of 7 transitions, 21 in all", "2 numbers: observation", "action[0]"):
        assert part in shown.stdout, part
    committed = data("commit", recorded, "--prove", 0, "--json", cwd=recorded.parent)
    report = json.loads(committed.stdout)
    assert report["root"] in shown.stdout
    assert report["proof"]["episode"] == 0
    told = data("commit", recorded, cwd=recorded.parent)
    assert f"root {report['root']}" in told.stdout
    assert "3 episodes, 21 transitions" in told.stdout


def test_problems_are_listed_and_change_the_exit_status(recorded: Path) -> None:
    with h5py.File(recorded, "r+") as file:
        file["episode_1/observations"][2, 0] = np.nan
        file["episode_2/actions"][0, 0] = np.inf
    shown = data("inspect", recorded, cwd=recorded.parent)
    assert shown.returncode == 1
    assert "episode_1 (index 1) column 'observation' row 2 is NaN" in shown.stdout
    assert "Error: 2 problems in" in shown.stderr
    whole = data("inspect", recorded, "--json", cwd=recorded.parent)
    assert whole.returncode == 1
    assert json.loads(whole.stdout)["problem_count"] == 2
    refused = data("commit", recorded, cwd=recorded.parent)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "Try:" in refused.stderr


def test_nothing_named_is_a_usage_error(tmp_path: Path) -> None:
    done = data("commit", cwd=tmp_path)
    assert done.returncode == 2
    assert "no data set is named" in done.stderr


def test_only_so_many_components_and_problems_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    wide = {name: [0.5] * 40 for name in ("mean", "std", "min", "max")}
    report: dict[str, Any] = {
        "path": "d.h5",
        "seconds": 75.0,
        "embodiments": {"": 1, "ur5": 2},
        "image_shape": [32, 32, 3],
        "image_keys": ["observation.top"],
        "columns": [{"key": "observation.top", "dtype": "coded picture", "shape": [32, 32, 3]}],
        "statistics": {"observation": {"rows": 9, **wide}},
        "notes": ["a note"],
        "problems": [{"message": "first", "remediation": ""}],
        "problem_count": 4,
    }
    render_data.show_inspected(report)
    said = capsys.readouterr().out
    for part in (
        "(none) 1, ur5 2", "1 min 15 s", "32 x 32 x 3: observation.top", "image",
        "observation: 28 more in --json", "note: a note", "and 3 problems more",
    ):  # fmt: skip
        assert part in said, part


def test_the_verb_starts_without_tensors_or_arrays() -> None:
    code = "import sys, lensemblectl.app as a; a.answer(['data', 'inspect', '--help'])\n"
    code += "print(sorted({'numpy', 'torch', 'h5py', 'trio'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
