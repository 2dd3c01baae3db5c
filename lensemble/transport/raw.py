"""What a driver needs from the network below it; everything else about links is shared.

A raw endpoint gives authenticated connections, a raw connection gives byte streams and small
unreliable datagrams.  Framing, heartbeats, the demux and the rule of one link per peer stand on
top, in ``links`` and ``endpoint``, and so are the same code over QUIC and over memory.
"""

from typing import Protocol

from lensemble.ids import NodeId
from lensemble.transport.driver import LinkFacts, PeerAddress

MAX_PIECE_BYTES = 256 << 10
"""Longest run of bytes that one call hands to, or takes from, the network."""


NOTHING = memoryview(bytearray())


class RawLost(Exception):
    """A stream or connection is of no more use; ``reason`` is a phrase."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class RawSend(Protocol):
    """The sending half of a byte stream.  Every method raises ``RawLost`` once it is torn."""

    async def write(self, prefix: bytes, payload: bytes | memoryview) -> None:
        """Write both, whole.  After a cancel some of it is on its way and the rest is not."""

    async def finish(self) -> None:
        """End the stream and wait until the peer's transport has all of it."""

    async def reset(self) -> None:
        """Tear the stream.  Not while a ``write`` is running; never raises."""

    async def stopped(self) -> str:
        """Wait until the peer refuses the stream or the connection is gone; the reason.

        It may wait for ever once the stream is finished.
        """


class RawReceive(Protocol):
    """The receiving half of a byte stream."""

    async def read_into(self, into: memoryview, beyond: memoryview = NOTHING) -> int:
        """Take what is there, at least one byte; 0 at the end of the stream.

        Bytes go to ``into`` first, and only once that is full to ``beyond``; the count is of both.
        A cancelled call takes nothing.

        Raises:
            RawLost: reset by the peer, or the connection is gone.
        """

    async def stop(self) -> None:
        """Refuse the rest.  Not while a ``read_into`` is running; never raises."""


class RawConnection(Protocol):
    """An authenticated connection.  Once it is closed, everything on it raises ``RawLost``."""

    peer: NodeId

    async def open_control(self) -> tuple[RawSend, RawReceive]: ...

    async def accept_control(self) -> tuple[RawSend, RawReceive]:
        """The stream pair that the peer opened and has written to."""

    async def open_uni(self) -> RawSend: ...

    async def accept_uni(self) -> RawReceive:
        """The next stream that the peer opened and has written to.  A cancel loses none."""

    def send_datagram(self, payload: bytes) -> bool:
        """Try to get a few bytes across; lost silently when the network would have it so.

        False if the path carries none of this size, or none at all.
        """

    async def read_datagram(self) -> bytes: ...

    async def closed(self) -> str:
        """Wait until the connection is closed, by either side; the reason."""

    def close(self, reason: str) -> None:
        """Close at once; what is not acknowledged yet may be lost."""

    def facts(self) -> LinkFacts: ...


class RawIncoming(Protocol):
    """A peer that knocked; nothing is known about it yet."""

    async def complete(self) -> RawConnection:
        """Finish the handshake."""

    async def refuse(self) -> None:
        """Turn it away; never raises."""


class RawEndpoint(Protocol):
    node: NodeId

    async def start(self) -> None:
        """Bind.

        Raises:
            ConfigError: an address that cannot be bound.
        """

    def addresses(self) -> tuple[str, ...]: ...

    async def connect(self, peer: PeerAddress) -> RawConnection: ...

    async def accept(self) -> RawIncoming: ...

    async def close(self) -> None:
        """Close everything and wait until the peers can know."""
