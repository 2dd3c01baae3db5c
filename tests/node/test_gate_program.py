"""The program that tests states on public data: figures of healthy, collapsed and turned states."""

import json
import os
import select
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from lensemble.errors import DatasetError, EvaluationError
from lensemble.workload import Inner, Workload, WorldModelTask, layout
from lensemble_local.arm import Order, make
from lensemble_node.worker.training import baseline, gate
from lensemble_node.worker.training.baseline import write_parameters
from lensemble_node.worker.training.gate_scores import Scorer, read_domain, split
from lensemble_node.worker.training.gauge import turn_weights
from lensemble_node.worker.training.source import DataSource
from lensemble_node.worker.training.windows import Trajectory, Windows

WORKLOAD = Workload(
    name="tiny",
    task=WorldModelTask(observation_dim=6, latent_dim=4, hidden=16, head_hidden=8),
    inner=Inner(steps=10, batch=32),
)
WHERE = layout(WORKLOAD)


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make(tmp_path_factory.mktemp("arm"), Order(1, 4, "numpy", 0, False, 0))
    return next(path for path in made if path.name.startswith("public"))


@pytest.fixture(scope="module")
def scorer(public: Path) -> Scorer:
    return Scorer(WORKLOAD, read_domain(DataSource(public), WORKLOAD))


@pytest.fixture(scope="module")
def healthy(public: Path) -> NDArray[np.float32]:
    return baseline.warm_start(WORKLOAD, public, 60)


def stored(place: Path, name: str, flat: NDArray[np.float32]) -> Path:
    write_parameters(place / f"{name}.f32", WORKLOAD, flat)
    return place / f"{name}.f32"


def test_a_healthy_state_and_a_collapsed_one(
    scorer: Scorer, healthy: NDArray[np.float32], tmp_path: Path
) -> None:
    good = scorer.test(stored(tmp_path, "good", healthy), None)
    assert good["finite"]
    assert good["std"] > 0.3
    assert good["probe_r2"] > 0.5
    assert "drift_before" not in good
    small = healthy.copy()
    for name in ("encoder.output.weight", "encoder.output.bias"):
        WHERE.views(small)[name][...] *= 1e-4
    bad = scorer.test(stored(tmp_path, "bad", small), None)
    assert bad["std"] < 0.1
    assert bad["probe_r2"] < 0.5


def test_drift_is_what_has_turned_and_what_turning_back_leaves(
    scorer: Scorer, healthy: NDArray[np.float32], tmp_path: Path
) -> None:
    turned = healthy.copy()
    quarter = np.eye(4)
    quarter[:2, :2] = [[0.0, -1.0], [1.0, 0.0]]
    turn_weights(WHERE.views(turned), quarter, WORKLOAD.task.history)
    prior = stored(tmp_path, "prior", healthy)
    found = scorer.test(stored(tmp_path, "turned", turned), prior)
    assert found["drift_before"] > 0.1
    assert found["drift_after"] < 0.01 * found["drift_before"]
    assert found["max_degrees"] == pytest.approx(90.0, abs=1.0)
    still = scorer.test(prior, prior)
    assert (still["drift_before"], still["max_degrees"]) == (0.0, pytest.approx(0.0, abs=1e-3))
    # Turning the frame is no change of the model.
    assert found["std"] == pytest.approx(still["std"], rel=1e-3)
    assert found["probe_r2"] == pytest.approx(still["probe_r2"], abs=1e-2)


def test_a_state_that_is_not_finite_and_one_that_is_not_there(
    scorer: Scorer, healthy: NDArray[np.float32], tmp_path: Path
) -> None:
    prior = stored(tmp_path, "prior", healthy)
    for number in (1e9, 1e15, 1e19, 1e25, 3e38):
        broken = healthy.copy()
        WHERE.views(broken)["encoder.output.weight"][...] *= number
        WHERE.views(broken)["predictor.output.weight"][...] *= number
        found = scorer.test(stored(tmp_path, "huge", np.clip(broken, -3e38, 3e38)), prior)
        assert found["finite"] is False or found["std"] > 1e6
        json.dumps(found, allow_nan=False)
    assert found["finite"] is False
    gone = scorer.test(stored(tmp_path, "good", healthy), tmp_path / "gone.f32")
    assert gone["finite"]
    assert "no drift" in gone["warning"]


class _Episodes:
    source = DataSource(Path("data"))

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def cut(self, index: int, start: int, span: int) -> Trajectory:
        raise NotImplementedError

    def images(self, index: int, start: int, stop: int) -> NDArray[np.uint8]:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("lengths", "cut"),
    [([10, 10, 10, 10], 24), ([40], 29), ([3, 3, 30], 23), ([10, 10], 8), ([30, 10], 28)],
)
def test_whole_episodes_are_held_out_where_there_are_several(lengths: list[int], cut: int) -> None:
    windows = Windows(_Episodes(lengths), 3)
    fit, scored = split(windows)
    assert len(fit) == cut
    assert np.array_equal(np.concatenate([fit, scored]), np.arange(windows.count))


def test_too_little_data_is_refused() -> None:
    with pytest.raises(EvaluationError, match="3 windows"):
        split(Windows(_Episodes([5]), 3))
    with pytest.raises(DatasetError):
        read_domain(DataSource(Path("nowhere.h5")), WORKLOAD)


def test_the_program_answers_line_by_line(
    public: Path, healthy: NDArray[np.float32], tmp_path: Path
) -> None:
    (tmp_path / "w.json").write_bytes(WORKLOAD.canonical())
    state = stored(tmp_path, "state", healthy)
    asked = [
        {"state": str(state), "prior": str(state)},
        {"state": str(tmp_path / "gone.f32"), "prior": ""},
    ]
    done = subprocess.run(
        [sys.executable, "-m", gate.__name__, f"--workload={tmp_path / 'w.json'}",
         f"--data={public}", f"--parent={os.getpid()}", "--niceness=5"],
        input="".join(json.dumps(each) + "\n" for each in asked),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ready, figures, refused = map(json.loads, done.stdout.splitlines())
    assert ready["ready"] > 0
    assert figures["figures"]["drift_before"] == 0.0
    assert "gone.f32" in refused["refused"]


def test_a_program_that_cannot_begin_says_why(tmp_path: Path) -> None:
    (tmp_path / "w.json").write_bytes(WORKLOAD.canonical())
    done = subprocess.run(
        [sys.executable, "-m", gate.__name__, f"--workload={tmp_path / 'w.json'}",
         f"--data={tmp_path / 'gone.h5'}"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == gate.EXIT_FAILED
    assert "gone.h5" in json.loads(done.stdout)["failed"]


def test_the_program_dies_with_the_daemon(public: Path, tmp_path: Path) -> None:
    (tmp_path / "w.json").write_bytes(WORKLOAD.canonical())
    command = [sys.executable, "-m", gate.__name__, f"--workload={tmp_path / 'w.json'}",
               f"--data={public}"]  # fmt: skip
    daemon = (
        "import os, subprocess, sys\n"
        f"child = subprocess.Popen([*{command!r}, f'--parent={{os.getpid()}}'],"
        " stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "print(child.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", daemon],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as parent:
        assert parent.stdout is not None
        child = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
    try:
        ended, _, _ = select.select([child], [], [], 30.0)
        assert ended
    finally:
        os.close(child)
