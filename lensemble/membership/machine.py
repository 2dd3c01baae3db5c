"""The membership machine of one member: what it is asked and told, and how it probes."""

from lensemble.ids import NodeId
from lensemble.membership.agenda import Agenda, Entry, Timer
from lensemble.membership.beliefs import Beliefs
from lensemble.membership.draw import Draw
from lensemble.membership.outcomes import Action, Member
from lensemble.membership.profiles import Profile
from lensemble.membership.roll import Roll
from lensemble.membership.voice import Voice
from lensemble.wire.membership import MAX_UPDATES, Ack, Message, Nack, Probe, ProbeFor

FAREWELLS = 8
"""Members that a leaver tells."""

CROWD_MESSAGES = 6
"""Most messages more in an interval when more is to be told than probes can carry."""

HELPED_AT_ONCE = 256
"""Probes for others that are open; further ones are not begun."""

NACK_SHARE = 0.6
"""A helper says after this part of its own patience that its target has not answered."""

LATE_SHARE = 0.5
"""Of the profile's least patience: when a call comes this late, the silence was our own."""


class _Flight:
    """A probe of one's own that is not answered; ``asked`` are helpers that owe a word."""

    __slots__ = ("asked", "due", "helpers", "node", "sent")

    def __init__(self, node: NodeId, due: float) -> None:
        self.node = node
        self.due = due
        self.sent: dict[int, float] = {}
        self.helpers: tuple[NodeId, ...] | None = None
        self.asked: set[NodeId] = set()


class _Help:
    """A probe on behalf of ``asker``, whose number for it is ``sequence``."""

    __slots__ = ("asker", "sequence", "target")

    def __init__(self, asker: NodeId, sequence: int, target: NodeId) -> None:
        self.asker = asker
        self.sequence = sequence
        self.target = target


