"""What is held for true of each member, oneself included, and how claims change it."""

from lensemble.ids import NodeId
from lensemble.membership.agenda import Agenda, Entry, Timer
from lensemble.membership.outcomes import Changed
from lensemble.membership.profiles import Profile
from lensemble.membership.record import Record
from lensemble.membership.roll import Roll
from lensemble.membership.voice import Voice
from lensemble.wire.membership import Standing, Update

MAX_INCARNATION = 1 << 61
"""A claim above this is ignored: nobody could go above it, and nobody gets there honestly."""

ASKED_AT = (0.5, 0.75)
"""Parts of a suspicion after which its holder asks the suspect itself; most have heard by then."""


TOLD_AGAIN = frozenset({Standing.ALIVE, Standing.LEFT})
"""What those are told again who doubt it: they have missed a refutation, or a farewell."""


class Beliefs:
    """Hears claims, holds those that count, and has them passed on."""

    def __init__(self, voice: Voice, roll: Roll, agenda: Agenda, profile: Profile) -> None:
        self._voice = voice
        self._roll = roll
        self._agenda = agenda
        self._profile = profile

    def hear(self, update: Update, sender: NodeId) -> None:
        """A claim that ``sender`` passes on or makes; one about an unknown member is ignored."""
        record = self._roll.records.get(update.node)
        if update.incarnation > MAX_INCARNATION:
            return
        if record is None:
            if update.node == self._voice.me:
                self._hear_of_oneself(update, sender)
        elif update.incarnation < record.incarnation or (
            record.standing is Standing.LEFT and update.incarnation == record.incarnation
        ):
            self._correct(record, update)
        elif update.standing is Standing.SUSPECT:
            by = update.by or sender
            if by == self._voice.me or by in self._roll.records:
                self._suspect(record, update, by)
        elif record.outranked_by(update.standing, update.incarnation):
            self._hold(record, update, f"{update.standing}, said by {_short(sender)}")

    def hear_from(self, record: Record, boot: str, incarnation: int) -> None:
        """A member speaks itself, so it lives; remember whether it knows what is held of it."""
        if boot == record.boot and incarnation == record.incarnation:
            record.unaware = record.standing is not Standing.ALIVE and record.is_doubted()
            return
        self.hear(Update(record.node, Standing.ALIVE, incarnation, boot), record.node)
        record.unaware = record.boot != boot or record.is_doubted()

    def accuse(self, record: Record) -> None:
        """One's own probe of ``record`` had no answer; the suspect is told at once."""
        me = self._voice.me
        claim = Update(record.node, Standing.SUSPECT, record.incarnation, record.boot, me)
        self._suspect(record, claim, me)
        self._voice.gossip(record.node)

    def time_is_up(self, entry: Entry) -> None:
        """A suspicion ends, if it is still the one that the timer was armed for."""
        record = self._roll.records.get(entry.node)
        if (
            record is None
            or record.standing is not Standing.SUSPECT
            or record.incarnation != entry.number
            or record.due != entry.due
        ):
            return
        lasts = record.lasts(self._profile, self._voice.health, self._others())
        if record.asked < len(ASKED_AT):
            record.asked += 1
            self._voice.probe(record.node, self._voice.number())
        elif record.began + lasts <= self._agenda.here:
            dead = Update(record.node, Standing.DEAD, record.incarnation, record.boot)
            self._hold(record, dead, f"suspected for {self._agenda.here - record.began:.1f} s")
            self._voice.announce(dead)
            return
        self._arm(record)

    def _hear_of_oneself(self, update: Update, sender: NodeId) -> None:
        """Refute what is at least as high as one's own incarnation; else say again what is so."""
        voice = self._voice
        if update.boot == voice.boot and update.standing is Standing.ALIVE:
            return
        if update.incarnation < voice.incarnation:
            if voice.me not in voice.rumours:
                voice.announce(voice.myself(), sender)
            return
        voice.incarnation = update.incarnation + 1
        if update.boot == voice.boot:
            voice.feel(1)
        voice.announce(voice.myself(), sender)

    def _correct(self, record: Record, update: Update) -> None:
        """Send what is so after a doubt that it outranks: where one goes round, so must the other.

        Who has known it for long does not take it for news, so the answer of a suspect to a claim
        about its past would otherwise end with them.
        """
        doubt = update.standing is Standing.SUSPECT or update.standing is Standing.DEAD
        if doubt and record.standing in TOLD_AGAIN and record.node not in self._voice.rumours:
            self._voice.rumours.add(record.claim())

    def _suspect(self, record: Record, update: Update, by: NodeId) -> None:
        """Begin a suspicion, or count one accuser more."""
        if record.outranked_by(Standing.SUSPECT, update.incarnation):
            self._hold(record, update, f"no answer to probes of {_short(by)}")
            record.suspect(by, self._agenda.here)
        elif not self._is_another(record, update, by):
            return
        else:
            record.accusers.add(by)
            self._voice.rumours.add(update)
        self._arm(record)

    def _is_another(self, record: Record, update: Update, by: NodeId) -> bool:
        return (
            record.standing is Standing.SUSPECT
            and update.incarnation == record.incarnation
            and by not in record.accusers
            and len(record.accusers) <= record.wanted(self._others())
        )

    def _arm(self, record: Record) -> None:
        """Have the timer of a suspicion come up when it is to, as of this moment."""
        lasts = record.lasts(self._profile, self._voice.health, self._others())
        share = ASKED_AT[record.asked] if record.asked < len(ASKED_AT) else 1.0
        due = record.began + share * lasts
        if due != record.due:
            record.due = due
            self._agenda.arm(due, Timer.SUSPICION, record.incarnation, record.node)

    def _others(self) -> int:
        """Members apart from a suspect and its first accuser."""
        return len(self._roll.present) - 1

    def _hold(self, record: Record, update: Update, reason: str) -> None:
        """Take ``update`` for what is so, and pass it on."""
        before, lived = record.standing, record.boot
        if update.incarnation > record.incarnation:
            record.boot = update.boot
        restarted = lived not in ("", record.boot)
        met = record.incarnation == 0 and update.standing is Standing.ALIVE is before
        record.incarnation = update.incarnation
        record.unaware = False
        if not met:
            # Each meets it anyway; going round, first meetings would crowd out news.
            self._voice.rumours.add(update)
        if update.standing is not before:
            record.stand(update.standing, self._agenda.now, restarted)
            self._roll.moved(record)
        elif not restarted:
            return
        self._voice.out.append(
            Changed(record.node, before, record.standing, record.incarnation, restarted, reason)
        )


def _short(node: NodeId) -> str:
    return node[:10]
