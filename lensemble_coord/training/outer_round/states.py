"""Where a round may be, and what every state stands on."""

from enum import StrEnum
from typing import Literal, TypeAlias

import msgspec

from lensemble.ids import Digest, NodeId
from lensemble_coord.training import patience
from lensemble_coord.training.outer_round.events import BlobArrived, UpdateAnnounced


class RoundState(StrEnum):
    """The public answer to "where is the round?"; computed from the state, never stored."""

    OPEN = "open"
    COLLECTING = "collecting"
    AGGREGATING = "aggregating"
    ALIGNING = "aligning"
    COMMITTING = "committing"
    CLOSED = "closed"
    ABORTED = "aborted"


class Rules(msgspec.Struct, frozen=True):
    """What configuration fixes for every round; times in seconds."""

    quorum: int
    max_attempts: int
    open_timeout_s: float
    open_grace_s: float
    collect_timeout_s: float
    """A participant without progress for this long, or at most a quarter longer, is left out."""
    retry_backoff_s: float
    retry_backoff_max_s: float
    on_commitment_mismatch: Literal["abort", "exclude"]
    masked: bool = False
    threshold: int = 0
    """Fewest unmasking answers, for any number of participants; never below a majority of them."""
    share_timeout_s: float = 30.0
    unmask_timeout_s: float = 15.0
    collect_max_s: float = 0.0
    """The longest an attempt collects whatever progress is made; 0 is ``patience.MAX_PATIENCE``."""


class Ground(msgspec.Struct, frozen=True):
    """What every state stands on.

    ``round`` and ``attempt`` name the round in flight, or in ``Closed`` the next one.  ``tries``
    counts attempts of this round within the present run.  ``patience_s`` replaces the open timeout
    for the present run, and the run ends when it expires.  ``stopping`` is why an operator ends the
    run behind a commit that is already under way.  ``resting`` nodes are not asked any more; what
    one of them has bound itself to, it may finish.
    """

    rules: Rules
    round: int
    attempt: int
    digest: Digest
    here: tuple[NodeId, ...] = ()
    remaining: int = 0
    tries: int = 0
    patience_s: float | None = None
    stopping: str = ""
    resting: frozenset[NodeId] = frozenset()

    @property
    def asked(self) -> tuple[NodeId, ...]:
        """Who is expected in a round that opens."""
        return tuple(node for node in self.here if node not in self.resting)


class Binding(msgspec.Struct, frozen=True, gc=False):
    """A valid ``Commitment`` of this attempt."""

    node: NodeId
    dataset_root: Digest
    signature: bytes


class Contribution(msgspec.Struct, frozen=True, gc=False):
    """An update that is announced, arrived whole, and bound to its dataset."""

    node: NodeId
    dataset_root: Digest
    commitment_signature: bytes
    digest: Digest
    update_signature: bytes


class Dropped(msgspec.Struct, frozen=True, gc=False):
    node: NodeId
    code: str
    reason: str


class Closed(msgspec.Struct, frozen=True, tag=True):
    """No round in flight: at rest, or between two rounds."""

    ground: Ground


class Open(msgspec.Struct, frozen=True, tag=True):
    ground: Ground
    bound: tuple[Binding, ...] = ()
    declined: tuple[Dropped, ...] = ()
    graced: bool = False
    hurry: bool = False


class Sharing(msgspec.Struct, frozen=True, tag=True):
    """Masked only: ``bound`` exchange shares of their mask secrets; ``shared`` have sent theirs."""

    ground: Ground
    bound: tuple[Binding, ...]
    threshold: int
    shared: tuple[NodeId, ...] = ()
    dropped: tuple[Dropped, ...] = ()


class Collecting(msgspec.Struct, frozen=True, tag=True):
    """``expected`` may contribute; ``announced`` and ``arrived`` are halves of a contribution.

    ``expected`` are sorted, ``advances`` of all of them in that order; ``checks`` counts how often
    they were looked at.
    """

    ground: Ground
    expected: tuple[Binding, ...]
    announced: tuple[UpdateAnnounced, ...] = ()
    arrived: tuple[BlobArrived, ...] = ()
    verified: tuple[Contribution, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    threshold: int = 0
    advances: tuple[patience.Advance, ...] = ()
    checks: int = 0


class Unmasking(msgspec.Struct, frozen=True, tag=True):
    """Masked only: the contributors are fixed and reveal what takes the masks off their sum."""

    ground: Ground
    contributors: tuple[Contribution, ...]
    dropped: tuple[Dropped, ...]
    threshold: int
    answered: tuple[NodeId, ...] = ()
    gone: tuple[NodeId, ...] = ()


class Aggregating(msgspec.Struct, frozen=True, tag=True):
    ground: Ground
    contributors: tuple[Contribution, ...]
    dropped: tuple[Dropped, ...]
    failures: int = 0
    reason: str = ""
    """Masked only: why the last try failed, while the pause before the next one lasts."""


class Aligning(msgspec.Struct, frozen=True, tag=True):
    ground: Ground
    contributors: tuple[Contribution, ...]
    dropped: tuple[Dropped, ...]
    field_sum: Digest


class Committing(msgspec.Struct, frozen=True, tag=True):
    ground: Ground
    contributors: tuple[Contribution, ...]
    dropped: tuple[Dropped, ...]
    field_sum: Digest
    failures: int = 0
    reason: str = ""
    """Why the last try failed, while the pause before the next one lasts."""


class Aborted(msgspec.Struct, frozen=True, tag=True):
    """The attempt is discarded; ``retrying`` says whether another one follows by itself."""

    ground: Ground
    code: str
    reason: str
    retrying: bool


State: TypeAlias = (
    Closed | Open | Sharing | Collecting | Unmasking | Aggregating | Aligning | Committing | Aborted
)


InFlight: TypeAlias = Open | Sharing | Collecting | Unmasking | Aggregating | Aligning | Committing


_PUBLIC = {"sharing": RoundState.OPEN, "unmasking": RoundState.AGGREGATING}


def public_state(state: State) -> RoundState:
    name = type(state).__name__.lower()
    return _PUBLIC.get(name) or RoundState(name)
