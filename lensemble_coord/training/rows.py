"""What the ledger tells, as values."""

from typing import Literal, TypeAlias

import msgspec

from lensemble.ids import Digest, NodeId
from lensemble_coord.training.record import ContributionRecord

ArtifactKind: TypeAlias = Literal["weights", "momentum", "sum"]
AttemptState: TypeAlias = Literal["open", "closed", "aborted"]
RunState: TypeAlias = Literal["running", "completed", "stopped"]


class Attempt(msgspec.Struct, frozen=True):
    """One attempt of a round; times are ISO 8601 in UTC, empty until they happen."""

    round: int
    attempt: int
    run: str
    state: AttemptState
    code: str
    reason: str
    opened_at: str
    closed_at: str


class Run(msgspec.Struct, frozen=True):
    """A request for ``requested`` rounds, of which ``done`` are committed."""

    run: str
    requested: int
    done: int
    state: RunState
    code: str
    reason: str
    manifest_digest: str
    started_at: str
    ended_at: str


class Member(msgspec.Struct, frozen=True):
    node: NodeId
    name: str
    admitted_by: str
    first_seen: str
    last_seen: str


class Invite(msgspec.Struct, frozen=True):
    """``expires`` is in seconds since the epoch; ``used_by`` is JSON, a list of node ids."""

    secret_hash: str
    expires: float
    uses_left: int
    used_by: str


class Event(msgspec.Struct, frozen=True):
    """``event`` is a JSON object."""

    seq: int
    at: str
    event: str


class Committed(msgspec.Struct, frozen=True):
    """A record as it stands in the ledger."""

    record: ContributionRecord
    record_hash: Digest
    run: str
    committed_at: str
