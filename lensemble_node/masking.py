"""The secrets of one attempt of a masked round, and what a node does with them.

Drawn for a commitment, dealt to a roster, masked with, answered from: each once, in this order.
They are held in memory only, for the attempt in hand; ``attempt`` says until when.  Everything a
coordinator sends is checked here before a secret is used: it may not be honest.
"""

from collections.abc import Iterable
from typing import TypeVar

from lensemble import identity
from lensemble.errors import ContractViolation, SecureAggregationError
from lensemble.ids import Digest, NodeId
from lensemble.secagg.keys import Context, PublicKeys
from lensemble.secagg.participant import Answer, Bound, Dealt, Drawn, unmask_payload
from lensemble.secagg.roster import Roster
from lensemble.secagg.shares import Dealing, Envelope
from lensemble.wire import messages
from lensemble_node import signals

Step = TypeVar("Step")


class Secrets:
    """Fresh secrets of ``me`` for the attempt that ``asked`` opens.

    ``least``: fewest updates whose sum may be revealed, because noise is sized for so many.
    """

    def __init__(self, me: NodeId, asked: messages.RoundOpen, least: int = 0) -> None:
        self.context = Context(asked.federation, asked.round, asked.attempt)
        self._me = me
        self._least = least
        self._seed = asked.sketch_seed
        self._config_hash: Digest = asked.config_hash
        self._drawn = Drawn(self.context, me)
        self._roster: Roster | None = None
        self._dealt: Dealt | None = None
        self._bound: Bound | None = None
        self._answer: tuple[tuple[NodeId, ...], Answer] | None = None

    def __repr__(self) -> str:
        return f"Secrets({self.context})"

    @property
    def keys(self) -> messages.MaskKeys:
        """What goes into the commitment."""
        return _wired(self._drawn.public)

    def deal(self, message: messages.Roster) -> Dealing:
        """Share the secrets among the neighbours on a roster, if it is what it must be.

        Raises:
            SecureAggregationError: nodes not sorted, a signature that is not its node's, or this
                node's keys missing or altered.
            MaskingFault: names the node whose keys are not usable.
            ContractViolation: no majority as threshold, one below what the noise is sized for, too
                few nodes, or dealt before.
        """
        if message.threshold < self._least:
            raise ContractViolation(
                f"the sum of {message.threshold} updates could be revealed; the noise of each is "
                f"sized for {self._least} or more (privacy.cohort)",
                "Have the coordinator's operator raise `rounds.secure_agg_threshold` to the "
                "workload's `privacy.cohort`.",
            )
        members = message.members
        self._check(members)
        keys = {each.node: _public(each.keys) for each in members}
        roster = Roster(self.context, keys, message.threshold, self._seed)
        self._dealt = self._drawn.deal(roster)
        self._roster = roster
        return self._dealt.dealing

    def _check(self, members: tuple[messages.RosterEntry, ...]) -> None:
        nodes = [each.node for each in members]
        if nodes != sorted(set(nodes)):
            raise SecureAggregationError("the roster is not sorted, or names a node twice")
        mine = [each.keys for each in members if each.node == self._me]
        if mine != [self.keys]:
            raise SecureAggregationError(
                "the roster does not carry the keys that this node committed to"
            )
        for each in members:
            if not identity.verify(each.node, each.signature, self._signed(each)):
                raise SecureAggregationError(
                    f"the roster gives keys of {each.node} that it did not sign for this attempt"
                )

    def _signed(self, entry: messages.RosterEntry) -> bytes:
        at = self.context
        return messages.commitment_payload(
            at.federation,
            at.round,
            at.attempt,
            entry.dataset_root,
            self._config_hash,
            keys=entry.keys,
        )

    def open(self, envelopes: Iterable[messages.Envelope]) -> None:
        """Open what the neighbours dealt to this node; who is missing has dropped out.

        Raises:
            MaskingFault: names the dealer of what does not open or is not what it committed to; or
                too few are left.
            SecureAggregationError: two envelopes of one dealer, or nothing was dealt yet.
            ContractViolation: opened before, or of a node that is no neighbour.
        """
        named = list(envelopes)
        sealed = {each.dealer: Envelope(each.sealed, each.commitments) for each in named}
        if len(sealed) != len(named):
            raise SecureAggregationError("two envelopes of one dealer")
        self._bound = _had(self._dealt).receive(sealed)

    def terms(self) -> tuple[signals.MaskTerm, ...]:
        """The masks of this node's update.

        Raises:
            SecureAggregationError: nothing was opened yet.
        """
        return tuple(
            signals.MaskTerm(term.key.hex(), term.negative) for term in _had(self._bound).terms()
        )

    def decide(self, survivors: tuple[NodeId, ...]) -> None:
        """Consent to the unmasking of the sum of ``survivors``, and of no other ever.

        Raises:
            MaskingFault: an honest coordinator does not ask for this.
            SecureAggregationError: nothing was opened yet.
        """
        self._answer = survivors, _had(self._bound).answer(self.context, survivors)

    def answer(self) -> tuple[bytes, bytes]:
        """The shares that were consented to, and the bytes to sign with them.

        Raises:
            SecureAggregationError: nothing was consented to.
        """
        survivors, answer = _had(self._answer)
        payload = unmask_payload(_had(self._roster), survivors, answer.shares)
        return answer.shares, payload


def _had(step: Step | None) -> Step:
    if step is None:
        raise SecureAggregationError("a step of the masked round was left out")
    return step


def _wired(keys: PublicKeys) -> messages.MaskKeys:
    return messages.MaskKeys(
        mask_key=keys.mask_key, share_key=keys.share_key, self_commitment=keys.self_commitment
    )


def _public(keys: messages.MaskKeys) -> PublicKeys:
    return PublicKeys(keys.mask_key, keys.share_key, keys.self_commitment)
