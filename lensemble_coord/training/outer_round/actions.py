"""What the round machine asks its rim for, and the timers that it arms."""

from enum import StrEnum
from typing import TypeAlias

import msgspec

from lensemble.ids import Digest, NodeId
from lensemble.machine import ArmTimer, CancelTimer
from lensemble_coord.training.outer_round.events import Holding
from lensemble_coord.training.outer_round.states import Binding, Contribution


class Timer(StrEnum):
    OPEN = "open"
    GRACE = "grace"
    SHARE = "share"
    COLLECT = "collect"
    COLLECT_END = "collect_end"
    UNMASK = "unmask"
    RETRY = "retry"


PHASE_TIMERS = (
    Timer.OPEN,
    Timer.GRACE,
    Timer.SHARE,
    Timer.COLLECT,
    Timer.COLLECT_END,
    Timer.UNMASK,
)
"""What may run while a round is in flight; all are cancelled when it aborts."""


class OpenRound(msgspec.Struct, frozen=True, tag=True):
    """Record the attempt, durably, then tell ``nodes``."""

    round: int
    attempt: int
    digest: Digest
    nodes: tuple[NodeId, ...]


class AskAlso(msgspec.Struct, frozen=True, tag=True):
    """Tell ``node`` too that the round is open."""

    node: NodeId


class OfferState(msgspec.Struct, frozen=True, tag=True):
    """Send ``node`` what it does not hold of the global state; nothing if it holds all of it."""

    node: NodeId
    held: Holding


class SendRoster(msgspec.Struct, frozen=True, tag=True):
    """Tell the bound nodes each other's keys and the threshold."""

    bound: tuple[Binding, ...]
    threshold: int


class BeginCollect(msgspec.Struct, frozen=True, tag=True):
    nodes: tuple[NodeId, ...]


class Refuse(msgspec.Struct, frozen=True, tag=True):
    """Count what ``node`` sent as refused and tell it why."""

    node: NodeId
    code: str
    reason: str


class DropUpdate(msgspec.Struct, frozen=True, tag=True):
    """Forget whatever ``node`` sent for this attempt."""

    node: NodeId


class RequestUnmask(msgspec.Struct, frozen=True, tag=True):
    """Ask the survivors for what takes the masks off the sum of exactly their updates."""

    survivors: tuple[NodeId, ...]
    dropouts: tuple[NodeId, ...]


class DeriveSum(msgspec.Struct, frozen=True, tag=True):
    contributors: tuple[Contribution, ...]


class Diagnose(msgspec.Struct, frozen=True, tag=True):
    field_sum: Digest
    contributors: tuple[Contribution, ...]


class Commit(msgspec.Struct, frozen=True, tag=True):
    """Outer step, checkpoint, one ledger record."""

    field_sum: Digest
    contributors: tuple[Contribution, ...]


class AnnounceClose(msgspec.Struct, frozen=True, tag=True):
    round: int
    attempt: int
    digest: Digest
    contributors: tuple[NodeId, ...]


class AnnounceAbort(msgspec.Struct, frozen=True, tag=True):
    """Record and tell that the attempt is discarded; drop its spool."""

    round: int
    attempt: int
    digest: Digest
    code: str
    reason: str
    retries: bool


class FinishRun(msgspec.Struct, frozen=True, tag=True):
    """The rounds asked for are done, or given up for ``reason``."""

    completed: bool
    code: str = ""
    reason: str = ""


Action: TypeAlias = (
    OpenRound
    | AskAlso
    | OfferState
    | SendRoster
    | BeginCollect
    | RequestUnmask
    | Refuse
    | DropUpdate
    | DeriveSum
    | Diagnose
    | Commit
    | AnnounceClose
    | AnnounceAbort
    | FinishRun
    | ArmTimer
    | CancelTimer
)
