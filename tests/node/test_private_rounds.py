"""A trainer that keeps a budget, by itself and in its process."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lensemble.errors import InvariantError, LedgerIntegrityError, PrivacyBudgetExceeded
from lensemble.state_dir import CHARGES
from lensemble.workload import (
    FieldTerms,
    Inner,
    NoopTask,
    Objective,
    Privacy,
    Release,
    Workload,
    initial_parameters,
)
from lensemble_node import signals
from lensemble_node.worker.training.kinds import NOOP_REACH
from lensemble_node.worker.training.local_round import Trainer
from lensemble_node.worker.training.source import DataSource
from tests.node import worlds
from tests.node.worker_process import FEDERATION, warm_start, worker

ROOT = Path(__file__).parents[2]


def private(parameters: int = 1000, quantize: str = "none", **terms: object) -> Workload:
    return Workload(
        name="noop",
        task=NoopTask(parameters=parameters),
        inner=Inner(steps=1, batch=1),
        field=FieldTerms(k=16),
        privacy=Privacy.model_validate({"enabled": True} | terms),
        release=Release(quantize=quantize),
    )


def trainer(workload: Workload, state: Path) -> Trainer:
    made = Trainer(workload, None, state, "n0", 1)
    made.account(FEDERATION)
    return made


def run(made: Trainer, workload: Workload, index: int = 0, attempt: int = 0) -> np.ndarray:
    order = worlds.order(workload, index, attempt)
    return made.train(initial_parameters(workload), **order).vector.copy()


def charged(made: Trainer) -> int:
    standing = made.standing
    assert standing is not None
    return standing.releases


# ---- charging ----


def test_training_without_an_account_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvariantError, match="no account"):
        run(Trainer(private(), None, tmp_path, "n0", 1), private())
    plain = Trainer(worlds.noop(), None, tmp_path, "n0", 1)
    plain.account(FEDERATION)
    assert plain.standing is None
    run(plain, worlds.noop())
    assert not (tmp_path / "privacy").exists()


def test_a_retry_is_the_same_vector_and_one_charge(tmp_path: Path) -> None:
    workload = private()
    made = trainer(workload, tmp_path)
    words = run(made, workload)
    for each in (made, trainer(workload, tmp_path)):
        for attempt in range(1, 4):
            assert np.array_equal(run(each, workload, attempt=attempt), words)
        assert charged(each) == 1


def test_what_is_released_is_clipped_and_noised(tmp_path: Path) -> None:
    workload = private(parameters=20_000, clip_norm=0.01, noise_multiplier=3.0, epsilon=1e3)
    made = trainer(workload, tmp_path)
    done = made.train(initial_parameters(workload), **worlds.order(workload))
    assert done.clip_factor == pytest.approx(0.01 / (NOOP_REACH * np.sqrt(20_000 / 3)), rel=0.02)
    difference = worlds.delta(done.vector, workload)
    assert difference.std() == pytest.approx(0.03, rel=0.03)
    (line,) = (tmp_path / "privacy" / "ledger.jsonl").read_text().splitlines()[-1:]
    assert f'"clip_factor":{done.clip_factor!r}' in line
    restarted = trainer(workload, tmp_path)
    again = restarted.train(initial_parameters(workload), **worlds.order(workload))
    assert again.clip_factor == done.clip_factor


def test_a_damaged_release_is_noised_and_charged_anew(tmp_path: Path) -> None:
    workload = private(epsilon=50.0)
    made = trainer(workload, tmp_path)
    words = run(made, workload)
    path = tmp_path / "release" / "round-0.u32"
    path.write_bytes(bytes(len(path.read_bytes())))
    assert not np.array_equal(run(made, workload, attempt=1), words)
    assert charged(made) == 2


def test_the_budget_ends_training_before_anything_is_made(tmp_path: Path) -> None:
    workload = private(noise_multiplier=2.0)
    for index in range(11):
        made = trainer(workload, tmp_path)
        run(made, workload, index)
        assert made.adopt(index)
    for each in (made, trainer(workload, tmp_path)):
        with pytest.raises(PrivacyBudgetExceeded, match="spent by 11 releases"):
            run(each, workload, 11)
        assert not list((tmp_path / "release").iterdir())
    # The last one that was charged may still be sent.
    other = tmp_path / "other"
    made = trainer(private(), other)
    run(made, private())
    words = run(made, private(), 1)
    assert np.array_equal(run(trainer(private(), other), private(), 1, attempt=3), words)
    with pytest.raises(PrivacyBudgetExceeded):
        run(made, private(), 2)


def test_a_ledger_removed_behind_a_trained_state_is_noticed(tmp_path: Path) -> None:
    made = trainer(private(), tmp_path)
    run(made, private())
    made.adopt(0)
    for place in CHARGES:
        (tmp_path / place).unlink()
    with pytest.raises(LedgerIntegrityError):
        trainer(private(), tmp_path)


def test_a_kill_at_any_call_loses_no_charge(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.node.charge_at_every_call", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'cli'}"},
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20


def test_the_secret_is_in_no_file(tmp_path: Path) -> None:
    """Neither the key, nor the stream, nor a draw of it, in any form that it has in memory."""
    workload = private(parameters=4000, quantize="int8")
    secret = bytes((7 * i + 13) % 251 for i in range(32))
    made = Trainer(workload, None, tmp_path, "n0", 1)
    made.account(FEDERATION, lambda count: secret[:count])
    run(made, workload)
    made.adopt(0)
    run(made, workload, 1)
    kept = b"".join(worlds.tree(tmp_path).values())
    assert len(kept) > 16_000
    forms = [secret, secret.hex().encode(), secret[::-1]]
    assert not [form for form in forms if form in kept or form[:8] in kept]


# ---- spent ----


@pytest.mark.parametrize("noisy", [True, False], ids=["private", "plain"])
def test_a_spent_release_is_never_sent_again(tmp_path: Path, noisy: bool) -> None:
    workload = private(epsilon=50.0) if noisy else worlds.noop()
    made = trainer(workload, tmp_path)
    first = run(made, workload)
    made.spend(0)
    for each in (made, trainer(workload, tmp_path)):
        second = run(each, workload, attempt=1)
        assert not np.array_equal(first, second)
    # Not spent, the new one serves later attempts; spent in its turn, it does not.
    assert np.array_equal(run(made, workload, attempt=2), second)
    made.spend(0)
    third = run(trainer(workload, tmp_path), workload, attempt=3)
    assert len({words.tobytes() for words in (first, second, third)}) == 3
    if noisy:
        assert charged(trainer(workload, tmp_path)) == 3


def test_what_was_spent_is_not_made_again_from_the_same_batches(tmp_path: Path) -> None:
    """The vector is gone, its round's mark is not: other batches, so another vector."""
    workload = worlds.noop()
    made = trainer(workload, tmp_path)
    first = run(made, workload)
    made.spend(0)
    (tmp_path / "release" / "round-0.u32").unlink()
    assert not np.array_equal(run(trainer(workload, tmp_path), workload, attempt=1), first)
    fresh = trainer(workload, tmp_path / "fresh")
    assert np.array_equal(run(fresh, workload, attempt=1), first)
    fresh.spend(1)
    assert not np.array_equal(run(fresh, workload, 1), run(made, workload, 1))
    made.discard(1)
    run(made, workload, 2)
    assert not list((tmp_path / "release").glob("*.spent"))


