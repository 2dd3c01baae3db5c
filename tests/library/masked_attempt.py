"""One masked attempt in memory: who drops out, and when, is given for each node."""

import hashlib
from collections.abc import Mapping, Sequence
from enum import Enum, auto

import numpy as np
import pytest

from lensemble.ids import FederationId, NodeId
from lensemble.secagg.faults import MaskingFault
from lensemble.secagg.field import FieldVector
from lensemble.secagg.keys import Context
from lensemble.secagg.masks import MaskStream
from lensemble.secagg.participant import Answer, Bound, Drawn
from lensemble.secagg.roster import Roster
from lensemble.secagg.shares import Dealing, check_dealing, envelopes_for
from lensemble.secagg.unmask import Recovery, leftover

FEDERATION = FederationId("0123456789abcdef" * 2)
CONTEXT = Context(FEDERATION, 7, 0)


class Stage(Enum):
    """Where a node drops out."""

    NEVER = auto()
    BEFORE_SHARES = auto()
    MID_UPLOAD = auto()
    AFTER_UPLOAD = auto()
    DURING_UNMASK = auto()


UPLOADED = (Stage.NEVER, Stage.AFTER_UPLOAD, Stage.DURING_UNMASK)


def nodes(count: int) -> list[NodeId]:
    return [NodeId(hashlib.sha256(b"%d" % index).hexdigest()) for index in range(count)]


def update(node: NodeId, words: int) -> FieldVector:
    """A vector of its own for each node; small, as honest updates are."""
    generator = np.random.Generator(np.random.Philox(int(node[:8], 16)))
    return generator.integers(-(1 << 20), 1 << 20, words).astype(np.int32).view(np.uint32)


def plain_sum(among: Sequence[NodeId], words: int) -> list[int]:
    """The integer sum, in Python's integers."""
    columns = zip(*(update(node, words).view(np.int32).tolist() for node in among), strict=True)
    return [sum(column) for column in columns]


class Attempt:
    """Participants that have exchanged keys and shares, ready to mask."""

    def __init__(
        self,
        names: Sequence[NodeId],
        threshold: int,
        without_shares: Sequence[NodeId] = (),
        context: Context = CONTEXT,
    ) -> None:
        self.drawn = {node: Drawn(context, node) for node in names}
        public = {node: each.public for node, each in self.drawn.items()}
        self.roster = Roster(context, public, threshold, 11)
        self.dealt = {
            node: each.deal(self.roster)
            for node, each in self.drawn.items()
            if node not in without_shares
        }
        self.dealings: dict[NodeId, Dealing] = {}
        for node, dealt in self.dealt.items():
            check_dealing(self.roster, node, dealt.dealing)
            self.dealings[node] = dealt.dealing

    def bind(self) -> dict[NodeId, Bound]:
        return {
            node: each.receive(envelopes_for(self.roster, self.dealings, node))
            for node, each in self.dealt.items()
        }


class Masked:
    """A bound attempt and its masked updates, to be ended in any number of ways."""

    def __init__(self, attempt: Attempt, words: int) -> None:
        self.attempt = attempt
        self.words = words
        self.bound = attempt.bind()
        self.updates = {node: update(node, words) for node in self.bound}
        for node, bound in self.bound.items():
            bound.mask().add(0, self.updates[node])

    def answer(self, node: NodeId, survivors: Sequence[NodeId]) -> Answer:
        """Of a participant as it was before any answer, so that one attempt ends in many ways."""
        bound = self.bound[node]
        again = Bound(bound._secrets, self.attempt.roster, bound._pairs)
        return again.answer(self.attempt.roster.context, survivors)

    def end(self, stages: Mapping[NodeId, Stage]) -> list[int]:
        """The unmasked sum of those who uploaded."""
        roster = self.attempt.roster
        survivors = sorted(node for node in self.bound if stages[node] in UPLOADED)
        recovery = Recovery(roster, self.attempt.dealings, survivors)
        for node in survivors:
            if stages[node] is Stage.NEVER:
                recovery.accept(node, self.answer(node, survivors))
            elif stages[node] is Stage.DURING_UNMASK:
                part = self.answer(node, survivors).shares[:-1]
                with pytest.raises(MaskingFault, match=node):
                    recovery.accept(node, Answer(part))
        total = np.zeros(self.words, dtype=np.uint32)
        for node in survivors:
            np.add(total, self.updates[node], out=total)
        MaskStream(leftover(roster, recovery.reveal())).subtract(0, total)
        return [int(word) for word in total.view(np.int32)]
