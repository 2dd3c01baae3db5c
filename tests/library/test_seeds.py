import pytest
from hypothesis import given
from hypothesis import strategies as st

from lensemble import seeds


@pytest.mark.parametrize(
    ("root", "label", "seed"),
    [
        (42, "torch", 502105390651072317),
        (0, "python", 8444696587771374422),
        (7, "sketch:3", 4153186984671930622),
        (0, "sketch:0", 676122520791145774),
    ],
)
def test_golden(root: int, label: str, seed: int) -> None:
    assert seeds.derive(root, label) == seed


@pytest.mark.parametrize(
    ("root", "round_index", "seed"), [(7, 3, 4153186984671930622), (0, 0, 676122520791145774)]
)
def test_golden_sketch(root: int, round_index: int, seed: int) -> None:
    assert seeds.sketch(root, round_index) == seed


def test_the_scheme_is_named() -> None:
    assert seeds.SCHEME == "blake3-v1"


@given(st.integers(0, (1 << 63) - 1), st.text(st.characters(exclude_categories=["Cs"])))
def test_a_seed_fits_63_bits(root: int, label: str) -> None:
    assert 0 <= seeds.derive(root, label) < 1 << 63
    assert seeds.derive(root, label) == seeds.derive(root, label)


def test_labels_and_roots_are_told_apart() -> None:
    drawn = {
        seeds.derive(root, f"{label}:{i}") for root in (0, 1) for label in "ab" for i in (0, 1)
    }
    assert len(drawn) == 8
