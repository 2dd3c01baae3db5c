"""One committed round as a record, and what makes a chain of them."""

import hashlib
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from lensemble.errors import LedgerIntegrityError
from lensemble.ids import Digest, FederationId
from lensemble.params import ParamLayout
from lensemble.wire.fence import MAX_PARTICIPANTS, Count, Federation, Hash, NodeKey
from lensemble.workload import Workload

RECORD_SCHEMA = 1
GENESIS_ROUND = -1
MAX_REASON = 1000
_RECORD_TAG = b"lensemble/ledger-record/v1\x00"

PlanHex = Annotated[str, Meta(pattern=r"\A([0-9a-f]{2}){1,65536}\Z")]
SignatureHex = Annotated[str, Meta(pattern=r"\A[0-9a-f]{128}\Z")]


class Contributor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One summand of a round, with what its node signed."""

    node: NodeKey
    dataset_root: Hash
    update_digest: Hash
    commitment_signature: SignatureHex
    update_signature: SignatureHex


class MaskedMember(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A participant of the masking, contributor or not; ``keys`` are three times 32 bytes."""

    node: NodeKey
    dataset_root: Hash
    keys: Annotated[str, Meta(pattern=r"\A[0-9a-f]{192}\Z")]
    commitment_signature: SignatureHex


