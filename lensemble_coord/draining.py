"""Lets go of a node: answers ``lensemblectl drain``, and tells everything that uses nodes."""

from collections.abc import AsyncGenerator, Callable

import trio
from msgspec.structs import replace

from lensemble.ctl import replies, requests
from lensemble.ids import NodeId
from lensemble_coord.drains import Drains
from lensemble_coord.inference.orchestrator import Orchestrator
from lensemble_coord.training import outer_round
from lensemble_coord.training.coordinator import Rounds
from lensemble_coord.training.store import Store

LOOK_S = 0.5
"""Between two looks at what is left on a node."""


class Draining:
    """Drained nodes, and what is still on them."""

    def __init__(
        self, drains: Drains, store: Store, rounds: Rounds, orchestrator: Orchestrator
    ) -> None:
        self._drains = drains
        self._store = store
        self._rounds = rounds
        self._orchestrator = orchestrator

    async def begin(self) -> None:
        """Tell the rounds of the nodes that were drained before this process began."""
        for node in self._drains.nodes:
            await self._rounds.hear(outer_round.MemberRests(node))

    def word(self, node: NodeId) -> str:
        """draining, drained, or nothing."""
        if node not in self._drains.nodes:
            return ""
        busy = self._orchestrator.runs_on(node) or self._in_round(node)
        return "draining" if busy else "drained"

    def marked(self, listing: Callable[[], replies.MemberList]) -> replies.MemberList:
        """``listing`` with what is known here of drained members."""
        plain = listing()
        members = tuple(replace(each, drain=self.word(NodeId(each.node))) for each in plain.members)
        return replace(plain, members=members)

    async def answer(self, request: requests.Drain) -> AsyncGenerator[replies.Reply, None]:
        """The replies to ``request``.

        Raises:
            OperatorError: no such node.
            StorageError: it cannot be made durable; then nothing has changed.
        """
        node = self._store.find(request.node)
        note, name = self._rounds.journal.note, self._store.name(node)
        if request.undo:
            if await self._drains.remove(node):
                note("node.in_use", node=node, peer=name)
            await self._rounds.hear(outer_round.MemberRests(node, resting=False))
            yield self._status(node, ())
            return
        known = node in self._drains.nodes
        await self._drains.add(node, request.reason)
        if not known:
            note("node.drained", node=node, peer=name, reason=request.reason)
        await self._rounds.hear(outer_round.MemberRests(node))
        said = f"{name} is drained: {request.reason}"
        stays = await self._orchestrator.move_off(node, said, force=request.force)
        while True:
            status = self._status(node, tuple(stays))
            yield status
            if not request.wait or status.state != "draining":
                return
            with trio.move_on_after(LOOK_S):
                await self._orchestrator.changed.wait()

    def _status(self, node: NodeId, stays: tuple[str, ...]) -> replies.DrainStatus:
        return replies.DrainStatus(
            node=node,
            name=self._store.name(node),
            state=self.word(node) or "in use",
            runs=tuple(self._orchestrator.runs_on(node)),
            in_round=self._in_round(node),
            stays=stays,
        )

    def _in_round(self, node: NodeId) -> bool:
        return node in outer_round.participants(self._rounds.state)
