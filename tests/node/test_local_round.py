import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lensemble.errors import (
    CheckpointIntegrityError,
    ConfigError,
    ContractViolation,
    DatasetError,
    GaugeError,
    StorageError,
)
from lensemble.params import parameter_digest
from lensemble.seeds import derive
from lensemble.workload import (
    Inner,
    NoopTask,
    Workload,
    WorldModelTask,
    initial_parameters,
    layout,
)
from lensemble_node.worker.training.kinds import NOOP_REACH
from lensemble_node.worker.training.local_round import Trainer
from lensemble_node.worker.training.local_store import LocalStore
from lensemble_node.worker.training.source import DataSource
from lensemble_node.worker.training.stops import Stopped
from tests.node import worlds

WORKLOAD = worlds.small()
PRIOR = initial_parameters(WORKLOAD)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return worlds.data(tmp_path_factory.mktemp("arm"))


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


def later(rounds: int = 1) -> np.ndarray:
    return (PRIOR + np.float32(0.001 * rounds)).astype(np.float32)


# ---- the world model ----


def test_facts_say_what_the_data_is(folder: Path, state: Path) -> None:
    facts = worlds.trainer(WORKLOAD, folder, state).facts
    assert (facts.episodes, facts.steps, facts.observation_dim, facts.action_dim) == (3, 300, 6, 2)


def test_release_encodes_the_difference_and_reports_it(folder: Path, state: Path) -> None:
    seen: list[tuple[int, float]] = []
    order = worlds.order(WORKLOAD)
    order["progress"] = lambda step, loss: seen.append((step, loss))
    done = worlds.trainer(WORKLOAD, folder, state).train(PRIOR, **order)
    difference = worlds.delta(done.vector, WORKLOAD)
    assert difference.shape == PRIOR.shape
    assert done.l2_norm == pytest.approx(float(np.sqrt(np.square(difference).sum())), rel=1e-4)
    assert done.max_abs == pytest.approx(float(np.abs(difference).max()), abs=1e-6)
    assert 0 < done.max_abs < done.l2_norm
    assert [step for step, _ in seen] == list(range(1, 7))
    assert (done.loss_first, done.loss_last) == (seen[0][1], seen[-1][1])
    assert not done.reused


def test_a_retry_releases_the_same_bytes_after_a_restart_too(folder: Path, state: Path) -> None:
    first = worlds.trainer(WORKLOAD, folder, state)
    done = first.train(PRIOR, **worlds.order(WORKLOAD))
    words, files = done.vector.copy(), worlds.tree(state)
    for trainer in (first, worlds.trainer(WORKLOAD, folder, state)):
        again = trainer.train(PRIOR, **worlds.order(WORKLOAD, attempt=1))
        assert again.reused
        assert np.array_equal(again.vector, words)
        assert (again.l2_norm, again.loss_last) == (done.l2_norm, done.loss_last)
        assert worlds.tree(state) == files


def test_another_prior_round_or_workload_trains_anew(folder: Path, state: Path) -> None:
    trainer = worlds.trainer(WORKLOAD, folder, state)
    words = trainer.train(PRIOR, **worlds.order(WORKLOAD)).vector.copy()
    moved = trainer.train(later(), **worlds.order(WORKLOAD))
    assert not moved.reused
    assert not np.array_equal(moved.vector, words)
    assert not trainer.train(later(), **worlds.order(WORKLOAD, 1)).reused
    assert list((state / "release").glob("*.u32")) == [state / "release" / "round-1.u32"]
    other = worlds.small(lr=1e-3)
    assert not worlds.trainer(other, folder, state).train(later(), **worlds.order(other, 1)).reused


def test_a_damaged_release_is_trained_again_to_the_same_bytes(folder: Path, state: Path) -> None:
    trainer = worlds.trainer(WORKLOAD, folder, state)
    words = trainer.train(PRIOR, **worlds.order(WORKLOAD)).vector.copy()
    path = state / "release" / "round-0.u32"
    raw = bytearray(path.read_bytes())
    raw[100] ^= 1
    path.write_bytes(raw)
    again = trainer.train(PRIOR, **worlds.order(WORKLOAD))
    assert not again.reused
    assert np.array_equal(again.vector, words)


