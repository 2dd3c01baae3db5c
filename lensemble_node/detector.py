"""A node's part in membership: whom the coordinator names, how to reach them, who lives.

A message goes over a link of its own to its member where there is one; such links are dialled when
a member is to be probed.  Where none can be had, and where the configuration allows none, it goes
to the coordinator, which passes it on.  Who belongs to the federation is for the coordinator alone
to say; who lives, for all members.
"""

import os
from collections import Counter
from collections.abc import Callable
from typing import TypeAlias

import msgspec
import trio

from lensemble.ctl import replies
from lensemble.detector import Detector, Self
from lensemble.errors import FrameError
from lensemble.ids import FederationId, NodeId
from lensemble.logs import logger
from lensemble.membership.outcomes import Changed
from lensemble.membership.profiles import Profile
from lensemble.transport.driver import Driver
from lensemble.wire import circle, letters, membership
from lensemble.wire.fence import MAX_PARTICIPANTS
from lensemble.wire.letters import Way
from lensemble.wire.membership import Standing
from lensemble_node import egress
from lensemble_node.config import MembershipSection
from lensemble_node.peer_links import PeerLinks

MAX_CIRCLES = 4
"""Lists of members that wait to be begun; a newer one ends the one before it."""

GONE = frozenset({"dead", "left"})
"""States of members that no path leads to."""

Members: TypeAlias = dict[NodeId, circle.Acquaintance]


class Ground(msgspec.Struct, frozen=True):
    """What a node's part in membership stands on.

    ``say`` sends a note on the control way of the coordinator, if there is a session.
    """

    config: MembershipSection
    driver: Driver
    links: PeerLinks
    say: Callable[[bytes], None]


class _Circle:
    """The federation that this node belongs to; ``members`` without the coordinator."""

    def __init__(self, federation: FederationId, coordinator: NodeId, detector: Detector) -> None:
        self.federation = federation
        self.coordinator = coordinator
        self.detector = detector
        self.scope = trio.CancelScope()
        self.members: Members = {}
        self.incoming: Members | None = None
        """A whole list of which not all pages have come."""


