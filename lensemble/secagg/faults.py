"""What can go wrong with masks: one error, its cause, and the nodes that are to blame."""

from collections.abc import Iterable
from enum import StrEnum

from lensemble.errors import SecureAggregationError
from lensemble.ids import NodeId


class Cause(StrEnum):
    BELOW_THRESHOLD = "below_threshold"
    """Too few nodes are present to reconstruct what the sum needs."""
    BAD_KEYS = "key_agreement_failed"
    BAD_DEALING = "dealing_refused"
    """A node dealt shares that do not open, do not fit, or are for something else."""
    WRONG_SHARE = "wrong_share"
    """A holder revealed something else than the share it was dealt."""
    RECONSTRUCTION = "mask_reconstruction_failed"
    """The shares of one dealer give no secret of its: it dealt shares of something else."""
    UNMASK_REFUSED = "unmask_refused"
    """A request which, answered, could reveal more than one sum."""


class MaskingFault(SecureAggregationError):
    """A masked sum cannot go on; ``nodes`` names those at fault, if any is.

    ``present`` and ``threshold`` say how many were there and how many are needed; both are 0
    where numbers are not the reason.
    """

    default_remediation = "Nothing was revealed beyond whole sums; the round is tried again."

    def __init__(
        self,
        cause: Cause,
        message: str,
        nodes: Iterable[NodeId] = (),
        *,
        present: int = 0,
        threshold: int = 0,
    ) -> None:
        super().__init__(message)
        self.cause = cause
        self.nodes = tuple(nodes)
        self.present = present
        self.threshold = threshold


def below_threshold(what: str, present: int, threshold: int) -> MaskingFault:
    return MaskingFault(
        Cause.BELOW_THRESHOLD,
        f"{what}: {present} present, {threshold} needed",
        present=present,
        threshold=threshold,
    )
