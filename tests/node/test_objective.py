import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lensemble.workload import Objective, Workload, WorldModelTask, initial_parameters
from lensemble_node.worker.training.model import ActionHead, WorldModel
from lensemble_node.worker.training.objective import (
    Batch,
    Landmarks,
    directions,
    loss,
    sigreg,
)

torch.set_num_threads(1)


def normal(n: int, d: int, scale: float = 1.0) -> torch.Tensor:
    draw = np.random.Generator(np.random.Philox(9)).standard_normal((n, d)) * scale
    return torch.tensor(draw, dtype=torch.float32)


def slow_sigreg(latents: np.ndarray, sketch: np.ndarray, knots: int) -> float:
    """The same integral over [-3, 3], with complex numbers and every knot on both sides."""
    at = np.linspace(-3, 3, 2 * knots - 1)
    total = 0.0
    for direction in sketch.T:
        empirical = np.exp(1j * np.outer(latents @ direction, at)).mean(axis=0)
        error = np.abs(empirical - np.exp(-(at**2) / 2)) ** 2 * np.exp(-(at**2) / 2)
        total += np.trapezoid(error, at)
    return total / sketch.shape[1]


def test_sigreg_is_the_integral_over_both_sides() -> None:
    latents, sketch = normal(50, 4, 0.7) + 0.3, directions(3, 0, 4, 6)
    slow = slow_sigreg(latents.double().numpy(), sketch.astype(np.float64), 17)
    assert float(sigreg(latents, torch.from_numpy(sketch), 17)) == pytest.approx(slow, rel=1e-4)


def test_sigreg_prefers_a_standard_normal() -> None:
    sketch = torch.from_numpy(directions(0, 0, 6, 32))
    good = float(sigreg(normal(4000, 6), sketch, 17))
    assert good < 0.01
    for worse in (normal(4000, 6, 0.3), normal(4000, 6, 3.0), normal(4000, 6) + 1.0):
        assert float(sigreg(worse, sketch, 17)) > 10 * good
    collapsed = float(sigreg(torch.zeros(100, 6), sketch, 17))
    assert collapsed > 0.3


def test_directions_golden() -> None:
    """All machines draw these; a change would make mixed federations train apart."""
    unit = directions(676122520791145774, 0, 4, 2)
    golden = [[0.79574, 0.05956], [-0.23618, 0.50806], [0.55589, -0.27355], [-0.04486, -0.81456]]
    assert np.allclose(unit, golden, atol=2e-5)
    assert unit.dtype == np.float32


@given(st.integers(0, (1 << 63) - 1), st.integers(0, 10_000))
def test_directions_are_unit_shared_for_ten_steps_and_then_fresh(seed: int, step: int) -> None:
    unit = directions(seed, step, 12, 8)
    assert np.allclose(np.square(unit).sum(axis=0), 1, atol=1e-5)
    assert np.array_equal(unit, directions(seed, step - step % 10, 12, 8))
    assert not np.array_equal(unit, directions(seed, step + 10, 12, 8))


def parts() -> tuple[WorldModel, ActionHead, Batch]:
    task = WorldModelTask()
    model, head = WorldModel(task), ActionHead(task, 2, 0)
    model.load(initial_parameters(Workload()))
    batch = Batch(normal(64 * 4, 6).view(64, 4, 6), normal(64 * 3, 2).view(64, 3, 2))
    return model, head, batch


def test_loss_is_the_weighted_sum_of_its_parts() -> None:
    model, head, batch = parts()
    sketch = torch.from_numpy(directions(1, 0, 12, 32))
    marks = Landmarks(normal(7, 6), normal(7, 12))

    def value(pred: float, sig: float, anc: float) -> float:
        terms = Objective(lambda_pred=pred, lambda_sig=sig, lambda_anc=anc, probe_hash="0" * 64)
        return loss((model, head), batch, sketch, terms, marks).item()

    single = value(1, 0, 0), value(0, 1, 0), value(0, 0, 1)
    assert all(part > 0 for part in single)
    assert value(2, 3, 4) == pytest.approx(2 * single[0] + 3 * single[1] + 4 * single[2], rel=1e-5)
    drift = model.encode(marks.points) - marks.targets
    assert single[2] == pytest.approx((drift.square().sum() / 7).item(), rel=1e-5)


def test_the_target_receives_gradient() -> None:
    model, head, batch = parts()
    batch.observations.requires_grad_(True)
    terms = Objective(lambda_sig=0.0)
    loss((model, head), batch, torch.ones(12, 1), terms).backward()
    assert batch.observations.grad is not None
    assert float(batch.observations.grad[:, -1].abs().max()) > 0
