"""The coordinator's side of the masks of one attempt: routes what it cannot read.

It learns the keys, the encrypted shares and the masked updates of all, and at the end what takes
the masks off the sum of the survivors: their self seeds, and the mask keys of those who dropped
out.
"""

import threading
from collections.abc import Iterable

import msgspec
import numpy as np

from lensemble import identity
from lensemble.errors import SecureAggregationError
from lensemble.ids import Digest, FederationId, NodeId
from lensemble.params import PARAMETER_BYTES
from lensemble.secagg.keys import Context, PublicKeys
from lensemble.secagg.masks import MaskStream, Term
from lensemble.secagg.participant import Answer, unmask_payload
from lensemble.secagg.roster import Roster
from lensemble.secagg.shares import Dealing, check_dealing, envelopes_for
from lensemble.secagg.unmask import Recovery, Revealed, leftover
from lensemble.wire import messages


class Leftover:
    """The masks left in a sum, as an addend that takes them off; readable from several threads."""

    def __init__(self, terms: tuple[Term, ...], total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.participant = NodeId("the masks")
        self.complete = True
        self.updates = 0
        self._terms = terms
        self._streams = threading.local()

    def read_into(self, offset: int, into: memoryview) -> None:
        """Fill ``into`` (bytes, whole words) with the negated masks from byte ``offset``."""
        if not hasattr(self._streams, "mine"):
            # A stream is one thread's; equal terms give equal streams.
            self._streams.mine = MaskStream(self._terms)
        words = np.frombuffer(into, dtype=np.uint32)
        words[:] = 0
        self._streams.mine.subtract(offset // PARAMETER_BYTES, words)


class Transcript(msgspec.Struct, frozen=True, kw_only=True):
    """What fixes a masked sum beside the masked updates; goes into the ledger's record."""

    threshold: int
    roster_digest: Digest
    revealed_digest: Digest
    members: tuple[messages.RosterEntry, ...]
    dealers: tuple[NodeId, ...]


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
        keys = {each.node: _public(each.keys) for each in self.members}
        self.roster = Roster(Context(*at), keys, threshold, round_seed)
        self._dealings: dict[NodeId, Dealing] = {}
        self._recovery: Recovery | None = None
        self._revealed: Revealed | None = None

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

    def take_answer(self, node: NodeId, message: messages.UnmaskAnswer) -> None:
        """Keep the shares that ``node`` reveals.

        Raises:
            MaskingFault: not signed for this set, or not the shares it was dealt; names it.
            SecureAggregationError: nothing was asked.
        """
        recovery = self._asked()
        payload = unmask_payload(self.roster, recovery.survivors, message.shares)
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

    def transcript(self) -> Transcript:
        """What the record of the round keeps; after ``reveal``.

        Raises:
            SecureAggregationError: nothing was revealed.
        """
        if self._revealed is None:
            raise SecureAggregationError("the masks of this attempt were not taken off")
        return Transcript(
            threshold=self.roster.threshold,
            roster_digest=self.roster.digest,
            revealed_digest=self._revealed.digest(self.roster),
            members=self.members,
            dealers=tuple(sorted(self._dealings)),
        )

    def _asked(self) -> Recovery:
        if self._recovery is None:
            raise SecureAggregationError("no survivors were asked to unmask in this attempt")
        return self._recovery


def _public(keys: messages.MaskKeys) -> PublicKeys:
    return PublicKeys(keys.mask_key, keys.share_key, keys.self_commitment)
