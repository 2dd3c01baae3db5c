import hashlib
import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lensemble.blob import SumDigest, UpdateDigest
from lensemble.errors import ContractViolation
from lensemble.params import ParamLayout, layout_of
from lensemble.secagg import scale
from lensemble.secagg.field import encode
from lensemble.secagg.masks import MaskStream, Term
from lensemble.secagg.plan import MAX_K, MIN_K, FieldPlan, signed_of
from lensemble.workload import FieldTerms, Privacy, Workload

TERMS = FieldTerms(k=24, n_max=5)
LAYOUT = layout_of(
    {"encoder.a": (301,), "encoder.b": (7,), "predictor.c": (40, 3), "predictor.d": (5,)}
)
SHORT = layout_of({"encoder.a": (3,), "encoder.b": (2,), "predictor.c": (1,), "predictor.d": (5,)})
CODES = st.lists(
    st.one_of(st.just(0), st.integers(64 + MIN_K, 64 + MAX_K)), min_size=4, max_size=4
).map(lambda each: bytes(each) if any(each) else b"")


def plan_of(code: bytes, layout: ParamLayout = SHORT, n_max: int = 5) -> FieldPlan:
    return FieldPlan(layout, FieldTerms(k=24, n_max=n_max), code)


def blob(plan: FieldPlan, words: list[int], tail: list[int]) -> np.ndarray:
    """The blob of ``plan`` with these signed words, written by hand."""
    raw = b""
    for byte, tensor in zip(plan.code or bytes(4), plan.layout.tensors, strict=True):
        part = words[tensor.offset : tensor.offset + tensor.size]
        size = 2 if byte else 4
        raw += b"".join((each % (1 << 8 * size)).to_bytes(size, "little") for each in part)
        raw += bytes(-len(raw) % 4)
    raw += b"".join(each.to_bytes(4, "little") for each in tail)
    return np.frombuffer(raw, dtype=np.uint32).copy()


# ---- all wide ----


def test_an_all_wide_plan_is_the_flat_vector_of_32_bits() -> None:
    plan = FieldPlan(LAYOUT, TERMS)
    assert (plan.nbytes, plan.tail, plan.digest) == (LAYOUT.nbytes, LAYOUT.nbytes, LAYOUT.digest)
    words = encode(np.linspace(-1, 1, LAYOUT.size, dtype=np.float32), TERMS)
    raw = words.data.cast("B")
    for tag, digest in (
        (b"lensemble/update/v1\x00", UpdateDigest(plan)),
        (b"lensemble/field-sum/v1\x00", SumDigest(plan)),
    ):
        digest.update(raw)
        due = hashlib.sha256(tag + bytes.fromhex(LAYOUT.digest) + words.tobytes()).hexdigest()
        assert digest.hexdigest() == due
    assert hashlib.sha256(words.tobytes()).hexdigest() == (
        "1b6a4c18ea53a37d03a88b7048c6ddbdcaf8bed5b04a1f06837351bc637dbb35"
    )
    bare, under = words.copy(), words.copy()
    MaskStream([Term(bytes(32))]).add(0, bare)
    MaskStream([Term(bytes(32))], plan).add(0, under)
    assert np.array_equal(bare, under)
    decoded = np.empty(LAYOUT.size)
    plan.decode(0, raw, decoded)
    assert np.array_equal(decoded, words.view(np.int32) * 2.0**-24)


# ---- where words are ----


def test_segments_lie_one_after_the_other_and_are_filled_up() -> None:
    plan = plan_of(bytes([64 + 10, 0, 64 - 3, 0]))
    laid = [(each.first, each.last, each.start, each.stop, each.bits) for each in plan.segments]
    assert laid == [(0, 3, 0, 8, 16), (3, 5, 8, 16, 32), (5, 6, 16, 20, 16), (6, 11, 20, 40, 32)]
    assert (plan.tail, plan.nbytes) == (40, 52)
    assert [each.clipped for each in plan.narrow] == [44, 48]
    assert [plan.byte_of(at) for at in range(12)] == [0, 2, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40]
    assert [plan.coordinate_at(at) for at in (0, 2, 5, 8, 15, 16, 39, 40)] == [
        0, 1, 2, 3, 4, 5, 10, 11,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        (bytes(3), "for 3 tensors"),
        (bytes(4), "the empty one"),
        (bytes([64 + MAX_K + 1, 0, 0, 0]), "k=101"),
        (bytes([64 + MIN_K - 1, 0, 0, 0]), "k=-41"),
    ],
)
def test_a_code_of_another_form_is_refused(code: bytes, problem: str) -> None:
    with pytest.raises(ContractViolation, match=problem):
        plan_of(code)


