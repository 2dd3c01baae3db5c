"""Oneself as the others hear it: who one is, and what goes with each message."""

from lensemble.ids import NodeId
from lensemble.membership.outcomes import Action, Send
from lensemble.membership.profiles import MAX_HEALTH
from lensemble.membership.roll import Roll
from lensemble.membership.rumours import Rumours
from lensemble.wire.membership import (
    MAX_UPDATES,
    Ack,
    Gossip,
    Nack,
    Probe,
    ProbeFor,
    Standing,
    Update,
    Updates,
)

FIRST_INCARNATION = 1

ANNOUNCED_TO = 3
"""Members that are told at once what must not wait for the next probe."""


class Voice:
    """Makes messages and keeps them, with all else that is to be done, in ``out``."""

    def __init__(self, me: NodeId, boot: str, roll: Roll, sequence: int) -> None:
        self.me = me
        self.boot = boot
        self.incarnation = FIRST_INCARNATION
        self.left = False
        self.health = 0
        self.rumours = Rumours()
        self.out: list[Action] = []
        self._roll = roll
        self._sequence = sequence

    def myself(self) -> Update:
        standing = Standing.LEFT if self.left else Standing.ALIVE
        return Update(self.me, standing, self.incarnation, self.boot)

    def feel(self, worse: int) -> None:
        self.health = min(MAX_HEALTH, max(0, self.health + worse))

    def number(self) -> int:
        """Of a probe; none is used twice."""
        self._sequence += 1
        return self._sequence

    def probe(self, to: NodeId, sequence: int) -> None:
        self._send(to, Probe(self.boot, self.incarnation, self._updates(to), sequence))

    def probe_for(self, to: NodeId, sequence: int, target: NodeId) -> None:
        updates = self._updates(to)
        self._send(to, ProbeFor(self.boot, self.incarnation, updates, sequence, target))

    def ack(self, to: NodeId, sequence: int, about: Update | None = None) -> None:
        self._send(to, Ack(self.boot, self.incarnation, self._updates(to, about), sequence))

    def nack(self, to: NodeId, sequence: int) -> None:
        self._send(to, Nack(self.boot, self.incarnation, self._updates(to), sequence))

    def gossip(self, to: NodeId) -> None:
        self._send(to, Gossip(self.boot, self.incarnation, self._updates(to)))

    def announce(self, update: Update, to: NodeId | None = None) -> None:
        """Tell ``update`` to ``to`` and a few more at once, and to all on what is sent anyway."""
        self.rumours.add(update)
        if to is not None:
            self.gossip(to)
        for node in self._roll.some(ANNOUNCED_TO):
            self.gossip(node)

    def take_out(self) -> tuple[Action, ...]:
        """What is to be done since the last call."""
        if not self.out:
            return ()
        out, self.out = tuple(self.out), []
        return out

    def _send(self, to: NodeId, message: Probe | ProbeFor | Ack | Nack | Gossip) -> None:
        self.out.append(Send(to, message))

    def _updates(self, to: NodeId, about: Update | None = None) -> Updates:
        """What ``to`` must know of itself first; then ``about``; then what is going round."""
        first = []
        record = self._roll.records[to]
        if record.must_be_told():
            first.append(record.claim())
        if self.left:
            first.append(self.myself())
        if about is not None:
            first.append(about)
        return (*first, *self.rumours.take(MAX_UPDATES - len(first), to))