class NodeDetector:
    """One node in the membership of one federation at a time.

    ``changed`` is set, and replaced, when somebody is held for another thing; ``refused`` counts.
    """

    def __init__(self, ground: Ground, refused: Counter[str]) -> None:
        self.changed = trio.Event()
        self._config = ground.config
        self._driver = ground.driver
        self._links = ground.links
        self._say = ground.say
        self._refused = refused
        self._circle: _Circle | None = None
        self._begun, self._to_run = trio.open_memory_channel[_Circle](MAX_CIRCLES)
        self._log = logger("members")

    @property
    def callable(self) -> bool:
        """Whether other members may call this node."""
        return self._config.direct and self._config.direct_links > 0

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Take part until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._take_notes)
            task_status.started()
            async for begun in self._to_run:
                nursery.start_soon(self._serve, begun)

    def leave(self) -> None:
        """Tell the members that this node goes away by itself, and take no further part."""
        if self._circle is not None:
            self._circle.detector.leave()
            self._end()

    def take(self, coordinator: NodeId, order: circle.CircleOrder) -> None:
        """What the coordinator of the session says of and among members."""
        match order:
            case circle.Circle():
                self._meet(coordinator, order)
            case circle.MemberNote(note=note):
                self._noted(coordinator, note)

    def belongs(self, node: NodeId) -> bool:
        """Whether ``node`` is another node of this federation, as its coordinator has said."""
        return self._circle is not None and node in self._circle.members

    def listing(self, name: str, lead: str) -> replies.MemberList:
        """Everyone as this node sees them; ``name`` is its own, ``lead`` the coordinator's."""
        here = self._circle
        if here is None:
            return replies.MemberList(name=name)
        names = {node: entry.name for node, entry in here.members.items()}
        made = here.detector.listing(name, {**names, here.coordinator: lead})
        rows = tuple(
            msgspec.structs.replace(
                row,
                path=self._path(here, NodeId(row.node)) if row.state not in GONE else "none",
                coordinator=row.node == here.coordinator,
            )
            for row in made.members
        )
        return msgspec.structs.replace(made, members=rows)

    # ---- the list of members ----

    def _meet(self, coordinator: NodeId, page: circle.Circle) -> None:
        here = self._joined(coordinator, page)
        entries = {entry.node: entry for entry in page.members if entry.node != self._driver.node}
        if page.fresh:
            here.incoming = {}
            here.detector.greet(coordinator)
        if here.incoming is None:
            known = {n: e for n, e in {**here.members, **entries}.items() if n not in page.gone}
            self._become(here, known)
            return
        here.incoming.update(entries)
        if not page.more:
            self._become(here, here.incoming)
            here.incoming = None

    def _joined(self, coordinator: NodeId, page: circle.Circle) -> _Circle:
        """The circle that ``page`` is of, begun if it is another one than before."""
        profile = Profile(**msgspec.structs.asdict(page.figures))
        here = self._circle
        if here is not None:
            same = (here.federation, here.coordinator) == (page.federation, coordinator)
            if same and here.detector.profile == profile:
                return here
            if not same:
                here.detector.leave()
            self._end()
        me = Self(self._driver.node, os.urandom(8).hex(), int.from_bytes(os.urandom(7)))
        detector = Detector(me, profile, self._carry, self._report)
        self._circle = here = _Circle(page.federation, coordinator, detector)
        detector.learn(coordinator)
        self._begun.send_nowait(here)
        return here

    def _become(self, here: _Circle, members: Members) -> None:
        if len(members) > MAX_PARTICIPANTS:
            self._refused["too_many_members"] += 1
            return
        before, here.members = here.members, members
        for node in before.keys() - members.keys():
            here.detector.forget(node)
        for node in sorted(members.keys() - before.keys()):
            here.detector.learn(node)
        if self.callable:
            addresses = {node: entry.addresses for node, entry in members.items()}
            self._links.open_to(addresses, self._config.direct_links)

    async def _serve(self, begun: _Circle) -> None:
        with begun.scope:
            await begun.detector.run()

    def _end(self) -> None:
        """Take part in nothing until another list comes."""
        if self._circle is not None:
            self._circle.scope.cancel()
            self._circle = None
            self._links.open_to({}, 0)

    # ---- notes ----

    async def _take_notes(self) -> None:
        while True:
            self._noted(*await self._driver.receive_note())

    def _noted(self, neighbour: NodeId, note: bytes) -> None:
        here = self._circle
        if here is None:
            return
        try:
            letter = letters.unseal(note)
        except FrameError:
            self._refused["note"] += 1
            return
        match letter.way:
            case Way.NEIGHBOUR:
                sender = neighbour
            case Way.PASSED_ON if letter.node is not None and neighbour == here.coordinator:
                sender = letter.node
            case _:
                self._refused["note_forged"] += 1
                return
        if code := here.detector.heard(letter.message, sender):
            self._refused[f"note_{code}"] += 1
        elif letter.way is Way.NEIGHBOUR:
            self._links.used(neighbour)

    def _carry(self, to: NodeId, message: membership.Message) -> None:
        here = self._circle
        if here is None:
            return
        datagram = egress.permit_gossip(message)
        if to == here.coordinator:
            self._to_coordinator(here, letters.seal(datagram))
            return
        if self.callable and self._driver.send_note(to, letters.seal(datagram)):
            self._links.used(to)
            return
        if isinstance(message, membership.Probe) and self.callable:
            self._links.wish(to)
        self._to_coordinator(here, letters.pass_on(to, datagram))

    def _to_coordinator(self, here: _Circle, note: bytes) -> None:
        if not self._driver.send_note(here.coordinator, note):
            self._say(note)

    def _path(self, here: _Circle, node: NodeId) -> str:
        star = self._driver.link_to(here.coordinator) is not None
        if node == here.coordinator:
            return "direct" if star else "none"
        if self.callable and self._driver.link_to(node) is not None:
            return "direct"
        return "relayed" if star else "none"

    # ---- what changed ----

    def _report(self, change: Changed) -> None:
        here = self._circle
        entry = None if here is None else here.members.get(change.node)
        bad = change.after in {Standing.SUSPECT, Standing.DEAD}
        (self._log.warning if bad else self._log.info)(
            f"member.{change.after}",
            node=change.node,
            peer="" if entry is None else entry.name,
            was=str(change.before),
            incarnation=change.incarnation,
            restarted=change.restarted,
            reason=change.reason,
        )
        self.changed.set()
        self.changed = trio.Event()
