"""Narrow words: what leaves, what stays, and whose it is."""

import io
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lensemble.errors import CheckpointIntegrityError, ContractViolation
from lensemble.params import layout_of
from lensemble.secagg.field import FieldBoundExceeded
from lensemble.secagg.plan import FieldPlan
from lensemble.workload import FieldTerms, initial_parameters, layout
from lensemble_node.worker.training.local_round import Trainer
from lensemble_node.worker.training.noise import SecretNoise
from lensemble_node.worker.training.words import RESIDUAL, Encoder, Residual
from tests.node import worlds

LAYOUT = layout_of({"encoder.a": (301,), "encoder.b": (7,), "predictor.c": (1000,)})
TERMS = FieldTerms(n_max=4)
NARROW = FieldPlan(LAYOUT, TERMS, bytes([64 + 14, 0, 64 + 10]))
WIDE = FieldPlan(LAYOUT, TERMS)


def drawn(seed: int, spread: float = 0.02) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, spread, LAYOUT.size).astype(np.float32)


def chance(seed: int) -> SecretNoise:
    return SecretNoise(np.random.default_rng(seed).bytes)


def cut(values: np.ndarray, size: int) -> list[np.ndarray]:
    return [values[at : at + size].copy() for at in range(0, len(values), size)]


def encoded(
    pieces: Iterable[np.ndarray], plan: FieldPlan, due: Residual | None, left: Path, seed: int = 0
) -> tuple[np.ndarray, list[int]]:
    """What the words of the blob stand for, and its tail."""
    with left.open("wb") as file:
        encoder = Encoder(plan, TERMS, chance(seed), due, file)
        raw = b"".join(each.tobytes() for each in encoder.words(pieces))
    assert len(raw) == plan.nbytes
    found = np.empty(LAYOUT.size)
    plan.decode(0, memoryview(raw), found)
    return found, np.frombuffer(raw[plan.tail :], dtype="<u4").tolist()


def residual(path: Path) -> np.ndarray:
    found = np.zeros(LAYOUT.size, dtype=np.float32)
    Residual(path, LAYOUT).add_to(0, found)
    return found


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 1400), st.integers(0, 1000), st.sampled_from([0.02, 0.5, 1.0]))
def test_what_leaves_and_what_stays_are_the_difference(
    tmp_path_factory: pytest.TempPathFactory, size: int, seed: int, spread: float
) -> None:
    path = tmp_path_factory.mktemp("words") / RESIDUAL
    values = drawn(seed, spread)
    found, tail = encoded(cut(values, size), NARROW, None, path, seed)
    stays = residual(path)
    step = np.concatenate([np.full(301, 2.0**-14), np.full(7, 2.0**-24), np.full(1000, 2.0**-10)])
    most = np.where(step == 2.0**-24, np.inf, NARROW.limit * step)
    assert np.abs(found).max(where=np.isfinite(most), initial=0) <= most[301 + 7]
    whole = np.abs(values) <= most
    # bfloat16 has 8 bits of what is left; of what was cut off, which is more, likewise.
    slack = np.abs(values - found) * 2.0**-8 + step * 2.0**-10
    slack[301:308] = 2.0**-25
    assert (np.abs(found + stays - values) <= slack).all()
    assert (np.abs(values - found)[whole] <= step[whole]).all()
    assert tail == [1, int((~whole[:301]).sum()), int((~whole[308:]).sum())]
    assert not stays[301:308].any()


def test_rounding_is_right_on_average_and_by_chance(tmp_path: Path) -> None:
    values = np.full(LAYOUT.size, 0.3 * 2.0**-10, dtype=np.float32)
    found, _ = encoded([values.copy()], NARROW, None, tmp_path / "a", 1)
    steps = found[308:] * 2.0**10
    assert set(steps) == {0.0, 1.0}
    assert abs(steps.mean() - 0.3) < 5 * np.sqrt(0.21 / 1000)
    again, _ = encoded([values.copy()], NARROW, None, tmp_path / "b", 2)
    assert not np.array_equal(again, found)


