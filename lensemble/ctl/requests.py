"""What may be asked of a daemon over its control socket; every field has a limit."""

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

CTL_VERSION = 1
MAX_REQUEST_BYTES = 1 << 16
MAX_ROUNDS = 1_000_000
MAX_LISTED = 10_000

Label = Annotated[str, Meta(max_length=64)]
Sentence = Annotated[str, Meta(max_length=500)]
RoundCount = Annotated[int, Meta(ge=1, le=MAX_ROUNDS)]
Listed = Annotated[int, Meta(ge=1, le=MAX_LISTED)]


class _Request(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    pass


class Hello(_Request, frozen=True, kw_only=True, tag=True):
    """First request of every client."""

    ctl_version: int
    version: Label
    """Release of Lensemble the client belongs to."""


class Status(_Request, frozen=True, kw_only=True, tag=True):
    """Answered by one ``CoordinatorStatus`` or ``NodeStatus``, or with ``watch`` by many."""

    watch: bool = False
    interval_s: Annotated[float, Meta(ge=0.1, le=3600)] = 1.0
    """Longest pause between two replies; a change is sent at once."""


class Run(_Request, frozen=True, kw_only=True, tag=True):
    """Start a run of ``rounds`` rounds; refused while another run goes on.

    Answered by ``RunStarted``; then, unless ``detach``, by ``CoordinatorStatus`` at each change and
    ``RoundClosed`` for each round, and last by ``RunEnded``.
    """

    rounds: RoundCount
    open_timeout_s: Annotated[float, Meta(gt=0, le=604_800)] | None = None
    """Instead of the configured one; the run ends when a round finds no quorum for so long."""
    detach: bool = False


class Attach(_Request, frozen=True, kw_only=True, tag=True):
    """Watch the run that goes on; answered as ``Run`` is."""


class Abort(_Request, frozen=True, kw_only=True, tag=True):
    """End the round in flight and the run; what is committed stays.  Answered by ``Done``."""

    reason: Sentence = "aborted by the operator"


class Rounds(_Request, frozen=True, kw_only=True, tag=True):
    """The latest rounds; answered by ``RoundList``."""

    limit: Listed = 20


class Round(_Request, frozen=True, kw_only=True, tag=True):
    """One committed round in full; answered by ``RoundDetail``."""

    index: Annotated[int, Meta(ge=0, le=1 << 53)]


class Invite(_Request, frozen=True, kw_only=True, tag=True):
    """Make a ticket; answered by ``Invited``."""

    uses: Annotated[int, Meta(ge=1, le=4096)] = 1
    ttl_s: Annotated[float, Meta(gt=0, le=31_536_000)] = 86_400.0


class Checkpoints(_Request, frozen=True, kw_only=True, tag=True):
    """Answered by ``CheckpointList``."""


class CheckpointExport(_Request, frozen=True, kw_only=True, tag=True):
    """Where a checkpoint lies, for the client to copy; answered by ``CheckpointLocation``."""

    which: Label = "latest"
    """``latest``, a round index, or a digest or the beginning of one."""


class Events(_Request, frozen=True, kw_only=True, tag=True):
    """The latest recorded events, oldest first, and with ``follow`` those to come.

    Answered by an ``EventRow`` for each.
    """

    limit: Listed = 50
    follow: bool = False


class Join(_Request, frozen=True, kw_only=True, tag=True):
    """Make this node belong to the coordinator that gave ``ticket``; answered by ``Joined``."""

    ticket: Annotated[str, Meta(max_length=2048)]


class Leave(_Request, frozen=True, kw_only=True, tag=True):
    """Make this node leave its federation and stay idle; answered by ``Done``."""

    reason: Sentence = "left by the operator"


Request: TypeAlias = (
    Hello
    | Status
    | Run
    | Attach
    | Abort
    | Rounds
    | Round
    | Invite
    | Checkpoints
    | CheckpointExport
    | Events
    | Join
    | Leave
)
