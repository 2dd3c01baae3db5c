"""The worker's side of the pipe pair: lines in, lines out, blocking, single-threaded."""

import os
import select
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from lensemble.crash_points import reached
from lensemble.errors import WorkerFault
from lensemble_node import signals

_READ_BYTES = 1 << 16
Heard = TypeVar("Heard")


class DaemonGone(Exception):
    """The other end of the pipes is closed; there is nobody left to work for."""


class Port(Generic[Heard]):
    """Reads commands from ``source`` and writes events to ``sink``, both descriptors of pipes.

    ``parse`` makes a command of a line of up to ``limit`` bytes.
    """

    def __init__(
        self,
        source: int,
        sink: int,
        parse: Callable[[bytes], Heard],
        limit: int = signals.MAX_LINE_BYTES,
    ) -> None:
        self._parse = parse
        self._limit = limit
        self._source = source
        self._sink = sink
        self._buffer = bytearray()
        self._lines: deque[bytes] = deque()
        self._poll = select.poll()
        self._poll.register(source, select.POLLIN)

    def say(self, *events: signals.SignalLine) -> None:
        """Write ``events``, at once.

        Raises:
            DaemonGone: nobody reads.
        """
        for event in events:
            reached("worker.says", type(event).__name__)
        left = memoryview(b"".join(map(signals.line, events)))
        try:
            while left.nbytes:
                left = left[os.write(self._sink, left) :]
        except BrokenPipeError as error:
            raise DaemonGone from error

    def wait(self) -> Heard:
        """The next command.

        Raises:
            DaemonGone: there will be none.
            WorkerFault: a line that is no command.
        """
        while not self._lines:
            self._read()
        return self._parse(self._lines.popleft())

    def look(self, within_s: float = 0.0) -> Heard | None:
        """The next command if there is one already, or comes in time; raises as ``wait``."""
        while not self._lines:
            if not self._poll.poll(1e3 * within_s):
                return None
            self._read()
        return self._parse(self._lines.popleft())

    def is_quiet(self) -> bool:
        """Whether there is no command yet."""
        return not self._lines and not self._poll.poll(0)

    def _read(self) -> None:
        piece = os.read(self._source, _READ_BYTES)
        if not piece:
            raise DaemonGone
        self._buffer += piece
        end = self._buffer.rfind(b"\n") + 1
        if end:
            self._lines.extend(bytes(self._buffer[:end]).splitlines())
            del self._buffer[:end]
        elif len(self._buffer) > self._limit:
            raise WorkerFault(f"a line of over {self._limit} bytes")
