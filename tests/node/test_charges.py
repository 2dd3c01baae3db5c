import os
import shutil
import stat
from pathlib import Path

import pytest

from lensemble.errors import LedgerIntegrityError, PrivacyBudgetExceeded, StorageError
from lensemble.ids import Digest
from lensemble.privacy.accountant import Mechanism, epsilon
from lensemble.state_dir import CHARGES
from lensemble.workload import FieldTerms, Privacy, Workload
from lensemble_node.worker.training.charges import Account, Charges

FEDERATION, ROOT = "5" * 32, Digest("a" * 64)


def private(**terms: object) -> Workload:
    return Workload(
        field=FieldTerms(k=16), privacy=Privacy.model_validate({"enabled": True} | terms)
    )


def opened(
    state: Path,
    workload: Workload | None = None,
    federation: str = FEDERATION,
    root: Digest = ROOT,
    trained: bool = False,
) -> Charges:
    account = Account(federation, root, workload or private())
    return Charges(state, account, trained=trained)


def vector(number: int) -> Digest:
    return Digest(f"{number:064x}")


def spent(charges: Charges) -> float:
    return charges.standing().epsilon


def one(count: int) -> float:
    return epsilon({Mechanism(1.0): count}, 1e-5)


def test_a_charge_survives_and_counts_once(tmp_path: Path) -> None:
    charges = opened(tmp_path)
    assert (spent(charges), charges.standing().rounds_left) == (0.0, 2)
    charges.charge(vector(1), 0, 0)
    charges.charge(vector(1), 0, 1)
    for each in (charges, opened(tmp_path)):
        standing = each.standing()
        assert standing.epsilon == pytest.approx(4.377, abs=1e-3)
        assert (standing.releases, standing.rounds_left) == (1, 1)
        assert (standing.budget, standing.delta, standing.unit) == (8.0, 1e-5, "participant")


def test_the_budget_ends_at_the_planned_release_and_not_before(tmp_path: Path) -> None:
    workload = private(noise_multiplier=2.0)
    planned = opened(tmp_path, workload).standing().rounds_left
    assert planned == 11
    for number in range(planned):
        charges = opened(tmp_path, workload)
        charges.require_room()
        charges.charge(vector(number), number, 0)
    for each in (charges, opened(tmp_path, workload)):
        with pytest.raises(PrivacyBudgetExceeded, match=r"from 7\.\d+ to 8\.\d+ .* budget is 8"):
            each.require_room()
        with pytest.raises(PrivacyBudgetExceeded):
            each.charge(vector(99), 99, 0)
        each.charge(vector(0), 0, 5)
        assert spent(each) == pytest.approx(epsilon({Mechanism(2.0): 11}, 1e-5))


def test_what_a_charge_is_bound_to(tmp_path: Path) -> None:
    opened(tmp_path).charge(vector(1), 0, 0)
    other_root, other_federation = Digest("b" * 64), "6" * 32
    assert spent(opened(tmp_path, root=other_root)) == one(1)
    assert spent(opened(tmp_path, federation=other_federation)) == one(1)
    assert spent(opened(tmp_path, private(epsilon=20.0))) == one(1)
    assert spent(opened(tmp_path, federation=other_federation, root=other_root)) == 0.0


def test_different_noises_compose(tmp_path: Path) -> None:
    opened(tmp_path).charge(vector(1), 0, 0)
    more = private(noise_multiplier=2.0)
    opened(tmp_path, more).charge(vector(2), 1, 0)
    wanted = epsilon({Mechanism(1.0): 1, Mechanism(2.0): 1}, 1e-5)
    assert spent(opened(tmp_path, more)) == pytest.approx(wanted)


def test_episodes_promise_nothing_about_the_participant(tmp_path: Path) -> None:
    episodes = private(unit="episode", noise_multiplier=2.0, sample_rate=0.1)
    charges = opened(tmp_path, episodes)
    charges.charge(vector(1), 0, 0)
    assert spent(charges) == pytest.approx(epsilon({Mechanism(2.0, 0.1): 50}, 1e-5))
    with pytest.raises(PrivacyBudgetExceeded, match="bounds nothing for the participant"):
        opened(tmp_path)


# ---- files ----


