from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lensemble.errors import DegenerateProcrustes, FrameDriftExceeded, ProbeError
from lensemble.ids import Digest
from lensemble.secagg.field import decode, encode
from lensemble.workload import Gauge, Objective, Privacy, Workload, initial_parameters, layout
from lensemble_node.worker.training import gauge, objective, probe, protect
from lensemble_node.worker.training.model import ActionHead, WorldModel
from lensemble_node.worker.training.noise import SecretNoise
from lensemble_node.worker.training.release import release
from lensemble_node.worker.training.source import DataSource
from tests.node import worlds

torch.set_num_threads(1)
WORKLOAD = worlds.small()
LAYOUT = layout(WORKLOAD)
TASK = worlds.SMALL
PRIOR = initial_parameters(WORKLOAD)
NONE = np.zeros((TASK.latent_dim,) * 2)
POINTS = np.random.Generator(np.random.Philox(1)).normal(size=(400, 6)).astype(np.float32)


def orthogonal(seed: int, width: int = TASK.latent_dim) -> np.ndarray:
    draw = np.random.Generator(np.random.Philox(seed)).normal(size=(width, width))
    return np.linalg.qr(draw)[0]


def trained(seed: int = 0, scale: float = 0.05) -> np.ndarray:
    draw = np.random.Generator(np.random.Philox(seed))
    return (PRIOR + draw.normal(0, scale, LAYOUT.size)).astype(np.float32)


def turned(flat: np.ndarray, turn: np.ndarray) -> np.ndarray:
    copy = flat.copy()
    gauge.turn_weights(LAYOUT.views(copy), turn, TASK.history)
    return copy


def latents(flat: np.ndarray) -> np.ndarray:
    model = WorldModel(TASK)
    model.load(flat)
    return model.latents(torch.from_numpy(POINTS))


# ---- turning weights ----


@pytest.mark.parametrize("seed", range(4))
def test_turned_weights_predict_the_same_in_the_turned_frame(seed: int) -> None:
    """At weights that are not zero, biases included: of full weights, not of differences."""
    turn = orthogonal(seed)
    one, other = WorldModel(TASK), WorldModel(TASK)
    one.load(trained(seed))
    other.load(turned(trained(seed), turn))
    head = ActionHead(TASK, 2, seed)
    observations = torch.from_numpy(POINTS).reshape(-1, TASK.history, 6)
    actions = torch.zeros(len(observations), TASK.history, 2) + 0.3
    rotation = torch.from_numpy(turn.astype(np.float32))
    with torch.no_grad():
        before, after = one.encode(observations), other.encode(observations)
        assert (before @ rotation - after).abs().max() < 1e-5
        embedded = head(actions)
        ahead = one.predict(before, embedded) @ rotation
        assert (ahead - other.predict(after, embedded)).abs().max() < 1e-5
    assert np.abs(turned(turned(trained(seed), turn), turn.T) - trained(seed)).max() < 1e-6


def test_turning_writes_to_nothing_else() -> None:
    flat, moved = trained(), turned(trained(), orthogonal(3))
    before, after = LAYOUT.views(flat), LAYOUT.views(moved)
    written = {name for name in before if before[name].tobytes() != after[name].tobytes()}
    assert written == {
        "encoder.output.weight",
        "encoder.output.bias",
        "predictor.input.weight",
        "predictor.output.weight",
        "predictor.output.bias",
    }
    actions = slice(TASK.history * TASK.latent_dim, None)
    columns = (views["predictor.input.weight"][:, actions] for views in (before, after))
    assert np.array_equal(*columns)


# ---- finding the rotation ----


@given(seed=st.integers(0, 1 << 32), noise=st.sampled_from([0.0, 0.05]))
def test_a_random_frame_is_found(seed: int, noise: float) -> None:
    turn = orthogonal(seed)
    reference = latents(trained())
    draw = np.random.Generator(np.random.Philox(seed + 1))
    moved = reference @ turn.T + noise * reference.std() * draw.normal(size=reference.shape)
    found = gauge.procrustes(moved, reference, NONE)
    assert np.abs(found @ found.T - np.eye(TASK.latent_dim)).max() < 1e-9
    left = gauge.misalignment(moved @ found, reference)
    assert left <= 1.3 * gauge.misalignment(moved, reference @ turn.T) + 1e-9


def test_a_frame_that_has_not_turned_is_left_where_it_is() -> None:
    reference = latents(trained())
    for pull in (NONE, np.eye(TASK.latent_dim)):
        found = gauge.procrustes(reference, reference, pull)
        assert gauge.principal_angles(found).max() < 1e-5