def test_what_rounding_leaves_is_sent_later_whole(tmp_path: Path) -> None:
    """Twenty differences, some far over the limit: their sum is off by less than two steps."""
    due, sent, wanted = None, np.zeros(LAYOUT.size), np.zeros(LAYOUT.size)
    for number in range(40):
        values = drawn(number, 0.05) if number < 20 else np.zeros(LAYOUT.size, np.float32)
        if number == 3:
            values[400] = 20.0
        wanted += values
        path = tmp_path / str(number)
        found, tail = encoded(cut(values, 500), NARROW, due, path, number)
        assert (tail[2] > 0) == (number in (3, 4))
        sent += found
        due = Residual(path, LAYOUT)
    assert (np.abs(sent - wanted)[308:] <= 2 * 2.0**-10).all()
    assert (np.abs(sent - wanted)[:301] <= 2 * 2.0**-14).all()
    found, _ = encoded([np.zeros(LAYOUT.size, np.float32)], WIDE, due, tmp_path / "wide")
    off = np.abs(sent + found - wanted)
    assert off[400] <= 20.0 * 2.0**-9
    assert np.delete(off, 400).max() < 1e-4
    assert not residual(tmp_path / "wide").any()


def test_the_narrow_field_refuses_what_the_wide_one_refuses(tmp_path: Path) -> None:
    for value in (np.nan, np.inf, -1000.0):
        values = drawn(0)
        values[777] = value
        with pytest.raises(FieldBoundExceeded, match="coordinate 777"):
            encoded(cut(values, 300), NARROW, None, tmp_path / "x")
    with pytest.raises(ContractViolation, match="nowhere"):
        Encoder(NARROW, TERMS, chance(0))


def test_a_residual_that_is_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / RESIDUAL
    encoded([drawn(0)], NARROW, None, path)
    sound = path.read_bytes()
    for bad in (b"", b"LNSRESID", sound[:-2], sound + b"xx", b"X" + sound[1:], sound[:20]):
        path.write_bytes(bad or b"-")
        with pytest.raises(CheckpointIntegrityError, match="is no residual"):
            Residual(path, LAYOUT)
    path.write_bytes(sound)
    with pytest.raises(CheckpointIntegrityError, match=r"another layout|tensors"):
        Residual(path, layout_of({"encoder.a": (301,)}))


# ---- the life of a residual ----

WORKLOAD = worlds.noop(2000)
PRIOR = initial_parameters(WORKLOAD)
CODE = bytes([64 + 16]) * len(layout(WORKLOAD).tensors)
PLAN = FieldPlan(layout(WORKLOAD), WORKLOAD.room, CODE)


def trainer(state: Path) -> Trainer:
    return Trainer(WORKLOAD, None, state, "n0", 1)


def release(node: Trainer, index: int, attempt: int = 0, code: bytes = CODE) -> np.ndarray:
    """What the release of that round stands for."""
    done = node.train(PRIOR, **worlds.order(WORKLOAD, index, attempt), plan=code)
    assert done.plan.code == code
    found = np.empty(done.plan.layout.size)
    done.plan.decode(0, done.vector.data.cast("B"), found)
    return found


def true(index: int, tmp_path: Path) -> np.ndarray:
    """The difference of that round, from a node that has rounded nothing yet."""
    return release(trainer(tmp_path / f"true {index}"), index, code=b"")


