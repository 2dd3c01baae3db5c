"""Polynomials over GF(2**128): their values, and what each share counts for the value at zero.

The weights depend on the indices of the shares alone, which are small and the same for most secrets
of a round: they are kept, and a secret costs one product for each share.  Nothing here is secret
from whoever calls it: they have the shares, or deal them.  The field is that of pycryptodome's
shares, a bit for each coefficient, modulo x**128 + x**7 + x**2 + x + 1.
"""

from collections.abc import Iterable
from functools import lru_cache

_BITS = 128
_POLYNOMIAL = (1 << _BITS) | 0b1000_0111
_LOW = (1 << _BITS) - 1
_MAX_KEPT = 1024


def times(a: int, b: int) -> int:
    """The product of two elements; quick where ``b`` has few bits."""
    product = 0
    while b:
        lowest = b & -b
        product ^= a * lowest
        b ^= lowest
    while high := product >> _BITS:
        product = (product & _LOW) ^ high ^ (high << 1) ^ (high << 2) ^ (high << 7)
    return product


def value_at(x: int, coefficients: Iterable[int]) -> int:
    """The polynomial with these coefficients, the constant last, at ``x``; by Horner's rule."""
    value = 0
    for coefficient in coefficients:
        value = times(value, x) ^ coefficient
    return value


def inverse(a: int) -> int:
    """The inverse of ``a``, which is not zero; Euclid's algorithm on polynomials."""
    left, right, of_left, of_right = a, _POLYNOMIAL, 1, 0
    while left != 1:
        shift = left.bit_length() - right.bit_length()
        if shift < 0:
            left, right, of_left, of_right, shift = right, left, of_right, of_left, -shift
        left ^= right << shift
        of_left ^= of_right << shift
    return of_left


@lru_cache(_MAX_KEPT)
def weights(indices: tuple[int, ...]) -> tuple[int, ...]:
    """The weight of the share of each of ``indices``, which are positive and distinct.

    It is the product over all others ``m`` of ``x_m / (x_j + x_m)``.
    """
    top = _product(indices)
    bottoms = [_product((j, *(j ^ m for m in indices if m != j))) for j in indices]
    # One inversion for all: of the products up to each, back from the last.
    upto = [1]
    for bottom in bottoms:
        upto.append(times(upto[-1], bottom))
    rest, found = times(top, inverse(upto[-1])), []
    for before, bottom in zip(reversed(upto[:-1]), reversed(bottoms), strict=True):
        found.append(times(before, rest))
        rest = times(rest, bottom)
    return tuple(reversed(found))


def _product(factors: Iterable[int]) -> int:
    product = 1
    for factor in factors:
        product = times(product, factor)
    return product