def test_the_pull_leaves_directions_without_variance_alone() -> None:
    draw = np.random.Generator(np.random.Philox(0))
    scales = np.array([2.0, 1.5, 1.0, 1e-2])
    reference = draw.normal(size=(500, 4)) * scales
    moved = reference + 0.05 * draw.normal(size=reference.shape)
    moved[:, 3] = -reference[:, 3]
    plain, pulled = (gauge.procrustes(moved, reference, rho * np.eye(4)) for rho in (0.0, 0.3))
    assert gauge.principal_angles(plain).max() > 170
    assert gauge.principal_angles(pulled).max() < 5


def test_weights_that_have_not_changed_pull_evenly() -> None:
    views = LAYOUT.views(trained())
    pull = gauge.kinship(views, views, TASK.history)
    assert np.trace(pull) == pytest.approx(TASK.latent_dim)
    assert np.linalg.eigvalsh(pull).min() > 0.5
    turn = orthogonal(4)
    moved = LAYOUT.views(turned(trained(), turn))
    assert gauge.polar(gauge.kinship(moved, views, TASK.history)) == pytest.approx(turn.T, abs=1e-6)


def test_reflections_are_a_symmetry_too() -> None:
    reference = latents(trained())
    mirror = np.eye(TASK.latent_dim)
    mirror[2, 2] = -1
    found = gauge.procrustes(reference @ mirror, reference, NONE)
    assert np.linalg.det(found) < 0
    assert np.abs(found - mirror).max() < 1e-6


def test_angles_are_those_of_the_planes() -> None:
    turn = np.eye(5)
    for plane, degrees in ((0, 30.0), (2, 80.0)):
        c, s = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
        turn[plane : plane + 2, plane : plane + 2] = [[c, -s], [s, c]]
    basis = orthogonal(9, 5)
    angles = np.sort(gauge.principal_angles(basis @ turn @ basis.T))
    assert angles == pytest.approx([0, 30, 30, 80, 80], abs=1e-5)


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
def test_a_degenerate_spectrum_is_judged_relative_to_its_largest_value(scale: float) -> None:
    draw = np.random.Generator(np.random.Philox(0))
    reference = draw.normal(size=(100, 3)) * scale
    none = np.zeros((3, 3))
    assert gauge.procrustes(reference, reference, none) == pytest.approx(np.eye(3))
    flat = reference.copy()
    flat[:, 1] = flat[:, 0]
    with pytest.raises(DegenerateProcrustes, match="ratio below 1e-06"):
        gauge.procrustes(flat, flat, none)


def test_effective_dimension_counts_the_directions() -> None:
    draw = np.random.Generator(np.random.Philox(0)).normal(size=(20_000, 6))
    assert gauge.participation_ratio(draw) == pytest.approx(6, rel=0.01)
    assert gauge.participation_ratio(draw * [1, 1, 1, 0, 0, 0]) == pytest.approx(3, rel=0.01)
    assert gauge.participation_ratio(np.zeros((10, 4))) == 0


# ---- the stage ----


def sight(flat: np.ndarray) -> gauge.Sight:
    return gauge.Sight(latents(flat), LAYOUT.views(flat))


def aligned(flat: np.ndarray, **terms: object) -> gauge.Alignment:
    made = Gauge(**({"align": True} | terms))
    return gauge.Alignment(made, sight(PRIOR), sight(flat), TASK.history)


@pytest.mark.parametrize("rho", [0.0, 0.3])
def test_a_turned_participant_releases_what_it_would_have_released(rho: float) -> None:
    here = aligned(trained(), rho=rho, threshold_degrees=0.0)
    straight = here.stage(LAYOUT)(trained().copy())
    for seed in range(5):
        moved = turned(trained(), orthogonal(seed))
        there = aligned(moved, rho=rho)
        assert there.drift.aligned
        assert there.drift.before > 0.5
        assert there.drift.after == pytest.approx(here.drift.after, rel=1e-3)
        assert np.abs(there.stage(LAYOUT)(moved.copy()) - straight).max() < 1e-5


def test_alignment_fires_above_the_threshold_only() -> None:
    small = trained(scale=0.005)
    quiet = aligned(small)
    assert not quiet.drift.aligned
    assert quiet.drift.rms_degrees < 15
    assert quiet.drift.after == quiet.drift.before
    assert np.array_equal(quiet.stage(LAYOUT)(small.copy()), small)
    assert aligned(small, threshold_degrees=0.0).drift.aligned
    assert not aligned(turned(small, orthogonal(0)), align=False).drift.aligned


def test_latents_that_do_not_say_how_they_turned_are_released_with_a_warning() -> None:
    flat = trained()
    views = LAYOUT.views(flat)
    views["encoder.output.weight"][...] = 0
    views["encoder.output.bias"][...] = 0
    found = gauge.Alignment(Gauge(align=True, rho=0.0), sight(flat), sight(flat), TASK.history)
    assert not found.drift.aligned
    assert "released without alignment" in found.drift.warning
    assert np.array_equal(found.stage(LAYOUT)(flat.copy()), flat)


