"""Shares put together here and by pycryptodome: the same bits, for any indices and any shares."""

import os

import pytest
from Crypto.Protocol.SecretSharing import Shamir
from hypothesis import given, settings
from hypothesis import strategies as st

from lensemble.secagg.interpolation import inverse, times, weights
from lensemble.secagg.shares import combine, split

HALF = 16
SHARES = st.binary(min_size=2 * HALF, max_size=2 * HALF)
ELEMENTS = st.integers(1, (1 << 128) - 1)


def combined_by_the_library(shares: dict[int, bytes]) -> bytes:
    return b"".join(
        Shamir.combine([(index, share[start : start + HALF]) for index, share in shares.items()])
        for start in (0, HALF)
    )


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.integers(1, 59), SHARES, min_size=1, max_size=12))
def test_what_the_library_makes_of_the_same_shares(shares: dict[int, bytes]) -> None:
    assert combine(shares) == combined_by_the_library(shares)


def test_the_most_shares_that_a_secret_of_a_thousand_nodes_has() -> None:
    shares = {index: os.urandom(2 * HALF) for index in range(2, 32)}
    assert combine(shares) == combined_by_the_library(shares)


@pytest.mark.parametrize(("holders", "quorum"), [(2, 1), (5, 3), (59, 30), (73, 37)])
def test_the_library_reads_what_is_dealt_here(holders: int, quorum: int) -> None:
    secret = os.urandom(2 * HALF)
    shares = dict(enumerate(split(secret, holders, quorum), 1))
    last = {index: shares[index] for index in sorted(shares)[-quorum:]}
    assert combined_by_the_library(last) == secret
    if quorum > 1:
        assert combined_by_the_library(dict(list(last.items())[1:])) != secret


@settings(max_examples=60, deadline=None)
@given(ELEMENTS, ELEMENTS, ELEMENTS)
def test_products_are_those_of_a_field(a: int, b: int, c: int) -> None:
    assert times(a, inverse(a)) == 1
    assert times(a, b) == times(b, a) < 1 << 128
    assert times(times(a, b), c) == times(a, times(b, c))
    assert times(a, b ^ c) == times(a, b) ^ times(a, c)


def test_a_product_that_has_to_be_reduced() -> None:
    """The power 128 of x is the rest of the field's polynomial."""
    assert times(1 << 127, 2) == 0b1000_0111


@pytest.mark.parametrize("index", [1, 7, 58])
def test_a_single_share_is_the_secret(index: int) -> None:
    assert weights((index,)) == (1,)
