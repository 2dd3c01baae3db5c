import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lensemble import merkle
from lensemble_local import arm
from lensemble_node.worker.training import survey
from lensemble_node.worker.training.dataset import DataSource, open_dataset
from lensemble_node.worker.training.statistics import Running
from tests.node import recordings

LENGTHS = (7, 4, 9)


class Survey:
    """Runs the program in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: object, status: int = 0) -> dict[str, Any]:
        assert survey.main([str(each) for each in arguments]) == status
        self.out, self.err = self._capsys.readouterr()
        lines = [json.loads(line) for line in self.out.splitlines()]
        return lines[-1]["report"] if lines else {}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Survey:
    return Survey(capsys)


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    arm.make(tmp_path, arm.Order(1, 2, "numpy", 0, unseen=False))
    return tmp_path / "node0.h5"


def test_what_is_inspected_is_what_a_worker_sees(recorded: Path, run: Survey) -> None:
    found = run("inspect", recorded)
    assert (found["layout"], found["embodiments"]) == ("robomimic", {"": 2})
    assert (found["episodes"], found["steps"]) == (2, 200)
    assert (found["observation_dim"], found["action_dim"]) == (6, 2)
    assert found["lengths"]["shortest"] == found["lengths"]["longest"] == 100
    assert found["lengths"]["histogram"]["counts"] == [2]
    assert {"key": "action", "dtype": "float32", "shape": [2]} in found["columns"]
    assert (found["problems"], found["notes"]) == ([], [])
    with open_dataset(DataSource(recorded)) as data:
        assert found["root"] == data.commitment().root == run("commit", recorded)["root"]
        states = np.concatenate([data.episode(index).observations for index in range(2)])
    means = found["statistics"]["observation.angles"]["mean"]
    means += found["statistics"]["observation.velocities"]["mean"]
    assert np.allclose(means, states.mean(axis=0), atol=1e-6)
    assert found["normalize"]["offset"] == means
    assert np.allclose(found["normalize"]["scale"], states.std(axis=0), atol=1e-6)


@given(pieces=st.lists(st.integers(0, 7), min_size=1, max_size=6), seed=st.integers(0, 1 << 30))
def test_statistics_of_pieces_are_those_of_the_whole(pieces: list[int], seed: int) -> None:
    draw = np.random.Generator(np.random.Philox(seed))
    parts = [draw.normal(100.0, 3.0, (rows, 2)).astype(np.float32) for rows in pieces]
    running = Running(2)
    for part in parts:
        running.add(part)
    whole = np.concatenate(parts).astype(np.float64)
    assert running.count == len(whole)
    if len(whole):
        told = running.told()
        assert np.allclose(told["mean"], whole.mean(axis=0))
        assert np.allclose(told["std"], whole.std(axis=0))
        assert (told["min"], told["max"]) == (
            whole.min(axis=0).tolist(),
            whole.max(axis=0).tolist(),
        )


def damaged(path: Path) -> Path:
    """Five things wrong with four episodes of six, and an attribute that is not."""
    recordings.robomimic(path, recordings.recordings((7, 4, 9, 5, 6, 8)))
    with h5py.File(path, "r+") as file:
        file["data/demo_0/obs/state"][3, 1] = np.nan
        file["data/demo_0/actions"][2, 0] = np.inf
        rows = file["data/demo_2/obs/state"][:-2]
        del file["data/demo_2/obs/state"]
        file["data/demo_2/obs/state"] = rows
        del file["data/demo_3/actions"]
        file["data/demo_4/obs/state"][0, 0] = -np.inf
    return path


def test_every_problem_is_found_not_only_the_first(tmp_path: Path, run: Survey) -> None:
    path = damaged(tmp_path / "d.h5")
    found = run("inspect", path, status=1)
    said = [problem["message"] for problem in found["problems"]]
    assert found["problem_count"] == len(said) == 5
    for text in (
        "demo_0 (index 0) column 'observation.state' row 3 is NaN at component 1",
        "demo_0 (index 0) column 'action' row 2 is infinite at component 0",
        "demo_2 (index 2) column 'observation.state' has 7 rows of 4; expected 9",
        "demo_3 (index 3) has no column 'action'",
        "demo_4 (index 4) column 'observation.state' row 0 is infinite",
    ):
        assert any(text in sentence for sentence in said), text
    assert found["root"] == ""
    assert found["statistics"]["action"]["rows"] == 3 + 5 + 7
    few = run("inspect", path, "--problems", 2, status=1)
    assert (few["problem_count"], len(few["problems"])) == (5, 2)


def test_what_cannot_be_opened_is_a_report_too(tmp_path: Path, run: Survey) -> None:
    (tmp_path / "text.h5").write_text("hello")
    found = run("inspect", tmp_path / "text.h5", status=1)
    assert "no HDF5 file" in found["problems"][0]["message"]
    assert "columns" not in found


def test_episodes_too_short_for_a_window_are_told_of(tmp_path: Path, run: Survey) -> None:
    path = recordings.minari(tmp_path / "d.h5", recordings.recordings(LENGTHS))
    assert run("inspect", path, "--window", 3)["notes"] == []
    (note,) = run("inspect", path, "--window", 5)["notes"]
    assert note.startswith("1 of 3 episodes are shorter than a window of 5")
    found = run("inspect", path, "--window", 9, status=1)
    assert "longest episode has 8 transitions" in found["problems"][0]["message"]


def test_a_refusal_names_the_place_and_holds_no_observation(recorded: Path, run: Survey) -> None:
    with h5py.File(recorded, "r+") as file:
        rows = file["data/demo_1/obs/angles"]
        rows[7, 1] = np.nan
        seen = [f"{value:.3f}"[:5] for value in np.ravel(rows[7]) if np.isfinite(value)]
    run("commit", recorded, status=1)
    assert run.out == ""
    assert "column 'observation.angles' row 7 is NaN at component 1" in run.err
    assert "Try:" in run.err
    assert not any(value in run.err for value in seen if value not in ("0.000", "1.000"))


# ---- a node's configuration ----


def node(folder: Path, **data: object) -> Path:
    lines = [f"{key} = {json.dumps(value)}" for key, value in data.items()]
    (folder / "state").mkdir(exist_ok=True)
    (folder / "node.toml").write_text("\n".join(["[data]", *lines]))
    return folder / "node.toml"


def test_a_configuration_says_what_to_look_at(tmp_path: Path, run: Survey) -> None:
    recordings.robomimic(tmp_path / "d.h5", recordings.recordings(LENGTHS))
    with h5py.File(tmp_path / "d.h5", "r+") as file:
        for index, label in enumerate(("a", "b", "b")):
            file[f"data/demo_{index}"].attrs["embodiment"] = label
    config = node(tmp_path, path="d.h5", embodiment="b", format="robomimic")
    found = run("inspect", "--config", config)
    assert (found["embodiment"], found["episodes"]) == ("b", 2)
    assert found["embodiments"] == {"a": 1, "b": 2}
    assert run("inspect", "--config", config, "--embodiment", "a")["episodes"] == 1
    run("inspect", "--config", tmp_path / "none.toml", status=2)
    run("inspect", status=2)
    assert "no data set is named" in run.err


def test_commit_takes_the_note_of_the_node_unless_told_to_read(tmp_path: Path, run: Survey) -> None:
    recordings.robomimic(tmp_path / "d.h5", recordings.recordings(LENGTHS))
    config = node(tmp_path, path="d.h5")
    first = run("commit", "--config", config)
    assert not first["noted"]
    second = run("commit", "--config", config)
    assert (second["noted"], second["root"]) == (True, first["root"])
    assert not run("commit", "--config", config, "--full")["noted"]
    note = tmp_path / "state/dataset.json"
    note.write_text(note.read_text().replace(first["root"], "0" * 64))
    run("commit", "--config", config, "--full", status=1)
    assert "is noted for the same size, date and inode" in run.err


def test_an_episode_is_proved_to_be_in_the_root(tmp_path: Path, run: Survey) -> None:
    path = recordings.flat(tmp_path / "d.h5", recordings.recordings(LENGTHS))
    found = run("commit", path, "--prove", 1)
    proof = found["proof"]
    steps = [merkle.Step(s["side"], bytes.fromhex(s["digest"])) for s in proof["steps"]]
    assert merkle.proves(found["root"], bytes.fromhex(proof["leaf"]), steps)
    assert not merkle.proves(found["root"], bytes(32), steps)
    run("commit", path, "--prove", 3, status=1)
    assert "no episode of index 3; there are 3" in run.err
