import hashlib
import itertools
import json
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lensemble.errors import ContractViolation, ResidencyViolation
from lensemble.params import (
    MAX_PARAMETERS,
    MAX_TENSORS,
    ParameterDigest,
    layout_of,
    parameter_digest,
)

SHAPES = {
    "predictor.a.weight": (2, 3),
    "encoder.b.bias": (4,),
    "encoder.a.weight": (4, 1),
    "predictor.a.bias": (1,),
}
NAMES = st.from_regex(r"\A(encoder|predictor)\.[a-z0-9.]{1,8}\Z")
ANY_SHAPES = st.dictionaries(
    NAMES, st.lists(st.integers(1, 4), max_size=3).map(tuple), min_size=1, max_size=8
)


def test_encoder_first_each_group_sorted_offsets_count_parameters() -> None:
    layout = layout_of(SHAPES)
    assert [(t.name, t.offset, t.size) for t in layout.tensors] == [
        ("encoder.a.weight", 0, 4),
        ("encoder.b.bias", 4, 4),
        ("predictor.a.bias", 8, 1),
        ("predictor.a.weight", 9, 6),
    ]
    assert (layout.size, layout.nbytes) == (15, 60)


def test_golden_digests() -> None:
    layout = layout_of(SHAPES)
    text = json.dumps([[t.name, list(t.shape)] for t in layout.tensors], separators=(",", ":"))
    assert layout.digest == hashlib.sha256(text.encode()).hexdigest()
    flat = np.arange(15, dtype=np.float32)
    tagged = b"lensemble/parameters/v1\x00" + bytes.fromhex(layout.digest) + flat.tobytes()
    assert parameter_digest(layout, flat) == hashlib.sha256(tagged).hexdigest()


@given(ANY_SHAPES, st.randoms(use_true_random=False))
def test_the_order_of_the_mapping_does_not_matter(
    shapes: dict[str, tuple[int, ...]], chance: random.Random
) -> None:
    names = list(shapes)
    chance.shuffle(names)
    assert layout_of({name: shapes[name] for name in names}) == layout_of(shapes)


@given(ANY_SHAPES)
def test_views_tile_the_flat_vector(shapes: dict[str, tuple[int, ...]]) -> None:
    layout = layout_of(shapes)
    flat = np.zeros(layout.size, dtype=np.float32)
    for name, view in layout.views(flat).items():
        assert view.shape == shapes[name]
        np.add(view, 1, out=view)
    assert np.all(flat == 1)


@pytest.mark.parametrize(
    "name", ["action_head.weight", "head.weight", "encoders.a", "encoder", "predictor", "", ".a"]
)
def test_whatever_is_local_is_refused(name: str) -> None:
    with pytest.raises(ResidencyViolation, match="outside the federated groups"):
        layout_of({**SHAPES, name: (1,)})


@pytest.mark.parametrize("shape", [(0,), (2, 0), (-1,)])
def test_a_dimension_below_one_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ContractViolation, match="dimensions start at 1"):
        layout_of({"encoder.a": shape})


def test_limits() -> None:
    with pytest.raises(ContractViolation, match="not 0"):
        layout_of({})
    with pytest.raises(ContractViolation, match=f"1 to {MAX_TENSORS} tensors"):
        layout_of({f"encoder.{i}": (1,) for i in range(MAX_TENSORS + 1)})
    with pytest.raises(ContractViolation, match="exceed the limit"):
        layout_of({"encoder.a": (MAX_PARAMETERS, 2)})


def test_a_flat_vector_of_another_size_has_no_views() -> None:
    with pytest.raises(ContractViolation, match="layout wants"):
        layout_of(SHAPES).views(np.zeros(14, dtype=np.float32))


@pytest.mark.parametrize(("extra", "says"), [(b"1234", "4 bytes longer"), (b"", "4 bytes shorter")])
def test_a_digest_wants_exactly_the_bytes_of_the_layout(extra: bytes, says: str) -> None:
    layout = layout_of({"encoder.a": (2,)})
    running = ParameterDigest(layout)
    running.update(b"0123" + extra + extra)
    with pytest.raises(ContractViolation, match=says):
        running.hexdigest()


@given(st.lists(st.integers(0, 60), max_size=5))
def test_a_digest_does_not_depend_on_the_pieces(cuts: list[int]) -> None:
    layout = layout_of(SHAPES)
    flat = np.arange(15, dtype=np.float32)
    raw, running = flat.tobytes(), ParameterDigest(layout)
    edges = [0, *sorted(cuts), len(raw)]
    for start, end in itertools.pairwise(edges):
        running.update(raw[start:end])
    assert running.hexdigest() == parameter_digest(layout, flat)


def test_one_bit_makes_another_digest() -> None:
    layout = layout_of(SHAPES)
    flat = np.zeros(15, dtype=np.float32)
    seen = {parameter_digest(layout, flat)}
    for index in range(15):
        other = flat.copy()
        other.view(np.uint32)[index] ^= 1
        seen.add(parameter_digest(layout, other))
    seen.add(parameter_digest(layout_of({"encoder.a": (15,)}), flat))
    assert len(seen) == 17


def test_doubles_are_not_parameters() -> None:
    layout = layout_of({"encoder.a": (2,)})
    with pytest.raises(ContractViolation):
        parameter_digest(layout, np.zeros(2))
