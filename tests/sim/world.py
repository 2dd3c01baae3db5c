"""A small world of machines: one clock, links that lag and break, hosts that die and come back.

Nothing here knows what a round is.  A host is anything with the methods of ``Host``; it sees the
others only through links, asks for later calls with ``World.after``, and loses both when it
crashes.  One seed decides everything, so a life that fails can be lived again.
"""

import heapq
import random
from collections.abc import Callable
from typing import Protocol

HEARTBEAT_LOSS_S = 2.0
"""After this long at most, each end of a broken link knows."""


class Host(Protocol):
    """A process.  ``start`` begins a new life; what must outlive it, the host keeps apart."""

    name: str

    def start(self) -> None: ...

    def connected(self, link: "Link") -> None: ...

    def heard(self, link: "Link", payload: object) -> None: ...

    def lost(self, link: "Link") -> None: ...


class Conditions:
    """What the network does to what is sent; seconds and probabilities."""

    def __init__(
        self, latency_s: float = 0.02, jitter_s: float = 0.05, breaks: float = 0.0
    ) -> None:
        self.latency_s = latency_s
        self.jitter_s = jitter_s
        self.breaks = breaks
        """Probability that sending one payload breaks the link under it."""


class Link:
    """A connection of two hosts: in order each way while it lives, nothing after."""

    def __init__(self, ends: tuple[Host, Host]) -> None:
        self.ends = ends
        self.alive = True
        self.clear_at = {end.name: 0.0 for end in ends}

    def other(self, host: Host) -> Host:
        return self.ends[1] if host is self.ends[0] else self.ends[0]


class World:
    def __init__(self, seed: int, conditions: Conditions) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now = 0.0
        self.conditions = conditions
        self.hosts: dict[str, Host] = {}
        self.lives: dict[str, int] = {}
        self.up: set[str] = set()
        self.links: list[Link] = []
        self.checks: list[Callable[[], None]] = []
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._counter = 0
        self._transcript: list[tuple[float, str, str, object]] = []

    # ---- time ----

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Call it at ``when`` whatever happens to any host."""
        self._counter += 1
        heapq.heappush(self._queue, (when, self._counter, call))

    def after(self, host: Host, seconds: float, call: Callable[[], None]) -> None:
        """Call it later, unless ``host`` has died by then."""
        life = self.lives[host.name]

        def in_the_same_life() -> None:
            if host.name in self.up and self.lives[host.name] == life:
                call()

        self.at(self.now + seconds, in_the_same_life)

    def run(self, until: Callable[[], bool], limit_s: float) -> bool:
        """Let time pass until it is so; False if ``limit_s`` or all events are used up."""
        end = self.now + limit_s
        while not until():
            if not self._queue or self._queue[0][0] > end:
                self.now = end
                return False
            self.now, _, call = heapq.heappop(self._queue)
            call()
            for check in self.checks:
                check()
        return True

    # ---- hosts ----

    def add(self, host: Host) -> None:
        self.hosts[host.name] = host
        self.lives[host.name] = 0

    def boot(self, host: Host) -> None:
        if host.name not in self.up:
            self.lives[host.name] += 1
            self.up.add(host.name)
            self.note(host, "boots", self.lives[host.name])
            host.start()

    def crash(self, host: Host) -> None:
        if host.name in self.up:
            self.note(host, "dies", self.lives[host.name])
            self.up.remove(host.name)
            for link in [link for link in self.links if host in link.ends]:
                self.cut(link)

    def restart(self, host: Host, within_s: float) -> None:
        """It dies now and comes back some time within so many seconds."""
        self.crash(host)
        self.at(self.now + self.random.uniform(0.0, within_s), lambda: self.boot(host))

    # ---- links ----

    def connect(self, host: Host, other: Host) -> Link | None:
        """A new link, or None where nobody answers."""
        if other.name not in self.up:
            return None
        link = Link((host, other))
        self.links.append(link)
        self._deliver(link, other, self._lag(), lambda: other.connected(link))
        return link

    def send(
        self, link: Link, sender: Host, payload: object, *, about: object = None, delay_s: float = 0
    ) -> None:
        """Deliver ``payload`` in order, after ``delay_s`` more than the network needs.

        ``about`` is what the transcript shows in its place.
        """
        receiver = link.other(sender)
        self.note(sender, f"-> {receiver.name}", payload if about is None else about)
        if not link.alive:
            return
        if self.random.random() < self.conditions.breaks:
            self.note(sender, "link breaks", receiver.name)
            self.cut(link)
            return
        self._deliver(link, receiver, self._lag() + delay_s, lambda: receiver.heard(link, payload))

    def cut(self, link: Link) -> None:
        """Break the link; its ends learn of it one by one."""
        if link.alive:
            link.alive = False
            self.links.remove(link)
            for end in link.ends:
                if end.name in self.up:
                    lag = self.random.uniform(0, HEARTBEAT_LOSS_S)
                    self.after(end, lag, lambda end=end: end.lost(link))  # type: ignore[misc]

    def _lag(self) -> float:
        return self.conditions.latency_s + self.random.random() * self.conditions.jitter_s

    def _deliver(self, link: Link, to: Host, lag: float, call: Callable[[], None]) -> None:
        when = max(self.now + lag, link.clear_at[to.name])
        link.clear_at[to.name] = when

        def if_alive() -> None:
            if link.alive:
                call()

        self.after(to, when - self.now, if_alive)

    # ---- what happened ----

    def note(self, host: Host, what: str, about: object) -> None:
        self._transcript.append((self.now, host.name, what, about))

    def transcript(self) -> str:
        """One line for everything that happened; long ids are cut."""
        return "\n".join(
            f"{when:9.3f}  {who:<8} {what} {_brief(about)}"
            for when, who, what, about in self._transcript
        )


def _brief(about: object) -> str:
    kind = type(about).__name__
    fields = getattr(about, "__struct_fields__", None)
    if fields is None:
        return str(about)
    shown = ("node", "round", "attempt", "epoch", "code", "outcome", "reason", "timer", "completed")
    told = [f"{f}={str(getattr(about, f))[:60]}" for f in fields if f in shown]
    return f"{kind}({', '.join(told)})"
