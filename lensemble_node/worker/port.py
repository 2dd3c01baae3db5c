"""The worker's side of the pipe pair: lines in, lines out, blocking, single-threaded."""

import os
import select
from collections import deque

from lensemble.crash_points import reached
from lensemble.errors import WorkerFault
from lensemble_node import signals

_READ_BYTES = 1 << 16


class DaemonGone(Exception):
    """The other end of the pipes is closed; there is nobody left to work for."""


class Port:
    """Reads commands from ``source`` and writes events to ``sink``, both descriptors of pipes."""

    def __init__(self, source: int, sink: int) -> None:
        self._source = source
        self._sink = sink
        self._buffer = bytearray()
        self._lines: deque[bytes] = deque()
        self._poll = select.poll()
        self._poll.register(source, select.POLLIN)

    def say(self, event: signals.Event) -> None:
        """Write ``event``.

        Raises:
            DaemonGone: nobody reads.
        """
        reached("worker.says", type(event).__name__)
        left = memoryview(signals.line(event))
        try:
            while left.nbytes:
                left = left[os.write(self._sink, left) :]
        except BrokenPipeError as error:
            raise DaemonGone from error

    def wait(self) -> signals.Command:
        """The next command.

        Raises:
            DaemonGone: there will be none.
            WorkerFault: a line that is no command.
        """
        while not self._lines:
            self._read()
        return signals.parse_command(self._lines.popleft())

    def look(self) -> signals.Command | None:
        """The next command if there is one already; raises as ``wait``."""
        while not self._lines:
            if not self._poll.poll(0):
                return None
            self._read()
        return signals.parse_command(self._lines.popleft())

    def _read(self) -> None:
        piece = os.read(self._source, _READ_BYTES)
        if not piece:
            raise DaemonGone
        self._buffer += piece
        end = self._buffer.rfind(b"\n") + 1
        if end:
            self._lines.extend(bytes(self._buffer[:end]).splitlines())
            del self._buffer[:end]
        elif len(self._buffer) > signals.MAX_LINE_BYTES:
            raise WorkerFault(f"a line of over {signals.MAX_LINE_BYTES} bytes")
