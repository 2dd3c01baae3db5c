import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lensemble.errors import ContractViolation, SecureAggregationError
from lensemble.secagg import field
from lensemble.wire.messages import FieldParams
from lensemble.workload import FieldTerms

TERMS = FieldTerms(k=24, n_max=64)


def f32(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def test_golden_words() -> None:
    words = field.encode(f32(0.0, 1.0, -1.0, 2**-24, -(2**-24), 2**-25, 3 * 2**-25), TERMS)
    assert words.tolist() == [0, 1 << 24, (1 << 32) - (1 << 24), 1, (1 << 32) - 1, 0, 2]


def test_both_kinds_of_terms_are_one_field() -> None:
    other = FieldParams(k=24, n_max=64)
    values = np.linspace(-1.9, 1.9, 1001, dtype=np.float32)
    assert np.array_equal(field.encode(values, TERMS), field.encode(values, other))
    assert field.bound(other) == TERMS.bound


@given(
    hnp.arrays(np.float32, st.integers(1, 300), elements=st.floats(-1.75, 1.75, width=32)),
    st.integers(8, 24),
)
def test_decode_undoes_encode_to_half_a_step(values: np.ndarray, k: int) -> None:
    terms = FieldTerms(k=k, n_max=64)
    back = field.decode(field.encode(values, terms), terms)
    assert np.all(np.abs(back - values.astype(np.float64)) <= 0.5 * 2.0**-k)


def test_rounding_in_float32_equals_rounding_in_float64() -> None:
    values = np.random.Generator(np.random.Philox(1)).normal(0, 0.3, 200_000).astype(np.float32)
    exact = np.rint(values.astype(np.float64) * 2.0**24).astype(np.int64).astype(np.uint32)
    assert np.array_equal(field.encode(values, TERMS), exact)


@pytest.mark.parametrize("bad", [2.0, -2.0, 1e30, float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("index", [0, 65_535, 65_536, 70_000])
def test_a_coordinate_over_the_bound_is_named(bad: float, index: int) -> None:
    values = np.zeros(70_001, dtype=np.float32)
    values[index] = bad
    with pytest.raises(field.FieldBoundExceeded, match=f"coordinate {index} of the update is"):
        field.encode(values, TERMS)


@pytest.mark.parametrize(("k", "n_max"), list(itertools.product((8, 20, 24, 30), (1, 3, 64, 1000))))
def test_the_bound_is_tight_and_n_max_summands_never_wrap(k: int, n_max: int) -> None:
    terms = FieldParams(k=k, n_max=n_max)
    most = np.float32(field.bound(terms))
    if float(most) > field.bound(terms):  # float32 rounded it up: that value must be refused
        with pytest.raises(field.FieldBoundExceeded):
            field.encode(f32(most), terms)
        most = np.nextafter(most, np.float32(0))
    words = field.encode(f32(most, -most), terms)
    total = np.zeros(2, dtype=np.uint32)
    for _ in range(n_max):
        field.fold(total, words)
    assert field.decode(total, terms).tolist() == [n_max * float(most), -n_max * float(most)]


@given(st.permutations(range(5)))
def test_a_sum_does_not_depend_on_order(order: list[int]) -> None:
    generator = np.random.Generator(np.random.Philox(7))
    updates = [generator.normal(0, 0.1, 97).astype(np.float32) for _ in range(5)]
    total = np.zeros(97, dtype=np.uint32)
    for index in order:
        field.fold(total, field.encode(updates[index], TERMS))
    plain = sum(np.rint(u.astype(np.float64) * 2**24) for u in updates)
    assert np.array_equal(field.decode(total, TERMS) * 2**24, plain)


def test_fold_and_encode_refuse_other_shapes_and_types() -> None:
    total = np.zeros(3, dtype=np.uint32)
    with pytest.raises(ContractViolation):
        field.fold(total, np.zeros(2, dtype=np.uint32))
    with pytest.raises(ContractViolation):
        field.fold(total, np.zeros(3, dtype=np.int64))
    with pytest.raises(ContractViolation):
        field.encode(np.zeros(3), TERMS)
    with pytest.raises(ContractViolation):
        field.encode(np.zeros((1, 3), dtype=np.float32), TERMS)
    with pytest.raises(ContractViolation):
        field.encode(f32(1, 2, 3), TERMS, out=np.zeros(2, dtype=np.uint32))


def test_check_sum_tells_a_left_over_mask_from_a_sum() -> None:
    generator = np.random.Generator(np.random.Philox(3))
    honest = field.encode(generator.normal(0, 0.05, 4096).astype(np.float32), TERMS)
    field.check_sum(honest, TERMS, 1)
    masked = generator.integers(0, 1 << 32, 4096, dtype=np.uint32)
    for contributors in (1, 64):
        with pytest.raises(SecureAggregationError):
            field.check_sum(masked, TERMS, contributors)
    for contributors in (0, 65):
        with pytest.raises(SecureAggregationError):
            field.check_sum(honest, TERMS, contributors)
