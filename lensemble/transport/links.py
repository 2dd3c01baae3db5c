"""A link: one live connection to a peer with its control stream, edges, notes and heartbeat.

Each side asks for a sign of life in a datagram every second; a side that hears nothing for its
timeout closes the connection, and everything on it is lost at that moment.  Whoever is asked
answers, so that each side keeps its own pace whatever the other's is.  A peer that does not read
its control stream holds up at most ``MAX_QUEUED_CONTROL`` payloads and nobody else.
"""

from collections import Counter
from collections.abc import Mapping
from functools import partial

import msgspec
import trio

from lensemble.errors import EdgeFault, FrameError, InvariantError, LinkLost
from lensemble.ids import EdgeId, NodeId
from lensemble.transport.driver import MAX_CONTROL_BYTES, LinkFacts
from lensemble.transport.framing import PREFIX, FrameReader, TooLong
from lensemble.transport.notes import MAX_NOTE_BYTES, Notes
from lensemble.transport.raw import RawConnection, RawLost, RawReceive, RawSend
from lensemble.transport.streams import (
    RESET_TIMEOUT_S,
    ExpectedEdge,
    StreamReceiver,
    StreamSender,
    read_preamble,
)

MAX_QUEUED_CONTROL = 16
"""Control payloads that wait for a slow peer before ``send`` does."""

MAX_PENDING_STREAMS = 256
"""Streams of one peer whose preamble is not read yet."""

MAX_REASON_BYTES = 200
OPEN_TIMEOUT_S = 5.0
FLUSH_TIMEOUT_S = 1.0
PROBE_TIMEOUT_S = 1.0
LATE_S = 0.5
"""A watchdog that wakes later than this was held up itself and grants its peer one more beat."""

BEAT = b"\x01"
PROBE = b"\x02"
NOTE = b"\x03"
"""First byte of a datagram, which says what it is; the first two are all of theirs."""


class Pace(msgspec.Struct, frozen=True):
    """How often a link says that it lives, and after how long a silence it does not; seconds."""

    heartbeat_s: float = 1.0
    heartbeat_timeout_s: float = 3.0