class Membership:
    """What one member knows of the others, and its part in keeping that true.

    It does no IO and reads no clock: ``now`` is in seconds of any clock that never goes back.
    Actions are to be performed in order.  After every call, ``next_due`` says when ``tick`` is to
    be called next.  A call that comes later than that is a pause of one's own, not a silence of
    others: all that was running goes on where it was.

    Args:
        self_id: whose machine this is.
        boot: 16 lower-case hex digits drawn at process start.
        profile: the figures; the same for all members.
        seed: of the order of probes and the choice of helpers; equal seeds and equal calls give
            equal actions.
    """

    def __init__(self, self_id: NodeId, boot: str, profile: Profile, seed: int) -> None:
        self._profile = profile
        self._draw = Draw(seed)
        self._roll = Roll(self._draw)
        self._voice = Voice(self_id, boot, self._roll, self._draw.below(1 << 32))
        self._agenda = Agenda(LATE_SHARE * profile.probe_s)
        self._beliefs = Beliefs(self._voice, self._roll, self._agenda, profile)
        self._intervals = 0
        self._dead = 0
        self._flights: dict[int, _Flight] = {}
        """By each of their numbers: a probe that is repeated has two."""
        self._probed: set[NodeId] = set()
        self._helping: dict[int, _Help] = {}

    # ---- what is known ----

    @property
    def health(self) -> int:
        """0 if all is well here, up to ``MAX_HEALTH`` if this member had better doubt itself."""
        return self._voice.health

    @property
    def incarnation(self) -> int:
        """One's own."""
        return self._voice.incarnation

    def next_due(self) -> float | None:
        """When ``tick`` is due; None if there is nobody to look after."""
        return self._agenda.next_due()

    def members(self) -> tuple[Member, ...]:
        """All others that are known, in order of their ids; oneself is not among them."""
        return tuple(record.shown() for _, record in sorted(self._roll.records.items()))

    def member(self, node: NodeId) -> Member | None:
        """The same of one; None if it is not known."""
        record = self._roll.records.get(node)
        return None if record is None else record.shown()

    # ---- what happens ----

    def learn(self, node: NodeId, now: float) -> tuple[Action, ...]:
        """``node`` belongs to the federation; nothing happens if that is known, or is oneself.

        Raises:
            InvariantError: there are ``MAX_MEMBERS`` already.
        """
        if node != self._voice.me and node not in self._roll.records:
            self._come(now)
            self._roll.add(node, now)
            self._voice.rumours.resize(len(self._roll.records) + 1)
            if not self._agenda and not self._voice.left:
                wait = self._profile.interval_s * self._draw.below(1 << 16) / (1 << 16)
                self._agenda.arm(self._agenda.here + wait, Timer.INTERVAL)
        return self._voice.take_out()

    def forget(self, node: NodeId) -> None:
        """``node`` is not of the federation; nothing of it is kept, and nothing is said."""
        if node not in self._roll.records:
            return
        self._roll.remove(node)
        self._voice.rumours.drop(node)
        self._voice.rumours.resize(len(self._roll.records) + 1)
        for flight in [each for each in self._flights.values() if each.node == node]:
            self._land(flight)
        for sequence, call in list(self._helping.items()):
            if node in (call.asker, call.target):
                del self._helping[sequence]
        if not self._roll.records:
            self._agenda.clear()

    def greet(self, node: NodeId, now: float) -> tuple[Action, ...]:
        """There is a way to ``node`` again: probe it out of turn, so that doubts end soon.

        Nothing follows from an answer that does not come.
        """
        if node in self._roll.records and not self._voice.left:
            self._come(now)
            self._voice.probe(node, self._voice.number())
        return self._voice.take_out()

    def heard(self, message: Message, sender: NodeId, now: float) -> tuple[Action, ...]:
        """``message`` has come on a connection that belongs to ``sender``.

        A message of an unknown sender, and an update about an unknown member, is ignored.
        """
        record = self._roll.records.get(sender)
        if record is None:
            return ()
        if self._voice.left:
            if isinstance(message, Probe):
                self._voice.ack(sender, message.sequence)
            return self._voice.take_out()
        self._come(now)
        record.heard = now
        self._beliefs.hear_from(record, message.boot, message.incarnation)
        for update in message.updates:
            self._beliefs.hear(update, sender)
        self._answer(message, sender)
        if record.unaware and not isinstance(message, Probe):
            self._voice.gossip(sender)
        return self._voice.take_out()

    def rtt(self, node: NodeId, seconds: float) -> None:
        """The link to ``node`` was measured; answers to probes are measured without this."""
        record = self._roll.records.get(node)
        if record is not None:
            record.measured(seconds)

    def tick(self, now: float) -> tuple[Action, ...]:
        """Do what is due at ``now``; calling early does no harm."""
        self._come(now)
        while (entry := self._agenda.take()) is not None:
            self._fall_due(entry)
        return self._voice.take_out()

    def leave(self, now: float) -> tuple[Action, ...]:
        """Say goodbye; from here on the machine only repeats that to whoever probes it."""
        if not self._voice.left:
            self._come(now)
            self._voice.left = True
            for node in self._roll.some(FAREWELLS):
                self._voice.gossip(node)
            self._flights.clear()
            self._probed.clear()
            self._helping.clear()
            self._agenda.clear()
        return self._voice.take_out()

    def _come(self, now: float) -> None:
        if self._agenda.come(now):
            self._voice.feel(1)

    def _fall_due(self, entry: Entry) -> None:
        match entry.timer:
            case Timer.INTERVAL:
                self._begin_interval()
            case Timer.ANSWER:
                self._unanswered(entry.number)
            case Timer.HELP:
                call = self._helping.pop(entry.number, None)
                if call is not None:
                    self._voice.nack(call.asker, call.sequence)
            case Timer.SUSPICION:
                self._beliefs.time_is_up(entry)

    # ---- probing ----

    def _begin_interval(self) -> None:
        voice, here = self._voice, self._agenda.here
        self._agenda.arm(here + self._profile.interval_s * (voice.health + 1), Timer.INTERVAL)
        record = self._roll.next(self._probed)
        if record is not None:
            patience = self._profile.probe_timeout(record.rtt_s, voice.health)
            self._probed.add(record.node)
            self._launch(_Flight(record.node, here + patience))
        self._revive()
        crowd = len(voice.rumours) // (2 * MAX_UPDATES)
        if crowd > 0:
            for node in self._roll.some(min(crowd, CROWD_MESSAGES)):
                voice.gossip(node)

    def _revive(self) -> None:
        """Speak to one of the dead now and then, and at each interval while some come back."""
        self._intervals += 1
        fewer = self._roll.dead_count < self._dead
        self._dead = self._roll.dead_count
        if fewer or self._intervals % self._profile.revive_intervals == 0:
            dead = self._roll.dead()
            if dead is not None:
                self._voice.probe(dead.node, self._voice.number())

    def _launch(self, flight: _Flight) -> int:
        """Probe once; the number of it."""
        sequence = self._voice.number()
        flight.sent[sequence] = self._agenda.here
        self._flights[sequence] = flight
        self._voice.probe(flight.node, sequence)
        self._agenda.arm(flight.due, Timer.ANSWER, sequence)
        return sequence

    def _unanswered(self, sequence: int) -> None:
        """Ask again, and ask others to ask; after that, suspect."""
        flight, voice = self._flights.get(sequence), self._voice
        if flight is None or flight.due > self._agenda.here:
            return
        record = self._roll.records[flight.node]
        if not record.present:
            self._land(flight)
        elif flight.helpers is None:
            flight.helpers = tuple(self._roll.some(self._profile.helpers, flight.node))
            flight.asked = set(flight.helpers)
            patience = self._profile.probe_timeout(record.rtt_s, voice.health)
            flight.due = self._agenda.here + patience
            number = self._launch(flight)
            for helper in flight.helpers:
                voice.probe_for(helper, number, flight.node)
        else:
            self._land(flight)
            # With nobody to ask, nothing is learnt about oneself.
            voice.feel(len(flight.asked))
            self._beliefs.accuse(record)

    def _land(self, flight: _Flight) -> None:
        for sequence in flight.sent:
            self._flights.pop(sequence, None)
        self._probed.discard(flight.node)

    def _answered(self, sequence: int, sender: NodeId) -> None:
        flight, call = self._flights.get(sequence), self._helping.get(sequence)
        if flight is not None and (sender == flight.node or sender in (flight.helpers or ())):
            here = self._agenda.here
            if sender == flight.node and here <= flight.due:
                self._roll.records[sender].measured(here - flight.sent[sequence])
            self._land(flight)
            self._voice.feel(-1)
        elif call is not None and sender == call.target:
            del self._helping[sequence]
            about = self._roll.records[call.target].claim()
            self._voice.ack(call.asker, call.sequence, about)

    def _answer(self, message: Message, sender: NodeId) -> None:
        match message:
            case Probe():
                self._voice.ack(sender, message.sequence)
            case Ack():
                self._answered(message.sequence, sender)
            case ProbeFor():
                self._help(message, sender)
            case Nack():
                flight = self._flights.get(message.sequence)
                if flight is not None:
                    flight.asked.discard(sender)

    def _help(self, message: ProbeFor, asker: NodeId) -> None:
        target = self._roll.records.get(message.target)
        if message.target == self._voice.me:
            self._voice.ack(asker, message.sequence)
        elif target is not None and len(self._helping) < HELPED_AT_ONCE:
            sequence = self._voice.number()
            self._helping[sequence] = _Help(asker, message.sequence, target.node)
            self._voice.probe(target.node, sequence)
            patience = NACK_SHARE * self._profile.probe_timeout(target.rtt_s)
            self._agenda.arm(self._agenda.here + patience, Timer.HELP, sequence)
