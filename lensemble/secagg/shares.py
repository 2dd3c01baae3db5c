"""Secrets of 32 bytes in shares, each committed to by its dealer and encrypted to its holder.

Shamir's scheme over GF(2**128): each half of a secret is shared by itself, with coefficients from
the operating system.  Tests hold it to pycryptodome, whose shares are of the same bits and take
fifteen times as long, which a roster of a thousand feels.  A share is
also published as its SHA-256, so that whoever receives one sees at once whether it is the one that
was dealt: a wrong share has exactly one author and nobody has to search for it.
"""

import hashlib
import os
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from msgspec import Meta

from lensemble.ids import NodeId
from lensemble.secagg.faults import Cause, MaskingFault
from lensemble.secagg.graph import MAX_HOLDERS
from lensemble.secagg.interpolation import times, value_at, weights
from lensemble.secagg.keys import KEY_BYTES, Context, SecretKeys, agree, derived, node_bytes, tagged
from lensemble.secagg.roster import Roster

SHARE_BYTES = KEY_BYTES
PAIR_BYTES = 2 * SHARE_BYTES
"""Of the two shares that one holder gets of one dealer, and of their two commitments."""
NONCE_BYTES = 12
TAG_BYTES = 16
SEALED_BYTES = NONCE_BYTES + PAIR_BYTES + TAG_BYTES
_HALF = 16


class Kind(StrEnum):
    """Which secret of its dealer a share is of; the value goes into its commitment."""

    SELF = "self"
    MASK = "mask"


class SharePair(msgspec.Struct, frozen=True):
    """A holder's shares of both secrets of one dealer, 32 bytes each."""

    of_self: bytes
    of_mask: bytes

    def __repr__(self) -> str:
        return "SharePair(...)"

    def of(self, kind: Kind) -> bytes:
        return self.of_self if kind is Kind.SELF else self.of_mask


class Dealing(msgspec.Struct, frozen=True):
    """What a dealer sends: commitments for all its holders, ciphertexts for its neighbours.

    ``commitments`` has 64 bytes for each of ``roster.holders(dealer)``, ``sealed`` one string of 92
    bytes for each of ``roster.neighbours(dealer)``, in those orders.
    """

    commitments: Annotated[bytes, Meta(max_length=MAX_HOLDERS * PAIR_BYTES)]
    sealed: Annotated[
        tuple[Annotated[bytes, Meta(min_length=SEALED_BYTES, max_length=SEALED_BYTES)], ...],
        Meta(max_length=MAX_HOLDERS - 1),
    ]


class Envelope(msgspec.Struct, frozen=True, gc=False):
    """One dealer's shares on their way to one holder: ciphertext and the pair's commitments."""

    sealed: Annotated[bytes, Meta(min_length=SEALED_BYTES, max_length=SEALED_BYTES)]
    commitments: Annotated[bytes, Meta(min_length=PAIR_BYTES, max_length=PAIR_BYTES)]


# ---- Shamir ----


def split(secret: bytes, holders: int, quorum: int) -> list[bytes]:
    """``secret`` (32 bytes) in shares of 32 bytes, for the indices 1 to ``holders``."""
    halves = [_values(secret[start : start + _HALF], holders, quorum) for start in (0, _HALF)]
    return [low + high for low, high in zip(*halves, strict=True)]


def _values(constant: bytes, holders: int, quorum: int) -> list[bytes]:
    """A random polynomial of degree ``quorum - 1`` with this constant, at 1 to ``holders``."""
    drawn = os.urandom(_HALF * (quorum - 1)) + constant
    coefficients = [
        int.from_bytes(drawn[start : start + _HALF], "big") for start in range(0, len(drawn), _HALF)
    ]
    return [value_at(x, coefficients).to_bytes(_HALF, "big") for x in range(1, holders + 1)]


def combine(shares: Mapping[int, bytes]) -> bytes:
    """The secret (32 bytes) of exactly a quorum of ``shares`` by index, from 1."""
    low = high = 0
    for weight, share in zip(weights(tuple(shares)), shares.values(), strict=True):
        low ^= times(int.from_bytes(share[:_HALF], "big"), weight)
        high ^= times(int.from_bytes(share[_HALF:], "big"), weight)
    return low.to_bytes(_HALF, "big") + high.to_bytes(_HALF, "big")


# ---- commitments ----


def commitment(context: Context, kind: Kind, dealer: NodeId, holder: NodeId, share: bytes) -> bytes:
    """SHA-256 (32 bytes) of ``share``, bound to its attempt, kind, dealer and holder.

    A share is uniform over 2**256 values, so its digest gives nothing away.
    """
    bound = tagged(f"share-{kind}", context, node_bytes(dealer), node_bytes(holder), share)
    return hashlib.sha256(bound).digest()


def _commitments(context: Context, dealer: NodeId, holder: NodeId, pair: SharePair) -> bytes:
    return b"".join(commitment(context, kind, dealer, holder, pair.of(kind)) for kind in Kind)