def test_what_is_nowhere_near_the_frame_is_not_released() -> None:
    far = trained(scale=2.0)
    with pytest.raises(FrameDriftExceeded, match=r"gauge.limit is 1"):
        aligned(far, limit=1.0)
    assert aligned(far, align=False, limit=1.0).drift.after > 1
    assert aligned(far).drift.after > 1


def test_alignment_comes_before_clipping_noise_rounding_and_encoding() -> None:
    """Each stage on the result of the one before: another order gives another vector."""
    private = Privacy(enabled=True, clip_norm=0.25, noise_multiplier=1e-3)
    workload = Workload(
        task=TASK,
        objective=Objective(probe_hash="ab" * 32),
        gauge=Gauge(align=True),
        privacy=private,
        release={"quantize": "int8"},
    )
    moved = turned(trained(), orthogonal(0))
    found = gauge.Alignment(workload.gauge, sight(PRIOR), sight(moved), TASK.history)
    assert found.drift.aligned

    def entropy(count: int) -> bytes:
        return np.random.Generator(np.random.Philox(5)).bytes(count)

    protection = protect.Protection(workload, SecretNoise(entropy))
    pipeline = replace(protection.pipeline(), on_weights=(found.stage(LAYOUT),))
    sent = release(LAYOUT.views(moved.copy()), PRIOR, LAYOUT, pipeline)

    difference = found.stage(LAYOUT)(moved.copy()) - PRIOR
    assert np.linalg.norm(moved - PRIOR) > 1.5 * np.linalg.norm(difference)
    factor = protect.clip(difference, private.clip_norm)
    assert protection.clip_factor == pytest.approx(factor)
    SecretNoise(entropy).add_to(difference, private.noise_sd)
    expected = protect.quantize(difference)
    found = decode(encode(sent.values, workload.room), workload.field)
    assert np.abs(found - expected).max() <= 2.0 ** -(workload.field.k + 1)


# ---- the rotation anchor ----


def test_the_rotation_anchor_has_the_gradient_it_says() -> None:
    draw = np.random.Generator(np.random.Philox(2))
    targets = torch.from_numpy(draw.normal(size=(20, 4)))
    moved = torch.from_numpy(targets.numpy() + 0.3 * draw.normal(size=(20, 4)))
    moved.requires_grad_(True)
    assert torch.autograd.gradcheck(lambda z: objective.turned(z, targets), (moved,))
    same = targets.clone().requires_grad_(True)
    torch.autograd.backward(objective.turned(same, targets))
    assert same.grad is not None
    assert torch.isfinite(same.grad).all()


def test_the_rotation_anchor_costs_turning_and_nothing_else() -> None:
    draw = np.random.Generator(np.random.Philox(2))
    targets = torch.from_numpy(draw.normal(size=(50, 4)))
    assert float(objective.turned(targets * 1.7, targets)) < 1e-12
    turn = torch.from_numpy(orthogonal(1, 4))
    expected = float((turn.T - torch.eye(4)).square().sum())
    assert float(objective.turned(targets @ turn, targets)) == pytest.approx(expected, rel=0.05)


# ---- in a round ----


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return worlds.data(tmp_path_factory.mktemp("arm"))


def test_a_round_with_a_probe_says_how_the_frame_has_turned(folder: Path, tmp_path: Path) -> None:
    made = probe.build(DataSource(folder / "public.h5"), WORKLOAD, PRIOR, 20)
    made.write(tmp_path / "probe")
    terms = Objective(probe_hash=made.digest)
    plain = worlds.small().model_copy(update={"objective": terms})
    turning = plain.model_copy(update={"gauge": Gauge(align=True, threshold_degrees=0.0)})
    vectors = []
    for name, workload in (("plain", plain), ("turning", turning)):
        trainer = worlds.trainer(workload, folder, tmp_path / name)
        if workload.gauge.align:
            with pytest.raises(ProbeError, match="none is pinned"):
                trainer.train(PRIOR, **worlds.order(workload))
        trainer.pin(tmp_path / "probe", Digest(made.digest))
        done = trainer.train(PRIOR, **worlds.order(workload))
        assert done.drift is not None
        assert done.drift.aligned == workload.gauge.align
        assert done.drift.before > 0
        assert 1 <= done.drift.dimension <= TASK.latent_dim
        again = worlds.trainer(workload, folder, tmp_path / name)
        assert again.train(PRIOR, **worlds.order(workload)).drift == done.drift
        vectors.append(done.vector.copy())
    assert not np.array_equal(*vectors)
    bare = worlds.trainer(WORKLOAD, folder, tmp_path / "bare")
    assert bare.train(PRIOR, **worlds.order(WORKLOAD)).drift is None
