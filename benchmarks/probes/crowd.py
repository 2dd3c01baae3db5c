"""Many nodes in one process for ``scale.py``: ``crowd.py COUNT ROUNDS TICKET WORKLOAD``.

Each has an endpoint, a link and edges of its own over QUIC and speaks the protocol of a node; only
training is left out, and the update is a constant.  It prints a line when all have joined, and one
for each round, once all have seen it closed.
"""

import resource
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import trio

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lensemble import identity, ticket
from lensemble.config import load
from lensemble.transport.driver import PeerAddress
from lensemble.transport.iroh_driver import IrohDriver
from lensemble.wire import messages
from lensemble.workload import Workload
from tests.coord.scripted_node import ScriptedNode  # it lies with the tests

KNOCKING = 16
BIND = "127.0.0.1:0"
HEARTBEAT_S, LOST_S, DIAL_S = 2.0, 300.0, 60.0
"""A thousand nodes share one process here: they may be slow to answer."""


class Crowd:
    """``count`` nodes that take part in ``rounds`` rounds."""

    def __init__(self, given: ticket.Ticket, terms: Workload, rounds: int) -> None:
        self._given = given
        self._terms = terms
        self._rounds = rounds
        self._knocking = trio.CapacityLimiter(KNOCKING)
        self._here = 0
        self._closed = [0] * rounds
        self._count = 0

    async def live(self, count: int) -> None:
        self._count = count
        async with trio.open_nursery() as nursery:
            for number in range(count):
                nursery.start_soon(self._one, number)

    async def _one(self, number: int) -> None:
        me = identity.generate()
        driver = IrohDriver(
            me,
            (BIND,),
            heartbeat_s=HEARTBEAT_S,
            heartbeat_timeout_s=LOST_S,
            dial_timeout_s=DIAL_S,
        )
        async with trio.open_nursery() as nursery:
            await nursery.start(driver.run)
            node = ScriptedNode(driver, me, self._terms, f"node-{number}")
            peer = PeerAddress(self._given.coordinator, self._given.addresses)
            async with AsyncExitStack() as stack:
                async with self._knocking:
                    await stack.enter_async_context(node.joined(peer, invite=self._given.secret))
                    await node.wait_for(messages.Welcome)
                self._here += 1
                if self._here == self._count:
                    print("joined", flush=True)
                await self._take_part(node)
            nursery.cancel_scope.cancel()

    async def _take_part(self, node: ScriptedNode) -> None:
        for number in range(self._rounds):
            if node.welcome.aggregation == "masked":
                close = await node.take_masked_part()
            else:
                close = await node.take_part()
            if close.outcome != "closed":
                raise SystemExit(f"a round was {close.outcome}: {close.reason}")
            self._closed[number] += 1
            if self._closed[number] == self._count:
                print(f"closed {number}", flush=True)


async def main(count: int, rounds: int, text: str, workload: str) -> None:
    _, allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, allowed))
    terms = load(Path(workload), Workload)
    await Crowd(ticket.decode(text), terms, rounds).live(count)


if __name__ == "__main__":
    trio.run(main, int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
