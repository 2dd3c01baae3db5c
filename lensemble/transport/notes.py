"""Small payloads that travel in datagrams beside everything else on a link, and may be lost.

A note never waits for a stream, and no stream waits for a note.  What comes in is kept for one
reader, a bounded number from each peer: a peer that says too much loses its own notes only.
"""

from collections import Counter, deque

import trio

from lensemble.ids import NodeId

MAX_NOTE_BYTES = 1280
"""Longest note; a path may carry less, see ``Driver.send_note``."""

MAX_WAITING_NOTES = 32
"""Of one peer, that the reader has not taken yet; what comes beyond is dropped and counted."""


class Notes:
    """What came and is not read; ``refused`` counts what had no room as ``note_overflow``."""

    def __init__(self, refused: Counter[str]) -> None:
        self._refused = refused
        self._waiting: deque[tuple[NodeId, bytes]] = deque()
        self._of_peer: Counter[NodeId] = Counter()
        self._arrived = trio.Event()

    def put(self, peer: NodeId, note: bytes) -> None:
        """Keep a note that ``peer`` sent, or drop it."""
        if self._of_peer[peer] >= MAX_WAITING_NOTES:
            self._refused["note_overflow"] += 1
            return
        self._of_peer[peer] += 1
        self._waiting.append((peer, note))
        self._arrived.set()

    async def take(self) -> tuple[NodeId, bytes]:
        """The oldest note, and who sent it."""
        while not self._waiting:
            self._arrived = trio.Event()
            await self._arrived.wait()
        peer, note = self._waiting.popleft()
        self._of_peer[peer] -= 1
        if not self._of_peer[peer]:
            del self._of_peer[peer]
        return peer, note
