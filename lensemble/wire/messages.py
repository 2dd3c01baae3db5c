"""Every message between a coordinator and a node, and the bytes that signatures cover.

Messages of a round carry (federation, epoch, round, attempt), so that one from another life of the
same node, or from another attempt, is told apart and refused.  No message carries an observation,
an action, an embedding or a parameter: payload travels on edges only.
"""

import hashlib
import json
from collections.abc import Iterable
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from lensemble.edge.spec import EdgeSpec
from lensemble.ids import Digest, NodeId
from lensemble.params import MAX_TENSORS
from lensemble.wire import roster_rows
from lensemble.wire.circle import CircleOrder, MemberNote, Reached
from lensemble.wire.fence import (
    MAX_PARTICIPANTS,
    Count,
    Federation,
    Fenced,
    Hash,
    Label,
    Message,
    NodeKey,
    Nodes,
    OfRound,
    PublicKey,
    SealedShares,
    Sentence,
    Signature,
)
from lensemble.wire.stages import BurstAnswer, BurstOrder, StageAnswer, StageOrder
from lensemble.wire.steps import MAX_STEPS, Steps

WIRE_VERSION = 1
"""The version this build speaks; the first thing checked in every message."""

MAX_EDGES_PER_NODE = 256
MAX_WORKLOAD_BYTES = 1 << 16

# ---- membership ----


class Join(Message, frozen=True, kw_only=True, tag=True):
    """First message of a node.  ``boot`` is drawn at process start and tells restarts apart."""

    speaks: tuple[int, int]
    """Lowest and highest wire version of the sender."""
    build: Label
    name: Label
    boot: Annotated[str, Meta(pattern=r"\A[0-9a-f]{16}\Z")]
    federation: Federation | None = None
    invite: Annotated[bytes, Meta(max_length=64)] = b""
    gossips: bool = False
    """Whether the sender takes part in membership, which see in ``wire.membership``."""
    addresses: Reached = ()
    """Where other members may call it."""


class LastRecord(Message, frozen=True, kw_only=True):
    """The newest committed round, so that a returning node learns whether it took part."""

    round: Annotated[int, Meta(ge=-1)]
    digest: Hash
    contributors: Nodes


class Welcome(Fenced, frozen=True, kw_only=True, tag=True):
    build: Label
    coordinator: Label
    workload: Annotated[bytes, Meta(max_length=MAX_WORKLOAD_BYTES)]
    """Canonical JSON of the workload."""
    config_hash: Hash
    layout_digest: Hash
    aggregation: Literal["plain", "masked"]
    trains: bool = True
    """Whether there will be rounds; else the workload stands for none, and no worker is needed."""

    last: LastRecord


class Refused(Message, frozen=True, kw_only=True, tag=True):
    """Not admitted, or a message that will not be acted on."""

    code: Label
    reason: Sentence
    remediation: Sentence = ""
    final: bool = False
    """The sender of the refused message should not try again by itself."""


class Leave(Fenced, frozen=True, kw_only=True, tag=True):
    """Either side ends the session in order."""

    reason: Sentence


# ---- provisioning ----


class Provision(Fenced, frozen=True, kw_only=True, tag=True):
    """Make ready the named edge-ends; ``state`` is the node's Rx, ``update`` its Tx."""

    state: EdgeSpec
    update: EdgeSpec


class Provisioned(Fenced, frozen=True, kw_only=True, tag=True):
    """Every end of ``edges`` is registered or open."""

    edges: Annotated[tuple[int, ...], Meta(max_length=MAX_EDGES_PER_NODE)]


class Teardown(Fenced, frozen=True, kw_only=True, tag=True):
    edges: Annotated[tuple[int, ...], Meta(max_length=MAX_EDGES_PER_NODE)]


class TornDown(Fenced, frozen=True, kw_only=True, tag=True):
    edges: Annotated[tuple[int, ...], Meta(max_length=MAX_EDGES_PER_NODE)]


class EdgeLost(Fenced, frozen=True, kw_only=True, tag=True):
    """An edge-end of the sender faulted; the coordinator provisions a new pair."""

    edge: Annotated[int, Meta(ge=0)]
    reason: Sentence


# ---- a round ----


class FieldParams(Message, frozen=True, kw_only=True):
    """Integer field of the updates: 32 bits, ``rint(x * 2**k)``, at most ``n_max`` summands.

    ``plan`` says which tensors have 16 bits in this round, see ``secagg.plan``; empty: none.
    """

    k: Annotated[int, Meta(ge=8, le=30)]
    n_max: Annotated[int, Meta(ge=1, le=MAX_PARTICIPANTS)]
    plan: Annotated[bytes, Meta(max_length=MAX_TENSORS)] = b""


