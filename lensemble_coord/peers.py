"""The nodes that are here, for whoever places work on them.

Sessions put their node on the board when it is admitted and take it off when its link ends; what a
node says about stages goes to the one who listens, after the session has checked its fence.  Who
lives among the members of the federation, here or not, is for the one who watches to say.
"""

from collections.abc import Callable
from typing import Protocol

import msgspec
import trio

from lensemble.ids import NodeId
from lensemble.transport.driver import LinkFacts
from lensemble.wire.circle import CircleOrder, MemberNote
from lensemble.wire.stages import BurstAnswer, BurstOrder, Inventory, StageAnswer, StageOrder


class Listener(Protocol):
    """Hears what concerns stages; its methods return at once."""

    def node_said(self, node: NodeId, message: StageAnswer) -> None: ...

    def link_said(self, node: NodeId, message: BurstAnswer) -> None: ...

    def node_lost(self, node: NodeId, reason: str) -> None: ...


class Member(msgspec.Struct, frozen=True):
    """A node as a member of the federation; ``unfit`` says why nothing is to be placed on it."""

    node: NodeId
    name: str
    unfit: str = ""


class Watcher(Protocol):
    """Knows who lives; its methods return at once."""

    def came(self, peer: "Peer") -> None: ...

    def noted(self, node: NodeId, note: bytes) -> None: ...

    def unfit(self, node: NodeId) -> str: ...

    def members(self) -> tuple[Member, ...]: ...


class Reach(msgspec.Struct, frozen=True):
    """How other members reach a node.  Without ``gossips`` it takes no part in membership."""

    gossips: bool = False
    addresses: tuple[str, ...] = ()


class Peer:
    """One node on one live link.

    Args:
        node: its identity.
        name: what people call it.
        epoch: of its session; every message to it carries it.
        tell: queues a message to it, never waits.
        facts: of its link, as they are at the moment.
    """

    def __init__(
        self,
        node: NodeId,
        name: str,
        epoch: int,
        tell: Callable[[StageOrder | BurstOrder | CircleOrder], None],
        facts: Callable[[], LinkFacts],
    ) -> None:
        self.node = node
        self.name = name
        self.epoch = epoch
        self.tell = tell
        self.facts = facts
        self.since = trio.current_time()
        self.reach = Reach()
        self.inventory: Inventory | None = None
        """What it can hold of a model, once it has said so."""
        self.said_at = self.since


class Peers:
    """Who is here; ``changed`` is set, and replaced, when somebody comes, goes or offers more."""

    def __init__(self) -> None:
        self.here: dict[NodeId, Peer] = {}
        self.changed = trio.Event()
        self._listener: Listener | None = None
        self._watcher: Watcher | None = None

    def listen(self, listener: Listener) -> None:
        """Let ``listener`` hear what nodes say about stages, and which are lost."""
        self._listener = listener

    def watch(self, watcher: Watcher) -> None:
        """Let ``watcher`` say who lives."""
        self._watcher = watcher

    def arrive(self, peer: Peer) -> None:
        self.here[peer.node] = peer
        if self._watcher is not None:
            self._watcher.came(peer)
        self._announce()

    def leave(self, node: NodeId, reason: str) -> None:
        """Take ``node`` off the board; every stage on it is gone."""
        if self.here.pop(node, None) is None:
            return
        if self._listener is not None:
            self._listener.node_lost(node, reason)
        self._announce()

    def take(self, node: NodeId, message: StageAnswer | BurstAnswer | MemberNote) -> None:
        """Something that ``node`` said in its live session."""
        peer = self.here.get(node)
        if peer is None:
            return
        if isinstance(message, MemberNote):
            if self._watcher is not None:
                self._watcher.noted(node, message.note)
            return
        if isinstance(message, Inventory):
            peer.inventory, peer.said_at = message, trio.current_time()
            self._announce()
        if self._listener is None:
            return
        if isinstance(message, BurstAnswer):
            self._listener.link_said(node, message)
        else:
            self._listener.node_said(node, message)

    def absent(self) -> tuple[Member, ...]:
        """Members of the federation that are not here, in order of their ids."""
        known = () if self._watcher is None else self._watcher.members()
        gone = [each for each in known if each.node not in self.here]
        return tuple(sorted(gone, key=lambda each: each.node))

    def unfit(self, node: NodeId) -> str:
        """Why nothing is to be placed on ``node``, as far as membership goes."""
        return "" if self._watcher is None else self._watcher.unfit(node)

    def _announce(self) -> None:
        self.changed.set()
        self.changed = trio.Event()