class CoreLink:
    """One live connection to a peer; ``run`` serves it until it is lost."""

    def __init__(
        self,
        raw: RawConnection,
        control: tuple[RawSend, RawReceive],
        pace: Pace,
        refused: Counter[str],
        *,
        dialled: bool,
    ) -> None:
        self.peer = raw.peer
        self.lost = trio.Event()
        self.dialled = dialled
        self.ahead: Mapping[tuple[NodeId, EdgeId], ExpectedEdge] = {}
        """Edges that were registered without regard to a link, by peer."""
        self.notes = Notes(refused)
        """Where notes of the peer go."""
        self._raw = raw
        self._pace = pace
        self._refused = refused
        self._control_send, control_receive = control
        self._control_frames = FrameReader(control_receive)
        self._queue, self._queued = trio.open_memory_channel[bytes](MAX_QUEUED_CONTROL)
        self._flushed = trio.Event()
        self._heard = trio.Event()
        self._heard_at = trio.current_time()
        self._edges: dict[EdgeId, ExpectedEdge] = {}
        self._pending = trio.Semaphore(MAX_PENDING_STREAMS)
        self._reason = ""
        self._nursery: trio.Nursery | None = None

    # ---- what a user of the link sees ----

    def lost_reason(self) -> str:
        return self._reason

    async def send(self, payload: bytes) -> None:
        if len(payload) > MAX_CONTROL_BYTES:
            raise FrameError(
                f"a control payload of {len(payload)} bytes exceeds the limit of "
                f"{MAX_CONTROL_BYTES}",
                "Send it as a blob on an edge.",
            )
        try:
            await self._queue.send(payload)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise self._gone() from None

    async def receive(self) -> bytes:
        try:
            payload = await self._control_frames.receive(MAX_CONTROL_BYTES)
        except TooLong as violation:
            self._refused["frame"] += 1
            self.lose(f"refused what the peer sent: {violation.reason}")
            raise FrameError(f"control stream of {self.peer}: {violation.reason}") from violation
        except RawLost as lost:
            self.lose(lost.reason)
            raise self._gone() from lost
        if payload is None:
            # An orderly close ends the stream first and gives its reason just after.
            with trio.move_on_after(FLUSH_TIMEOUT_S):
                await self.lost.wait()
            self.lose("the peer ended its control stream")
            raise self._gone()
        return payload

    def facts(self) -> LinkFacts:
        silent = trio.current_time() - self._heard_at
        return msgspec.structs.replace(self._raw.facts(), heard_s=silent)

    async def close(self, reason: str) -> None:
        self._queue.close()
        with trio.move_on_after(FLUSH_TIMEOUT_S):
            await self._flushed.wait()
        self.lose(reason)

    # ---- what the endpoint uses ----

    def expect_edge(self, edge: EdgeId) -> ExpectedEdge:
        if edge in self._edges:
            raise InvariantError(f"edge {edge} from {self.peer} is registered twice")
        expected = ExpectedEdge(self._edge_name(edge, "from"), partial(self._forget, edge))
        self._edges[edge] = expected
        if self.lost.is_set():
            expected.lose(self._reason)
        return expected

    async def open_edge(self, edge: EdgeId) -> StreamSender:
        name = self._edge_name(edge, "to")
        with trio.move_on_after(OPEN_TIMEOUT_S):
            try:
                sender = StreamSender(await self._raw.open_uni(), name)
            except RawLost as lost:
                raise EdgeFault(f"{name}: {lost.reason}") from lost
            await sender.send_preamble(edge)
            return sender
        raise EdgeFault(f"{name}: the peer has room for no further stream")

    def send_note(self, note: bytes) -> bool:
        """Send ``note`` in a datagram; False if this path cannot carry it as it is now."""
        if self.lost.is_set() or len(note) > MAX_NOTE_BYTES:
            return False
        return self._datagram(NOTE + note)

    def stands_on(self, raw: RawConnection) -> bool:
        return self._raw is raw

    async def probe(self) -> bool:
        """Whether the peer answers on this link within a second."""
        heard = self._heard
        with trio.move_on_after(PROBE_TIMEOUT_S):
            self._datagram(PROBE)
            await heard.wait()
            return not self.lost.is_set()
        return False

    def lose(self, reason: str) -> None:
        """Close the connection and wake everyone who waits on it; only the first reason counts."""
        if self.lost.is_set():
            return
        self._reason = _clip(reason)
        self.lost.set()
        self._raw.close(self._reason)
        self._queue.close()
        self._queued.close()
        self._heard.set()
        for expected in self._edges.values():
            if not expected.taken:
                expected.lose(self._reason)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                for task in (self._write_control, self._beat, self._watch_close):
                    nursery.start_soon(task)
                nursery.start_soon(self._listen)
                nursery.start_soon(self._take_streams, nursery)
                task_status.started()
                await self.lost.wait()
                nursery.cancel_scope.cancel()
        finally:
            self._nursery = None
            self.lose("this side shut down")

    # ---- its tasks ----

    async def _write_control(self) -> None:
        try:
            async for payload in self._queued:
                await self._control_send.write(PREFIX.pack(len(payload)), payload)
            await self._control_send.finish()
        except RawLost as lost:
            self.lose(lost.reason)
        except trio.ClosedResourceError:
            pass
        self._flushed.set()

    async def _beat(self) -> None:
        while True:
            self._datagram(PROBE)
            await trio.sleep(self._pace.heartbeat_s)

    async def _listen(self) -> None:
        timeout = self._pace.heartbeat_timeout_s
        while not self.lost.is_set():
            deadline = trio.current_time() + timeout
            if not await self._hear(deadline):
                late = trio.current_time() - deadline
                if late < LATE_S or not await self._hear(deadline + late + self._pace.heartbeat_s):
                    self.lose(f"no heartbeat for {timeout:g} s")
                    return

    async def _hear(self, deadline: float) -> bool:
        """Take one datagram; False when none came before ``deadline``."""
        with trio.move_on_at(deadline):
            try:
                payload = await self._raw.read_datagram()
            except RawLost as lost:
                self.lose(lost.reason)
                return True
            self._take_datagram(payload)
            self._heard.set()
            self._heard = trio.Event()
            self._heard_at = trio.current_time()
            return True
        return False

    def _take_datagram(self, payload: bytes) -> None:
        if payload == PROBE:
            self._datagram(BEAT)
        elif payload.startswith(NOTE) and len(payload) <= MAX_NOTE_BYTES + 1:
            self.notes.put(self.peer, payload[1:])
        elif payload != BEAT:
            self._refused["datagram"] += 1

    async def _watch_close(self) -> None:
        self.lose(await self._raw.closed())

    async def _take_streams(self, nursery: trio.Nursery) -> None:
        while True:
            await self._pending.acquire()
            try:
                raw = await self._raw.accept_uni()
            except RawLost as lost:
                self.lose(lost.reason)
                return
            nursery.start_soon(self._route, raw)

    async def _route(self, raw: RawReceive) -> None:
        """Read the preamble and hand the stream to the edge that waits for it."""
        try:
            edge = await read_preamble(raw)
        finally:
            self._pending.release()
        expected = None if edge is None else self._expected(edge)
        if expected is not None and not expected.taken:
            expected.arrive(StreamReceiver(raw, expected.name))
            return
        fault = "preamble" if edge is None else "unknown_edge" if expected is None else "duplicate"
        self._refused[fault] += 1
        with trio.move_on_after(RESET_TIMEOUT_S):
            await raw.stop()

    # ---- small things ----

    def _expected(self, edge: EdgeId) -> ExpectedEdge | None:
        return self._edges.get(edge) or self.ahead.get((self.peer, edge))

    def _datagram(self, payload: bytes) -> bool:
        try:
            return self._raw.send_datagram(payload)
        except RawLost as lost:
            self.lose(lost.reason)
            return False

    def _forget(self, edge: EdgeId, unclaimed: StreamReceiver | None) -> None:
        self._edges.pop(edge, None)
        if unclaimed is not None and self._nursery is not None and not self.lost.is_set():
            self._nursery.start_soon(unclaimed.stop)

    def _gone(self) -> LinkLost:
        return LinkLost(f"link to {self.peer}: {self._reason or 'closing'}")

    def _edge_name(self, edge: EdgeId, preposition: str) -> str:
        return f"edge {edge} {preposition} {self.peer}"


def _clip(reason: str) -> str:
    if len(reason) > MAX_REASON_BYTES or not reason.isascii():
        return reason.encode()[:MAX_REASON_BYTES].decode(errors="ignore")
    return reason
