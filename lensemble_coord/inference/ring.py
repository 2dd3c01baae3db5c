"""The coordinator's two ends of a run's ring: tokens go out to the first stage, results come back.

Each chunk gets the next step of the run; a result that comes back goes to whoever sent that step.
"""

import struct
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeAlias

import msgspec
import trio

from lensemble import stage_chunk
from lensemble.edge.arena import Region
from lensemble.edge.spec import EdgeSpec
from lensemble.errors import EdgeFault, FrameError
from lensemble.ids import SlotIndex
from lensemble.stage_chunk import RESULT, Chunk, Kind, Sampling
from lensemble.transport.driver import Driver
from lensemble.transport.ends import ArenaLeases, RxEnd, TxEnd

MAX_TRIPS = 256
"""Latest trips whose times are kept."""

Torn = Callable[[str, bool], None]
"""Takes why an end broke, and whether it is the one from the last stage; returns at once."""

Heard = Callable[[int, int, float], None]
"""Takes step, token and its log-probability; returns at once."""


Load: TypeAlias = tuple[int, int, Sequence[int], Sampling | None]
"""Session, start, tokens, sampling."""


class Trip(msgspec.Struct, frozen=True):
    """One token's way round, from the filled slot to the landed result, and when that landed.

    ``alone`` where it is of an answer rather than of a prompt, and nothing else was under way.
    """

    step: int
    microseconds: int
    at: float
    alone: bool
    session: int
    index: int
    """Of the token in its answer."""


class _Awaited(msgspec.Struct, frozen=True):
    heard: Heard
    since: float
    alone: bool
    session: int
    index: int


class Ring:
    """Both ends of one run.

    Args:
        driver: live links to the nodes of first and last stage.
        leases: where the rings of both edges come from.
        ends: the edge to the first stage, and that from the last one.
        vocabulary: of the model; a token beyond it is none.
    """

    def __init__(
        self, driver: Driver, leases: ArenaLeases, ends: tuple[EdgeSpec, EdgeSpec], vocabulary: int
    ) -> None:
        self.out, self.into = ends
        self._vocabulary = vocabulary
        self.steps = 0
        self.late = 0
        """Results that nobody awaited."""
        self.observed: Callable[[float], None] = _unheard
        """Takes how many seconds each trip took."""
        self.trips: deque[Trip] = deque(maxlen=MAX_TRIPS)
        self._driver = driver
        self._leases = leases
        self._awaited: dict[int, _Awaited] = {}
        self._tx: TxEnd

    async def hold(
        self,
        torn: Torn,
        *,
        task_status: trio.TaskStatus[trio.Nursery] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Lease and serve both ends until cancelled; everything is given back at the end.

        Started, with the nursery to ``open`` in, once the receiving end is registered.  ``torn``
        hears why an end broke.

        Raises:
            ArenaExhausted: a ring can never fit.
        """
        async with _leased(self._leases, self.out, self.into) as (out, into):
            rx = RxEnd(self.into, into, self._driver)
            self._tx = TxEnd(self.out, out, self._driver)
            async with trio.open_nursery() as nursery:
                await nursery.start(rx.serve)
                nursery.start_soon(self._listen, rx, torn)
                task_status.started(nursery)
                await trio.sleep_forever()

    async def open(self, nursery: trio.Nursery, torn: Torn) -> None:
        """Open the stream to the first stage; it is served in ``nursery``.

        Raises:
            EdgeFault: there is no link to it.
        """
        await nursery.start(self._tx.serve)
        if self._tx.fault is not None:
            raise EdgeFault(self._tx.fault)
        nursery.start_soon(self._watch, self._tx, torn)

    async def send(
        self,
        session: int,
        start: int,
        tokens: Sequence[int],
        sampling: Sampling | None,
        heard: Heard | None = None,
    ) -> int:
        """Put ``tokens`` of ``session`` on the edge once there is room; the step it became.

        Raises:
            EdgeFault: the edge is torn.
        """
        slot = await self._tx.acquire()
        return self._fill(slot, (session, start, tokens, sampling), heard)

    def send_now(
        self,
        session: int,
        start: int,
        tokens: Sequence[int],
        sampling: Sampling | None,
        heard: Heard | None = None,
    ) -> int | None:
        """As ``send`` where there is room already; None where there is none, or no edge."""
        slot = self._tx.acquire_now()
        if slot is None:
            return None
        return self._fill(slot, (session, start, tokens, sampling), heard)

    def _fill(self, slot: SlotIndex, load: Load, heard: Heard | None) -> int:
        session, start, tokens, sampling = load
        self.steps += 1
        chunk = Chunk(Kind.TOKENS, session, len(tokens), start, self.steps, sampling)
        view = self._tx.region.slot(slot)
        begin = stage_chunk.write(chunk, view)
        struct.pack_into(f"<{len(tokens)}I", view, begin, *tokens)
        if sampling is not None and heard is not None:
            alone = sampling.index > 0 and not self._awaited
            now = trio.current_time()
            self._awaited[self.steps] = _Awaited(heard, now, alone, session, sampling.index)
        self._tx.filled(slot, begin + 4 * len(tokens))
        return self.steps

    async def _listen(self, rx: RxEnd, torn: Torn) -> None:
        try:
            while (landed := await rx.receive()) is not None:
                slot, extent = landed
                try:
                    self._take(rx.region.slot(slot)[:extent])
                finally:
                    rx.consumed(slot)
            torn("it ended its stream of results", True)
        except EdgeFault as fault:
            torn(fault.message, True)
        except FrameError as error:
            torn(f"it sent what is no result: {error.message}", True)

    def _take(self, raw: memoryview) -> None:
        chunk, payload = stage_chunk.read(raw)
        if chunk.kind is not Kind.RESULT or len(payload) < RESULT.size:
            raise FrameError(f"a chunk of kind {chunk.kind.name} with {len(payload)} bytes")
        token, log_probability = RESULT.unpack_from(payload)
        if token >= self._vocabulary:
            raise FrameError(f"token {token} of a vocabulary of {self._vocabulary}")
        awaited = self._awaited.pop(chunk.step, None)
        if awaited is None:
            self.late += 1
            return
        now = trio.current_time()
        took = round((now - awaited.since) * 1e6)
        whose = awaited.session, awaited.index
        self.trips.append(Trip(chunk.step, took, now, awaited.alone, *whose))
        self.observed(now - awaited.since)
        awaited.heard(chunk.step, token, log_probability)

    async def _watch(self, end: TxEnd, torn: Torn) -> None:
        await end.over.wait()
        torn(end.fault or "the stream to it ended", False)


def _unheard(_: float) -> None:
    return None


@asynccontextmanager
async def _leased(leases: ArenaLeases, *specs: EdgeSpec) -> AsyncIterator[list[Region]]:
    regions = await leases.lease_all(specs)
    try:
        yield regions
    finally:
        for region in regions:
            leases.give_back(region)