def test_adopting_goes_on_and_discarding_rolls_back(folder: Path, tmp_path: Path) -> None:
    def rounds(state: Path, ends: str) -> list[np.ndarray]:
        trainer = worlds.trainer(WORKLOAD, folder, state)
        words = []
        for index, end in enumerate(ends):
            done = trainer.train(later(index), **worlds.order(WORKLOAD, index))
            words.append(done.vector.copy())
            if end == "a":
                assert trainer.adopt(index)
            else:
                trainer.discard(index)
            assert not list((state / "release").iterdir())
            assert not list((state / "local").glob("pending-*"))
        return words

    adopted, dropped = rounds(tmp_path / "a", "aa"), rounds(tmp_path / "d", "da")
    assert np.array_equal(adopted[0], dropped[0])
    assert not np.array_equal(adopted[1], dropped[1])
    fresh = worlds.trainer(WORKLOAD, folder, tmp_path / "f")
    first = fresh.train(later(1), **worlds.order(WORKLOAD, 1))
    assert np.array_equal(first.vector, dropped[1])


def test_a_restart_between_rounds_changes_nothing(folder: Path, tmp_path: Path) -> None:
    words: dict[str, list[np.ndarray]] = {"on": [], "off": []}
    for name, restart in (("on", True), ("off", False)):
        state = tmp_path / name
        trainer = worlds.trainer(WORKLOAD, folder, state)
        for index in range(3):
            done = trainer.train(later(index), **worlds.order(WORKLOAD, index))
            words[name].append(done.vector.copy())
            if restart:
                trainer = worlds.trainer(WORKLOAD, folder, state)
            assert trainer.adopt(index)
            if restart:
                trainer = worlds.trainer(WORKLOAD, folder, state)
    assert all(np.array_equal(a, b) for a, b in zip(*words.values(), strict=True))


def test_adopting_what_is_not_there_says_so(folder: Path, state: Path) -> None:
    trainer = worlds.trainer(WORKLOAD, folder, state)
    assert not trainer.adopt(0)
    trainer.discard(0)
    trainer.train(PRIOR, **worlds.order(WORKLOAD))
    assert not trainer.adopt(3)


def test_adopting_twice_changes_nothing(folder: Path, state: Path) -> None:
    trainer = worlds.trainer(WORKLOAD, folder, state)
    trainer.train(PRIOR, **worlds.order(WORKLOAD))
    assert trainer.adopt(0)
    files = worlds.tree(state)
    assert trainer.adopt(0)
    assert worlds.trainer(WORKLOAD, folder, state).adopt(0)
    assert worlds.tree(state) == files


def test_a_disk_that_refuses_is_named_and_leaves_nothing_half_done(
    folder: Path, state: Path
) -> None:
    trainer = worlds.trainer(WORKLOAD, folder, state)
    shutil.rmtree(state / "release")
    (state / "release").write_text("in the way")
    with pytest.raises(StorageError, match=str(state)):
        trainer.train(PRIOR, **worlds.order(WORKLOAD))
    (state / "release").unlink()
    done = worlds.trainer(WORKLOAD, folder, state).train(PRIOR, **worlds.order(WORKLOAD))
    assert not done.reused


def test_what_is_kept_is_for_this_user_only(folder: Path, state: Path) -> None:
    trainer = worlds.trainer(WORKLOAD, folder, state)
    trainer.train(PRIOR, **worlds.order(WORKLOAD))
    trainer.adopt(0)
    trainer.train(later(), **worlds.order(WORKLOAD, 1))
    modes = {path: path.stat().st_mode & 0o077 for path in state.rglob("*")}
    assert modes
    assert not any(modes.values())


