"""What an edge is, as both its ends are told: who sends, who receives, and how much at a time."""

import msgspec

from lensemble.errors import ContractViolation
from lensemble.ids import EdgeId, NodeId

MAX_EDGE_ID = (1 << 64) - 1
"""An edge id travels as u64."""

MAX_CAPACITY_BYTES = 64 << 20
"""Longest chunk an edge can be provisioned for, in bytes."""

MAX_SLOTS = 64
"""Deepest ring of one edge-end."""

DEFAULT_SLOTS = 2


class EdgeSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One edge: one producer, one consumer, chunks of at most ``capacity_bytes``.

    ``slots`` is the depth of the ring at each end.

    Raises:
        ContractViolation: a field outside its limits, or an edge from a node to itself.
    """

    edge: EdgeId
    producer: NodeId
    consumer: NodeId
    capacity_bytes: int
    slots: int = DEFAULT_SLOTS

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("edge", self.edge, 0, MAX_EDGE_ID),
            ("capacity_bytes", self.capacity_bytes, 1, MAX_CAPACITY_BYTES),
            ("slots", self.slots, 1, MAX_SLOTS),
        ):
            if not low <= value <= high:
                raise ContractViolation(
                    f"{name} of edge {self.edge} is {value}; it must lie in {low}..{high}"
                )
        if self.producer == self.consumer:
            raise ContractViolation(f"edge {self.edge} would lead from {self.producer} to itself")

    @property
    def ring_bytes(self) -> int:
        """Bytes that the ring of one end occupies."""
        return self.capacity_bytes * self.slots