def test_the_world_model_trains_anew_on_other_batches(tmp_path: Path) -> None:
    folder = worlds.data(tmp_path / "arm")
    workload = worlds.small()
    made = worlds.trainer(workload, folder, tmp_path / "state")
    first = made.train(initial_parameters(workload), **worlds.order(workload)).vector.copy()
    made.spend(0)
    again = made.train(initial_parameters(workload), **worlds.order(workload, attempt=1))
    assert not again.reused
    assert not np.array_equal(again.vector, first)
    assert made.adopt(0)


# ---- in its process ----


def test_a_worker_says_what_is_spent_and_stops_at_the_budget(tmp_path: Path) -> None:
    with worker(tmp_path, private()) as w:
        facts = w.configure()
        assert facts.budget is not None
        assert (facts.budget.spent, facts.budget.rounds_left) == (0.0, 2)
        w.attach()
        digest = w.fetch((0, 0), warm_start(w.workload))
        spent = []
        for index in range(2):
            trained = w.train((index, 0), digest)
            assert trained.budget is not None
            spent.append((round(trained.budget.spent, 2), trained.budget.rounds_left))
            assert trained.field_use is not None
            assert 0 < trained.field_use < 1
            w.tell(signals.Close(round=index, digest=digest, adopt=True))
            assert w.hear() == signals.Closed(round=index, adopted=True)
        assert spent == [(4.38, 1), (6.57, 0)]
        w.tell(w.train_command((2, 0), digest))
        failed = w.hear_until(signals.Failed)
        assert isinstance(failed, signals.Failed)
        assert (failed.code, failed.round, failed.fatal) == ("dp_budget_exceeded", 2, False)
        assert "from 6.573 to 8.385" in failed.message
    with worker(tmp_path, private()) as w:
        facts = w.configure()
        assert facts.budget is not None
        assert (facts.budget.releases, facts.budget.rounds_left) == (2, 0)


def test_killed_between_charge_and_send_the_charge_stays(tmp_path: Path) -> None:
    with worker(tmp_path, private()) as w:
        w.configure()
        w.attach()
        digest = w.fetch((0, 0), warm_start(w.workload))
        first = w.train((0, 0), digest)
        w.process.kill()
    with worker(tmp_path, private()) as w:
        facts = w.configure()
        assert facts.budget is not None
        assert first.budget is not None
        assert facts.budget.spent == first.budget.spent
        w.attach()
        w.fetch((0, 1), warm_start(w.workload))
        again = w.train((0, 1), digest)
        assert (again.reused, again.digest, again.budget) == (True, first.digest, first.budget)


# ---- episodes ----


def episodic(**terms: object) -> Workload:
    given = {"enabled": True, "unit": "episode", "sample_rate": 0.5, "epsilon": 1e3}
    return Workload(
        task=worlds.SMALL,
        inner=Inner(steps=6, batch=16),
        objective=Objective(sketch_dim=16),
        privacy=Privacy.model_validate(given | terms),
    )


def episode_trainer(workload: Workload, folder: Path, state: Path) -> Trainer:
    made = Trainer(workload, DataSource(folder / "node0.h5"), state, "n0", 1)
    made.account(FEDERATION)
    return made


def test_episodes_are_charged_step_by_step_and_never_twice_alike(tmp_path: Path) -> None:
    folder, workload = worlds.data(tmp_path / "arm"), episodic()
    vectors = []
    for name in ("a", "b"):
        made = episode_trainer(workload, folder, tmp_path / name)
        vectors.append(run(made, workload))
        assert np.array_equal(run(made, workload, attempt=1), vectors[-1])
        ledger = (tmp_path / name / CHARGES[0]).read_text()
        assert '"steps":6' in ledger
        assert '"rate":0.5' in ledger
        assert charged(made) == 1
        assert made.adopt(0)
    assert not np.array_equal(*vectors)
    assert run(made, workload, 1).size != 0
    assert charged(made) == 2
