"""Names of things that travel between processes."""

from typing import NewType

NodeId = NewType("NodeId", str)
"""64 lower-case hex digits: the Ed25519 public key of a node, also its iroh endpoint id."""

EdgeId = NewType("EdgeId", int)
"""Unsigned 64-bit, assigned by the coordinator, never used again after its edge is gone."""

SlotIndex = NewType("SlotIndex", int)
"""Position of a slot in the ring of one edge-end, from 0."""

Digest = NewType("Digest", str)
"""64 lower-case hex digits of a SHA-256."""

FederationId = NewType("FederationId", str)
"""32 lower-case hex digits drawn once, when the coordinator's state directory is made."""
