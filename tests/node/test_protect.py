import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lensemble.errors import SecureAggregationError
from lensemble.secagg.field import FieldBoundExceeded, check_sum, decode, encode, reach
from lensemble.workload import (
    FieldTerms,
    NoisyField,
    Privacy,
    Release,
    Workload,
    initial_parameters,
    layout,
)
from lensemble_node.worker.training.noise import SecretNoise
from lensemble_node.worker.training.protect import Protection, clip, norm, quantize
from lensemble_node.worker.training.release import Pipeline, release
from lensemble_node.worker.training.stops import Diverged

FIELD = FieldTerms(k=20)


def drawn(size: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    generator = np.random.Generator(np.random.Philox(seed))
    return generator.normal(0, scale, size).astype(np.float32)


def private(quantized: str = "none", **terms: object) -> Workload:
    return Workload(
        field=FIELD,
        privacy=Privacy.model_validate({"enabled": True} | terms),
        release=Release(quantize=quantized),
    )


def known(count: int) -> bytes:
    return bytes(range(count))


# ---- clipping ----


@settings(deadline=None)
@given(st.integers(1, 3000), st.floats(1e-6, 1e6), st.floats(1e-3, 1e3), st.integers(0, 99))
def test_no_norm_is_over_the_limit(size: int, scale: float, limit: float, seed: int) -> None:
    flat = drawn(size, seed, scale)
    before = flat.copy()
    factor = clip(flat, limit)
    assert float(np.linalg.norm(flat.astype("f8"))) <= limit * (1 + 1e-12)
    assert np.allclose(flat, before * factor, rtol=1e-5)
    if norm(before) <= limit:
        assert factor == 1.0
        assert np.array_equal(flat, before)
    else:
        assert norm(flat) == pytest.approx(limit, rel=1e-5)


def test_a_norm_of_zero_or_just_the_limit_is_left_alone() -> None:
    nothing, whole = np.zeros(1000, np.float32), np.zeros(1000, np.float32)
    whole[7] = 0.5
    assert clip(nothing, 0.5) == 1.0
    assert clip(whole, 0.5) == 1.0
    assert (norm(nothing), norm(whole)) == (0.0, 0.5)
    assert clip(np.zeros(0, np.float32), 1.0) == 1.0
    over = np.full(4, np.nextafter(np.float32(0.5), np.float32(1)), np.float32)
    assert clip(over, 1.0) < 1.0
    assert norm(over) <= 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, 3e38])
def test_what_is_not_finite_is_not_clipped_into_shape(bad: float) -> None:
    flat = drawn(100)
    flat[3] = bad
    if math.isfinite(bad):
        clip(flat, 1.0)
        assert norm(flat) <= 1.0
        return
    with pytest.raises(Diverged, match="not finite"):
        clip(flat, 1.0)


# ---- noise ----


