"""One worker process from its start to its end, whoever it works for."""

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import trio

from lensemble_node import signals

MAX_PENDING_COMMANDS = 4096
"""A worker that leaves more commands unread is wedged."""

MAX_LINES_AT_ONCE = 64
STOP_WAIT_S = 2.0
DRAIN_WAIT_S = 1.0
"""How long after its end what it said may still take to be read."""

STDERR_LINES = 200
STDERR_LINE_BYTES = 2000
UNWILLING = "it did not stop when asked"
SOURCE = Path(__file__).resolve().parent.parent
_READ_BYTES = 1 << 16


class Life:
    """One process: its pipes, its exit, and why it was killed, if it was by us.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, command: list[str], environment: dict[str, str], arena_fd: int) -> None:
        # Not trio.lowlevel.open_process: that starts the process from a pool thread, and the
        # parent-death signal of the worker fires when the thread that started it ends.
        self.popen = subprocess.Popen(  # noqa: S603  # the arguments are our own
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            pass_fds=(arena_fd,),
            start_new_session=True,
            env=environment,
        )
        try:
            self._exited = os.pidfd_open(self.popen.pid)
            self.stdin, self.stdout, self.stderr = self._streams()
        except OSError:
            # No descriptor is left to watch it by.
            self.popen.kill()
            self.popen.wait()
            raise
        self.pending, self.queue = trio.open_memory_channel[bytes](MAX_PENDING_COMMANDS)
        self.killed_for = ""
        self._behind = False
        """Whether something was queued that is not in the pipe yet."""

    def _streams(self) -> tuple[trio.lowlevel.FdStream, ...]:
        pipes = [p for p in (self.popen.stdin, self.popen.stdout, self.popen.stderr) if p]
        streams = tuple(trio.lowlevel.FdStream(os.dup(pipe.fileno())) for pipe in pipes)
        for pipe in pipes:
            pipe.close()
        return streams

    def send(self, command: signals.SignalLine) -> None:
        """Write ``command`` at once if nothing is before it and the pipe has room, else queue it.

        A chunk of a token waits for this: a turn of the scheduler and one of ``write`` are saved.
        """
        line = signals.line(command)
        if not self._behind:
            line = self._write_now(line)
        if line:
            self._queue(line)

    def _write_now(self, line: bytes) -> bytes:
        """Write as much of ``line`` as the pipe has room for; the rest of it."""
        try:
            return line[os.write(self.stdin.fileno(), line) :]
        except OSError:
            # No room, or nobody reads any more: ``write`` waits, or finds that out as well.
            return line

    def _queue(self, line: bytes) -> None:
        self._behind = True
        try:
            self.pending.send_nowait(line)
        except trio.WouldBlock:
            self.kill(f"{MAX_PENDING_COMMANDS} commands lie unread")
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return

    def kill(self, reason: str) -> None:
        """End the process and everything it started, at once."""
        if self.popen.returncode is None:
            self.killed_for = self.killed_for or reason
            os.killpg(self.popen.pid, signal.SIGKILL)

    async def wait(self) -> int:
        """The exit status; negative for a signal."""
        if self.popen.returncode is None:
            await trio.lowlevel.wait_readable(self._exited)
            # What it started goes with it; the group is its own until it is reaped.
            os.killpg(self.popen.pid, signal.SIGKILL)
        return self.popen.wait()

    async def write(self) -> None:
        """Pass on commands until there are no more or the process stops reading."""
        try:
            async for line in self.queue:
                await self.stdin.send_all(line + self._more())
                self._behind = self.queue.statistics().current_buffer_used > 0
        except trio.BrokenResourceError:
            self.pending.close()

    def _more(self) -> bytes:
        """What else waits: whoever is woken once reads it all."""
        lines: list[bytes] = []
        with contextlib.suppress(trio.WouldBlock, trio.EndOfChannel):
            while len(lines) < MAX_LINES_AT_ONCE:
                lines.append(self.queue.receive_nowait())
        return b"".join(lines)

    async def stop(self, wait_s: float = STOP_WAIT_S) -> None:
        """Ask it to finish, then make it."""
        self.send(signals.Stop())
        self.pending.close()
        with trio.move_on_after(wait_s):
            await self.write()
            await self.stdin.aclose()
            await self.wait()
        self.kill(UNWILLING)
        await self.wait()
        await self.close()

    async def close(self) -> None:
        os.close(self._exited)
        for pipe in (self.stdin, self.stdout, self.stderr):
            await pipe.aclose()

    def ending(self, status: int, memory: str = "") -> str:
        """How it ended, as a phrase; ``memory`` names the limit it may have met."""
        if self.killed_for:
            how = f"was ended: {self.killed_for}"
        elif status == signals.EXIT_NO_MEMORY:
            how = "ran out of memory" + (f" ({memory})" if memory else "")
        elif status == signals.EXIT_GROUP_LOST:
            how = "lost one of its processes, or one hung"
        elif status < 0:
            how = f"was killed by {signal.Signals(-status).name}"
        else:
            how = f"exited with status {status}"
        return f"the worker (pid {self.popen.pid}) {how}"


class LineReader:
    """Lines of a stream, newline included; a longer one than ``limit`` comes in pieces."""

    def __init__(self, stream: trio.abc.ReceiveStream, limit: int) -> None:
        self._stream = stream
        self._limit = limit
        self._buffer = bytearray()

    async def next(self) -> bytes:
        """The next line; empty at the end of the stream."""
        searched = 0
        while (end := self._buffer.find(b"\n", searched) + 1) == 0:
            searched = len(self._buffer)
            if searched > self._limit:
                return self._take(self._limit + 1)
            piece = await self._stream.receive_some(_READ_BYTES)
            if not piece:
                return self._take(len(self._buffer))
            self._buffer += piece
        return self._take(end)

    def _take(self, length: int) -> bytes:
        line = bytes(self._buffer[:length])
        del self._buffer[:length]
        return line
