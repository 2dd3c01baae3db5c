"""Many nodes in one process for ``scale.py``: ``crowd.py FIRST COUNT ROUNDS BEAT TICKET WORKLOAD``.

Each has an endpoint, a link and edges of its own over QUIC and speaks the protocol of a node; only
training is left out, and the update is a constant.  What all of them are sent alike, this process
reads and checks once.  It prints a line when all have joined, and one for each round, once all have
seen it closed.
"""

import gc
import resource
import sys
from collections import OrderedDict
from contextlib import AsyncExitStack
from pathlib import Path

import trio

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lensemble import identity, ticket
from lensemble.config import load
from lensemble.secagg.roster import Roster
from lensemble.transport.driver import PeerAddress
from lensemble.transport.iroh_driver import IrohDriver
from lensemble.wire import codec, messages
from lensemble.workload import Workload
from tests.coord.scripted_node import ScriptedNode  # it lies with the tests

KNOCKING = 16
BIND = "127.0.0.1:0"
LOST_S, DIAL_S = 300.0, 60.0
"""Hundreds of nodes share one process here: they may be slow to answer."""

ALIKE_BYTES, ALIKE_KEPT = 4096, 8
"""From this size on it pays to look whether another node was sent the same."""


class Alike:
    """What several nodes were sent alike, read once."""

    def __init__(self) -> None:
        self._read: OrderedDict[bytes, messages.FromCoordinator] = OrderedDict()
        self._rosters: OrderedDict[tuple[int, int], tuple[messages.Roster, Roster]] = OrderedDict()

    def read(self, payload: bytes) -> messages.FromCoordinator:
        if len(payload) < ALIKE_BYTES:
            return codec.decode_from_coordinator(payload)
        found = self._read.get(payload)
        if found is None:
            found = self._read[payload] = codec.decode_from_coordinator(payload)
            while len(self._read) > ALIKE_KEPT:
                self._read.popitem(last=False)
        return found

    def roster(self, told: messages.Roster, make: "Member", opening: messages.RoundOpen) -> Roster:
        at = (told.round, told.attempt)
        known = self._rosters.get(at)
        if known is None or known[0].rows != told.rows:
            known = self._rosters[at] = told, ScriptedNode.roster_of(make, told, opening)
            while len(self._rosters) > ALIKE_KEPT:
                self._rosters.popitem(last=False)
        return known[1]


class Member(ScriptedNode):
    """One of the crowd."""

    alike: Alike

    def read(self, payload: bytes) -> messages.FromCoordinator:
        return self.alike.read(payload)

    def roster_of(self, told: messages.Roster, opening: messages.RoundOpen) -> Roster:
        return self.alike.roster(told, self, opening)


class Crowd:
    """Nodes that take part in ``rounds`` rounds, with ``beat_s`` between heartbeats."""

    def __init__(self, given: ticket.Ticket, terms: Workload, rounds: int, beat_s: float) -> None:
        self._beat_s = beat_s
        self._given = given
        self._terms = terms
        self._rounds = rounds
        self._alike = Alike()
        self._here = 0
        self._closed = [0] * rounds
        self._count = 0

    async def live(self, first: int, count: int) -> None:
        """Be the ``count`` nodes from number ``first`` on."""
        self._count, self._knocking = count, trio.CapacityLimiter(KNOCKING)
        async with trio.open_nursery() as nursery:
            for number in range(first, first + count):
                nursery.start_soon(self._one, number)

    async def _one(self, number: int) -> None:
        me = identity.generate()
        driver = IrohDriver(
            me,
            (BIND,),
            heartbeat_s=self._beat_s,
            heartbeat_timeout_s=LOST_S,
            dial_timeout_s=DIAL_S,
        )
        async with trio.open_nursery() as nursery:
            async with self._knocking:
                # To bind an endpoint collects garbage: not over all the nodes that are here.
                gc.freeze()
                await nursery.start(driver.run)
            node = Member(driver, me, self._terms, f"node-{number}")
            node.alike = self._alike
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


async def main(first: int, count: int, crowd: Crowd) -> None:
    _, allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, allowed))
    await crowd.live(first, count)


if __name__ == "__main__":
    _, lowest, number, turns, beat, invitation, workload = sys.argv
    terms = load(Path(workload), Workload)
    everyone = Crowd(ticket.decode(invitation), terms, int(turns), float(beat))
    trio.run(main, int(lowest), int(number), everyone)
