import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lensemble import merkle
from lensemble.errors import ProvenanceError
from lensemble.ids import Digest


def sha(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def slow_root(leaves: list[bytes]) -> str:
    def top(level: list[bytes]) -> bytes:
        if len(level) == 1:
            return level[0]
        above = [sha(b"\x02" + a + b) for a, b in zip(level[::2], level[1::2], strict=False)]
        return top(above + ([level[-1]] if len(level) % 2 else []))

    return sha(b"\x03" + top(sorted(leaves))).hex()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 9])
def test_root_equals_the_plain_recursion(count: int) -> None:
    leaves = [sha(bytes([i])) for i in range(count)]
    assert merkle.root(leaves) == slow_root(leaves)


@given(st.permutations([sha(bytes([i])) for i in range(7)]))
def test_root_does_not_depend_on_order(leaves: list[bytes]) -> None:
    assert merkle.root(leaves) == merkle.root(reversed(leaves)) == slow_root(leaves)


def test_an_odd_node_is_promoted_and_not_doubled() -> None:
    a, b, c = sorted(sha(bytes([i])) for i in range(3))
    assert merkle.root([a, b, c]) != merkle.root([a, b, c, c])


def test_no_leaf_and_no_column_have_no_hash() -> None:
    with pytest.raises(ProvenanceError):
        merkle.root([])
    with pytest.raises(ProvenanceError):
        merkle.leaf({})


def test_leaf_golden() -> None:
    """Fixed for good: a change of it breaks every stored commitment."""
    column = merkle.array_column(np.arange(6, dtype=np.float32).reshape(3, 2))
    digest = merkle.leaf({"action": column, "note": merkle.text_column(["a", "é"])}).hex()
    assert digest == "275b48494b50d50d4d8572622ea6c4dd8016c8d64ab75e9c6a537d19c9e15656"


def test_leaf_sees_key_dtype_shape_and_bytes_but_not_byte_order() -> None:
    values = np.arange(6, dtype=np.float32).reshape(3, 2)
    base = merkle.leaf({"a": merkle.array_column(values)})
    big = values.astype(">f4")
    assert merkle.leaf({"a": merkle.array_column(big)}) == base
    others = [
        {"b": values},
        {"a": values.reshape(2, 3)},
        {"a": values.astype(np.float64)},
        {"a": values.view(np.int32)},
        {"a": values + 1},
        {"a": values, "b": values},
    ]
    leaves = {merkle.leaf({k: merkle.array_column(v) for k, v in o.items()}) for o in others}
    assert len(leaves | {base}) == len(others) + 1


def test_pieces_may_be_cut_anywhere_but_must_add_up() -> None:
    data = bytes(range(24))
    whole = merkle.leaf({"a": merkle.Column("uint8", (24,), (data,), 24)})
    assert merkle.leaf({"a": merkle.Column("uint8", (24,), (data[:5], data[5:]), 24)}) == whole
    with pytest.raises(ProvenanceError):
        merkle.leaf({"a": merkle.Column("uint8", (24,), (data[:5],), 24)})


@given(count=st.integers(1, 40), at=st.integers(0, 39), bit=st.integers(0, 255))
def test_a_proof_leads_from_its_leaf_to_the_root_and_no_other(
    count: int, at: int, bit: int
) -> None:
    leaves = [hashlib.sha256(bytes([index])).digest() for index in range(count)]
    of = leaves[at % count]
    steps = merkle.proof(leaves, of)
    top = merkle.root(leaves)
    assert merkle.proves(top, of, steps)
    other = bytearray(of)
    other[bit // 8] ^= 1 << bit % 8
    assert not merkle.proves(top, bytes(other), steps)
    assert not merkle.proves(Digest("0" * 64), of, steps)
    if steps:
        assert not merkle.proves(top, of, steps[1:])
    with pytest.raises(ProvenanceError, match="not of this dataset"):
        merkle.proof(leaves, bytes(other))
