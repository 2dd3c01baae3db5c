"""Who may join: a pure decision over what a node says of itself and what the coordinator knows."""

import hashlib
from typing import Literal, TypeAlias

import msgspec

from lensemble.ids import FederationId, NodeId
from lensemble.wire.messages import Join

MAX_NAME = 64


class Invitation(msgspec.Struct, frozen=True):
    """An invite the coordinator gave out; times in seconds since the epoch."""

    expires: float
    uses_left: int


class Known(msgspec.Struct, frozen=True):
    """What the coordinator knows when a node knocks."""

    federation: FederationId
    allowed: frozenset[NodeId]
    admitted_before: bool
    invites: bool
    invitation: Invitation | None
    here: frozenset[NodeId]
    max_participants: int
    now: float
    revoked: str | None = None
    """Why this node was revoked, if it was."""


class Admitted(msgspec.Struct, frozen=True, tag=True):
    by: Literal["config", "invite", "roster"]


class Denied(msgspec.Struct, frozen=True, tag=True):
    """``final``: trying again with the same words will not help."""

    code: str
    reason: str
    remediation: str
    final: bool


Decision: TypeAlias = Admitted | Denied


def invite_hash(secret: bytes) -> str:
    """What the ledger keeps of an invite's secret: SHA-256, hex."""
    return hashlib.sha256(b"lensemble/invite/v1\x00" + secret).hexdigest()


def decide(node: NodeId, join: Join, known: Known) -> Decision:
    """Admit ``node``, unless revoked, by allow-list, earlier admission or a valid invite."""
    if join.federation is not None and join.federation != known.federation:
        return Denied(
            "other_federation",
            f"the node belongs to federation {join.federation}, this is {known.federation}",
            "Join with a new ticket, or point the node at its own coordinator.",
            final=True,
        )
    if known.revoked is not None:
        return Denied(
            "revoked",
            f"node {node} was revoked: {known.revoked}",
            "Ask the coordinator's operator; with a key of its own (`lensemblectl rotate-key`) and "
            "a ticket a node is another one.",
            final=True,
        )
    if node not in known.here and len(known.here) >= known.max_participants:
        return Denied(
            "full",
            f"{len(known.here)} nodes are here, max_participants is {known.max_participants}",
            "Raise rounds.max_participants on the coordinator.",
            final=False,
        )
    if node in known.allowed:
        return Admitted("config")
    if known.admitted_before:
        return Admitted("roster")
    if not join.invite:
        return Denied(
            "not_admitted",
            f"node {node} is not on the allow-list and shows no invite",
            "Ask the coordinator's operator for a ticket (`lensemblectl invite`), "
            "or to add the node id to admission.allow.",
            final=True,
        )
    return _by_invite(known)


def _by_invite(known: Known) -> Decision:
    again = "Ask the coordinator's operator for a new ticket (`lensemblectl invite`)."
    if not known.invites:
        reason = "this coordinator admits by allow-list only"
        return Denied("invites_off", reason, "Ask for the node id to be added.", final=True)
    invitation = known.invitation
    if invitation is None:
        return Denied("unknown_invite", "this invite was never given out", again, final=True)
    if invitation.uses_left < 1:
        return Denied("used_invite", "this invite has been used up", again, final=True)
    if invitation.expires <= known.now:
        late = known.now - invitation.expires
        return Denied("expired_invite", f"this invite expired {late:.0f} s ago", again, final=True)
    return Admitted("invite")
