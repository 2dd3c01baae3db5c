"""Outer steps that were committed, told to those who can take them themselves.

A node that holds the parameters and the outer momentum from which a step started needs only the
revealed sum of that round to come to the same parameters and momentum, to the last bit.
"""

from typing import Annotated, TypeAlias

from msgspec import Meta

from lensemble.params import MAX_TENSORS
from lensemble.wire.fence import MAX_PARTICIPANTS, Hash, Message

MAX_STEPS = 3
"""The sums of more rounds would be about as many bytes as parameters and momentum are."""


class TakenStep(Message, frozen=True, kw_only=True):
    """From ``start`` to ``end`` by the mean of ``contributors`` updates, whose sum is ``total``.

    A momentum of None is nought, or is not needed: the workload's ``outer.momentum`` is 0.
    """

    start: Hash
    start_momentum: Hash | None
    end: Hash
    end_momentum: Hash | None
    total: Hash
    """Digest of the sum; see ``blob.SumDigest``."""
    contributors: Annotated[int, Meta(ge=1, le=MAX_PARTICIPANTS)]
    plan: Annotated[bytes, Meta(max_length=MAX_TENSORS)] = b""
    """Of the words of the sum; see ``secagg.plan``."""


Steps: TypeAlias = Annotated[tuple[TakenStep, ...], Meta(max_length=MAX_STEPS)]
"""Oldest first; each starts where the one before it ends."""
