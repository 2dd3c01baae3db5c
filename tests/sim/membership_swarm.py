"""Many membership machines and a bad network, in discrete events: equal seeds, equal lives."""

import heapq
import itertools
import random
import struct
import zlib
from collections.abc import Callable, Iterable

import msgspec

from lensemble.ids import NodeId
from lensemble.membership.machine import Membership
from lensemble.membership.outcomes import Action, Changed, Send
from lensemble.membership.profiles import Profile
from lensemble.wire import membership as wire
from lensemble.wire.membership import Message, Standing

SAMPLE = 499
"""Each so many messages one goes through its bytes."""

ROOM = 2
"""Datagrams that wait for a host that is stopped; further ones are lost."""

_LINE = struct.Struct("<dHHBB")
_KINDS = {
    kind: number
    for number, kind in enumerate(
        (wire.Probe, wire.ProbeFor, wire.Ack, wire.Nack, wire.Gossip), start=1
    )
}

Machine = Callable[[NodeId, str, Profile, int], Membership]


class Weather(msgspec.Struct, frozen=True):
    """One-way delays are drawn evenly from ``delay_s`` less to ``delay_s`` more ``jitter_s``."""

    delay_s: float = 0.3
    jitter_s: float = 0.15
    loss: float = 0.05


class Seen(msgspec.Struct, frozen=True):
    """That ``host`` took a change for a fact at ``at``."""

    at: float
    host: int
    change: Changed


class Host:
    """One process: its machine, whether it runs, and what waits for it while it is stopped."""

    def __init__(self, index: int, node: NodeId, machine: Membership) -> None:
        self.index = index
        self.node = node
        self.machine = machine
        self.up = True
        self.stopped = False
        self.wake: float | None = None
        self.waiting: list[tuple[int, Message]] = []
        self.gone: dict[int, Standing] = {}
        """By their places, those that are held for anything but alive here."""


