"""A small world of machines: one clock, links that lag, stall and break, hosts that die.

Nothing here knows what a round is.  A host is anything with the methods of ``Host``; it sees the
others only through links, asks for later calls with ``World.after``, and loses both when it
crashes.  One seed decides everything, so a life that fails can be lived again.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

Call = Callable[[], None]
Pause = tuple[float, Call]
"""How long an action takes, and what it does at its end."""

IDLE_S = 3.0
"""A link over which one side hears nothing for this long is lost."""

DIAL_TIMEOUT_S = 5.0
TOLD_WITHIN_S = 2.0
"""After this long at most, each end of a broken link knows."""


class Host:
    """A process.  ``start`` begins a new life; what must outlive it, the host keeps apart.

    Any machine joins the world as one of these, or as an ``Actor`` within one.
    """

    def __init__(self, world: "World", name: str) -> None:
        self.world = world
        self.name = name
        self.up = False
        self.lives = 0
        world.hosts[name] = self

    def start(self) -> None:
        """A new process begins."""

    def stopped(self, *, power: bool) -> None:
        """The process is dead; with ``power`` what was not flushed is lost."""

    def connected(self, link: "Link") -> None:
        """Somebody has dialled this host."""

    def heard(self, link: "Link", lane: Hashable, payload: Any) -> None:
        """Something has come in on a lane of a link."""

    def lost(self, link: "Link") -> None:
        """The link is gone."""


class Conditions:
    """What the network does to what is sent; seconds and probabilities."""

    def __init__(self) -> None:
        self.latency_s = 0.02
        self.jitter_s = 0.05
        self.breaks = 0.0
        """Probability that sending one payload breaks the link under it."""


class Link:
    """A connection of two hosts.  Each lane is in order each way while it lives."""

    def __init__(self, ends: tuple[Host, Host]) -> None:
        self.ends = ends
        self.alive = True
        self.trickles = False
        """What is under way when it breaks still arrives, until the receiver knows."""
        self.told: set[str] = set()
        self.clear_at: dict[tuple[str, Hashable], float] = {}
        self.held: list[Callable[[], None]] = []
        """What a partition keeps."""

    def other(self, host: Host) -> Host:
        return self.ends[1] if host is self.ends[0] else self.ends[0]


class World:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now = 0.0
        self.conditions = Conditions()
        self.hosts: dict[str, Host] = {}
        self.links: list[Link] = []
        self.blocked: dict[tuple[str, str], int] = {}
        self.events = 0
        self._queue: list[tuple[float, int, Host | None, int, Call]] = []
        self._counter = 0
        self._transcript: deque[tuple[float, str, str, object]] = deque()

    # ---- time ----

    def at(self, when: float, call: Call) -> None:
        """Call it at ``when`` whatever happens to any host."""
        self._counter += 1
        heapq.heappush(self._queue, (when, self._counter, None, 0, call))

    def after(self, host: Host, seconds: float, call: Call) -> None:
        """Call it later, unless ``host`` has died by then."""
        self._counter += 1
        entry = (self.now + seconds, self._counter, host, host.lives, call)
        heapq.heappush(self._queue, entry)

    def run(self, until: Callable[[], bool], limit_s: float) -> bool:
        """Let time pass until it is so; False if ``limit_s`` or all events are used up."""
        end = self.now + limit_s
        queue = self._queue
        while not until():
            if not queue or queue[0][0] > end:
                self.now = end
                return False
            self.now, _, host, life, call = heapq.heappop(queue)
            if host is None or (host.up and host.lives == life):
                self.events += 1
                call()
        return True

    # ---- hosts ----

    def boot(self, host: Host) -> None:
        if not host.up:
            host.lives += 1
            host.up = True
            self.note(host, "boots", host.lives)
            host.start()

    def crash(self, host: Host, *, power: bool = False) -> None:
        if host.up:
            self.note(host, "loses power" if power else "dies", host.lives)
            host.up = False
            for link in [link for link in self.links if host in link.ends]:
                self.cut(link)
            host.stopped(power=power)

    # ---- the network ----

    def block(self, sender: Host, receiver: Host, seconds: float) -> None:
        """Let nothing through one way for a while; a link that hears nothing for long is lost."""
        way = (sender.name, receiver.name)
        self.blocked[way] = self.blocked.get(way, 0) + 1
        self.note(sender, f"=| {receiver.name}", f"for {seconds:.1f} s")

        def is_lost() -> None:
            if self.blocked.get(way):
                for link in self._between(sender, receiver):
                    self.cut(link)

        if seconds > IDLE_S:
            self.at(self.now + IDLE_S, is_lost)
        self.at(self.now + seconds, lambda: self._heal(sender, receiver))

    def _heal(self, sender: Host, receiver: Host) -> None:
        way = (sender.name, receiver.name)
        self.blocked[way] -= 1
        if self.blocked[way]:
            return
        self.note(sender, f"=> {receiver.name}", "again")
        for link in self._between(sender, receiver):
            held, link.held = link.held, []
            for deliver in held:
                deliver()

    def _between(self, one: Host, other: Host) -> list[Link]:
        return [link for link in self.links if one in link.ends and other in link.ends]

    def _is_blocked(self, sender: Host, receiver: Host) -> bool:
        return bool(self.blocked.get((sender.name, receiver.name)))

    def dial(self, host: Host, other: Host, done: Callable[[Link | None], None]) -> None:
        """Call ``done`` with a new link, or with None where nobody answers."""
        silent = self._is_blocked(host, other) or self._is_blocked(other, host)
        if silent or not other.up:
            wait = DIAL_TIMEOUT_S if silent else self._lag()
            self.after(host, wait, lambda: done(None))
            return
        life = other.lives

        def answered() -> None:
            if not other.up or other.lives != life:
                done(None)
                return
            link = Link((host, other))
            self.links.append(link)
            other.connected(link)
            done(link)

        self.after(host, 2 * self._lag(), answered)

    def send(
        self,
        link: Link,
        sender: Host,
        lane: Hashable,
        payload: Any,
        *,
        about: object = None,
        delay_s: float = 0.0,
    ) -> None:
        """Deliver ``payload`` in the order of its lane, ``delay_s`` later than the network must.

        ``about`` is what the transcript shows in its place.
        """
        receiver = link.other(sender)
        if about is not None:
            self.note(sender, f"-> {receiver.name}", about)
        if not link.alive:
            return
        if self.conditions.breaks and self.random.random() < self.conditions.breaks:
            self.note(sender, "link breaks", receiver.name)
            self.cut(link)
            return

        def deliver() -> None:
            lag = self._lag() + delay_s
            when = max(self.now + lag, link.clear_at.get((receiver.name, lane), 0.0))
            link.clear_at[receiver.name, lane] = when
            self.after(receiver, when - self.now, arrive)

        def arrive() -> None:
            if link.alive or (link.trickles and receiver.name not in link.told):
                receiver.heard(link, lane, payload)

        if self._is_blocked(sender, receiver):
            link.held.append(deliver)
        else:
            deliver()

    def cut(self, link: Link) -> None:
        """Break the link; its ends learn of it one by one."""
        if not link.alive:
            return
        link.alive = False
        self.links.remove(link)
        link.trickles = self.random.random() < 0.5
        for end in link.ends:
            if end.up:
                lag = self.random.uniform(0, TOLD_WITHIN_S)
                self.after(end, lag, lambda end=end: self._tell(link, end))  # type: ignore[misc]

    def _tell(self, link: Link, end: Host) -> None:
        link.told.add(end.name)
        end.lost(link)

    def hang_up(self, link: Link, host: Host) -> None:
        """Close it in order: what was said before still arrives."""
        if link.alive:
            other = link.other(host)
            lanes = [t for (name, _), t in link.clear_at.items() if name == other.name]
            when = max([self.now + self._lag(), *lanes])

            def closes() -> None:
                if link.alive:
                    self.cut(link)

            self.at(when, closes)

    def _lag(self) -> float:
        return self.conditions.latency_s + self.random.random() * self.conditions.jitter_s

    # ---- what happened ----

    def note(self, host: Host, what: str, about: object) -> None:
        self._transcript.append((self.now, host.name, what, about))

    def transcript(self, last: int | None = None) -> str:
        """One line for each of the ``last`` things that happened; long ids are cut."""
        told = list(self._transcript)[-last if last else None :]
        return "\n".join(
            f"{when:9.3f}  {who:<8} {what} {brief(about)}" for when, who, what, about in told
        )


def brief(about: object) -> str:
    kind = type(about).__name__
    fields = getattr(about, "__struct_fields__", None)
    if fields is None:
        return str(about)[:200]
    shown = (
        "node", "round", "attempt", "epoch", "code", "outcome", "reason", "timer", "completed",
        "edge", "edges", "digest", "done", "total", "phase", "rounds", "held", "nodes",
    )  # fmt: skip
    inner = ("command", "message", "signal", "open", "commit", "announce", "action", "pair")
    told = [f"{f}={_word(getattr(about, f))}" for f in fields if f in shown]
    told += [brief(getattr(about, f)) for f in fields if f in inner]
    return f"{kind}({', '.join(told)})"


def _word(value: object) -> str:
    if isinstance(value, tuple):
        return "+".join(_word(each) for each in value)
    text = str(value)
    return text[:6] if len(text) == 64 else text[:80]


class Actor:
    """Runs one machine in a host: events wait their turn, actions are performed in order.

    An action that takes long keeps the next ones, and all events, waiting.
    """

    def __init__(
        self,
        host: Host,
        transition: Callable[[Any, Any], tuple[Any, tuple[Any, ...]]],
        state: Any,
        perform: Callable[[Any], Pause | None],
        moved: Callable[[Any, Any, Any], None],
    ) -> None:
        self.host = host
        self.state = state
        self._transition = transition
        self._perform = perform
        self._moved = moved
        self._events: deque[Any] = deque()
        self._actions: deque[Any] = deque()
        self.busy = False
        self._clear_at = 0.0

    def feed(self, event: Any) -> None:
        """Take ``event`` after those that wait already."""
        self._events.append(event)
        if not self.busy:
            self._go_on()

    def post(self, event: Any, delay_s: float = 0.0) -> None:
        """Feed it in a moment, in order with all that is posted."""
        world = self.host.world
        when = max(world.now + delay_s + world.random.random() * 0.01, self._clear_at)
        self._clear_at = when
        world.after(self.host, when - world.now, lambda: self.feed(event))

    def _go_on(self) -> None:
        self.busy = True
        while self._actions or self._events:
            if not self._actions:
                event = self._events.popleft()
                if isinstance(event, Expiry):
                    if not event.holds():
                        continue
                    event = event.event
                before = self.state
                self.state, actions = self._transition(before, event)
                self._moved(before, event, actions)
                self._actions.extend(actions)
                continue
            pause = self._perform(self._actions.popleft())
            if pause is not None:
                seconds, done = pause
                self.host.world.after(self.host, seconds, partial(self._resume, done))
                return
        self.busy = False

    def _resume(self, done: Call) -> None:
        done()
        self._go_on()


class Expiry:
    """A timer that ran out; ``holds`` until it is cancelled or armed again."""

    def __init__(self, timers: "Timers", name: str, token: object, event: Any) -> None:
        self.event = event
        self._timers = timers
        self._name = name
        self._token = token

    def holds(self) -> bool:
        if self._timers.running.get(self._name) is not self._token:
            return False
        del self._timers.running[self._name]
        return True


class Timers:
    """Turns ``ArmTimer`` into a later ``TimerExpired``."""

    def __init__(self, actor: Actor, expired: Callable[[str], Any]) -> None:
        self.running: dict[str, object] = {}
        self._actor = actor
        self._expired = expired

    def arm(self, name: str, seconds: float) -> None:
        token = self.running[name] = object()
        expiry = Expiry(self, name, token, self._expired(name))

        def expire() -> None:
            if self.running.get(name) is token:
                self._actor.feed(expiry)

        host = self._actor.host
        host.world.after(host, seconds, expire)

    def cancel(self, name: str) -> None:
        self.running.pop(name, None)
