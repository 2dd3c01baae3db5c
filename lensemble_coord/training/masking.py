"""The coordinator's side of the masks of one attempt: routes what it cannot read.

It learns the keys, the encrypted shares and the masked updates of all, and at the end what takes
the masks off the sum of the survivors: their self seeds, and the mask keys of those who dropped
out.
"""

import threading
from collections.abc import Iterable

import numpy as np

from lensemble import identity
from lensemble.errors import SecureAggregationError
from lensemble.ids import FederationId, NodeId
from lensemble.secagg.keys import Context, PublicKeys
from lensemble.secagg.masks import MaskStream, Term
from lensemble.secagg.participant import Answer, survivors_digest, unmask_payload_of
from lensemble.secagg.plan import WORD_BYTES, FieldPlan
from lensemble.secagg.roster import Roster
from lensemble.secagg.shares import Dealing, check_dealing, envelopes_for
from lensemble.secagg.unmask import Recovery, Revealed, leftover
from lensemble.wire import messages
from lensemble_coord.training import record


class Leftover:
    """The masks left in a sum, as an addend that takes them off; readable from several threads."""

    def __init__(self, terms: tuple[Term, ...], plan: FieldPlan) -> None:
        self.total_bytes = plan.nbytes
        self.participant = NodeId("the masks")
        self.complete = True
        self.updates = 0
        self._terms = terms
        self._plan = plan
        self._streams = threading.local()

    def read_into(self, offset: int, into: memoryview) -> None:
        """Fill ``into`` (bytes, whole words) with the negated masks from byte ``offset``."""
        if not hasattr(self._streams, "mine"):
            # A stream is one thread's; equal terms give equal streams.
            self._streams.mine = MaskStream(self._terms, self._plan)
        words = np.frombuffer(into, dtype=np.uint32)
        words[:] = 0
        self._streams.mine.subtract(offset // WORD_BYTES, words)


class Masking:
    """Keys, shares and answers of one attempt.

    Args:
        federation, round_index, attempt: the attempt.
        members: the bound participants with their keys; their signatures have been checked.
        threshold: fewest survivors for which anything is revealed.
        round_seed: public; the graph of neighbours is drawn from it and from the keys.

    Raises:
        MaskingFault: names the node whose keys are not usable.
    """

    def __init__(
        self,
        at: tuple[FederationId, int, int],
        members: Iterable[messages.RosterEntry],
        threshold: int,
        round_seed: int,
    ) -> None:
        self.members = tuple(sorted(members, key=lambda each: each.node))
        keys = {each.node: public_keys(each.keys) for each in self.members}
        self.roster = Roster(Context(*at), keys, threshold, round_seed)
        self._dealings: dict[NodeId, Dealing] = {}
        self._recovery: Recovery | None = None
        self._survivors = b""
        self._revealed: Revealed | None = None

    def take(self, node: NodeId, message: messages.Shares | messages.UnmaskAnswer) -> None:
        """Keep the shares that ``node`` dealt, or those that it reveals.

        Raises:
            SecureAggregationError: see ``take_shares`` and ``take_answer``.
        """
        if isinstance(message, messages.Shares):
            self.take_shares(node, message)
        else:
            self.take_answer(node, message)

    def take_shares(self, dealer: NodeId, message: messages.Shares) -> None:
        """Keep what ``dealer`` encrypted to its neighbours.

        Raises:
            MaskingFault: it is not for exactly its neighbours.
        """
        dealing = Dealing(message.commitments, message.sealed)
        check_dealing(self.roster, dealer, dealing)
        self._dealings[dealer] = dealing

    def start(self, nodes: Iterable[NodeId]) -> None:
        """Fix who takes part: those of the roster who dealt and are still here."""
        self._dealings = {node: self._dealings[node] for node in sorted(nodes)}

    def envelopes(self, holder: NodeId) -> tuple[messages.Envelope, ...]:
        """What ``holder`` is sent with ``Collect``."""
        found = envelopes_for(self.roster, self._dealings, holder)
        return tuple(
            messages.Envelope(
                dealer=dealer, sealed=envelope.sealed, commitments=envelope.commitments
            )
            for dealer, envelope in found.items()
        )

    def freeze(self, survivors: Iterable[NodeId]) -> None:
        """Fix whose updates are in the sum.

        Raises:
            MaskingFault: fewer than the threshold.
        """
        self._recovery = Recovery(self.roster, self._dealings, tuple(survivors))
        self._survivors = survivors_digest(self._recovery.survivors)

    def take_answer(self, node: NodeId, message: messages.UnmaskAnswer) -> None:
        """Keep the shares that ``node`` reveals.

        Raises:
            MaskingFault: not signed for this set, or not the shares it was dealt; names it.
            SecureAggregationError: nothing was asked.
        """
        recovery = self._asked()
        payload = unmask_payload_of(self.roster, self._survivors, message.shares)
        if not identity.verify(node, message.signature, payload):
            raise SecureAggregationError(
                f"the answer of {node} is not signed for the survivors that were asked about"
            )
        recovery.accept(node, Answer(message.shares))

    def reveal(self) -> tuple[Term, ...]:
        """The masks that are left in the sum; slow for hundreds of nodes, call it in a thread.

        Raises:
            MaskingFault: too few answers, or shares of something else; names who dealt them.
        """
        self._revealed = self._asked().reveal()
        return leftover(self.roster, self._revealed)

    def transcript(self) -> record.Masking:
        """What the record of the round keeps; after ``reveal``.

        Raises:
            SecureAggregationError: nothing was revealed.
        """
        if self._revealed is None:
            raise SecureAggregationError("the masks of this attempt were not taken off")
        return record.Masking(
            threshold=self.roster.threshold,
            roster_digest=self.roster.digest,
            members=tuple(
                record.MaskedMember(
                    node=each.node,
                    dataset_root=each.dataset_root,
                    keys=published(each.keys).hex(),
                    commitment_signature=each.signature.hex(),
                )
                for each in self.members
            ),
            dealers=tuple(sorted(self._dealings)),
            revealed_digest=self._revealed.digest(self.roster),
        )

    def _asked(self) -> Recovery:
        if self._recovery is None:
            raise SecureAggregationError("no survivors were asked to unmask in this attempt")
        return self._recovery


def public_keys(keys: messages.MaskKeys) -> PublicKeys:
    """The keys as the primitives take them."""
    return PublicKeys(keys.mask_key, keys.share_key, keys.self_commitment)


def published(keys: messages.MaskKeys) -> bytes:
    """The 96 bytes of the three, in the order that records keep them."""
    return keys.mask_key + keys.share_key + keys.self_commitment


def keys_of(member: record.MaskedMember) -> messages.MaskKeys:
    """The keys that a record keeps of ``member``."""
    raw = bytes.fromhex(member.keys)
    return messages.MaskKeys(mask_key=raw[:32], share_key=raw[32:64], self_commitment=raw[64:])


def roster_of(kept: record.ContributionRecord, masking: record.Masking) -> Roster:
    """The roster of a committed masked round, built anew from its record.

    Raises:
        ContractViolation, MaskingFault: the record holds none that could have been used.
    """
    context = Context(kept.federation, kept.round, kept.attempt)
    keys = {each.node: public_keys(keys_of(each)) for each in masking.members}
    return Roster(context, keys, masking.threshold, kept.sketch_seed)