class Swarm:
    """Hosts that all know each other, from ``size`` on; more may join.

    Args:
        seed: of all that is drawn here and in the machines.
        size: hosts at the start.
        profile: of all.
        weather: of the network.
        machine: what makes the machines; another one for machines broken on purpose.
    """

    def __init__(
        self,
        seed: int,
        size: int,
        profile: Profile,
        weather: Weather | None = None,
        machine: Machine = Membership,
    ) -> None:
        self.profile = profile
        self.weather = weather or Weather()
        self.draw = random.Random(seed)
        self.now = 0.0
        self.hosts: list[Host] = []
        self.places: dict[NodeId, int] = {}
        self.seen: list[Seen] = []
        self.messages = 0
        self.largest = 0
        self.trace = 0
        self.side: dict[int, int] = {}
        """The side of the partition on which a host is; empty if there is none."""
        self.deaf: set[tuple[int, int]] = set()
        """Ways, from one host to another, on which nothing arrives."""
        self._machine = machine
        self._heap: list[tuple[float, int, int, int, Message | None]] = []
        self._count = itertools.count()
        for _ in range(size):
            self._add()
        for host in self.hosts:
            self.introduce(host, self.hosts)

    # ---- hosts ----

    def _add(self) -> Host:
        node = NodeId(f"{self.draw.getrandbits(256):064x}")
        host = Host(len(self.hosts), node, self._made(node))
        self.hosts.append(host)
        self.places[node] = host.index
        return host

    def _made(self, node: NodeId) -> Membership:
        boot = f"{self.draw.getrandbits(64):016x}"
        return self._machine(node, boot, self.profile, self.draw.getrandbits(63))

    def introduce(self, host: Host, others: Iterable[Host]) -> None:
        """Tell ``host`` of ``others``, as a coordinator tells its roster."""
        for other in others:
            self.perform(host, host.machine.learn(other.node, self.now))

    def join(self) -> Host:
        """One host more; all that are up and it learn of each other."""
        host = self._add()
        up = [other for other in self.hosts if other.up]
        self.introduce(host, up)
        for other in up:
            self.introduce(other, [host])
        return host

    def crash(self, host: Host) -> None:
        host.up = False
        host.stopped = False
        host.wake = None
        host.waiting.clear()

    def restart(self, host: Host, known: Iterable[Host]) -> None:
        """Start it again, in another life, with nothing remembered but the roster."""
        host.machine = self._made(host.node)
        host.up = True
        host.gone.clear()
        self.introduce(host, known)

    def leave(self, host: Host) -> None:
        """It says goodbye and ends."""
        self.perform(host, host.machine.leave(self.now))
        self.crash(host)

    def forget(self, gone: Host) -> None:
        """The roster drops it everywhere."""
        for host in self.hosts:
            if host.up:
                host.machine.forget(gone.node)
                host.gone.pop(gone.index, None)
                self._wake(host)

    def stop(self, host: Host) -> None:
        """It is not run for a while; a few messages wait for it."""
        host.stopped = True
        host.wake = None

    def go_on(self, host: Host) -> None:
        host.stopped = False
        waiting, host.waiting = host.waiting, []
        for sender, message in waiting:
            self._hand(host, sender, message)
        self._wake(host)

    # ---- time ----

    def run(self, seconds: float) -> None:
        """Live for so long."""
        self.until(lambda: False, seconds)

    def until(self, done: Callable[[], bool], within_s: float, each_s: float = 0.5) -> bool:
        """Live until ``done``, looked at every ``each_s``; False if it is not within the time."""
        end = self.now + within_s
        while not done():
            if self.now >= end:
                return False
            self._advance(min(end, self.now + each_s) if each_s else end)
        return True

    def _advance(self, end: float) -> None:
        heap = self._heap
        while heap and heap[0][0] <= end:
            at, _, to, sender, message = heapq.heappop(heap)
            self.now = at
            host = self.hosts[to]
            if message is None:
                if host.wake == at and host.up:
                    host.wake = None
                    self.perform(host, host.machine.tick(at))
            elif host.stopped:
                if len(host.waiting) < ROOM:
                    host.waiting.append((sender, message))
            elif host.up:
                self._hand(host, sender, message)
        self.now = end

    def _hand(self, host: Host, sender: int, message: Message) -> None:
        line = _LINE.pack(self.now, host.index, sender, _KINDS[type(message)], len(message.updates))
        self.trace = zlib.crc32(line, self.trace)
        self.perform(host, host.machine.heard(message, self.hosts[sender].node, self.now))

    def perform(self, host: Host, actions: tuple[Action, ...]) -> None:
        for action in actions:
            if type(action) is Send:
                self._post(host.index, self.places[action.to], action.message)
            elif isinstance(action, Changed):
                self.seen.append(Seen(self.now, host.index, action))
                host.gone.pop(self.places[action.node], None)
                if action.after is not Standing.ALIVE:
                    host.gone[self.places[action.node]] = action.after
                self.trace = zlib.crc32(f"{self.now} {host.index} {action}".encode(), self.trace)
        self._wake(host)

    def _wake(self, host: Host) -> None:
        due = host.machine.next_due()
        if due is None or host.stopped:
            host.wake = None
        elif host.wake is None or due < host.wake:
            host.wake = max(due, self.now)
            heapq.heappush(self._heap, (host.wake, next(self._count), host.index, -1, None))

    # ---- network ----

    def _post(self, sender: int, to: int, message: Message) -> None:
        self.messages += 1
        if self.messages % SAMPLE == 0:
            datagram = wire.encode(message)
            self.largest = max(self.largest, len(datagram))
            assert wire.decode(datagram) == message
        draw, weather = self.draw.random, self.weather
        if draw() < weather.loss or (sender, to) in self.deaf:
            return
        if self.side and self.side.get(sender) != self.side.get(to):
            return
        delay = weather.delay_s + weather.jitter_s * (2 * draw() - 1)
        heapq.heappush(self._heap, (self.now + delay, next(self._count), to, sender, message))

    def cut(self, *sides: Iterable[Host]) -> None:
        """Let nothing through between the sides."""
        self.side = {host.index: number for number, side in enumerate(sides) for host in side}

    def heal(self) -> None:
        self.side = {}
        self.deaf.clear()

    # ---- what is so ----

    def others(self, host: Host) -> list[Host]:
        return [other for other in self.hosts if other.up and other is not host]

    def all_hold(self, about: Host, standing: Standing) -> bool:
        """Whether all others that are up hold ``about`` for ``standing``."""
        return all(
            host.gone.get(about.index, Standing.ALIVE) is standing for host in self.others(about)
        )

    def all_alive(self) -> bool:
        """Whether all that are up hold each other for alive."""
        return not any(
            self.hosts[place].up for host in self.hosts if host.up for place in host.gone
        )

    def deaths(self, since: float = 0.0) -> list[Seen]:
        """Deaths that were declared or believed, of whomever."""
        return [
            seen for seen in self.seen if seen.at >= since and seen.change.after is Standing.DEAD
        ]