def test_plans_differ_in_digest_by_all_that_they_are_made_of() -> None:
    code = bytes([64, 0, 70, 0])
    plans = [
        plan_of(b""),
        plan_of(code),
        plan_of(bytes([64, 0, 71, 0])),
        plan_of(code, n_max=6),
        FieldPlan(SHORT, FieldTerms(k=23, n_max=5), code),
    ]
    assert len({each.digest for each in plans}) == len(set(plans)) == len(plans)
    assert plan_of(code) == plans[1]


# ---- arithmetic against whole numbers ----


@settings(max_examples=200, deadline=None)
@given(CODES, st.integers(1, 5), st.data())
def test_sums_are_those_of_whole_numbers(code: bytes, count: int, data: st.DataObject) -> None:
    plan = plan_of(code)
    limits = [
        plan.limit if segment.bits == 16 else ((1 << 31) - 1) // 5
        for at in range(SHORT.size)
        for segment in [plan.segment_of(at)]
    ]
    updates = [[data.draw(st.integers(-most, most)) for most in limits] for _ in range(count)]
    tails = [
        [1, *(data.draw(st.integers(0, 9)) for _ in plan.narrow)] if plan.narrow else []
        for _ in range(count)
    ]
    total = np.zeros(plan.nbytes // 4, dtype=np.uint32)
    step = 4 * data.draw(st.integers(1, 5))
    for update, tail in zip(updates, tails, strict=True):
        whole = blob(plan, update, tail)
        assert whole.nbytes == plan.nbytes
        for start in range(0, plan.nbytes, step):
            piece = slice(start // 4, (start + step) // 4)
            plan.add(start, total[piece], whole[piece])
    due = [sum(column) for column in zip(*updates, strict=True)]
    raw = total.data.cast("B")
    first = data.draw(st.integers(0, SHORT.size - 1))
    decoded = np.empty(SHORT.size - first)
    plan.decode(first, raw[plan.byte_of(first) :], decoded)
    for at, value in enumerate(decoded, first):
        assert Fraction(float(value)) == due[at] * Fraction(2) ** -plan.segment_of(at).k
    if plan.narrow:
        said = total[plan.tail // 4 :].tolist()
        assert said == [sum(column) for column in zip(*tails, strict=True)]
        assert said[0] == count
    undone = total.copy()
    plan.subtract(0, undone, total)
    assert not undone.any()


@pytest.mark.parametrize("code", [b"", bytes([64, 0, 70, 0]), bytes([70] * 4)])
@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_masks_cancel_for_every_pattern_of_dropouts(code: bytes, count: int) -> None:
    """What is left in the sum of the survivors is the masks between them and those who dropped."""
    plan, draw = plan_of(code), np.random.default_rng(count)
    pair = {each: draw.bytes(32) for each in itertools.combinations(range(count), 2)}
    own = [draw.bytes(32) for _ in range(count)]
    bare = [draw.integers(0, 1 << 32, plan.nbytes // 4, dtype=np.uint32) for _ in range(count)]

    def terms(node: int) -> list[Term]:
        shared = [
            Term(key, node != low) for (low, high), key in pair.items() if node in (low, high)
        ]
        return [Term(own[node]), *shared]

    masked = [each.copy() for each in bare]
    for node, words in enumerate(masked):
        MaskStream(terms(node), plan).add(0, words)
        assert not np.array_equal(words, bare[node])
    for size in range(1, count + 1):
        for survivors in itertools.combinations(range(count), size):
            left = [Term(own[node]) for node in survivors]
            for (low, high), key in pair.items():
                if (low in survivors) != (high in survivors):
                    left.append(Term(key, low not in survivors))
            total = np.zeros(plan.nbytes // 4, dtype=np.uint32)
            wanted = total.copy()
            for node in survivors:
                plan.add(0, total, masked[node])
                plan.add(0, wanted, bare[node])
            stream = MaskStream(left, plan)
            half = len(total) // 2
            stream.subtract(half, total[half:])
            stream.subtract(0, total[:half])
            assert np.array_equal(total, wanted), (survivors, plan.code)


# ---- the plan of the next round ----


def moments_of(plan: FieldPlan, total: np.ndarray, piece: int = 64) -> scale.Moments:
    moments, raw = scale.Moments(plan), total.data.cast("B")
    size = plan.layout.size
    for first in range(0, size, piece):
        last = min(size, first + piece)
        stop = plan.byte_of(last) if last < size else plan.nbytes
        moments.include(first, last - first, raw[plan.byte_of(first) : stop])
    return moments


def drawn(sizes: tuple[int, ...], scales: tuple[float, ...]) -> np.ndarray:
    draw = np.random.default_rng(3)
    parts = [draw.normal(0, each, size) for size, each in zip(sizes, scales, strict=True)]
    return np.concatenate(parts)


WIDE = layout_of({"encoder.a": (400,), "encoder.b": (255,), "predictor.c": (1000,)})


@pytest.mark.parametrize("piece", [1, 7, 256, 5000])
def test_the_next_plan_is_a_function_of_the_sum(piece: int) -> None:
    plan = FieldPlan(WIDE, FieldTerms(n_max=4))
    values = drawn((400, 255, 1000), (1e-2, 1e-2, 3e-6))
    total = np.rint(values * 2.0**24).astype(np.int32).view(np.uint32)
    assert scale.next_code(moments_of(plan, total, piece), 4) == bytes([64 + 16, 0, 64 + 28])


def test_a_scale_reaches_32_root_mean_squares_of_the_mean_and_no_more_than_64() -> None:
    for n_max in (1, 4, 64, 128):
        plan = FieldPlan(WIDE, FieldTerms(n_max=n_max))
        for spread in np.geomspace(1e-6, 1e-1, 23):
            values = drawn((400, 255, 1000), (spread, 0.0, 3 * spread))
            total = np.rint(values * 2.0**24).astype(np.int32)
            code = scale.next_code(moments_of(plan, total.view(np.uint32)), 4)
            after = FieldPlan(WIDE, FieldTerms(n_max=n_max), code)
            assert [each.bits for each in after.segments] == [16, 32, 16]
            for segment in after.narrow:
                part = total[segment.first : segment.last] * 2.0**-24 / 4
                rms = float(np.sqrt(np.mean(part**2)))
                assert 32 <= after.limit * 2.0**-segment.k / rms < 64


def test_the_largest_sums_are_squared_exactly() -> None:
    for dtype in (np.int16, np.int32):
        ends = np.iinfo(dtype)
        words = np.resize(np.array([ends.min, ends.max, -1, 0, 77], dtype=dtype), 1 << 18)
        assert scale.square_sum(words) == sum(int(each) ** 2 for each in words.tolist())


def test_a_tensor_without_a_sum_stays_wide() -> None:
    plan = FieldPlan(WIDE, TERMS)
    total = np.zeros(WIDE.size, dtype=np.uint32)
    assert scale.next_code(moments_of(plan, total), 4) == b""
    total[3] = 5
    assert scale.next_code(moments_of(plan, total), 4) == bytes([64 + 35, 0, 0])


@pytest.mark.parametrize(("cut_off", "narrow"), [(16, True), (17, False)])
def test_a_saturated_tensor_falls_back_for_a_round(cut_off: int, narrow: bool) -> None:
    """Of 400 coordinates of 4 nodes at most 16 may be cut off; afterwards it is wide, once."""
    plan = FieldPlan(WIDE, FieldTerms(n_max=4), bytes([74, 0, 74]))
    total = np.zeros(plan.nbytes // 4, dtype=np.uint32)
    for span in plan.spans(0, plan.tail):
        signed_of(total, span)[:] = 100
    total[plan.tail // 4 :] = [4, cut_off, 0]
    code = scale.next_code(moments_of(plan, total), 4)
    assert (code[0] != 0, code[2] != 0) == (narrow, True)
    after = FieldPlan(WIDE, FieldTerms(n_max=4), code)
    again = np.full(after.nbytes // 4, 100, dtype=np.uint32)
    again[after.tail // 4 :] = 0
    assert all(scale.next_code(moments_of(after, again), 4)[each] for each in (0, 2))


def test_a_workload_says_why_all_words_have_32_bits() -> None:
    noisy = Privacy(enabled=True, placement="local")
    for workload, reason in (
        (Workload(), ""),
        (Workload(field=FieldTerms(n_max=128)), ""),
        (Workload(field=FieldTerms(n_max=129)), "field.n_max is 129"),
        (Workload(field=FieldTerms(bits=32)), "field.bits is 32"),
        (Workload(field=FieldTerms(k=14), privacy=noisy), "noise"),
        (Workload(privacy=Privacy(enabled=True, unit="episode")), ""),
    ):
        found = scale.why_wide(workload)
        assert reason in found
        assert bool(reason) == bool(found)