def test_a_crash_at_any_file_of_adopting_ends_adopted(folder: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    trainer = worlds.trainer(WORKLOAD, folder, base)
    trainer.train(PRIOR, **worlds.order(WORKLOAD))
    trainer.adopt(0)
    trainer.train(later(), **worlds.order(WORKLOAD, 1))
    whole = tmp_path / "whole"
    shutil.copytree(base, whole)
    assert LocalStore(whole).adopt(1)
    names = sorted(path.name for path in (base / "local" / "pending-1").iterdir())
    for moved in range(len(names) + 1):
        state = tmp_path / f"crash{moved}"
        shutil.copytree(base, state)
        (state / "local" / "pending-1").rename(state / "local" / "adopt-1")
        for name in names[:moved]:
            (state / "local" / "adopt-1" / name).replace(state / "local" / name)
        LocalStore(state)
        found = {k: v for k, v in worlds.tree(state).items() if k.startswith("local")}
        assert found == {k: v for k, v in worlds.tree(whole).items() if k.startswith("local")}


def test_files_of_an_interrupted_write_do_not_count(folder: Path, state: Path) -> None:
    trainer = worlds.trainer(WORKLOAD, folder, state)
    words = trainer.train(PRIOR, **worlds.order(WORKLOAD)).vector.copy()
    (state / "release" / "round-0.json").unlink()
    (state / "local" / "pending-7.part").mkdir()
    (state / "release" / "round-7.u32.part").write_bytes(b"x")
    again = worlds.trainer(WORKLOAD, folder, state)
    assert not list(state.rglob("*.part"))
    done = again.train(PRIOR, **worlds.order(WORKLOAD))
    assert not done.reused
    assert np.array_equal(done.vector, words)


def test_stopping_keeps_nothing(folder: Path, state: Path) -> None:
    trainer = worlds.trainer(WORKLOAD, folder, state)
    order = worlds.order(WORKLOAD)
    asked: list[None] = []
    order["should_stop"] = lambda: asked.append(None) or len(asked) > 3
    with pytest.raises(Stopped):
        trainer.train(PRIOR, **order)
    assert not list((state / "release").iterdir())
    assert not list((state / "local").iterdir())
    words = trainer.train(PRIOR, **worlds.order(WORKLOAD)).vector
    fresh = worlds.trainer(WORKLOAD, folder, state.with_name("fresh"))
    assert np.array_equal(fresh.train(PRIOR, **worlds.order(WORKLOAD)).vector, words)


def test_damaged_local_state_is_named(folder: Path, state: Path) -> None:
    trainer = worlds.trainer(WORKLOAD, folder, state)
    trainer.train(PRIOR, **worlds.order(WORKLOAD))
    trainer.adopt(0)
    (state / "local" / "head.safetensors").write_bytes(b"gone")
    with pytest.raises(CheckpointIntegrityError, match="local training state"):
        trainer.train(later(), **worlds.order(WORKLOAD, 1))


def test_what_another_workload_left_is_not_used(folder: Path, state: Path) -> None:
    trainer = worlds.trainer(WORKLOAD, folder, state)
    trainer.train(PRIOR, **worlds.order(WORKLOAD))
    trainer.adopt(0)
    other = worlds.small(lr=1e-3)
    used = worlds.trainer(other, folder, state).train(later(), **worlds.order(other, 1))
    fresh = worlds.trainer(other, folder, state.with_name("fresh"))
    assert np.array_equal(used.vector, fresh.train(later(), **worlds.order(other, 1)).vector)


def test_a_wrong_prior_or_sketch_is_refused(folder: Path, state: Path) -> None:
    trainer = worlds.trainer(WORKLOAD, folder, state)
    digest = parameter_digest(layout(WORKLOAD), PRIOR)
    order = worlds.order(WORKLOAD) | {"prior_digest": digest}
    with pytest.raises(GaugeError, match="warm start"):
        trainer.train(later(), **order)
    with pytest.raises(CheckpointIntegrityError):
        trainer.train(later(), **(worlds.order(WORKLOAD, 1) | {"prior_digest": digest}))
    with pytest.raises(GaugeError, match="sketch seed"):
        trainer.train(PRIOR, **(order | {"sketch_seed": 1}))
    with pytest.raises(ContractViolation):
        trainer.train(PRIOR[:-1], **order)
    assert trainer.train(PRIOR, **order).l2_norm > 0


def test_data_that_does_not_fit_is_refused_at_once(folder: Path, state: Path) -> None:
    wide = Workload(task=WorldModelTask(observation_dim=7))
    with pytest.raises(DatasetError, match="6 observation columns"):
        worlds.trainer(wide, folder, state)
    with pytest.raises(ConfigError, match="names no dataset"):
        Trainer(WORKLOAD, None, state, "n0", 1)
    with pytest.raises(DatasetError, match="does not exist"):
        Trainer(WORKLOAD, DataSource(folder / "none.h5"), state, "n0", 1)


def test_a_read_only_prior_will_do(folder: Path, state: Path) -> None:
    frozen = PRIOR.copy()
    frozen.flags.writeable = False
    worlds.trainer(WORKLOAD, folder, state).train(frozen, **worlds.order(WORKLOAD))
    assert np.array_equal(frozen, PRIOR)


# ---- the no-op task ----


@pytest.mark.parametrize("parameters", [1, 1000, (1 << 18) + 1])
def test_noop_releases_its_seeded_update(parameters: int, state: Path) -> None:
    workload = worlds.noop(parameters)
    trainer = Trainer(workload, None, state, "n0", 1)
    done = trainer.train(initial_parameters(workload), **worlds.order(workload))
    seed = derive(workload.root_seed, "noop:n0:0")
    draw = np.random.Generator(np.random.SFC64(seed)).random(parameters, dtype=np.float32)
    wanted = (draw - 0.5) * 2 * NOOP_REACH
    assert np.abs(worlds.delta(done.vector, workload) - wanted).max() < 2.0**-24
    assert done.max_abs <= NOOP_REACH
    again = trainer.train(initial_parameters(workload), **worlds.order(workload))
    assert again.reused
    assert trainer.adopt(0)


def test_noop_updates_differ_by_node_and_round_and_so_do_roots(tmp_path: Path) -> None:
    workload = worlds.noop()
    vectors, roots = [], set()
    for node in ("n0", "n1"):
        trainer = Trainer(workload, None, tmp_path / node, node, 1)
        roots.add(trainer.facts.root)
        for index in range(2):
            done = trainer.train(initial_parameters(workload), **worlds.order(workload, index))
            vectors.append(done.vector.tobytes())
            trainer.adopt(index)
    assert len(set(vectors)) == 4
    assert len(roots) == 2


def test_noop_pretends_to_train_step_by_step_until_told_to_stop(state: Path) -> None:
    workload = Workload(
        task=NoopTask(parameters=10, step_seconds=0.001), inner=Inner(steps=4, batch=1)
    )
    trainer, seen = Trainer(workload, None, state, "n0", 1), list[int]()
    order = worlds.order(workload)
    order["progress"] = lambda step, _: seen.append(step)
    order["should_stop"] = lambda: len(seen) == 2
    with pytest.raises(Stopped):
        trainer.train(initial_parameters(workload), **order)
    assert seen == [1, 2]
    order["should_stop"] = lambda: False
    assert not trainer.train(initial_parameters(workload), **order).reused
    assert seen == [1, 2, 1, 2, 3, 4]


def test_noop_imports_neither_torch_nor_h5py(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from tests.node import worlds\n"
        "from lensemble.workload import initial_parameters\n"
        "from lensemble_node.worker.training.local_round import Trainer\n"
        "w = worlds.noop(); t = Trainer(w, None, Path(sys.argv[1]), 'n0', 1)\n"
        "t.train(initial_parameters(w), **worlds.order(w)); t.adopt(0)\n"
        "print(sorted({'torch', 'h5py', 'mujoco'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ".:cli"},
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout.strip() == "[]"
