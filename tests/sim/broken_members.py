"""Membership machines that are broken on purpose, each in one rule, to show that lives notice."""

import itertools
from typing import Any

from lensemble.ids import NodeId
from lensemble.membership.agenda import Entry
from lensemble.membership.beliefs import Beliefs
from lensemble.membership.machine import Membership
from lensemble.membership.profiles import Profile
from lensemble.membership.record import Record
from lensemble.membership.roll import Roll
from lensemble.membership.voice import Voice
from lensemble.wire.membership import Standing, Update, Updates
from tests.sim.membership_swarm import Machine

_lives = itertools.count()


class SilentSuspect(Beliefs):
    """It refutes nothing."""

    def _hear_of_oneself(self, update: Update, sender: NodeId) -> None:
        pass


class TouchySuspect(Beliefs):
    """It refutes claims about its past, too."""

    def _hear_of_oneself(self, update: Update, sender: NodeId) -> None:
        if update.standing is not Standing.ALIVE:
            self._voice.incarnation += 1
            self._voice.rumours.add(self._voice.myself())


class Newborn(Beliefs):
    """It takes claims about another life of it for none of its business."""

    def _hear_of_oneself(self, update: Update, sender: NodeId) -> None:
        if update.boot == self._voice.boot:
            super()._hear_of_oneself(update, sender)


class HastyJudge(Beliefs):
    """Its timer does not look whether the suspicion is still the one it was armed for."""

    def time_is_up(self, entry: Entry) -> None:
        record = self._roll.records.get(entry.node)
        if record is not None and record.standing is not Standing.LEFT:
            dead = Update(record.node, Standing.DEAD, record.incarnation, record.boot)
            self._hold(record, dead, "hasty")
            self._voice.announce(dead)


class Gullible(Beliefs):
    """It believes that somebody lives whenever that is said of the same incarnation."""

    def hear(self, update: Update, sender: NodeId) -> None:
        record = self._roll.records.get(update.node)
        lives = update.standing is Standing.ALIVE
        if record is not None and lives and update.incarnation == record.incarnation:
            if record.standing is not Standing.ALIVE:
                self._hold(record, update, "gullible")
        else:
            super().hear(update, sender)

    def hear_from(self, record: Record, boot: str, incarnation: int) -> None:
        if record.standing is not Standing.ALIVE and incarnation == record.incarnation:
            self.hear(Update(record.node, Standing.ALIVE, incarnation, boot), record.node)
        super().hear_from(record, boot, incarnation)


class Sociable(Beliefs):
    """It takes whoever is spoken of for a member."""

    def hear(self, update: Update, sender: NodeId) -> None:
        if update.node != self._voice.me and update.node not in self._roll.records:
            self._roll.add(update.node, self._agenda.now)
        super().hear(update, sender)


class Discreet(Voice):
    """It does not tell a suspect what is held of it."""

    def _updates(self, to: NodeId, about: Update | None = None) -> Updates:
        hidden = self._roll.records[to]
        self._roll.records[to] = Record(to, 0.0)
        updates = super()._updates(to, about)
        self._roll.records[to] = hidden
        return updates


class WithoutDead(Roll):
    """Its dead are never spoken to."""

    def dead(self) -> Record | None:
        return None


def beliefs(kind: type[Beliefs]) -> Machine:
    def make(node: NodeId, boot: str, profile: Profile, seed: int) -> Membership:
        machine = Membership(node, boot, profile, seed)
        machine._beliefs = kind(machine._voice, machine._roll, machine._agenda, profile)
        return machine

    return make


def _with_class(part: str, kind: type[Any]) -> Machine:
    def make(node: NodeId, boot: str, profile: Profile, seed: int) -> Membership:
        machine = Membership(node, boot, profile, seed)
        getattr(machine, part).__class__ = kind
        return machine

    return make


class Abrupt(Membership):
    """It leaves without a word."""

    def leave(self, now: float) -> tuple[Any, ...]:
        super().leave(now)
        return ()


class Proud(Membership):
    """Its own pauses are the silence of others, and it never doubts itself.

    Either alone is made good by the other.
    """

    def _come(self, now: float) -> None:
        self._agenda._patience_s = float("inf")
        self._agenda.come(now)
        self._voice.health = 0


class Keeping(Membership):
    """It keeps who is forgotten."""

    def forget(self, node: NodeId) -> None:
        pass


def unseeded(node: NodeId, boot: str, profile: Profile, seed: int) -> Membership:
    """It draws from a seed of its own."""
    return Membership(node, boot, profile, next(_lives))


FOUND: dict[str, Machine] = {
    "a suspect refutes nothing": beliefs(SilentSuspect),
    "claims about the past are refuted": beliefs(TouchySuspect),
    "a restart does not outrank the past": beliefs(Newborn),
    "a timer does not look again": beliefs(HastyJudge),
    "any word of life counts": beliefs(Gullible),
    "whoever is spoken of is a member": beliefs(Sociable),
    "the suspect is not told": _with_class("_voice", Discreet),
    "the dead are not spoken to": _with_class("_roll", WithoutDead),
    "leaving is not said": Abrupt,
    "one's own pause and bad health are others' silence": Proud,
    "who is forgotten is kept": Keeping,
    "the order is not of the seed": unseeded,
}