class MaskKeys(Message, frozen=True, kw_only=True, gc=False):
    """What a participant publishes to be masked with, for one attempt; see ``secagg.keys``."""

    mask_key: PublicKey
    share_key: PublicKey
    self_commitment: PublicKey
    """SHA-256, not a key, of the private seed of its self mask."""


class RoundOpen(OfRound, frozen=True, kw_only=True, tag=True):
    prior_digest: Hash
    prior_momentum: Hash | None = None
    """Digest of the outer momentum; None before the first step, and where it is not needed."""
    steps: Steps = ()
    """The last that were committed; they lead to the prior parameters and momentum."""
    layout_digest: Hash
    config_hash: Hash
    roster_digest: Hash
    """Of the nodes asked to take part in this attempt."""
    sketch_seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    probe_hash: Hash | None = None
    """Covers the points, the landmarks among them and their targets, so none is named by itself."""
    inner_steps: Annotated[int, Meta(ge=1, le=100_000)]
    global_step: Count
    """Inner steps of all earlier rounds; where the learning-rate schedule stands."""
    state_bytes: Count
    """Of the prior parameters, and of the momentum if there is one."""
    field: FieldParams
    spent_before: Count = 0
    """Releases of this round from attempts below this number are spent: one of their sums was asked
    for, and a second sum over the same vector could be told apart from the first."""
    answer_within_s: Annotated[float, Meta(ge=0)]


class Commitment(OfRound, frozen=True, kw_only=True, tag=True):
    """Binds the sender to a dataset for this attempt, and says what of the state it holds.

    ``holds_bytes`` counts from the beginning of the parameters, behind which the momentum comes.
    ``follows``: it holds what so many of the last ``RoundOpen.steps`` start from, and can take
    them; ``holds_of_sum`` are leading bytes of the first sum of those.  ``keys`` are there exactly
    when aggregation is masked.
    """

    dataset_root: Hash
    episodes: Count
    holds_bytes: Count
    follows: Annotated[int, Meta(ge=0, le=MAX_STEPS)] = 0
    holds_of_sum: Count = 0
    keys: MaskKeys | None = None
    signature: Signature