def committed(roster: Roster, dealing: Dealing, dealer: NodeId, holder: NodeId) -> bytes:
    """The 64 bytes by which ``dealer`` committed to both shares of ``holder``: self, mask."""
    start = PAIR_BYTES * roster.holders(dealer).index(holder)
    return dealing.commitments[start : start + PAIR_BYTES]


# ---- dealing ----


def deal(secrets: SecretKeys, roster: Roster) -> tuple[Dealing, SharePair]:
    """Shares of both secrets for all holders; the pair is the dealer's own."""
    me, context, holders = secrets.node, roster.context, roster.holders(secrets.node)
    of_self = split(secrets.self_seed, len(holders), roster.quorum)
    of_mask = split(secrets.mask_private.private_bytes_raw(), len(holders), roster.quorum)
    pairs = dict(zip(holders, map(SharePair, of_self, of_mask), strict=True))
    bound = {holder: _commitments(context, me, holder, pair) for holder, pair in pairs.items()}
    sealed = tuple(_seal(secrets, roster, to, pairs[to], bound[to]) for to in roster.neighbours(me))
    return Dealing(b"".join(bound.values()), sealed), pairs[me]


def check_dealing(roster: Roster, dealer: NodeId, dealing: Dealing) -> None:
    """Refuse a dealing that is not for exactly the holders of ``dealer``.

    Raises:
        ContractViolation: ``dealer`` is not on the roster.
        MaskingFault: too few or too many commitments or ciphertexts, or of a wrong size.
    """
    neighbours = len(roster.neighbours(dealer))
    if (
        len(dealing.commitments) != PAIR_BYTES * (neighbours + 1)
        or len(dealing.sealed) != neighbours
        or any(len(each) != SEALED_BYTES for each in dealing.sealed)
    ):
        raise _refused(dealer, f"are not for {neighbours} neighbours")


def envelopes_for(
    roster: Roster, dealings: Mapping[NodeId, Dealing], holder: NodeId
) -> dict[NodeId, Envelope]:
    """What ``holder`` is sent: by dealer, of those of its neighbours who dealt.

    ``dealings`` have passed ``check_dealing``.
    """
    found: dict[NodeId, Envelope] = {}
    for dealer in roster.neighbours(holder):
        if dealer in dealings:
            dealing = dealings[dealer]
            sealed = dealing.sealed[roster.neighbours(dealer).index(holder)]
            found[dealer] = Envelope(sealed, committed(roster, dealing, dealer, holder))
    return found


# ---- encryption ----


def _seal(
    secrets: SecretKeys, roster: Roster, to: NodeId, pair: SharePair, commitments: bytes
) -> bytes:
    way = (secrets.node, to)
    nonce = os.urandom(NONCE_BYTES)
    text = pair.of_self + pair.of_mask
    cipher = ChaCha20Poly1305(_share_key(secrets, roster, to, way))
    return nonce + cipher.encrypt(nonce, text, _bound(roster, way, commitments))


def unseal(secrets: SecretKeys, roster: Roster, dealer: NodeId, envelope: Envelope) -> SharePair:
    """The shares that ``dealer`` dealt to the owner of ``secrets``.

    Raises:
        MaskingFault: names ``dealer``: it does not open (made by another, for another, for another
            attempt or another roster), or the shares are not those committed to.
    """
    way = (dealer, secrets.node)
    cipher = ChaCha20Poly1305(_share_key(secrets, roster, dealer, way))
    nonce, sealed = envelope.sealed[:NONCE_BYTES], envelope.sealed[NONCE_BYTES:]
    try:
        text = cipher.decrypt(nonce, sealed, _bound(roster, way, envelope.commitments))
    except (InvalidTag, ValueError) as error:
        raise _refused(dealer, "do not open") from error
    if len(text) != PAIR_BYTES:
        raise _refused(dealer, f"have {len(text)} bytes")
    pair = SharePair(text[:SHARE_BYTES], text[SHARE_BYTES:])
    if _commitments(roster.context, dealer, secrets.node, pair) != envelope.commitments:
        raise _refused(dealer, "are not those it committed to")
    return pair


def _share_key(
    secrets: SecretKeys, roster: Roster, peer: NodeId, way: tuple[NodeId, NodeId]
) -> bytes:
    shared = agree(secrets.share_private, roster.keys[peer].share_key, peer)
    return derived(shared, tagged("share-key", roster.context, *map(node_bytes, way)))


def _bound(roster: Roster, way: tuple[NodeId, NodeId], commitments: bytes) -> bytes:
    ends = map(node_bytes, way)
    return tagged("envelope", roster.context, bytes.fromhex(roster.digest), *ends, commitments)


def _refused(dealer: NodeId, why: str) -> MaskingFault:
    return MaskingFault(Cause.BAD_DEALING, f"the shares dealt by {dealer} {why}", (dealer,))
