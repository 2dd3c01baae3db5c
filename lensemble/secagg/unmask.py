"""The coordinator's part: from the survivors' answers to the masks left in the sum.

Of a survivor the self seed is reconstructed, of who dealt but did not contribute the mask key, and
of nobody both.  Everything reconstructed is checked against what its owner committed to.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping

import msgspec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from lensemble.errors import ContractViolation
from lensemble.ids import Digest, NodeId
from lensemble.secagg.faults import Cause, MaskingFault, below_threshold
from lensemble.secagg.keys import node_bytes, pair_key, self_commitment, self_key, tagged
from lensemble.secagg.masks import Term
from lensemble.secagg.participant import Answer
from lensemble.secagg.roster import Roster
from lensemble.secagg.shares import SHARE_BYTES, Dealing, Kind, combine, commitment, committed


class Revealed(msgspec.Struct, frozen=True):
    """What an attempt revealed: self seeds of survivors, mask keys of dropouts, 32 bytes each.

    With the roster and the masked updates it gives the sum again.
    """

    self_seeds: dict[NodeId, bytes]
    mask_keys: dict[NodeId, bytes]

    def digest(self, roster: Roster) -> Digest:
        """SHA-256 of all of it, for the transcript."""
        parts = [
            kind.encode() + node_bytes(node) + secrets[node]
            for kind, secrets in ((Kind.SELF, self.self_seeds), (Kind.MASK, self.mask_keys))
            for node in sorted(secrets)
        ]
        return Digest(hashlib.sha256(tagged("revealed", roster.context, *parts)).hexdigest())


class Recovery:
    """Gathers the answers for one frozen set of survivors.

    Args:
        roster: of the attempt.
        dealings: of all who dealt; each has passed ``check_dealing``.
        survivors: those whose masked updates are in the sum, all of them dealers.

    Raises:
        ContractViolation: a survivor that did not deal.
        MaskingFault: fewer survivors than the threshold.
    """

    def __init__(
        self, roster: Roster, dealings: Mapping[NodeId, Dealing], survivors: Collection[NodeId]
    ) -> None:
        alive = frozenset(survivors)
        if not alive <= dealings.keys():
            raise ContractViolation(f"survivors who never dealt: {sorted(alive - set(dealings))}")
        if len(alive) < roster.threshold:
            raise below_threshold("survivors", len(alive), roster.threshold)
        self.survivors = tuple(sorted(alive))
        self._roster = roster
        self._dealings = dealings
        self._alive = alive
        self._answered: set[NodeId] = set()
        self._shares: dict[NodeId, dict[int, bytes]] = {node: {} for node in self._wanted()}

    def _wanted(self) -> list[NodeId]:
        # A dropout without a surviving neighbour left no mask in the sum.
        return [
            node
            for node in sorted(self._dealings)
            if node in self._alive or not self._alive.isdisjoint(self._roster.neighbours(node))
        ]

    def dealers_of(self, holder: NodeId) -> tuple[NodeId, ...]:
        """Whose shares the answer of ``holder`` carries, in its order."""
        return tuple(node for node in self._roster.holders(holder) if node in self._dealings)

    def accept(self, holder: NodeId, answer: Answer) -> None:
        """Take the answer of ``holder``; a second one is ignored.

        Raises:
            MaskingFault: names ``holder``: it is no survivor, or a share is not the one it was
                dealt.  Nothing of the answer is used.
        """
        if holder not in self._alive:
            raise _wrong(holder, "it is not among the survivors")
        if holder in self._answered:
            return
        dealers = self.dealers_of(holder)
        if len(answer.shares) != SHARE_BYTES * len(dealers):
            raise _wrong(holder, f"{len(answer.shares)} bytes for {len(dealers)} dealers")
        shares = {
            dealer: answer.shares[SHARE_BYTES * place : SHARE_BYTES * (place + 1)]
            for place, dealer in enumerate(dealers)
        }
        for dealer, share in shares.items():
            self._check(dealer, holder, share)
        self._answered.add(holder)
        for dealer, share in shares.items():
            index = 1 + self._roster.holders(dealer).index(holder)
            self._shares[dealer][index] = share

    def _check(self, dealer: NodeId, holder: NodeId, share: bytes) -> None:
        kind = self._kind(dealer)
        both = committed(self._roster, self._dealings[dealer], dealer, holder)
        wanted = both[:SHARE_BYTES] if kind is Kind.SELF else both[SHARE_BYTES:]
        if commitment(self._roster.context, kind, dealer, holder, share) != wanted:
            raise _wrong(holder, f"its {kind} share of {dealer} is not the one it was dealt")

    def _kind(self, dealer: NodeId) -> Kind:
        return Kind.SELF if dealer in self._alive else Kind.MASK

    @property
    def answered(self) -> frozenset[NodeId]:
        """Whose answers were taken."""
        return frozenset(self._answered)

    @property
    def ready(self) -> bool:
        """Whether ``reveal`` has what it needs."""
        return len(self._answered) >= self._roster.threshold and all(
            len(shares) >= self._roster.quorum for shares in self._shares.values()
        )

    def reveal(self) -> Revealed:
        """Reconstruct every secret the sum needs, and check each.

        Takes a second or so for some hundred participants, in Python; run it in a thread.

        Raises:
            MaskingFault: too few answers; or a dealer, whom it names, dealt shares of another
                secret than the one it committed to.
        """
        roster = self._roster
        if len(self._answered) < roster.threshold:
            raise below_threshold("answers to unmask", len(self._answered), roster.threshold)
        for dealer, shares in self._shares.items():
            if len(shares) < roster.quorum:
                raise below_threshold(f"shares of {dealer}", len(shares), roster.quorum)
        secrets = {dealer: self._reconstruct(dealer) for dealer in self._shares}
        return Revealed(
            {node: secret for node, secret in secrets.items() if node in self._alive},
            {node: secret for node, secret in secrets.items() if node not in self._alive},
        )

    def _reconstruct(self, dealer: NodeId) -> bytes:
        shares = self._shares[dealer]
        secret = combine({index: shares[index] for index in sorted(shares)[: self._roster.quorum]})
        keys = self._roster.keys[dealer]
        if self._kind(dealer) is Kind.SELF:
            right = self_commitment(self._roster.context, dealer, secret) == keys.self_commitment
        else:
            private = X25519PrivateKey.from_private_bytes(secret)
            right = private.public_key().public_bytes_raw() == keys.mask_key
        if not right:
            raise MaskingFault(
                Cause.RECONSTRUCTION,
                f"the {self._kind(dealer)} shares dealt by {dealer} give no secret of its",
                (dealer,),
            )
        return secret


def _wrong(holder: NodeId, why: str) -> MaskingFault:
    return MaskingFault(Cause.WRONG_SHARE, f"the answer of {holder} is refused: {why}", (holder,))


def leftover(roster: Roster, revealed: Revealed) -> tuple[Term, ...]:
    """The masks left in the sum of the survivors' masked updates; ``subtract`` their stream.

    A pure function of the transcript: the self mask of each survivor, and what each shares with a
    neighbour that dealt and dropped out.
    """
    context = roster.context
    terms = [Term(self_key(context, node, seed)) for node, seed in revealed.self_seeds.items()]
    for gone, secret in revealed.mask_keys.items():
        private = X25519PrivateKey.from_private_bytes(secret)
        for node in _of(roster.neighbours(gone), revealed.self_seeds):
            key = pair_key(context, private, gone, node, roster.keys[node].mask_key)
            terms.append(Term(key, negative=gone < node))
    return tuple(terms)


def _of(nodes: Iterable[NodeId], wanted: Mapping[NodeId, bytes]) -> list[NodeId]:
    return [node for node in nodes if node in wanted]
