import numpy as np
import pytest

from lensemble.errors import ContractViolation, ResidencyViolation
from lensemble.secagg.field import FieldBoundExceeded, decode, encode
from lensemble.secagg.plan import FieldPlan
from lensemble.workload import FieldTerms, Workload, initial_parameters, layout
from lensemble_node.worker.training.noise import SecretNoise
from lensemble_node.worker.training.release import Pipeline, gather, release
from lensemble_node.worker.training.words import Encoder

WORKLOAD = Workload()
LAYOUT = layout(WORKLOAD)
PRIOR = initial_parameters(WORKLOAD)


def named(flat: np.ndarray) -> dict[str, np.ndarray]:
    return dict(LAYOUT.views(flat))


def moved(seed: int = 0, scale: float = 0.01) -> np.ndarray:
    draw = np.random.Generator(np.random.Philox(seed))
    return (PRIOR + draw.normal(0, scale, LAYOUT.size)).astype(np.float32)


def test_what_leaves_is_the_difference() -> None:
    local = moved()
    sent = release(named(local), PRIOR, LAYOUT)
    difference = local - PRIOR
    found = decode(encode(sent.values, WORKLOAD.field), WORKLOAD.field)
    assert np.abs(found - difference).max() <= 2.0**-25
    assert sent.extent.l2_norm == pytest.approx(float(np.linalg.norm(difference.astype("f8"))))
    assert sent.extent.max_abs == float(np.abs(difference).max())
    assert np.array_equal(local, moved())


@pytest.mark.parametrize("name", ["head.input.weight", "input.weight", "optimizer.exp_avg"])
def test_a_local_tensor_never_leaves(name: str) -> None:
    tensors = named(moved()) | {name: np.zeros(3, dtype=np.float32)}
    with pytest.raises(ResidencyViolation, match=name):
        release(tensors, PRIOR, LAYOUT)


def test_missing_and_misshapen_tensors_are_refused() -> None:
    tensors = named(moved())
    del tensors["encoder.input.bias"]
    with pytest.raises(ContractViolation, match=r"encoder\.input\.bias.*missing"):
        gather(tensors, LAYOUT)
    for bad in (np.zeros(95, np.float32), np.zeros(96), np.zeros((96, 1), np.float32)):
        with pytest.raises(ContractViolation, match=r"encoder\.input\.bias"):
            gather(tensors | {"encoder.input.bias": bad}, LAYOUT)


def test_a_difference_over_the_bound_is_not_released() -> None:
    local = moved()
    local[1234] += 3.0
    values = release(named(local), PRIOR, LAYOUT).values
    encoder = Encoder(FieldPlan(LAYOUT, WORKLOAD.field), WORKLOAD.field, SecretNoise())
    with pytest.raises(FieldBoundExceeded, match="coordinate 1234"):
        list(encoder.words([values[:700], values[700:]]))


def test_stages_run_in_the_fixed_order_on_what_they_are_for() -> None:
    seen: list[tuple[str, float]] = []

    def stage(label: str, factor: float):  # noqa: ANN202
        def apply(flat: np.ndarray) -> np.ndarray:
            seen.append((label, float(flat[0])))
            return flat * np.float32(factor)

        return apply

    local = moved()
    pipeline = Pipeline((stage("align", 1.0),), (stage("clip", 0.5), stage("noise", 1.0)))
    sent = release(named(local), PRIOR, LAYOUT, pipeline)
    first = float(local[0] - PRIOR[0])
    assert [label for label, _ in seen] == ["align", "clip", "noise"]
    assert [value for _, value in seen] == pytest.approx([float(local[0]), first, first / 2])
    half = decode(encode(sent.values, FieldTerms()), FieldTerms())
    assert np.abs(half - (local - PRIOR) / 2).max() <= 2.0**-25
