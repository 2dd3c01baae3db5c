"""Edge-ends over a world's links: the tx and rx machines, rings in an arena, chunks that are told.

A chunk is any object.  It lies in a slot of a leased region, and the checks here are that nobody
touches a slot that is not its own, and no region has two owners.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

from lensemble.edge import rx, tx
from lensemble.edge.spec import EdgeSpec
from lensemble.ids import SlotIndex
from tests.sim.world import Host, Link


class Region:
    """A leased ring; ``users`` are the pumps and workers that may touch it."""

    def __init__(self, number: int, slots: int) -> None:
        self.number = number
        self.slots: list[Any] = [None] * slots
        self.users: set[str] = set()
        self.leased = True


class Arena:
    """``room`` rings, handed out lowest first and used again at once."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.leased: dict[int, Region] = {}
        self.waiting: deque[tuple[int, Callable[[Region], None]]] = deque()

    def lease(self, slots: int, done: Callable[[Region], None]) -> None:
        """Call ``done`` with a region, now or once there is room."""
        self.waiting.append((slots, done))
        self._hand_out()

    def region(self, number: int) -> Region:
        region = self.leased.get(number)
        assert region is not None, f"ring {number} is used and not leased"
        return region

    def give_back(self, region: Region) -> None:
        assert self.leased.get(region.number) is region, "a ring is given back twice"
        assert not region.users, f"a ring is given back while {region.users} use it"
        region.leased = False
        del self.leased[region.number]
        self._hand_out()

    def forget(self, done: Callable[[Region], None]) -> None:
        """Nobody waits for this lease any more."""
        self.waiting = deque(each for each in self.waiting if each[1] is not done)

    def _hand_out(self) -> None:
        while self.waiting and len(self.leased) < self.room:
            slots, done = self.waiting.popleft()
            number = next(n for n in range(self.room) if n not in self.leased)
            region = self.leased[number] = Region(number, slots)
            done(region)


class TxEnd:
    """The sending end of ``spec`` on ``link``.

    Args:
        released: told of each slot that may be filled.
        faulted: told once, why no more can be sent.
    """

    def __init__(
        self,
        host: Host,
        link: Link,
        spec: EdgeSpec,
        region: Region,
        *,
        released: Callable[[SlotIndex], None],
        faulted: Callable[[str], None],
    ) -> None:
        self.host, self.link, self.spec, self.region = host, link, spec, region
        self.state: tx.State = tx.Unbound(spec.slots, spec.capacity_bytes)
        self.chunk_s = 0.0
        self.over = False
        self._released, self._faulted = released, faulted
        self._clear_at = 0.0
        region.users.add(f"tx {spec.edge}")

    def open(self) -> None:
        self._say("open", None)
        self._feed(tx.Opened())

    def filled(self, slot: SlotIndex, extent: int) -> None:
        assert self.region.leased, "a slot is filled in a ring that was given back"
        if not self.over:
            assert isinstance(self.state, tx.Ready | tx.Faulted)
            self._feed(tx.Filled(slot, extent))

    def lose(self, reason: str) -> None:
        if not self.over:
            self._feed(tx.StreamLost(reason))

    def cancel(self) -> None:
        """Reset what is sent; nothing of the ring is read again."""
        if not self.over:
            self.over = True
            self._say("reset", None)
        self.region.users.discard(f"tx {self.spec.edge}")

    def _say(self, what: str, chunk: Any, delay_s: float = 0.0) -> None:
        payload = (what, chunk)
        self.host.world.send(
            self.link, self.host, ("to_rx", self.spec.edge), payload, delay_s=delay_s
        )

    def _feed(self, event: tx.Event) -> None:
        self.state, actions = tx.transition(self.state, event)
        for action in actions:
            match action:
                case tx.SignalReleased(slot=slot):
                    self._released(slot)
                case tx.SendSlot(slot=slot):
                    self._send(slot)
                case tx.Report(fault=str(fault)):
                    self.over = True
                    self._say("reset", None)
                    self._faulted(fault)
                case _:
                    pass

    def _send(self, slot: SlotIndex) -> None:
        world = self.host.world
        chunk = self.region.slots[slot]
        when = max(world.now, self._clear_at) + self.chunk_s + world.random.random() * 0.02
        self._clear_at = when
        self._say("chunk", chunk, when - world.now)

        def sent() -> None:
            if not self.over:
                self._feed(tx.Sent(slot))

        world.after(self.host, when - world.now, sent)


class RxEnd:
    """The receiving end of ``spec``.

    Args:
        ready: told of each slot with a chunk in it.
        faulted: told once, why no more can come.
    """

    def __init__(
        self,
        host: Host,
        link: Link,
        spec: EdgeSpec,
        region: Region,
        *,
        ready: Callable[[SlotIndex, int], None],
        faulted: Callable[[str], None],
    ) -> None:
        self.host, self.link, self.spec, self.region = host, link, spec, region
        self.state: rx.State = rx.Unbound(spec.slots, spec.capacity_bytes)
        self.over = False
        self._offered: deque[SlotIndex] = deque()
        self._pending: deque[Any] = deque()
        self._ready, self._faulted = ready, faulted
        region.users.add(f"rx {spec.edge}")

    def register(self) -> None:
        self._feed(rx.Registered())

    def hear(self, what: str, chunk: Any) -> None:
        """What comes on the stream."""
        if self.over:
            return
        match what:
            case "chunk":
                self._pending.append(chunk)
                self._land()
            case "reset":
                self._feed(rx.StreamLost("reset by the peer"))
            case _:
                pass

    def consumed(self, slot: SlotIndex) -> None:
        if not self.over:
            self._feed(rx.Consumed(slot))

    def lose(self, reason: str) -> None:
        if not self.over:
            self._feed(rx.StreamLost(reason))

    def cancel(self) -> None:
        """Refuse what comes; nothing is written to the ring again."""
        if not self.over:
            self.over = True
            self._say_stop()
        self.region.users.discard(f"rx {self.spec.edge}")

    def _say_stop(self) -> None:
        payload = ("stop", None)
        self.host.world.send(self.link, self.host, ("to_tx", self.spec.edge), payload)

    def _land(self) -> None:
        while self._pending and self._offered and not self.over:
            slot, chunk = self._offered.popleft(), self._pending.popleft()
            assert self.region.leased, "a chunk lands in a ring that was given back"
            self.region.slots[slot] = chunk
            self._feed(rx.Landed(slot, 1))

    def _feed(self, event: rx.Event) -> None:
        self.state, actions = rx.transition(self.state, event)
        for action in actions:
            match action:
                case rx.OfferSlot(slot=slot):
                    self._offered.append(slot)
                case rx.SignalReady(slot=slot, extent=extent):
                    self._ready(slot, extent)
                case rx.Report(fault=str(fault)):
                    self.over = True
                    self._say_stop()
                    self._faulted(fault)
                case _:
                    pass
        if isinstance(event, rx.Consumed):
            self._land()
