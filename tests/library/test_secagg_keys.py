import contextlib
import hashlib
import itertools
import math

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from lensemble.errors import ContractViolation
from lensemble.ids import FederationId, NodeId
from lensemble.secagg.faults import Cause, MaskingFault
from lensemble.secagg.graph import MAX_HOLDERS, degree, neighbourhoods, quorum
from lensemble.secagg.keys import (
    Context,
    PublicKeys,
    SecretKeys,
    derived,
    pair_key,
    self_commitment,
    self_key,
)
from lensemble.secagg.roster import MAX_PARTICIPANTS, Roster
from tests.library.masked_attempt import CONTEXT, FEDERATION, nodes

ANNA, BERT, CARA = nodes(3)
OTHERS = (
    Context(FederationId("f" * 32), 7, 0),
    Context(FEDERATION, 8, 0),
    Context(FEDERATION, 7, 1),
)
SMALL_ORDER = (bytes(32), b"\x01" + bytes(31))


def private(first: int) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(bytes([first]) * 32)


def public(key: X25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


def roster(size: int = 3, threshold: int = 2, seed: int = 11) -> Roster:
    keys = {node: SecretKeys(CONTEXT, node).public for node in nodes(size)}
    return Roster(CONTEXT, keys, threshold, seed)


# ---- keys ----


def test_golden_derivations() -> None:
    shared = pair_key(CONTEXT, private(1), ANNA, BERT, public(private(2)))
    assert shared.hex() == "97f8512b9ad7ebccf49d0d891bef291d529dac1011fef281d78583902e76de8b"
    assert (
        self_key(CONTEXT, ANNA, bytes(32)).hex()
        == "b472618122f49a433cc430b31d5771cdce292cdac00ce6087febf2455ada0691"
    )
    assert (
        self_commitment(CONTEXT, ANNA, bytes(32)).hex()
        == "3764d57cdb3e050342b67d41393a6c41036ea6dc0eb1fe60657143536c8ba584"
    )


def test_hkdf_by_hand() -> None:
    # RFC 5869 with a zero salt, written with HMAC alone.
    key = hashlib.sha256
    block = bytes(64)
    inner = key(bytes(b ^ 0x36 for b in block) + b"secret").digest()
    prk = key(bytes(b ^ 0x5C for b in block) + inner).digest().ljust(64, b"\x00")
    inner = key(bytes(b ^ 0x36 for b in prk) + b"info\x01").digest()
    assert derived(b"secret", b"info") == key(bytes(b ^ 0x5C for b in prk) + inner).digest()


def test_both_of_a_pair_derive_one_key_and_nobody_else_does() -> None:
    one, two, other = private(1), private(2), private(3)
    key = pair_key(CONTEXT, one, ANNA, BERT, public(two))
    assert key == pair_key(CONTEXT, two, BERT, ANNA, public(one))
    assert key != pair_key(CONTEXT, other, BERT, ANNA, public(one))
    assert key != pair_key(CONTEXT, one, ANNA, CARA, public(two))


@pytest.mark.parametrize("context", OTHERS)
def test_every_derivation_is_bound_to_its_attempt(context: Context) -> None:
    seed = bytes(32)
    assert pair_key(context, private(1), ANNA, BERT, public(private(2))) != pair_key(
        CONTEXT, private(1), ANNA, BERT, public(private(2))
    )
    assert self_key(context, ANNA, seed) != self_key(CONTEXT, ANNA, seed)
    assert self_commitment(context, ANNA, seed) != self_commitment(CONTEXT, ANNA, seed)
    assert self_commitment(CONTEXT, BERT, seed) != self_commitment(CONTEXT, ANNA, seed)


def test_each_attempt_draws_new_secrets_and_shows_none() -> None:
    drawn = [SecretKeys(CONTEXT, ANNA) for _ in range(8)]
    for part in ("mask_key", "share_key", "self_commitment"):
        assert len({getattr(each.public, part) for each in drawn}) == 8
    assert drawn[0].self_seed.hex() not in repr(drawn[0])


@pytest.mark.parametrize("point", SMALL_ORDER)
@pytest.mark.parametrize("part", ["mask_key", "share_key"])
def test_a_point_of_small_order_is_refused_and_its_owner_named(part: str, point: bytes) -> None:
    keys = {node: SecretKeys(CONTEXT, node).public for node in (ANNA, BERT, CARA)}
    keys[BERT] = msgspec.structs.replace(keys[BERT], **{part: point})
    with pytest.raises(MaskingFault) as caught:
        Roster(CONTEXT, keys, 2, 0)
    assert (caught.value.cause, caught.value.nodes) == (Cause.BAD_KEYS, (BERT,))


@given(
    st.lists(st.binary(max_size=40) | st.binary(min_size=32, max_size=32), min_size=3, max_size=3)
)
def test_any_bytes_for_keys_are_taken_or_refused(parts: list[bytes]) -> None:
    keys = PublicKeys(*parts)
    if [len(part) for part in parts] != [32, 32, 32]:
        with pytest.raises(MaskingFault, match=ANNA):
            keys.check(ANNA)
        return
    with contextlib.suppress(MaskingFault):
        keys.check(ANNA)


def test_one_key_for_both_uses_is_refused() -> None:
    keys = SecretKeys(CONTEXT, ANNA).public
    with pytest.raises(MaskingFault, match=ANNA):
        msgspec.structs.replace(keys, share_key=keys.mask_key).check(ANNA)


@pytest.mark.parametrize(
    "context",
    [
        Context(FederationId("ff"), 0, 0),
        Context(FederationId("z" * 32), 0, 0),
        Context(FEDERATION, -1, 0),
        Context(FEDERATION, 0, 1 << 64),
    ],
)
def test_a_malformed_context_is_refused(context: Context) -> None:
    with pytest.raises(ContractViolation):
        context.encoded()


# ---- graph ----


def is_connected(graph: dict[NodeId, tuple[NodeId, ...]]) -> bool:
    seen: set[NodeId] = set()
    open_ends = [next(iter(graph))]
    while open_ends:
        node = open_ends.pop()
        if node not in seen:
            seen.add(node)
            open_ends += graph[node]
    return len(seen) == len(graph)


@pytest.mark.parametrize("size", [2, 3, 12, 32, 33, 64, 100, 257])
@pytest.mark.parametrize("seed", [b"one", b"two"])
def test_a_graph_is_regular_symmetric_connected_and_small(size: int, seed: bytes) -> None:
    graph = neighbourhoods(nodes(size), seed)
    assert graph.keys() == set(nodes(size))
    for node, near in graph.items():
        assert list(near) == sorted(set(near))
        assert len(near) == degree(size)
        assert node not in near
        assert all(node in graph[other] for other in near)
    assert is_connected(graph)


def test_the_graph_is_a_function_of_set_and_seed() -> None:
    names = nodes(64)
    assert neighbourhoods(names, b"seed") == neighbourhoods(reversed(names), b"seed")
    assert neighbourhoods(names, b"seed") != neighbourhoods(names, b"seen")
    flat = repr(sorted(neighbourhoods(names, b"seed").items())).encode()
    assert (
        hashlib.sha256(flat).hexdigest()
        == "9b910d6577cfd1921467342253e9e10e3fea8f11cb955f8f47614cf2735a17ff"
    )


def test_a_fifth_may_drop_out_and_the_rest_stays_connected() -> None:
    for trial in range(20):
        graph = neighbourhoods(nodes(100), b"%d" % trial)
        left = nodes(100)[20:]
        rest = {node: tuple(n for n in graph[node] if n in left) for node in left}
        assert is_connected(rest)
        assert min(len(near) + 1 for near in rest.values()) >= quorum(100, 51)


def test_the_degree_grows_as_the_logarithm() -> None:
    assert [degree(n) for n in (2, 32, 33, 64, 100, 1000, 4096)] == [1, 31, 30, 36, 38, 58, 72]
    for size in range(33, MAX_PARTICIPANTS + 1):
        assert 6 * math.log2(size) - 2 < degree(size) <= 6 * math.log2(size)
        assert degree(size) < size
        assert degree(size) % 2 == 0
    assert degree(MAX_PARTICIPANTS) + 1 == MAX_HOLDERS


@pytest.mark.parametrize("size", [2, 3, 31, 32, 33, 64, 100, 1000])
def test_a_quorum_is_a_majority_of_the_holders_and_the_threshold_where_all_hold(size: int) -> None:
    holders = degree(size) + 1
    for threshold in range(size // 2 + 1, size + 1):
        needed = quorum(size, threshold)
        assert holders < 2 * needed <= 2 * holders
        assert needed * size >= threshold * holders
        if holders == size:
            assert needed == threshold


# ---- roster ----


@pytest.mark.parametrize(
    ("size", "threshold", "seed"),
    [(1, 1, 0), (4, 2, 0), (4, 5, 0), (5, 0, 0), (3, 2, -1), (3, 2, 1 << 63)],
)
def test_terms_that_cannot_protect_are_refused(size: int, threshold: int, seed: int) -> None:
    with pytest.raises(ContractViolation):
        roster(size, threshold, seed)


@pytest.mark.parametrize("name", ["", "00", "A" * 64, "0" * 63 + " ", "g" * 64])
def test_a_malformed_node_id_is_refused(name: str) -> None:
    keys = {node: SecretKeys(CONTEXT, node).public for node in nodes(2)}
    keys[NodeId(name)] = keys[nodes(1)[0]]
    with pytest.raises(ContractViolation):
        Roster(CONTEXT, keys, 2, 0)


def test_the_digest_covers_everything() -> None:
    keys = {node: SecretKeys(CONTEXT, node).public for node in nodes(4)}
    backwards = dict(reversed(keys.items()))
    plain = Roster(CONTEXT, keys, 3, 0)
    assert Roster(CONTEXT, backwards, 3, 0).digest == plain.digest
    digests = {plain.digest, Roster(CONTEXT, keys, 4, 0).digest, Roster(CONTEXT, keys, 3, 1).digest}
    digests |= {Roster(context, keys, 3, 0).digest for context in OTHERS}
    fewer = dict(itertools.islice(keys.items(), 3))
    digests.add(Roster(CONTEXT, fewer, 3, 0).digest)
    for part in ("mask_key", "share_key", "self_commitment"):
        fresh = getattr(SecretKeys(CONTEXT, ANNA).public, part)
        changed = keys | {ANNA: msgspec.structs.replace(keys[ANNA], **{part: fresh})}
        digests.add(Roster(CONTEXT, changed, 3, 0).digest)
    assert len(digests) == 10


def test_holders_are_the_neighbours_and_the_node_itself() -> None:
    small = roster()
    assert small.holders(BERT) == tuple(sorted((ANNA, BERT, CARA)))
    assert BERT not in small.neighbours(BERT)
    with pytest.raises(ContractViolation, match="not on the roster"):
        small.neighbours(nodes(4)[3])