def test_what_counted_is_carried_on_and_what_did_not_is_not(tmp_path: Path) -> None:
    node = trainer(tmp_path / "s")
    exact = [true(index, tmp_path) for index in range(5)]
    path = tmp_path / "s" / "local" / RESIDUAL
    first = release(node, 0)
    assert not path.exists()
    assert node.adopt(0)
    kept = path.read_bytes()
    # A round that did not count, twice over, and a restart: what was left of round 0 stays due.
    release(node, 1)
    node.discard(1)
    assert path.read_bytes() == kept
    release(node, 2)
    node = trainer(tmp_path / "s")
    node.discard(2)
    assert path.read_bytes() == kept
    second = release(node, 3)
    assert node.adopt(3)
    assert path.read_bytes() != kept
    last = release(node, 4, code=b"")
    assert node.adopt(4)
    counted = exact[0] + exact[3] + exact[4]
    assert np.abs(first + second - exact[0] - exact[3]).max() < 2.0**-16 * 1.01
    assert np.abs(first + second + last - counted).max() < 2.0**-22
    # Nothing is due any more.
    assert np.array_equal(release(node, 5, code=b""), true(5, tmp_path))


def test_a_retry_sends_the_same_words_and_another_plan_other_ones(tmp_path: Path) -> None:
    node = trainer(tmp_path / "s")
    first = release(node, 0)
    for again in (node, trainer(tmp_path / "s")):
        assert np.array_equal(release(again, 0, attempt=1), first)
    coarse = release(node, 0, 2, bytes([64 + 12]) * len(CODE))
    assert np.array_equal(coarse, np.rint(coarse * 2.0**12) * 2.0**-12)
    node.spend(0)
    assert not np.array_equal(release(node, 0, 3, bytes([64 + 12]) * len(CODE)), coarse)


def test_a_node_killed_between_its_release_and_the_commit_has_what_counted(tmp_path: Path) -> None:
    first = release(trainer(tmp_path / "s"), 0)
    node = trainer(tmp_path / "s")
    assert node.adopt(0)
    second = release(node, 1, code=b"")
    due = true(0, tmp_path) + true(1, tmp_path)
    assert np.abs(first + second - due).max() < 2.0**-22


@pytest.mark.parametrize("moved", range(1, 4))
def test_a_move_that_was_cut_short_is_finished_with_its_residual(
    tmp_path: Path, moved: int
) -> None:
    node = trainer(tmp_path / "s")
    release(node, 0)
    local = tmp_path / "s" / "local"
    decided = local / "adopt-0"
    (local / "pending-0").rename(decided)
    due = (decided / RESIDUAL).read_bytes()
    names = sorted(each.name for each in decided.iterdir())
    for name in names[:moved]:
        os.replace(decided / name, local / name)
    node = trainer(tmp_path / "s")
    assert (local / RESIDUAL).read_bytes() == due
    assert node.adopt(0)


def test_the_residual_of_another_workload_is_not_added(tmp_path: Path) -> None:
    node = trainer(tmp_path / "s")
    release(node, 0)
    node.adopt(0)
    other = WORKLOAD.model_copy(update={"root_seed": 9})
    theirs = Trainer(other, None, tmp_path / "s", "n0", 1)
    fresh = Trainer(other, None, tmp_path / "f", "n0", 1)
    order = worlds.order(other, 1)
    assert np.array_equal(theirs.train(PRIOR, **order).vector, fresh.train(PRIOR, **order).vector)
    assert theirs.adopt(1)
    assert not residual_bytes(tmp_path / "s")


def residual_bytes(state: Path) -> bytes:
    found = np.zeros(layout(WORKLOAD).size, dtype=np.float32)
    Residual(state / "local" / RESIDUAL, layout(WORKLOAD)).add_to(0, found)
    return b"" if not found.any() else found.tobytes()


def test_no_second_copy_of_a_model_is_held() -> None:
    """Words come piece by piece: what is alive at once does not grow with the model."""
    big = layout_of({"encoder.a": (1 << 21,)})
    plan = FieldPlan(big, TERMS, bytes([64 + 14]))
    zeros = np.zeros(1 << 21, dtype=np.float32)
    sink = io.BytesIO()
    words = Encoder(plan, TERMS, chance(0), None, sink).words([zeros])
    assert max(each.nbytes for each in words) <= 1 << 17
