"""Events for people: each is logged at once and, in batches, kept in the ledger's database."""

import trio

from lensemble.errors import StorageError
from lensemble.logs import logger
from lensemble_coord.training.store import Store

MAX_QUEUED = 4096
MAX_TEXT = 1000
"""Characters of one field; a list of a thousand names must not outgrow an event of the ledger."""
BATCH_PAUSE_S = 0.25

Scalar = str | int | float | bool | None


def _short(value: Scalar) -> Scalar:
    return value[:MAX_TEXT] if isinstance(value, str) else value


class Journal:
    """Takes events without waiting; what does not fit the queue is logged and counted only."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._log = logger("coordinator")
        self._queue, self._queued = trio.open_memory_channel[dict[str, object]](MAX_QUEUED)
        self.dropped = 0
        self.written = trio.Event()

    def note(self, event: str, *, warn: bool = False, **fields: Scalar) -> None:
        """Record ``event`` with its fields."""
        (self._log.warning if warn else self._log.info)(event, **fields)
        try:
            self._queue.send_nowait({"event": event, **{n: _short(v) for n, v in fields.items()}})
        except trio.WouldBlock:
            self.dropped += 1

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Write what was noted until cancelled; the rest is written on the way out."""
        task_status.started()
        held: list[dict[str, object]] = []
        try:
            while True:
                held = [await self._queued.receive()]
                await trio.sleep(BATCH_PAUSE_S)
                held += self._drain()
                await self._write(held)
                held = []
                self.written.set()
                self.written = trio.Event()
        finally:
            rest = held + self._drain()
            if rest:
                with trio.CancelScope(shield=True):
                    await self._write(rest)

    async def _write(self, batch: list[dict[str, object]]) -> None:
        """Keep ``batch``; on a disk that refuses, the log alone has these."""
        try:
            await trio.to_thread.run_sync(self._store.note, batch)
        except StorageError as error:
            self.dropped += len(batch)
            self._log.warning("journal.refused", events=len(batch), reason=error.message)

    def _drain(self) -> list[dict[str, object]]:
        batch: list[dict[str, object]] = []
        while True:
            try:
                batch.append(self._queued.receive_nowait())
            except (trio.WouldBlock, trio.EndOfChannel):
                return batch
