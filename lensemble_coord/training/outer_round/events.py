"""What the round machine hears: of an operator, of nodes, of our own work.

Every word of a node or of our work carries the (round, attempt) that it is about.
"""

from typing import TypeAlias

import msgspec

from lensemble.errors import OperatorError, Response
from lensemble.ids import Digest, NodeId
from lensemble.machine import TimerExpired


class RoundsAsked(msgspec.Struct, frozen=True, tag=True):
    """``rounds`` more rounds are wanted, 1 at least; asked during a run they are part of it."""

    rounds: int
    patience_s: float | None = None

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise OperatorError(f"{self.rounds} rounds were asked for", "Ask for 1 or more.")


class MemberReady(msgspec.Struct, frozen=True, tag=True):
    """A node is admitted and its edges are provisioned."""

    node: NodeId


class MemberRests(msgspec.Struct, frozen=True, tag=True):
    """``node``, here or not, is left out of rounds that open later, or (False) is not any more."""

    node: NodeId
    resting: bool = True


class MemberLost(msgspec.Struct, frozen=True, tag=True):
    node: NodeId
    code: str
    reason: str


class Holding(msgspec.Struct, frozen=True):
    """What a node has of the state that a round starts from, as its ``Commitment`` says it.

    ``nbytes`` of the parameters and the momentum behind them; or what ``follows`` of the last
    steps start from, and ``of_sum`` bytes of the first sum of those.
    """

    nbytes: int
    follows: int = 0
    of_sum: int = 0


class Committed(msgspec.Struct, frozen=True, tag=True):
    """A node bound itself to a dataset, signature checked; it holds so much of the state."""

    node: NodeId
    round: int
    attempt: int
    dataset_root: Digest
    signature: bytes
    held: Holding


class Declined(msgspec.Struct, frozen=True, tag=True):
    """A node, or our own check of what it sent, says it will not contribute to this attempt."""

    node: NodeId
    round: int
    attempt: int
    code: str
    reason: str


class SharesSent(msgspec.Struct, frozen=True, tag=True):
    """A node sent its encrypted shares for every other bound node."""

    node: NodeId
    round: int
    attempt: int


class UnmaskAnswered(msgspec.Struct, frozen=True, tag=True):
    """A contributor revealed shares for the survivor set it signed; the signature is checked."""

    node: NodeId
    round: int
    attempt: int


class UpdateAnnounced(msgspec.Struct, frozen=True, tag=True, gc=False):
    node: NodeId
    round: int
    attempt: int
    digest: Digest
    dataset_root: Digest
    signature: bytes


class BlobArrived(msgspec.Struct, frozen=True, tag=True, gc=False):
    """A whole update lies in the spool; ``digest`` was computed here, the signature checked."""

    node: NodeId
    round: int
    attempt: int
    digest: Digest
    signature: bytes


class Progressed(msgspec.Struct, frozen=True, tag=True):
    """A node says how far it is, or (``arriving``) so many bytes of its update are here."""

    node: NodeId
    round: int
    attempt: int
    phase: str
    done: int
    total: int


class SumDerived(msgspec.Struct, frozen=True, tag=True):
    round: int
    attempt: int
    field_sum: Digest


class Diagnosed(msgspec.Struct, frozen=True, tag=True):
    round: int
    attempt: int


class Advanced(msgspec.Struct, frozen=True, tag=True):
    """The ledger record is durable: the global state is ``digest`` now."""

    round: int
    attempt: int
    digest: Digest


class StepFailed(msgspec.Struct, frozen=True, tag=True):
    """Our own work for this attempt failed; nothing is committed."""

    round: int
    attempt: int
    code: str
    reason: str
    response: Response


class AbortAsked(msgspec.Struct, frozen=True, tag=True):
    """An operator ends the run; the round in flight is discarded."""

    reason: str


Event: TypeAlias = (
    RoundsAsked
    | MemberReady
    | MemberRests
    | MemberLost
    | Committed
    | Declined
    | SharesSent
    | UpdateAnnounced
    | BlobArrived
    | UnmaskAnswered
    | Progressed
    | SumDerived
    | Diagnosed
    | Advanced
    | StepFailed
    | AbortAsked
    | TimerExpired
)


FromPeer: TypeAlias = (
    Committed | Declined | SharesSent | UpdateAnnounced | BlobArrived | UnmaskAnswered
)


FromWork: TypeAlias = SumDerived | Diagnosed | Advanced | StepFailed