@pytest.mark.parametrize("gone", [*CHARGES, "privacy", "local"])
def test_removing_a_part_resets_nothing(tmp_path: Path, gone: str) -> None:
    opened(tmp_path).charge(vector(1), 0, 0)
    place = tmp_path / gone
    shutil.rmtree(place) if place.is_dir() else place.unlink()
    assert spent(opened(tmp_path)) == one(1)
    first, second = (tmp_path / place for place in CHARGES)
    assert first.read_bytes() == second.read_bytes()


def test_a_ledger_that_is_gone_while_rounds_were_trained_is_an_error(tmp_path: Path) -> None:
    assert spent(opened(tmp_path)) == 0.0
    with pytest.raises(LedgerIntegrityError, match="has no charge of this workload"):
        opened(tmp_path, trained=True)
    opened(tmp_path).charge(vector(1), 0, 0)
    assert spent(opened(tmp_path, trained=True)) == one(1)


def test_whatever_is_cut_off_the_end_epsilon_never_falls(tmp_path: Path) -> None:
    """Every length of either file, the other whole, cut as well, or one charge behind."""
    start = tmp_path / "start"
    charges = opened(start, private(epsilon=50.0))
    lengths = []
    for number in range(3):
        charges.charge(vector(number), number, 0)
        lengths.append((start / CHARGES[0]).stat().st_size)
    whole = (start / CHARGES[0]).read_bytes()
    for cut in [*range(lengths[1], lengths[2] + 1, 29), lengths[2] - 1]:
        for others in (len(whole), cut, lengths[1]):
            state = tmp_path / f"cut-{cut}-{others}"
            shutil.copytree(start, state)
            (state / CHARGES[0]).write_bytes(whole[:cut])
            (state / CHARGES[1]).write_bytes(whole[:others])
            known = 3 if others == len(whole) or cut > lengths[1] else 2
            again = opened(state, private(epsilon=50.0))
            assert spent(again) == one(known)
            again.charge(vector(7), 7, 0)
            assert spent(opened(state, private(epsilon=50.0))) == one(known + 1)
            assert (state / CHARGES[0]).read_bytes() == (state / CHARGES[1]).read_bytes()
            shutil.rmtree(state)


def test_a_rotten_last_line_counts_and_stays_counted(tmp_path: Path) -> None:
    opened(tmp_path).charge(vector(1), 0, 0)
    for place in CHARGES:
        raw = bytearray((tmp_path / place).read_bytes())
        raw[20] ^= 1
        (tmp_path / place).write_bytes(raw)
    for _ in range(3):
        assert spent(opened(tmp_path)) == one(1)
    assert b'"note":"torn"' in (tmp_path / CHARGES[0]).read_bytes()


def test_damage_before_the_end_stops_everything(tmp_path: Path) -> None:
    charges = opened(tmp_path)
    for number in range(2):
        charges.charge(vector(number), number, 0)
    raw = bytearray((tmp_path / CHARGES[0]).read_bytes())
    raw[20] ^= 1
    (tmp_path / CHARGES[0]).write_bytes(raw)
    with pytest.raises(LedgerIntegrityError, match="line 1"):
        opened(tmp_path)


def test_two_different_ledgers_are_not_mixed(tmp_path: Path) -> None:
    for name, number in (("one", 1), ("two", 2)):
        opened(tmp_path / name).charge(vector(number), 0, 0)
    shutil.copy(tmp_path / "two" / CHARGES[0], tmp_path / "one" / CHARGES[0])
    with pytest.raises(LedgerIntegrityError, match="differs from its copy"):
        opened(tmp_path / "one")


@pytest.mark.parametrize("place", CHARGES)
def test_a_disk_that_refuses_keeps_what_was_written(tmp_path: Path, place: str) -> None:
    charges = opened(tmp_path, private(epsilon=50.0))
    charges.charge(vector(1), 0, 0)
    path = tmp_path / place
    aside = path.with_name("aside")
    path.rename(aside)
    path.mkdir()
    with pytest.raises(StorageError):
        charges.charge(vector(2), 1, 0)
    path.rmdir()
    aside.rename(path)
    charges.charge(vector(2), 1, 0)
    assert spent(charges) == one(2)
    assert spent(opened(tmp_path, private(epsilon=50.0))) == one(2)


def test_the_ledger_is_for_this_user_only(tmp_path: Path) -> None:
    opened(tmp_path).charge(vector(1), 0, 0)
    for place in CHARGES:
        assert stat.S_IMODE(os.stat(tmp_path / place).st_mode) == 0o600
