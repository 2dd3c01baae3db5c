"""The masked sum is the plain sum, whoever drops out and whenever; or it is not revealed at all."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lensemble.secagg.faults import Cause, MaskingFault
from tests.library.masked_attempt import UPLOADED, Attempt, Masked, Stage, nodes, plain_sum, update

WORDS = 5


def survivors_of(stages: dict[str, Stage]) -> list[str]:
    return sorted(node for node, stage in stages.items() if stage in UPLOADED)


@pytest.mark.parametrize("size", range(2, 7))
def test_every_dropout_pattern_gives_the_plain_sum_or_nothing(size: int) -> None:
    names, threshold = nodes(size), size // 2 + 1
    sums = {
        among: plain_sum(among, WORDS)
        for count in range(1, size + 1)
        for among in itertools.combinations(sorted(names), count)
    }
    later = [stage for stage in Stage if stage is not Stage.BEFORE_SHARES]
    revealed = 0
    for silent in itertools.chain.from_iterable(
        itertools.combinations(names, count) for count in range(size + 1)
    ):
        attempt = Attempt(names, threshold, silent)
        if size - len(silent) < threshold:
            for refused in attempt.dealt:
                with pytest.raises(MaskingFault) as caught:
                    attempt.bind()
                assert caught.value.cause is Cause.BELOW_THRESHOLD, refused
            continue
        masked = Masked(attempt, WORDS)
        dealers = sorted(masked.bound)
        for pattern in itertools.product(later, repeat=len(dealers)):
            stages = dict(zip(dealers, pattern, strict=True))
            if pattern.count(Stage.NEVER) >= threshold:
                assert masked.end(stages) == sums[tuple(survivors_of(stages))]
                revealed += 1
            else:
                with pytest.raises(MaskingFault) as caught:
                    masked.end(stages)
                assert caught.value.cause is Cause.BELOW_THRESHOLD
                assert caught.value.threshold == threshold > caught.value.present
    staying = range(threshold, size + 1)
    assert revealed == sum(
        len(list(itertools.combinations(names, count))) * 4 ** (size - count) for count in staying
    )


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_sums_of_2_to_12_with_any_threshold_and_dropouts(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 12))
    names = nodes(size)
    threshold = data.draw(st.integers(size // 2 + 1, size))
    gone = data.draw(st.lists(st.sampled_from(names), max_size=size - threshold, unique=True))
    stages = {
        node: data.draw(st.sampled_from(list(Stage)[1:])) if node in gone else Stage.NEVER
        for node in names
    }
    silent = [node for node, stage in stages.items() if stage is Stage.BEFORE_SHARES]
    masked = Masked(Attempt(names, threshold, silent), WORDS)
    assert masked.end(stages) == plain_sum(survivors_of(stages), WORDS)


@pytest.mark.parametrize(("size", "threshold", "gone"), [(33, 20, 8), (64, 34, 12), (100, 60, 15)])
def test_a_sparse_graph_gives_the_plain_sum(size: int, threshold: int, gone: int) -> None:
    names = nodes(size)
    generator = np.random.Generator(np.random.Philox(size))
    dropped = [names[index] for index in generator.permutation(size)[:gone]]
    kinds = itertools.cycle(list(Stage)[1:])
    stages = dict.fromkeys(names, Stage.NEVER) | dict(zip(dropped, kinds, strict=False))
    silent = [node for node, stage in stages.items() if stage is Stage.BEFORE_SHARES]
    masked = Masked(Attempt(names, threshold, silent), WORDS)
    assert masked.end(stages) == plain_sum(survivors_of(stages), WORDS)
    masks = max(len(each.terms()) for each in masked.bound.values())
    assert masks <= 1 + 6 * math.log2(size), "of the length of an update, for each participant"


def chi_square(words: np.ndarray) -> float:
    """Of the bytes of ``words`` against the uniform distribution: 255 degrees of freedom."""
    counts = np.bincount(words.view(np.uint8), minlength=256)
    expected = words.nbytes / 256
    return float(np.square(counts - expected).sum() / expected)


UNIFORM = 255 + 8 * np.sqrt(2 * 255)
"""Eight standard deviations above what uniform bytes give."""


def test_one_masked_update_looks_uniform_and_an_unmasked_one_does_not() -> None:
    masked = Masked(Attempt(nodes(3), 2), 1 << 16)
    for node, words in masked.updates.items():
        plain = update(node, 1 << 16)
        assert chi_square(words) < UNIFORM
        assert chi_square(plain) > 100 * UNIFORM
        assert chi_square(words - plain) < UNIFORM, "the mask itself"


def test_a_sum_with_one_mask_left_in_it_still_looks_uniform() -> None:
    masked = Masked(Attempt(nodes(3), 2), 1 << 16)
    pair = list(masked.updates.values())[:2]
    assert chi_square(pair[0] + pair[1]) < UNIFORM