class RosterEntry(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A bound participant as all others must see it: its keys, under its own signature."""

    node: NodeKey
    dataset_root: Hash
    keys: MaskKeys
    signature: Signature
    """Of its ``Commitment``."""


class Roster(OfRound, frozen=True, kw_only=True, tag=True):
    """Masked only: who is bound, sorted by node.  Answered by ``Shares``.

    Everybody has to see all of it: from all keys together follows who masks with whom.
    """

    rows: Annotated[bytes, Meta(max_length=MAX_PARTICIPANTS * roster_rows.ROW_BYTES)]
    """Of the members, see ``roster_rows``; make them with ``rows_of``."""
    threshold: Annotated[int, Meta(ge=1, le=MAX_PARTICIPANTS)]

    def __post_init__(self) -> None:
        if len(self.rows) % roster_rows.ROW_BYTES:
            raise ValueError(f"{len(self.rows)} bytes are no whole number of rows")

    @property
    def members(self) -> tuple[RosterEntry, ...]:
        """The members, put together anew each time."""
        return tuple(
            RosterEntry(
                node=NodeId(node),
                dataset_root=Digest(root),
                keys=MaskKeys(mask_key=mask, share_key=share, self_commitment=own),
                signature=signature,
            )
            for node, root, mask, share, own, signature in roster_rows.unpacked(self.rows)
        )

    @property
    def count(self) -> int:
        return len(self.rows) // roster_rows.ROW_BYTES


def rows_of(members: Iterable[RosterEntry]) -> bytes:
    """What ``Roster.rows`` says of ``members``."""
    return roster_rows.packed(
        (
            each.node,
            each.dataset_root,
            each.keys.mask_key,
            each.keys.share_key,
            each.keys.self_commitment,
            each.signature,
        )
        for each in members
    )


class Shares(OfRound, frozen=True, kw_only=True, tag=True):
    """Masked only: the sender's secrets, shared among its neighbours; see ``secagg.shares``."""

    commitments: Annotated[bytes, Meta(max_length=1 << 13)]
    sealed: Annotated[tuple[SealedShares, ...], Meta(max_length=128)]


class Envelope(Message, frozen=True, kw_only=True, gc=False):
    """The shares that ``dealer`` encrypted to the receiver, with the commitments to them."""

    dealer: NodeKey
    sealed: SealedShares
    commitments: Annotated[bytes, Meta(min_length=64, max_length=64)]


class Collect(OfRound, frozen=True, kw_only=True, tag=True):
    """The attempt has its participants; train, then send.  ``roster`` is sorted and names the
    receiver, if it is one of them; who the others are is told by ``Roster`` and ``RoundClose``.

    ``envelopes`` are the shares dealt to the receiver, empty in plain aggregation.
    """

    roster: Nodes
    send_within_s: Annotated[float, Meta(ge=0)]
    envelopes: Annotated[tuple[Envelope, ...], Meta(max_length=128)] = ()


class UnmaskRequest(OfRound, frozen=True, kw_only=True, tag=True):
    """Masked only: whose updates are in the sum, sorted.  Answered by ``UnmaskAnswer``, once."""

    survivors: Nodes


class UnmaskAnswer(OfRound, frozen=True, kw_only=True, tag=True):
    """Masked only: the shares that take the masks off that sum, signed with the survivor set."""

    shares: Annotated[bytes, Meta(max_length=1 << 13)]
    signature: Signature


class Progress(OfRound, frozen=True, kw_only=True, tag=True):
    phase: Literal["fetching", "waiting", "training", "releasing", "sending", "sent"]
    done: Count
    total: Count
    """Steps while training, bytes otherwise."""


class Update(OfRound, frozen=True, kw_only=True, tag=True):
    """Announces the update blob on the update edge.

    Norm and loss stay on the node unless its own configuration shares them.
    """

    digest: Hash
    nbytes: Count
    dataset_root: Hash
    reused: bool
    """The release of an earlier attempt of the same round, sent again."""
    l2_norm: float | None = None
    loss: float | None = None
    epsilon: Annotated[float, Meta(ge=0)] | None = None
    """What the sender's releases have spent, this one with them; accounting, not data."""
    signature: Signature


class Fault(OfRound, frozen=True, kw_only=True, tag=True):
    """The sender will not contribute to this attempt."""

    code: Label
    reason: Sentence
    remediation: Sentence = ""


class RoundClose(OfRound, frozen=True, kw_only=True, tag=True):
    outcome: Literal["closed", "aborted"]
    digest: Hash
    """Of the global state after the round; unchanged by an aborted one."""
    contributors: Nodes = ()
    code: Label = ""
    reason: Sentence = ""
    retries: bool = False
    """Another attempt of the same round follows."""


FromNode: TypeAlias = (
    Join
    | Leave
    | Provisioned
    | TornDown
    | EdgeLost
    | Commitment
    | Shares
    | Progress
    | Update
    | UnmaskAnswer
    | Fault
    | StageAnswer
    | BurstAnswer
    | MemberNote
)
FromCoordinator: TypeAlias = (
    Welcome
    | Refused
    | Leave
    | Provision
    | Teardown
    | RoundOpen
    | Roster
    | Collect
    | UnmaskRequest
    | RoundClose
    | StageOrder
    | BurstOrder
    | CircleOrder
)


# ---- what signatures cover ----


def _signed(kind: str, **fields: str | int) -> bytes:
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return f"lensemble/{kind}/v1\x00".encode() + text.encode()


def commitment_payload(  # noqa: PLR0913  # all that one signature binds, by name
    federation: str,
    round_index: int,
    attempt: int,
    dataset_root: str,
    config_hash: str,
    *,
    keys: MaskKeys | None = None,
) -> bytes:
    """The bytes a node signs to bind itself to ``dataset_root`` and ``keys`` for one attempt."""
    published = b"" if keys is None else keys.mask_key + keys.share_key + keys.self_commitment
    return _signed(
        "commitment",
        federation=federation,
        round=round_index,
        attempt=attempt,
        dataset_root=dataset_root,
        config_hash=config_hash,
        keys=published.hex(),
    )


def update_payload(
    federation: str, round_index: int, attempt: int, dataset_root: str, digest: str
) -> bytes:
    """The bytes a node signs, in ``Update`` and in the trailer of the blob, to own an update."""
    return _signed(
        "update",
        federation=federation,
        round=round_index,
        attempt=attempt,
        dataset_root=dataset_root,
        digest=digest,
    )


def roster_digest(nodes: Iterable[str]) -> Digest:
    """SHA-256 of the sorted node ids, one a line."""
    text = "".join(f"{node}\n" for node in sorted(nodes))
    return Digest(hashlib.sha256(b"lensemble/roster/v1\x00" + text.encode()).hexdigest())
