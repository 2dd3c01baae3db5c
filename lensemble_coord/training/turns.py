"""Turns in telling many nodes something large: only so much of it is on its way at a time.

What is written to a link lies in its connection's memory until the node has it.  A roster grows
with the nodes it goes to, so that a thousand of them on their way at once were hundreds of
megabytes, which a process does not give back.
"""

import trio

from lensemble.ids import NodeId

ON_THEIR_WAY_BYTES = 16 << 20
TURN_S = 1.0
"""For so long at most one node's turn keeps another one waiting; it may be slow, or gone."""


class Turns:
    """``nbytes`` go to each node; those of a federation of up to 270 have their turn at once."""

    def __init__(self, nbytes: int) -> None:
        self.at_once = max(1, ON_THEIR_WAY_BYTES // nbytes)
        self._until: dict[NodeId, float] = {}
        self._news = trio.Event()

    async def take(self, node: NodeId) -> None:
        """Wait until it is the turn of ``node``."""
        while len(self._until) >= self.at_once:
            first, until = next(iter(self._until.items()))
            with trio.move_on_at(until):
                await self._news.wait()
                continue
            self.end(first)
        self._until[node] = trio.current_time() + TURN_S

    def end(self, node: NodeId) -> None:
        """``node`` has answered; if it is not its turn, nothing changes."""
        if self._until.pop(node, None) is not None:
            self._news.set()
            self._news = trio.Event()
