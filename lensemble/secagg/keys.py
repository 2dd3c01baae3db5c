"""What one attempt's masks are derived from; every derivation is bound to that attempt.

Each participant draws, for each attempt, two X25519 key pairs (one to agree on masks, one to
encrypt shares) and a private self seed.  The public half travels in its signed commitment.
"""

import hashlib
import os

import msgspec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from lensemble.errors import ContractViolation
from lensemble.ids import FederationId, NodeId
from lensemble.secagg.faults import Cause, MaskingFault

KEY_BYTES = 32
"""Of a public key, a private key, a self seed, a commitment and a derived key."""
_FEDERATION_BYTES = 16
_NODE_BYTES = 32


class Context(msgspec.Struct, frozen=True):
    """The one attempt that keys, shares and masks belong to."""

    federation: FederationId
    round: int
    attempt: int

    def encoded(self) -> bytes:
        """32 bytes, different for every attempt.

        Raises:
            ContractViolation: the federation is not 32 hex digits, or a number is out of range.
        """
        try:
            raw = bytes.fromhex(self.federation)
            numbers = self.round.to_bytes(8, "big") + self.attempt.to_bytes(8, "big")
        except (ValueError, OverflowError) as error:
            raise ContractViolation(f"no attempt can be {self}") from error
        if len(raw) != _FEDERATION_BYTES:
            raise ContractViolation(f"{self.federation!r} is not a federation of 32 hex digits")
        return raw + numbers


def node_bytes(node: NodeId) -> bytes:
    """The 32 bytes that a node id stands for.

    Raises:
        ContractViolation: it is not 64 hex digits.
    """
    try:
        raw = bytes.fromhex(node)
    except ValueError as error:
        raise ContractViolation(f"{node!r} is not a node id") from error
    if len(raw) != _NODE_BYTES or raw.hex() != node:
        raise ContractViolation(f"{node!r} is not a node id of 64 lower-case hex digits")
    return raw


def tagged(label: str, context: Context, *parts: bytes) -> bytes:
    """Bytes to hash, derive from or authenticate; ``parts`` have fixed lengths for each label."""
    return b"".join((b"lensemble/secagg/", label.encode(), b"/v1\x00", context.encoded(), *parts))


class PublicKeys(msgspec.Struct, frozen=True, gc=False):
    """What a participant publishes for one attempt: three times 32 bytes.

    ``self_commitment`` is the SHA-256 of its self seed, bound to node and attempt.
    """

    mask_key: bytes
    share_key: bytes
    self_commitment: bytes

    def check(self, node: NodeId) -> None:
        """Refuse keys that no honest ``node`` publishes.

        Raises:
            MaskingFault: a wrong length, equal keys, or a point of small order.
        """
        parts = (self.mask_key, self.share_key, self.self_commitment)
        if any(len(part) != KEY_BYTES for part in parts) or self.mask_key == self.share_key:
            raise _bad_keys(node)
        probe = X25519PrivateKey.generate()
        for key in (self.mask_key, self.share_key):
            agree(probe, key, node)


def agree(private: X25519PrivateKey, public: bytes, node: NodeId) -> bytes:
    """The 32 bytes shared with the holder of ``public``, which ``node`` published.

    Raises:
        MaskingFault: ``public`` is a point of small order, or no point.
    """
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:
        raise _bad_keys(node) from error


def _bad_keys(node: NodeId) -> MaskingFault:
    return MaskingFault(Cause.BAD_KEYS, f"the masking keys of {node} are not usable", (node,))


class SecretKeys:
    """The private half, drawn from the operating system and never written anywhere."""

    def __init__(self, context: Context, node: NodeId) -> None:
        self.context = context
        self.node = node
        self.mask_private = X25519PrivateKey.generate()
        self.share_private = X25519PrivateKey.generate()
        self.self_seed = os.urandom(KEY_BYTES)
        self.public = PublicKeys(
            self.mask_private.public_key().public_bytes_raw(),
            self.share_private.public_key().public_bytes_raw(),
            self_commitment(context, node, self.self_seed),
        )

    def __repr__(self) -> str:
        return f"SecretKeys({self.context}, {self.node})"


def self_commitment(context: Context, node: NodeId, self_seed: bytes) -> bytes:
    """SHA-256 of ``self_seed``, bound to its owner and attempt: 32 bytes."""
    return hashlib.sha256(tagged("self", context, node_bytes(node), self_seed)).digest()


def pair_key(
    context: Context, private: X25519PrivateKey, me: NodeId, peer: NodeId, peer_key: bytes
) -> bytes:
    """Key of the mask that ``me`` and ``peer`` share; 32 bytes, the same for both.

    Raises:
        MaskingFault: ``peer_key``, the peer's public mask key, is not usable.
    """
    low, high = sorted((node_bytes(me), node_bytes(peer)))
    return derived(agree(private, peer_key, peer), tagged("pair-mask", context, low, high))


def self_key(context: Context, node: NodeId, self_seed: bytes) -> bytes:
    """Key of the mask that ``node`` alone adds; 32 bytes."""
    return derived(self_seed, tagged("self-mask", context, node_bytes(node)))


def derived(secret: bytes, info: bytes) -> bytes:
    """HKDF-SHA256 of ``secret`` for ``info``, without salt: 32 bytes."""
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=info).derive(secret)
