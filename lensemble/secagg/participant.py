"""A participant's part in one attempt, step by step: Drawn, Dealt, Bound.

``Drawn`` has fresh keys to publish; ``deal`` shares their secrets among the neighbours of a roster;
``receive`` opens the shares that they dealt; ``Bound`` can mask, and can answer for one set of
survivors.  Each step is taken once: a second roster, a second set of envelopes or a second set of
survivors could have both secrets of one participant revealed.  Nothing of it is ever stored; who
restarts has lost the attempt, and takes part in the next.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from lensemble.errors import ContractViolation
from lensemble.ids import NodeId
from lensemble.secagg.faults import Cause, MaskingFault, below_threshold
from lensemble.secagg.graph import MAX_HOLDERS
from lensemble.secagg.keys import (
    Context,
    PublicKeys,
    SecretKeys,
    node_bytes,
    pair_key,
    self_key,
    tagged,
)
from lensemble.secagg.masks import MaskStream, Term
from lensemble.secagg.roster import Roster
from lensemble.secagg.shares import SHARE_BYTES, Dealing, Envelope, Kind, SharePair, unseal
from lensemble.secagg.shares import deal as deal_shares


class Answer(msgspec.Struct, frozen=True):
    """Shares of 32 bytes, one for each dealer whose shares the sender holds, dealers sorted.

    The share is of the self seed of a survivor, of the mask key of anyone else.
    """

    shares: Annotated[bytes, Meta(max_length=MAX_HOLDERS * SHARE_BYTES)]


def unmask_payload(roster: Roster, survivors: Iterable[NodeId], shares: bytes) -> bytes:
    """The bytes a participant signs with its answer: for whom it answered, and with what."""
    return unmask_payload_of(roster, survivors_digest(survivors), shares)


def survivors_digest(survivors: Iterable[NodeId]) -> bytes:
    """SHA-256 of a set of survivors, for ``unmask_payload_of``: 32 bytes."""
    return hashlib.sha256(b"".join(node_bytes(node) for node in sorted(survivors))).digest()


def unmask_payload_of(roster: Roster, survivors: bytes, shares: bytes) -> bytes:
    """``unmask_payload`` of a set known by its digest, which many answers have in common."""
    digests = (survivors, hashlib.sha256(shares).digest())
    return tagged("unmask", roster.context, bytes.fromhex(roster.digest), *digests)


class UnmaskDuty:
    """Decides which shares may be revealed; holds none.

    One set of survivors is answered for, again if it is asked for again, and no other ever.
    ``dealers`` are those whose shares ``me`` holds, itself among them.
    """

    def __init__(self, roster: Roster, me: NodeId, dealers: Iterable[NodeId]) -> None:
        self.answered_for: tuple[NodeId, ...] | None = None
        self._roster = roster
        self._me = me
        self._dealers = tuple(sorted(dealers))

    def kinds(self, context: Context, survivors: Sequence[NodeId]) -> dict[NodeId, Kind]:
        """The one kind of share to reveal of each dealer, dealers sorted.

        Raises:
            MaskingFault: another attempt; another set than the one answered for; a set that is not
                sorted, not of this roster, without ``me``, or below the threshold or quorum.
        """
        asked = tuple(survivors)
        if context != self._roster.context:
            raise _unmask_refused(f"it is for {context}, these shares for {self._roster.context}")
        if self.answered_for is not None and asked != self.answered_for:
            raise _unmask_refused("another set of survivors was answered for")
        self._check(asked)
        self.answered_for = asked
        return {dealer: Kind.SELF if dealer in asked else Kind.MASK for dealer in self._dealers}

    def _check(self, asked: tuple[NodeId, ...]) -> None:
        roster, alive = self._roster, frozenset(asked)
        if list(asked) != sorted(alive):
            raise _unmask_refused("the survivors are not sorted, or one is named twice")
        if not alive.issubset(roster.nodes):
            raise _unmask_refused("it names survivors that are not on the roster")
        if self._me not in alive:
            raise _unmask_refused(f"it does not count {self._me} among the survivors")
        holders = alive.intersection(roster.holders(self._me))
        if not holders.issubset(self._dealers):
            raise _unmask_refused("it names a survivor that dealt no shares")
        if len(alive) < roster.threshold:
            raise below_threshold("survivors to unmask for", len(alive), roster.threshold)
        if len(holders) < roster.quorum:
            raise below_threshold(f"holders for {self._me}", len(holders), roster.quorum)


def _unmask_refused(why: str) -> MaskingFault:
    return MaskingFault(Cause.UNMASK_REFUSED, f"the request to unmask is refused: {why}")


class Drawn:
    """Fresh keys of ``me`` for the attempt ``context``, from the operating system."""

    def __init__(self, context: Context, me: NodeId) -> None:
        self._secrets = SecretKeys(context, me)
        self._spent = False

    @property
    def public(self) -> PublicKeys:
        return self._secrets.public

    def deal(self, roster: Roster) -> "Dealt":
        """Share both secrets among the neighbours; once.

        Raises:
            ContractViolation: they were dealt before, or the roster is of another attempt, or does
                not carry the keys drawn here.
        """
        secrets = self._secrets
        if self._spent:
            raise ContractViolation(f"{secrets.node} has dealt its shares of {secrets.context}")
        if roster.context != secrets.context:
            raise ContractViolation(f"a roster of {roster.context} for keys of {secrets.context}")
        if roster.keys.get(secrets.node) != secrets.public:
            raise ContractViolation(f"the roster does not carry the keys of {secrets.node}")
        self._spent = True
        dealing, own = deal_shares(secrets, roster)
        return Dealt(secrets, roster, dealing, own)


class Dealt:
    """``dealing`` is to be sent; the shares of the others are awaited."""

    def __init__(
        self, secrets: SecretKeys, roster: Roster, dealing: Dealing, own: SharePair
    ) -> None:
        self.dealing = dealing
        self._secrets = secrets
        self._roster = roster
        self._own = own
        self._spent = False

    def receive(self, envelopes: Mapping[NodeId, Envelope]) -> "Bound":
        """Open what the neighbours dealt; who is missing has dropped out.  Once.

        Raises:
            ContractViolation: received before, or from a node that is no neighbour.
            MaskingFault: names the dealer of an envelope that is refused; or fewer dealers than a
                quorum are left.
        """
        me, roster = self._secrets.node, self._roster
        if self._spent:
            raise ContractViolation(f"{me} has received its shares of {roster.context}")
        if not envelopes.keys() <= set(roster.neighbours(me)):
            raise ContractViolation(f"{me} was sent shares of nodes that are not its neighbours")
        pairs = {
            dealer: unseal(self._secrets, roster, dealer, envelope)
            for dealer, envelope in envelopes.items()
        }
        pairs[me] = self._own
        if len(pairs) < roster.quorum:
            raise below_threshold(f"dealers around {me}", len(pairs), roster.quorum)
        self._spent = True
        return Bound(self._secrets, roster, pairs)


class Bound:
    """Able to mask one update, and to answer for one set of survivors."""

    def __init__(
        self, secrets: SecretKeys, roster: Roster, pairs: Mapping[NodeId, SharePair]
    ) -> None:
        self._secrets = secrets
        self._roster = roster
        self._pairs = pairs
        self._duty = UnmaskDuty(roster, secrets.node, pairs)

    @property
    def dealers(self) -> tuple[NodeId, ...]:
        """Whose shares are held here, the own among them; sorted."""
        return tuple(sorted(self._pairs))

    @property
    def answered_for(self) -> tuple[NodeId, ...] | None:
        """The survivors answered for; from then on the masked update is spent."""
        return self._duty.answered_for

    def terms(self) -> tuple[Term, ...]:
        """The masks of the own update: the self mask, and one with each neighbour that dealt."""
        me, context = self._secrets.node, self._roster.context
        own = Term(self_key(context, me, self._secrets.self_seed))
        shared = (
            Term(self._pair_key(peer), negative=peer < me) for peer in self.dealers if peer != me
        )
        return (own, *shared)

    def _pair_key(self, peer: NodeId) -> bytes:
        secrets, theirs = self._secrets, self._roster.keys[peer].mask_key
        return pair_key(secrets.context, secrets.mask_private, secrets.node, peer, theirs)

    def mask(self) -> MaskStream:
        """A stream to ``add`` to the encoded update."""
        return MaskStream(self.terms())

    def answer(self, context: Context, survivors: Sequence[NodeId]) -> Answer:
        """The shares that unmask the sum of ``survivors``; sign ``unmask_payload`` with it.

        The caller sees to it that ``context`` is that of the request, and that its own update was
        sent whole.

        Raises:
            MaskingFault: the request is refused; see ``UnmaskDuty.kinds``.
        """
        kinds = self._duty.kinds(context, survivors)
        return Answer(b"".join(self._pairs[dealer].of(kind) for dealer, kind in kinds.items()))
