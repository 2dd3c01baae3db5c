"""What a node is in a federation: its worker, the edges of a session, the membership."""

from typing import TypeAlias

import msgspec

from lensemble.ids import FederationId, NodeId
from lensemble.wire import messages
from lensemble_node import attempt, signals
from lensemble_node.provision import Pair
from lensemble_node.terms import Terms

Attempt: TypeAlias = attempt.State


class Me(msgspec.Struct, frozen=True):
    """What this process is, fixed at its start."""

    node: NodeId
    name: str
    build: str
    boot: str
    pinned: str = ""
    """Take part only in the workload with this config hash."""
    share_norms: bool = False
    share_plain: bool = False
    task_entry: str = ""
    """Take part where the coordinator sees each update by itself."""
    backoff_s: float = 0.5
    backoff_max_s: float = 15.0
    start_timeout_s: float = 3600.0
    """A worker that has not opened its dataset by then is wedged."""


class Target(msgspec.Struct, frozen=True):
    """Whom to join; ``federation`` once it is known."""

    node: NodeId
    addresses: tuple[str, ...]
    federation: FederationId | None = None


class NoWorker(msgspec.Struct, frozen=True, tag=True):
    """No workload is known yet."""


class Starting(msgspec.Struct, frozen=True, tag=True):
    """The process is up or coming up and opens its dataset; ``owed`` is a round it must close."""

    terms: Terms
    owed: signals.Close | None = None


class Able(msgspec.Struct, frozen=True, tag=True):
    terms: Terms
    facts: signals.Configured
    owed: signals.Close | None = None


class Unable(msgspec.Struct, frozen=True, tag=True):
    """Dead or refusing its configuration; the supervisor starts it again."""

    terms: Terms
    code: str
    reason: str
    remediation: str = ""
    owed: signals.Close | None = None


Worker: TypeAlias = NoWorker | Starting | Able | Unable


class NoEdges(msgspec.Struct, frozen=True, tag=True):
    """None provisioned, or lost and reported."""


class Wanted(msgspec.Struct, frozen=True, tag=True):
    """Asked for; the worker cannot attach yet."""

    pair: Pair


class Provided(msgspec.Struct, frozen=True, tag=True):
    pair: Pair


class Usable(msgspec.Struct, frozen=True, tag=True):
    pair: Pair


Edges: TypeAlias = NoEdges | Wanted | Provided | Usable


class Unassigned(msgspec.Struct, frozen=True, tag=True):
    """No coordinator is known."""

    call: int = 0


class Dialing(msgspec.Struct, frozen=True, tag=True):
    """``call`` numbers the links of this process, so that news of an old one are told apart."""

    target: Target
    call: int
    failures: int = 0


class Resting(msgspec.Struct, frozen=True, tag=True):
    """Not connected, and why; ``delay_s`` is before jitter.  ``refused``: told not to come back."""

    target: Target
    call: int
    failures: int
    cause: str
    delay_s: float
    refused: bool = False


class Joining(msgspec.Struct, frozen=True, tag=True):
    """Connected; ``Join`` is sent."""

    target: Target
    call: int
    failures: int = 0


class Session(msgspec.Struct, frozen=True):
    """What ``Welcome`` said; ``last`` is the newest committed round."""

    federation: FederationId
    epoch: int
    coordinator: str
    build: str
    terms: Terms
    last: messages.LastRecord


class Joined(msgspec.Struct, frozen=True, tag=True):
    target: Target
    call: int
    session: Session
    edges: Edges = NoEdges()
    attempt: Attempt = attempt.Idle()
    fresh: bool = False
    """The edges are newer than the last ``RoundOpen``: it may be said again for them."""
    failures: int = 0


class Left(msgspec.Struct, frozen=True, tag=True):
    """This process is going away."""


Membership: TypeAlias = Unassigned | Dialing | Resting | Joining | Joined | Left


class Unmasked(msgspec.Struct, frozen=True):
    """The newest attempt whose sum this node has helped to unmask."""

    federation: FederationId
    round: int
    attempt: int


class State(msgspec.Struct, frozen=True, tag=True):
    me: Me
    worker: Worker = NoWorker()
    membership: Membership = Unassigned()
    unmasked: Unmasked | None = None
    """Neither it nor an older one is taken again: two sums of it would give an update away."""
