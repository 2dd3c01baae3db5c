import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lensemble.errors import AggregationError
from lensemble.outer_step import OuterStep, StepTerms, step_terms
from lensemble.params import FlatParameters, layout_of
from lensemble.secagg.plan import FieldPlan
from lensemble.workload import Workload

GOLDEN = Path(__file__).parent.parent / "golden" / "outer_step.json"
TERMS = StepTerms(0.7, 0.9, "fp32", 24, 3)


def words_of(count: int, seed: int) -> NDArray[np.uint32]:
    """Field words made by a hash, so that no generator of random numbers is part of a golden."""
    raw = b"".join(
        hashlib.sha256(f"{seed}:{block}".encode()).digest() for block in range(-(-count // 8))
    )
    return (np.frombuffer(raw, dtype=np.int32)[:count] >> 6).view(np.uint32)


def rounds(terms: StepTerms, count: int = 5, size: int = 1000) -> list[str]:
    parameters = (words_of(size, 99).view(np.int32) * np.float32(2.0**-22)).astype(np.float32)
    velocity = np.zeros(size, dtype=np.float32)
    digests = []
    for index in range(count):
        OuterStep(terms).apply(parameters, velocity, words_of(size, index))
        digests.append(hashlib.sha256(parameters.tobytes() + velocity.tobytes()).hexdigest())
    return digests


CASES = {
    "default": TERMS,
    "fp64": StepTerms(0.7, 0.9, "fp64", 24, 3),
    "plain": StepTerms(1.0, 0.0, "fp32", 20, 1),
    "many": StepTerms(0.1, 0.5, "fp32", 24, 64),
}


@pytest.mark.parametrize("name", CASES)
def test_the_golden_file_holds_on_this_machine(name: str) -> None:
    assert rounds(CASES[name]) == json.loads(GOLDEN.read_text())[name]


def nearest(value: Fraction) -> np.float32:
    """The float32 next to ``value``, ties to even: exact, without floating-point arithmetic."""
    if value == 0:
        return np.float32(0)
    exponent = 0
    size = abs(value)
    while size >= 2:
        size, exponent = size / 2, exponent + 1
    while size < 1 and exponent > -126:
        size, exponent = size * 2, exponent - 1
    mantissa = round(size * 2**23)
    return np.float32(
        float(Fraction(mantissa, 2**23) * Fraction(2) ** exponent) * (1 if value > 0 else -1)
    )


@settings(max_examples=200, deadline=None)
@given(
    st.integers(-(2**31), 2**31 - 1),
    st.floats(-100, 100, width=32),
    st.floats(-100, 100, width=32),
    st.integers(1, 64),
)
def test_every_operation_is_rounded_once_to_nearest(
    total: int, weight: float, momentum: float, count: int
) -> None:
    terms = StepTerms(0.7, 0.9, "fp32", 24, count)
    parameters = np.array([weight], dtype=np.float32)
    velocity = np.array([momentum], dtype=np.float32)
    words = np.array([total], dtype=np.int64).astype(np.int32).view(np.uint32)
    OuterStep(terms).apply(parameters, velocity, words)
    mu, eta = Fraction(float(np.float32(0.9))), Fraction(float(np.float32(0.7)))
    mean = np.float32(total * 2.0**-24 / count)
    v = nearest(Fraction(float(nearest(mu * Fraction(momentum)))) + Fraction(float(mean)))
    u = nearest(Fraction(float(mean)) + Fraction(float(nearest(mu * Fraction(float(v))))))
    w = nearest(Fraction(weight) + Fraction(float(nearest(eta * Fraction(float(u))))))
    assert velocity[0] == v
    assert parameters[0] == w


def test_the_first_step_moves_along_the_mean_by_1_33() -> None:
    words = words_of(4096, 1)
    mean = words.view(np.int32) * 2.0**-24 / 3
    parameters = np.zeros(4096, dtype=np.float32)
    OuterStep(TERMS).apply(parameters, np.zeros(4096, dtype=np.float32), words)
    assert np.allclose(parameters, 0.7 * 1.9 * mean, rtol=1e-5)
    assert (np.sign(parameters) == np.sign(mean)).all()


def test_pieces_and_threads_do_not_change_a_bit() -> None:
    size = 100_000
    words = words_of(size, 2)
    start = (words_of(size, 3).view(np.int32) * 2.0**-20).astype(np.float32)

    def run(piece: int, threads: int) -> tuple[FlatParameters, FlatParameters]:
        parameters, velocity = start.copy(), start[::-1].copy()

        def one(at: int) -> None:
            part = slice(at, at + piece)
            OuterStep(TERMS, piece).apply(parameters[part], velocity[part], words[part])

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(one, range(0, size, piece)))
        return parameters, velocity

    due = run(size, 1)
    for piece, threads in ((1000, 4), (7777, 2), (64, 3)):
        found = run(piece, threads)
        assert np.array_equal(due[0].view(np.uint32), found[0].view(np.uint32))
        assert np.array_equal(due[1].view(np.uint32), found[1].view(np.uint32))


def test_a_result_that_is_not_finite_is_refused() -> None:
    parameters = np.full(4, 3.4e38, dtype=np.float32)
    velocity = np.full(4, 3.4e38, dtype=np.float32)
    with pytest.raises(AggregationError, match="range"):
        OuterStep(TERMS).apply(parameters, velocity, np.zeros(4, dtype=np.uint32))


def test_terms_come_from_the_workload_and_need_a_contributor() -> None:
    assert step_terms(Workload(), 3) == TERMS
    for count in (0, 65):
        with pytest.raises(AggregationError):
            step_terms(Workload(), count)


def test_a_sum_of_words_of_both_widths_is_stepped_as_what_it_stands_for() -> None:
    layout = layout_of({"encoder.a": (7,), "encoder.b": (5,), "predictor.c": (4,)})
    plan = FieldPlan(layout, Workload().field, bytes([64 + 20, 0, 64 + 11]))
    narrow, wide, last = words_of(7, 1), words_of(5, 2), words_of(4, 3)
    signed = [(narrow.view(np.int32) >> 12), wide.view(np.int32), last.view(np.int32) >> 12]
    raw = (
        signed[0].astype(np.int16).tobytes()
        + bytes(2)
        + wide.tobytes()
        + signed[2].astype(np.int16).tobytes()
    )
    stands_for = np.concatenate(
        [signed[0].astype(np.int16) * 2.0**-20, signed[1] * 2.0**-24, signed[2] * 2.0**-11]
    )
    due = OuterStep(StepTerms(0.7, 0.9, "fp32", 0, 3)).planned_mean
    found = due(plan, 0, memoryview(raw), 16)
    assert np.array_equal(found, (stands_for / 3).astype(np.float32))
    whole, piecewise = (np.ones(16, dtype=np.float32) for _ in range(2))
    whole_v, piecewise_v = (np.ones(16, dtype=np.float32) for _ in range(2))
    step = OuterStep(TERMS, 16)
    step.apply_planned(whole, whole_v, plan, 0, memoryview(raw))
    for first, end in ((0, 3), (3, 10), (10, 16)):
        part = memoryview(raw)[plan.byte_of(first) :]
        step.apply_planned(piecewise[first:end], piecewise_v[first:end], plan, first, part)
    assert np.array_equal(whole, piecewise)
    assert np.array_equal(whole_v, piecewise_v)


def test_a_plan_of_wide_words_changes_no_bit() -> None:
    size = 1000
    words, layout = words_of(size, 5), layout_of({"encoder.a": (size,)})
    plan = FieldPlan(layout, Workload().field)
    both = [np.ones((2, size), dtype=np.float32) for _ in range(2)]
    OuterStep(TERMS).apply(*both[0], words)
    OuterStep(TERMS).apply_planned(*both[1], plan, 0, words.data.cast("B"))
    assert np.array_equal(both[0].view(np.uint32), both[1].view(np.uint32))
