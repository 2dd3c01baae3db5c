import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lensemble.errors import ChunkRefused
from lensemble.stage_chunk import MAX_RECENT, Sampling
from lensemble_node.worker.inference import sampling

LOGITS = hnp.arrays(
    np.float32, st.integers(1, 60), elements=st.floats(-30, 30, width=32, allow_subnormal=False)
)
TOKENS = st.lists(st.integers(0, 80), max_size=MAX_RECENT).map(tuple)
HOW = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 1.0, 2.5, 1e6]),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 1.0]),
    top_k=st.integers(0, 70),
    repeat_penalty=st.sampled_from([0.5, 1.0, 1.3]),
    seed=st.integers(0, (1 << 64) - 1),
    index=st.integers(0, 1 << 32),
    recent=TOKENS,
)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - float(logits.max()))
    shares: np.ndarray = weights / weights.sum()
    return shares


def kept_by_definition(logits: np.ndarray, how: Sampling) -> set[int]:
    """What may be drawn, written down the slow way: sort, cut, sort, cut."""
    scaled = [float(value) for value in logits]
    for token in set(how.recent):
        if token < len(scaled):
            value = scaled[token]
            better = value / how.repeat_penalty
            scaled[token] = better if value > 0 else value * how.repeat_penalty
    most = max(scaled)
    weights = [math.exp((value - most) / how.temperature) for value in scaled]
    order = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    if how.top_k:
        order = order[: how.top_k]
    total = sum(weights[token] for token in order)
    kept, held = set(), 0.0
    for token in order:
        kept.add(token)
        held += weights[token]
        # Where the sum meets the share to the last bit, either side is right.
        if how.top_p < 1 and held >= total * how.top_p * (1 + 1e-12):
            break
    return kept


@given(LOGITS, HOW)
def test_the_same_again_gives_the_same(logits: np.ndarray, how: Sampling) -> None:
    sampling.check(how)
    before = logits.copy()
    first = sampling.draw(logits, how)
    assert first == sampling.draw(logits.copy(), how)
    assert np.array_equal(before, logits), "the logits were changed"


@given(LOGITS, HOW)
def test_a_token_comes_with_its_own_log_probability(logits: np.ndarray, how: Sampling) -> None:
    token, logprob = sampling.draw(logits, how)
    assert 0 <= token < len(logits)
    assert logprob == pytest.approx(float(np.log(softmax(logits)[token])), abs=1e-5)


@given(LOGITS, HOW)
def test_only_what_the_definition_keeps_is_drawn(logits: np.ndarray, how: Sampling) -> None:
    assume(how.temperature > 0)
    token, _ = sampling.draw(logits, how)
    assert token in kept_by_definition(logits, how)


@given(LOGITS, st.integers(0, 1 << 32))
def test_greedy_takes_the_first_of_the_largest(logits: np.ndarray, index: int) -> None:
    how = Sampling(index=index, seed=index)
    assert sampling.draw(logits, how)[0] == int(np.flatnonzero(logits == logits.max())[0])


@given(
    hnp.arrays(np.float32, 20, elements=st.integers(-99, 99).map(float), unique=True),
    HOW.filter(lambda how: 0.3 <= how.temperature < 1e6),
)
def test_cut_to_one_is_greedy(logits: np.ndarray, how: Sampling) -> None:
    narrow = Sampling(how.temperature, 1.0, 1, 1.0, how.seed, how.index)
    nucleus = Sampling(how.temperature, 1e-9, 0, 1.0, how.seed, how.index)
    greedy = sampling.draw(logits, Sampling())[0]
    assert sampling.draw(logits, narrow)[0] == greedy
    assert sampling.draw(logits, nucleus)[0] == greedy


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_are_as_frequent_as_they_are_probable(temperature: float) -> None:
    logits = np.array([2.0, 1.0, 0.0, -1.0, 1.5], np.float32)
    draws = 8_000
    how = [Sampling(temperature=temperature, seed=7, index=index) for index in range(draws)]
    found = Counter(sampling.draw(logits, each)[0] for each in how)
    for token, expected in enumerate(softmax(logits / temperature)):
        spread = 5 * math.sqrt(expected * (1 - expected) / draws)
        assert abs(found[token] / draws - expected) < spread, (token, found)


def test_seeds_and_indices_are_independent() -> None:
    logits = np.zeros(1000, np.float32)
    drawn = {
        (seed, index): sampling.draw(logits, Sampling(1.0, seed=seed, index=index))[0]
        for seed in range(40)
        for index in range(40)
    }
    assert len(set(drawn.values())) > 700
    diagonals = [drawn[seed, seed + 1] == drawn[seed + 1, seed] for seed in range(39)]
    assert sum(diagonals) < 3


def test_a_draw_is_the_same_on_any_machine() -> None:
    logits = np.sin(np.arange(500, dtype=np.float32)) * 3
    how = [Sampling(0.8, 0.95, 100, 1.1, 42, index, (3, 14, 159)) for index in range(8)]
    drawn = [sampling.draw(logits, each)[0] for each in how]
    assert drawn == [
        410,
        102,
        215,
        146,
        247,
        385,
        8,
        228,
    ]


def test_a_penalty_makes_recent_tokens_less_likely_whatever_their_sign() -> None:
    for logits, other in (([3.0, 2.9, 0.0], 1), ([-1.0, -1.2, -9.0], 1)):
        values = np.array(logits, np.float32)
        assert sampling.draw(values, Sampling(repeat_penalty=1.5, recent=(1,)))[0] == 0
        assert sampling.draw(values, Sampling(repeat_penalty=1.5, recent=(0,)))[0] == other


@pytest.mark.parametrize(
    "how",
    [
        Sampling(temperature=-0.1),
        Sampling(temperature=math.nan),
        Sampling(temperature=math.inf),
        Sampling(top_p=0.0),
        Sampling(top_p=1.1),
        Sampling(top_p=math.nan),
        Sampling(top_k=-1),
        Sampling(repeat_penalty=0.0),
        Sampling(repeat_penalty=math.nan),
        Sampling(recent=(0,) * (MAX_RECENT + 1)),
    ],
)
def test_settings_by_which_nothing_can_be_drawn_are_refused(how: Sampling) -> None:
    with pytest.raises(ChunkRefused):
        sampling.check(how)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_refused(broken: float) -> None:
    logits = np.zeros(10, np.float32)
    logits[3] = broken
    with pytest.raises(ChunkRefused):
        sampling.draw(logits, Sampling())
