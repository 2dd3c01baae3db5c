"""The coordinator's part in membership: it tells who belongs to it, and is the centre of the star.

It is a member itself, one that nothing is ever placed on.  It tells each node who the others are,
passes notes on between those that have no link, and says of each whether work may be placed on it.
Whether a run or a round goes on is never decided here: that is for links to say.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Protocol

import msgspec
import trio

from lensemble.ctl import replies
from lensemble.detector import Detector, Self
from lensemble.errors import FrameError
from lensemble.ids import FederationId, NodeId
from lensemble.membership.outcomes import Changed
from lensemble.membership.profiles import Profile
from lensemble.transport.driver import Driver
from lensemble.wire import circle, letters, membership
from lensemble.wire.fence import MAX_PARTICIPANTS
from lensemble.wire.letters import Way
from lensemble.wire.membership import Standing
from lensemble_coord.peers import Member, Peer, Peers
from lensemble_coord.postage import Postage

LEFT_KEPT_S = 600.0
DEAD_KEPT_S = 86_400.0
"""After so long nobody needs to see a member that has left, or is dead."""

SWEEP_S = 60.0
"""Between two looks at who is to be forgotten."""


class Note(Protocol):
    """Records an event."""

    def __call__(self, event: str, *, warn: bool = False, **fields: str | int | bool) -> None: ...


class Surroundings(msgspec.Struct, frozen=True):
    """What ``Members`` has to do with; ``profile`` is what all members go by."""

    federation: FederationId
    profile: Profile
    driver: Driver
    peers: Peers
    note: Note


class Members:
    """Watches ``peers``; ``changed`` is set, and replaced, when somebody is held for another thing.

    Args:
        around: what it has to do with.
        boot: 16 hex digits drawn at the start of this process.
        seed: of the order in which members are probed.
    """

    def __init__(self, around: Surroundings, boot: str, seed: int) -> None:
        self.refused: Counter[str] = Counter()
        self.changed = trio.Event()
        self._federation = around.federation
        self._figures = circle.Figures(**msgspec.structs.asdict(around.profile))
        self._driver = around.driver
        self._peers = around.peers
        self._note = around.note
        self._circle: dict[NodeId, circle.Acquaintance] = {}
        self._postage = Postage()
        me = Self(around.driver.node, boot, seed)
        self._detector = Detector(me, around.profile, self._carry, self._report)
        around.peers.watch(self)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Take part until cancelled."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self._detector.run)
            nursery.start_soon(self._take_notes)
            nursery.start_soon(self._sweep)
            task_status.started()

    def leave(self) -> None:
        """Tell the members that this coordinator goes away by itself."""
        self._detector.leave()

    def listing(self, name: str) -> replies.MemberList:
        """Everyone as this coordinator sees them; ``name`` is its own."""
        names = {node: entry.name for node, entry in self._circle.items()}
        made = self._detector.listing(name, names)
        rows = tuple(
            msgspec.structs.replace(row, path=self._path(NodeId(row.node))) for row in made.members
        )
        return msgspec.structs.replace(made, members=rows, refused=dict(self.refused))

    # ---- what the board asks and brings ----

    def members(self) -> tuple[Member, ...]:
        """Everyone of the federation, and why nothing is to be placed on it."""
        return tuple(
            Member(node, entry.name, self.unfit(node)) for node, entry in self._circle.items()
        )

    def unfit(self, node: NodeId) -> str:
        """Why nothing is to be placed on ``node``; empty if it is alive, or takes no part."""
        return self._detector.trouble(node)

    def came(self, peer: Peer) -> None:
        """A node is here: it learns of the others, and they of it."""
        if not peer.reach.gossips:
            return
        known = self._circle.get(peer.node)
        if known is None and len(self._circle) >= MAX_PARTICIPANTS:
            self.refused["too_many_members"] += 1
            return
        entry = circle.Acquaintance(node=peer.node, name=peer.name, addresses=peer.reach.addresses)
        self._circle[peer.node] = entry
        for page in self._pages(peer):
            peer.tell(page)
        if entry != known:
            self._tell_others(peer.node, members=(entry,))
        self._detector.learn(peer.node)
        self._detector.greet(peer.node)

    def noted(self, node: NodeId, note: bytes) -> None:
        """A note that came from ``node``, in a datagram or on its control way."""
        if node not in self._circle or node not in self._peers.here:
            self.refused["note_of_stranger"] += 1
            return
        try:
            letter = letters.unseal(note)
        except FrameError:
            self.refused["note"] += 1
            return
        match letter.way:
            case Way.NEIGHBOUR:
                if code := self._detector.heard(letter.message, node):
                    self.refused[f"note_{code}"] += 1
            case Way.PASS_ON if letter.node is not None:
                self._pass_on(node, letter.node, letter.message)
            case _:
                self.refused["note_forged"] += 1

    # ---- the list ----

    def _pages(self, peer: Peer) -> Iterator[circle.Circle]:
        """The whole list, for ``peer``."""
        everyone = tuple(self._circle.values())
        size = circle.MAX_MEMBERS_PER_PAGE
        for start in range(0, len(everyone), size):
            yield self._page(
                peer,
                fresh=start == 0,
                more=start + size < len(everyone),
                members=everyone[start : start + size],
            )

    def _page(
        self,
        peer: Peer,
        *,
        fresh: bool = False,
        more: bool = False,
        members: tuple[circle.Acquaintance, ...] = (),
        gone: tuple[NodeId, ...] = (),
    ) -> circle.Circle:
        return circle.Circle(
            federation=self._federation,
            epoch=peer.epoch,
            figures=self._figures,
            fresh=fresh,
            more=more,
            members=members,
            gone=gone,
        )

    def _tell_others(
        self,
        about: NodeId,
        *,
        members: tuple[circle.Acquaintance, ...] = (),
        gone: tuple[NodeId, ...] = (),
    ) -> None:
        for peer in self._peers.here.values():
            if peer.node != about and peer.reach.gossips:
                peer.tell(self._page(peer, members=members, gone=gone))

    async def _sweep(self) -> None:
        """Forget those of whom nobody needs to know any more."""
        while True:
            await trio.sleep(SWEEP_S)
            for node in [node for node in self._circle if self._is_past(node)]:
                del self._circle[node]
                self._detector.forget(node)
                self._postage.forget(node)
                self._tell_others(node, gone=(node,))

    def _is_past(self, node: NodeId) -> bool:
        member = self._detector.member(node)
        if member is None or node in self._peers.here:
            return False
        age = trio.current_time() - member.since
        match member.standing:
            case Standing.LEFT:
                return age > LEFT_KEPT_S
            case Standing.DEAD:
                return age > DEAD_KEPT_S
            case _:
                return False

    # ---- notes ----

    async def _take_notes(self) -> None:
        while True:
            self.noted(*await self._driver.receive_note())

    def _carry(self, to: NodeId, message: membership.Message) -> None:
        self._send(to, letters.seal(membership.encode(message)))

    def _pass_on(self, sender: NodeId, to: NodeId, message: bytes) -> None:
        if to not in self._circle:
            self.refused["note_to_stranger"] += 1
        elif not self._postage.admits(sender, trio.current_time()):
            self.refused["note_too_often"] += 1
        else:
            self._send(to, letters.passed_on(sender, message))

    def _send(self, to: NodeId, note: bytes) -> None:
        """By datagram, or where none can carry it on the control way of a node that is here."""
        peer = self._peers.here.get(to)
        if peer is None or self._driver.send_note(to, note):
            return
        peer.tell(circle.MemberNote(federation=self._federation, epoch=peer.epoch, note=note))

    def _path(self, node: NodeId) -> str:
        return "direct" if self._driver.link_to(node) else "none"

    # ---- what changed ----

    def _report(self, change: Changed) -> None:
        name = self._circle[change.node].name if change.node in self._circle else ""
        self._note(
            f"member.{change.after}",
            warn=change.after in {Standing.SUSPECT, Standing.DEAD},
            node=change.node,
            peer=name,
            was=str(change.before),
            incarnation=change.incarnation,
            restarted=change.restarted,
            reason=change.reason,
        )
        self.changed.set()
        self.changed = trio.Event()