def test_noise_is_standard_normal_to_its_tails() -> None:
    draw = SecretNoise().gaussian(4_000_000)
    count = len(draw)
    assert abs(draw.mean()) < 5 / math.sqrt(count)
    assert abs(draw.var() - 1) < 5 * math.sqrt(2 / count)
    assert abs((draw**3).mean()) < 5 * math.sqrt(15 / count)
    assert abs((draw**4).mean() - 3) < 5 * math.sqrt(96 / count)
    for at in (0.0, 1.0, 2.0, 3.0, 4.0):
        share = 0.5 * math.erfc(at / math.sqrt(2))
        assert abs((draw > at).mean() - share) < 5 * math.sqrt(share / count)
        assert abs((draw < -at).mean() - share) < 5 * math.sqrt(share / count)
    lag = (draw[1:] * draw[:-1]).mean()
    half = (draw[: count // 2] * draw[count // 2 :]).mean()
    assert max(abs(lag), abs(half)) < 8 / math.sqrt(count)


def test_every_release_draws_its_own_key_and_only_that() -> None:
    asked: list[int] = []

    def entropy(count: int) -> bytes:
        asked.append(count)
        return bytes([len(asked)]) * count

    first, second = SecretNoise(entropy), SecretNoise(entropy)
    assert not np.array_equal(first.words(1000), second.words(1000))
    assert asked == [32, 32]
    assert np.array_equal(SecretNoise(known).words(9), SecretNoise(known).words(9))
    assert not np.array_equal(SecretNoise().words(9), SecretNoise().words(9))


def test_a_shorter_key_is_refused() -> None:
    with pytest.raises(ValueError, match="Invalid key size"):
        SecretNoise(lambda _: b"short")


def test_coins_and_numbers_are_fair() -> None:
    noise = SecretNoise()
    for rate in (0.01, 0.3, 1.0):
        share = noise.coins(200_000, rate).mean()
        assert abs(share - rate) <= 5 * math.sqrt(rate * (1 - rate) / 200_000)
    numbers = noise.numbers(7, 70_000)
    assert set(numbers) == set(range(7))
    assert np.abs(np.bincount(numbers) - 10_000).max() < 500


@pytest.mark.parametrize(
    ("placement", "contributors"),
    [("local", 3), ("local", 8), ("distributed", 5), ("distributed", 8)],
)
def test_the_sum_carries_the_stated_noise_whoever_drops_out(
    placement: str, contributors: int
) -> None:
    """Of 8 nodes some drop out; what is decoded of the others' sum has at least sigma * C."""
    size, cohort = 1_000_000, 5
    workload = private(placement=placement, cohort=cohort, clip_norm=0.5, noise_multiplier=1.5)
    total = np.zeros(size, dtype=np.uint32)
    signal = np.zeros(size)
    for node in range(contributors):
        update = drawn(size, node)
        clip(expected := update.copy(), 0.5)
        signal += expected
        pipeline = Protection(workload, SecretNoise()).pipeline()
        total += encode(pipeline.released(update).values, workload.room)
    noise = decode(total, FIELD) - signal
    each = 1.5 * 0.5 if placement == "local" else 1.5 * 0.5 / math.sqrt(cohort)
    wanted = each * math.sqrt(contributors)
    assert noise.std() == pytest.approx(wanted, rel=5 / math.sqrt(2 * size))
    assert abs(noise.mean()) < 5 * wanted / math.sqrt(size)
    assert noise.std() >= 0.75 * (1 - 0.004)


def test_an_update_that_does_not_enter_leaves_noise_alone() -> None:
    workload, size = private(sample_rate=0.3, noise_multiplier=1e-3), 400
    update = np.zeros(size, np.float32)
    update[0] = 1.0
    entered = 0
    for _ in range(1000):
        pipeline = Protection(workload, SecretNoise()).pipeline()
        released = pipeline.released(update.copy()).values
        first = decode(encode(released, workload.room), FIELD)[0]
        assert min(abs(first), abs(first - 1.0)) < 0.01
        entered += first > 0.5
    assert abs(entered - 300) < 5 * math.sqrt(1000 * 0.21)


def test_the_field_takes_noise_that_n_max_equal_coordinates_could_not_have() -> None:
    plain, room = FieldTerms(k=23), NoisyField(23, 64, 1.0, 8.5)
    assert plain.bound < 4.1
    flat = np.array([9.4, -9.4, 0.0], np.float32)
    assert np.allclose(decode(encode(flat, room), room), flat)
    with pytest.raises(FieldBoundExceeded, match=r"coordinate 1 .* holds at most 9\.5"):
        encode(np.array([9.4, -9.6], np.float32), room)
    with pytest.raises(FieldBoundExceeded):
        encode(flat, plain)
    with pytest.raises(FieldBoundExceeded):
        encode(np.array([300.0], np.float32), NoisyField(23, 64, 1e9, 8.5))


def test_a_sum_with_noise_is_plausible_up_to_its_own_bound() -> None:
    room = NoisyField(23, 64, 1.0, 8.5)
    most = reach(room, 4)
    assert most == (4 + 17) << 23
    check_sum(np.array([most], np.uint32), room, 4)
    with pytest.raises(SecureAggregationError, match="reach at most"):
        check_sum(np.array([most + 1], np.uint32), room, 4)


# ---- quantising ----


@settings(deadline=None)
@given(st.integers(1, 2000), st.floats(1e-12, 1e6), st.integers(0, 99))
def test_int8_moves_nothing_by_more_than_half_a_step(size: int, scale: float, seed: int) -> None:
    flat = drawn(size, seed, scale)
    before = flat.copy()
    assert quantize(flat) is flat
    for start in range(0, size, 256):
        block, was = flat[start : start + 256], before[start : start + 256]
        largest = np.abs(was).max()
        step = largest / 127
        assert np.abs(block - was).max() <= 0.5 * step * (1 + 1e-4)
        assert np.abs(block).max() <= largest * (1 + 1e-6)
        assert len(np.unique(block)) <= 255
    again = flat.copy()
    assert np.allclose(quantize(again), flat, rtol=1e-5)


def test_int8_leaves_zeros_and_the_largest() -> None:
    assert not quantize(np.zeros(300, np.float32)).any()
    flat = np.zeros(600, np.float32)
    flat[::256] = (1.0, -2.0, 3.0)
    assert np.allclose(quantize(flat.copy()), flat)


# ---- the order ----


def test_align_difference_clip_noise_quantise_encode() -> None:
    """With known entropy the released words are those of the stages in this order, and no other."""
    workload = private("int8", clip_norm=0.5, noise_multiplier=0.01)
    where, prior = layout(workload), initial_parameters(workload)
    trained = (prior + drawn(where.size, scale=0.1)).astype(np.float32)

    def align(flat: np.ndarray) -> np.ndarray:
        return flat[::-1].copy()

    private_stages = Protection(workload, SecretNoise(known)).pipeline()
    pipeline = Pipeline((align,), private_stages.on_difference)
    sent = release(dict(where.views(trained)), prior, where, pipeline)
    sent = encode(sent.values, workload.room)

    def clipped(flat: np.ndarray) -> np.ndarray:
        clip(out := flat.copy(), 0.5)
        return out

    def noised(flat: np.ndarray) -> np.ndarray:
        return (flat + 0.005 * SecretNoise(known).gaussian(where.size)).astype(np.float32)

    def quantized(flat: np.ndarray) -> np.ndarray:
        return quantize(flat.copy())

    difference = align(trained) - prior
    due = encode(quantized(noised(clipped(difference))), workload.room)
    assert np.array_equal(sent, due)
    for other in (
        noised(quantized(clipped(difference))),
        quantized(clipped(noised(difference))),
        quantized(noised(clipped(align(trained - prior)))),
        noised(clipped(quantized(difference))),
    ):
        assert not np.array_equal(sent, encode(other, workload.room))


def test_without_privacy_nothing_is_touched() -> None:
    assert Protection(Workload(), SecretNoise()).pipeline() == Pipeline()
    rounded = Protection(Workload(release=Release(quantize="int8")), SecretNoise()).pipeline()
    assert rounded == Pipeline(on_difference=(quantize,))
    episodes = Protection(private(unit="episode"), SecretNoise()).pipeline()
    assert episodes == Pipeline()