class Masking(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The transcript of a masked sum: with the masked updates and ``revealed`` it gives the sum."""

    threshold: Count
    roster_digest: Hash
    members: Annotated[tuple[MaskedMember, ...], Meta(max_length=MAX_PARTICIPANTS)]
    dealers: Annotated[tuple[NodeKey, ...], Meta(max_length=MAX_PARTICIPANTS)]
    revealed_digest: Hash


class Rejection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the outer step came to, and why it was not adopted."""

    candidate_digest: Hash
    candidate_momentum_digest: Hash
    reason: Annotated[str, Meta(pattern=r"\A[ -~]{1,1000}\Z")]


class ContributionRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every input and result of one outer step; round -1 pins the initial checkpoint.

    ``contributors`` is sorted by node and ``c_t`` is its length, the denominator of the mean.
    Where the step was ``rejected``, state and momentum after the round are those before it.
    """

    schema: int = RECORD_SCHEMA
    federation: Federation
    round: Annotated[int, Meta(ge=GENESIS_ROUND)]
    attempt: Count
    contributors: Annotated[tuple[Contributor, ...], Meta(max_length=MAX_PARTICIPANTS)]
    c_t: Count = msgspec.field(name="C_t")
    prior_digest: Hash | None
    next_digest: Hash
    prior_momentum_digest: Hash | None
    momentum_digest: Hash | None
    field_sum_digest: Hash | None
    config_hash: Hash
    layout_digest: Hash
    sketch_seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    masking: Masking | None = None
    """None if the coordinator saw each update."""
    rejected: Rejection | UnsetType = UNSET
    """Left out of the canonical JSON unless it is set."""
    next_plan: PlanHex | UnsetType = UNSET
    """Of the words of the round that follows, where any of them has 16 bits; see ``scale``."""
    prev_record_hash: Hash | None

    @property
    def following(self) -> bytes:
        """``next_plan`` as ``FieldPlan`` takes it."""
        return bytes.fromhex(self.next_plan) if isinstance(self.next_plan, str) else b""

    @property
    def stepped(self) -> tuple[str | None, str | None]:
        """Digests of parameters and momentum that the outer step came to."""
        if isinstance(self.rejected, Rejection):
            return self.rejected.candidate_digest, self.rejected.candidate_momentum_digest
        return self.next_digest, self.momentum_digest

    @property
    def refusal(self) -> str:
        """Why the step was not adopted; empty if it was."""
        return self.rejected.reason if isinstance(self.rejected, Rejection) else ""


def genesis(
    federation: FederationId, workload: Workload, layout: ParamLayout, initial: Digest
) -> ContributionRecord:
    """The record of round -1: nobody contributed, ``initial`` is the global state."""
    return ContributionRecord(
        federation=federation,
        round=GENESIS_ROUND,
        attempt=0,
        contributors=(),
        c_t=0,
        prior_digest=None,
        next_digest=initial,
        prior_momentum_digest=None,
        momentum_digest=None,
        field_sum_digest=None,
        config_hash=workload.digest,
        layout_digest=layout.digest,
        sketch_seed=0,
        prev_record_hash=None,
    )


def rejected(record: ContributionRecord, reason: str) -> ContributionRecord:
    """``record`` as it is when the step that it tells of is not adopted for ``reason``."""
    plain = reason.encode("ascii", "replace").decode()[:MAX_REASON]
    return msgspec.structs.replace(
        record,
        next_digest=record.prior_digest or record.next_digest,
        momentum_digest=record.prior_momentum_digest,
        rejected=Rejection(
            candidate_digest=record.next_digest,
            candidate_momentum_digest=record.momentum_digest or Digest(""),
            reason="".join(each if each.isprintable() else "?" for each in plain),
        ),
    )


def canonical(record: ContributionRecord) -> bytes:
    """Sorted compact JSON; all of its text is ASCII by the limits of the fields."""
    return msgspec.json.encode(record, order="sorted")


def record_hash(record: ContributionRecord) -> Digest:
    """SHA-256 of a domain tag and the canonical JSON."""
    return Digest(hashlib.sha256(_RECORD_TAG + canonical(record)).hexdigest())


def decode(text: str) -> ContributionRecord:
    """The record whose canonical JSON is ``text``.

    Raises:
        LedgerIntegrityError: not a record, or not in canonical form.
    """
    try:
        record = msgspec.json.decode(text, type=ContributionRecord)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise LedgerIntegrityError(f"not a contribution record: {error}") from error
    if canonical(record) != text.encode():
        raise LedgerIntegrityError(f"the record of round {record.round} is not in canonical form")
    return record


def faults(record: ContributionRecord, prior: ContributionRecord | None) -> list[str]:
    """What is wrong with ``record`` as the successor of ``prior``, or as the first."""
    found = _own_faults(record)
    if prior is None:
        first = (record.prior_digest, record.prior_momentum_digest, record.prev_record_hash)
        if record.round != GENESIS_ROUND or first != (None, None, None) or record.contributors:
            found.append(f"round {record.round} cannot be the first record")
        return found
    links = (
        ("round", record.round, prior.round + 1),
        ("federation", record.federation, prior.federation),
        ("config_hash", record.config_hash, prior.config_hash),
        ("layout_digest", record.layout_digest, prior.layout_digest),
        ("prior_digest", record.prior_digest, prior.next_digest),
        ("prior_momentum_digest", record.prior_momentum_digest, prior.momentum_digest),
        ("prev_record_hash", record.prev_record_hash, record_hash(prior)),
    )
    found += [f"{name} is {got}, the chain wants {due}" for name, got, due in links if got != due]
    return found


def _own_faults(record: ContributionRecord) -> list[str]:
    found = []
    nodes = [each.node for each in record.contributors]
    if record.schema != RECORD_SCHEMA:
        found.append(f"schema is {record.schema}, this build reads {RECORD_SCHEMA}")
    if nodes != sorted(set(nodes)):
        found.append("contributors are not sorted and distinct")
    if record.c_t != len(nodes):
        found.append(f"C_t is {record.c_t}, there are {len(nodes)} contributors")
    if record.round >= 0 and (
        not nodes or record.field_sum_digest is None or record.stepped[1] is None
    ):
        found.append("a round without contributors, sum or momentum")
    if record.refusal and (
        record.next_digest != record.prior_digest
        or record.momentum_digest != record.prior_momentum_digest
    ):
        found.append("the step was rejected, and yet the state or the momentum moved")
    if record.masking is not None:
        found += _masking_faults(record, record.masking)
    return found


def _masking_faults(record: ContributionRecord, masking: Masking) -> list[str]:
    """What is wrong with the masking of a record by itself: sets and numbers."""
    found = []
    members = [each.node for each in masking.members]
    contributors = {each.node for each in record.contributors}
    if members != sorted(set(members)) or list(masking.dealers) != sorted(set(masking.dealers)):
        found.append("members or dealers of the masking are not sorted and distinct")
    if not contributors <= set(masking.dealers) <= set(members):
        found.append("a contributor did not deal, or a dealer is no member of the masking")
    if not len(members) < 2 * masking.threshold <= 2 * len(contributors):
        found.append(
            f"a threshold of {masking.threshold} with {len(members)} members and "
            f"{len(contributors)} contributors"
        )
    return found
