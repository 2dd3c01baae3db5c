"""What a transport gives: identified links, one control stream each, and edges.

Two drivers implement this and pass one conformance suite: ``iroh_driver`` (QUIC) and
``memory_driver`` (in-process, with scripted faults).  Peers are known by their node id only.
"""

from typing import Protocol

import msgspec
import trio

from lensemble.ids import EdgeId, NodeId

MAX_CONTROL_BYTES = 1 << 20
"""Longest control payload in bytes; a longer one is refused on both ends."""


class PeerAddress(msgspec.Struct, frozen=True):
    """Where a peer can be reached: its identity and ``host:port`` socket addresses."""

    node: NodeId
    addresses: tuple[str, ...] = ()


class LinkFacts(msgspec.Struct, frozen=True):
    """What is known about the path to a peer; rates since the link came up.

    ``path`` is ``direct``, ``relay`` or ``memory``; ``rtt_ms`` is None until measured.
    """

    path: str
    remote: str
    rtt_ms: float | None
    sent_bytes: int
    received_bytes: int
    heard_s: float = 0.0
    """Seconds since the peer last proved to be alive, by a heartbeat or its answer."""


class EdgeSender(Protocol):
    """The sending end of an edge's stream; the preamble is already written."""

    async def send_frame(self, payload: memoryview) -> None:
        """Send one frame: u32 LE extent, then ``payload``.  A cancelled send tears the stream.

        Raises:
            EdgeFault: the stream or its link is gone.
        """

    async def finish(self) -> None:
        """End the stream in order and wait until the peer's transport has acknowledged it."""

    async def reset(self) -> None:
        """Tear the stream; the peer sees a fault, never a clean end."""

    async def lost(self) -> str:
        """Wait until the peer refuses the stream or its link is gone; the reason, as a phrase."""


class EdgeReceiver(Protocol):
    """The receiving end of an edge's stream, from the first frame on."""

    async def receive_frame(self, into: memoryview) -> int | None:
        """Fill ``into`` with one frame; its extent in bytes, or None after the last frame.

        A cancelled call loses nothing: the next call with the same ``into`` goes on.

        Raises:
            EdgeFault: torn frame, extent over ``len(into)``, reset, or a lost link.
        """

    async def stop(self) -> None:
        """Refuse the rest of the stream."""


class InboundEdge(Protocol):
    """An edge registered with the demux; its stream may not have arrived yet."""

    async def accept(self) -> EdgeReceiver:
        """Wait for the stream.

        Raises:
            EdgeFault: the link to the peer was lost first.
        """

    def close(self) -> None:
        """Take the edge out of the demux; a stream that comes later is refused and counted."""


class Link(Protocol):
    """One live, authenticated connection to a peer."""

    peer: NodeId
    lost: trio.Event

    def lost_reason(self) -> str:
        """Why the link was lost, as a phrase; empty while it lives."""

    async def send(self, payload: bytes) -> None:
        """Send one control payload, in order, whole.  Safe from several tasks.

        Raises:
            LinkLost: the link is gone.
            FrameError: ``payload`` is over ``MAX_CONTROL_BYTES``.
        """

    async def receive(self) -> bytes:
        """The next control payload.

        Raises:
            LinkLost: the link is gone.
            FrameError: the peer sent something that is not a frame; the link is closed.
        """

    def facts(self) -> LinkFacts: ...

    async def close(self, reason: str) -> None:
        """Close the link; the peer sees ``reason`` (at most 200 bytes of it)."""


class Driver(Protocol):
    """One endpoint of this process, listening and dialling."""

    node: NodeId

    def addresses(self) -> tuple[str, ...]:
        """The ``host:port`` addresses this endpoint is bound to."""

    def refused(self) -> dict[str, int]:
        """Counts of what was refused, by reason: ``unknown_edge``, ``handshake``, ``frame``, ..."""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled, then close everything; started once addresses are known."""

    async def dial(self, peer: PeerAddress) -> Link:
        """Connect.

        Raises:
            LinkLost: no answer, or the peer is not who its address says; names address and cause.
        """

    async def accept(self) -> Link:
        """The next link that a peer opened and that is heartbeating."""

    def expect_edge(self, peer: NodeId, edge: EdgeId, *, ahead: bool = False) -> InboundEdge:
        """Register ``edge`` from ``peer`` with the demux, before anyone is told to send on it.

        It is lost with the link there is; ``ahead`` of any link, its stream may come on any one.
        """

    async def open_edge(self, peer: NodeId, edge: EdgeId) -> EdgeSender:
        """Open the stream of ``edge`` on the live link to ``peer`` and write its preamble.

        Raises:
            EdgeFault: there is no live link to ``peer``.
        """

    def link_to(self, peer: NodeId) -> Link | None:
        """The live link to ``peer``."""

    def send_note(self, peer: NodeId, note: bytes) -> bool:
        """Send a small payload in a datagram on the live link to ``peer``; it may be lost.

        False if there is no such link, or its path carries no datagram of this size (at most
        ``notes.MAX_NOTE_BYTES``, and about 1100 bytes where little is known of the path yet).
        """

    async def receive_note(self) -> tuple[NodeId, bytes]:
        """The oldest note that came, and who sent it; for one reader."""
