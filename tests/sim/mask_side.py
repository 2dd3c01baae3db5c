"""The secrets of masked attempts as ids: who may answer what, and what becomes known by it.

No key agrees with anything here.  ``SimSecrets`` follows ``lensemble_node.masking.Secrets`` step by
step; ``Revealed`` is the adversary's notebook, which sees all that any node ever answered.
"""

import hashlib
from collections import defaultdict

import msgspec

from lensemble.errors import SecureAggregationError
from lensemble.ids import Digest, NodeId
from lensemble.wire import messages
from lensemble_node import signals

At = tuple[int, int]


def digest_of(*parts: object) -> Digest:
    return Digest(hashlib.sha256(repr(parts).encode()).hexdigest())


def sign(node: str, payload: bytes) -> bytes:
    """64 bytes that only ``node`` is supposed to make."""
    return hashlib.sha512(node.encode() + payload).digest()


class SimSecrets:
    """Fresh secrets of ``me`` for the attempt that ``asked`` opens."""

    drawn = 0

    def __init__(self, me: NodeId, asked: messages.RoundOpen, number: int) -> None:
        self.at: At = (asked.round, asked.attempt)
        self.me = me
        self.number = number
        key = bytes.fromhex(digest_of(me, "keys", self.at, number))
        self.keys = messages.MaskKeys(mask_key=key, share_key=key, self_commitment=key)
        self.roster: tuple[NodeId, ...] = ()
        self.threshold = 0
        self.dealers: tuple[NodeId, ...] = ()
        self.survivors: tuple[NodeId, ...] = ()

    def deal(self, message: messages.Roster) -> None:
        nodes = tuple(each.node for each in message.members)
        if [e.keys for e in message.members if e.node == self.me] != [self.keys]:
            raise SecureAggregationError(
                "the roster does not carry the keys that this node committed to"
            )
        if self.roster or not len(nodes) < 2 * message.threshold <= 2 * len(nodes):
            raise SecureAggregationError("no majority, or dealt before")
        self.roster, self.threshold = nodes, message.threshold

    def open(self, dealers: tuple[NodeId, ...]) -> None:
        if not self.roster or self.dealers:
            raise SecureAggregationError("opened before, or nothing was dealt")
        self.dealers = (*dealers, self.me)
        if not set(self.dealers) <= set(self.roster) or len(self.dealers) < self.threshold:
            raise SecureAggregationError("a stranger dealt, or too few are left")

    def terms(self) -> tuple[signals.MaskTerm, ...]:
        assert self.dealers, "masks before all shares are opened"
        return (signals.MaskTerm(digest_of(self.me, self.at, self.number, self.dealers)),)

    def decide(self, survivors: tuple[NodeId, ...]) -> None:
        known = set(survivors) <= set(self.dealers)
        if self.survivors or not known or self.me not in survivors:
            raise SecureAggregationError("an honest coordinator does not ask for this")
        if len(survivors) < self.threshold:
            raise SecureAggregationError("too few survivors")
        self.survivors = survivors


class Answer(msgspec.Struct, frozen=True):
    """One ``UnmaskAnswer`` as it left a node."""

    node: NodeId
    at: At
    survivors: tuple[NodeId, ...]
    dealers: tuple[NodeId, ...]
    threshold: int


class Revealed:
    """All answers of all nodes, and which vectors were sent under which masks."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.kinds: dict[tuple[At, NodeId], str] = {}
        self.sent: dict[tuple[At, NodeId], Digest] = {}
        """The released vector that a node sent in an attempt."""
        self.sums: dict[At, tuple[NodeId, ...]] = {}
        """Survivors of the attempts whose sum enough answers make known."""
        self.used: dict[Digest, At] = {}
        self._by_attempt: defaultdict[At, int] = defaultdict(int)

    def answered(self, answer: Answer) -> None:
        """A node reveals: of survivors the self mask, of the other dealers the pair masks."""
        twice = any((a.node, a.at) == (answer.node, answer.at) for a in self.answers)
        assert not twice, "a node answered twice in one attempt"
        self.answers.append(answer)
        for dealer in answer.dealers:
            kind = "self" if dealer in answer.survivors else "pair"
            known = self.kinds.setdefault((answer.at, dealer), kind)
            assert known == kind, f"both seeds of {dealer[:6]} are revealed in attempt {answer.at}"
        self._by_attempt[answer.at] += 1
        if self._by_attempt[answer.at] >= answer.threshold:
            self._known(answer)

    def _known(self, answer: Answer) -> None:
        if self.sums.setdefault(answer.at, answer.survivors) != answer.survivors:
            raise AssertionError(f"two sums of attempt {answer.at} are known")
        for node in answer.survivors:
            vector = self.sent.get((answer.at, node))
            assert vector is not None, f"{node[:6]} is in a sum that it sent nothing for"
            used = self.used.setdefault(vector, answer.at)
            assert used == answer.at, (
                f"a vector of {node[:6]} is in two sums, {used} and {answer.at}"
            )

    def sends(self, node: NodeId, at: At, vector: Digest) -> None:
        """A masked update leaves."""
        known = self.sent.setdefault((at, node), vector)
        assert known == vector, f"{node[:6]} sent two vectors in attempt {at}"
