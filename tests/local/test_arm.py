import hashlib
from pathlib import Path

import h5py
import numpy as np
import pytest

from lensemble_local import arm

LABELS = ["train:0", "train:1", "train:2"]


@pytest.mark.parametrize("which", [*arm.PARTICIPANTS, arm.UNSEEN, arm.PUBLIC], ids=lambda a: a.name)
def test_both_engines_are_one_arm(which: arm.Arm) -> None:
    pytest.importorskip("mujoco")
    ours = arm.roll(which, LABELS, engine="numpy", seed=0)
    theirs = arm.roll(which, LABELS, engine="mujoco", seed=0)
    two_seconds = slice(0, 41)
    assert np.abs(ours.states[:, two_seconds] - theirs.states[:, two_seconds]).max() < 1e-3


def test_energy_is_kept_without_damping_and_torque() -> None:
    free = arm.Arm("free", 9.81, (1.0, 1.0), 0.0, (1.0, 1.0), "none")
    state = np.array([[2.0, -1.0, 0.5, 0.3]])

    def energy(s: np.ndarray) -> float:
        q1, q2, v1, v2 = s[0]
        half, inertia = arm.LINK_M / 2, arm._capsule_inertia(1.0)
        square = (arm.LINK_M * v1) ** 2 + (half * (v1 + v2)) ** 2
        square += 2 * arm.LINK_M * half * v1 * (v1 + v2) * np.cos(q2)
        kinetic = 0.5 * (half * v1) ** 2 + 0.5 * inertia * v1**2
        kinetic += 0.5 * square + 0.5 * inertia * (v1 + v2) ** 2
        height = -half * np.cos(q1) - arm.LINK_M * np.cos(q1) - half * np.cos(q1 + q2)
        return float(kinetic + 9.81 * height)

    before = energy(state)
    for _ in range(100):
        state = arm.advance_numpy(free, state, np.zeros((1, 2)))
    assert energy(state) == pytest.approx(before, abs=1e-3)


def test_an_episode_depends_on_seed_and_label_only() -> None:
    alone = arm.roll(arm.PUBLIC, ["train:2"], engine="numpy", seed=3)
    among = arm.roll(arm.PUBLIC, LABELS, engine="numpy", seed=3)
    assert np.array_equal(alone.states[0], among.states[2])
    other = arm.roll(arm.PUBLIC, ["train:2"], engine="numpy", seed=4)
    assert not np.array_equal(alone.states, other.states)


def test_wiring_is_its_own_inverse_and_actions_stay_in_range() -> None:
    for which in arm.PARTICIPANTS:
        controls = np.random.Generator(np.random.Philox(0)).uniform(-1, 1, (5, 2))
        assert np.array_equal(which.wired(which.wired(controls)), controls)
        episodes = arm.roll(which, LABELS, engine="numpy", seed=0)
        assert np.abs(episodes.actions).max() <= 1
        assert np.isfinite(episodes.states).all()


def test_later_nodes_are_variations_and_all_differ() -> None:
    made = [arm.participant(index, 0) for index in range(9)]
    assert len(set(made)) == len({a.name for a in made}) == 9
    assert arm.participant(8, 0) == made[8] != arm.participant(8, 1)


def contents(path: Path) -> str:
    running = hashlib.sha256()

    def visit(name: str, item: object) -> None:
        if isinstance(item, h5py.Dataset):
            running.update(name.encode() + item[()].tobytes())

    with h5py.File(path) as file:
        file.visititems(visit)
    return running.hexdigest()


def test_command_writes_the_same_data_twice(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    digests = []
    for run in ("a", "b"):
        arm.main(
            ["--out", str(tmp_path / run), "--nodes", "2", "--episodes", "3", "--engine", "numpy"]
        )
        files = sorted((tmp_path / run).iterdir())
        digests.append([contents(path) for path in files])
    names = ["heldout-0.h5", "heldout-1.h5", "node0.h5", "node1.h5", "public.h5"]
    assert [path.name for path in files] == names
    assert digests[0] == digests[1]
    assert len(set(digests[0])) == len(names)
    assert capsys.readouterr().out.count(".h5") == 2 * len(names)
    with h5py.File(files[2]) as file:
        demo = file["data/demo_0"]
        assert demo["obs/angles"].shape == (100, 4)
        assert np.array_equal(demo["obs/velocities"][1:], demo["next_obs/velocities"][:-1])


def test_command_refuses_counts_out_of_range(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        arm.main(["--out", str(tmp_path), "--nodes", "0"])
