"""Owns the worker process: starts it, hears it, limits it, ends it, starts it again.

Every process is a new generation, and what is heard carries its number, so that the last words of
a dead one are told apart.  A line that does not parse ends its process and nothing else.
"""

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeAlias

import msgspec
import trio

from lensemble.errors import WorkerFault
from lensemble.logs import logger
from lensemble_node import signals

MAX_PENDING_COMMANDS = 4096
"""A worker that leaves more commands unread is wedged."""

STOP_WAIT_S = 2.0
DRAIN_WAIT_S = 1.0
SETTLED_S = 60.0
"""A process that lived this long starts the backoff anew."""

STDERR_LINES = 200
STDERR_LINE_BYTES = 2000
_READ_BYTES = 1 << 16
_SOURCE = Path(__file__).resolve().parent.parent


class Launch(msgspec.Struct, frozen=True):
    """How a worker is started; ``memory_bytes`` limits its address space, 0 does not.

    ``program`` replaces the interpreter and module, everything else stays.
    """

    arena_fd: int
    arena_bytes: int
    threads: int = 1
    memory_bytes: int = 0
    niceness: int = 0
    backoff_s: float = 1.0
    backoff_max_s: float = 30.0
    program: tuple[str, ...] = (
        sys.executable, "-P", "-X", "faulthandler", "-m", "lensemble_node.worker",
    )  # fmt: skip

    def command(self) -> list[str]:
        return [
            *self.program,
            f"--arena-fd={self.arena_fd}",
            f"--arena-bytes={self.arena_bytes}",
            f"--memory-bytes={self.memory_bytes}",
            f"--niceness={self.niceness}",
            f"--parent={os.getpid()}",
        ]

    def environment(self) -> dict[str, str]:
        """That of the daemon, with the code the daemon runs and the thread limit."""
        path = os.pathsep.join(p for p in (str(_SOURCE), os.environ.get("PYTHONPATH", "")) if p)
        threads = dict.fromkeys(
            ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(self.threads)
        )
        return {**os.environ, **threads, "PYTHONPATH": path}


class Started(msgspec.Struct, frozen=True, tag=True):
    """A process is up and was sent its configuration."""

    generation: int
    pid: int


class Said(msgspec.Struct, frozen=True, tag=True):
    generation: int
    signal: signals.Event


class Died(msgspec.Struct, frozen=True, tag=True):
    """It ended without being asked to; another one follows in ``restart_s`` seconds.

    ``fault`` says how, in our own words.  ``words`` are what it printed: they may hold anything
    that was in its memory, and stay on this node.
    """

    generation: int
    fault: str
    words: str
    restart_s: float


Report: TypeAlias = Started | Said | Died
Hear: TypeAlias = Callable[[Report], Awaitable[None]]


class WorkerFacts(msgspec.Struct, frozen=True):
    """For status.  ``state``: ``none``, ``running``, ``waiting`` (to start again), ``stopped``."""

    state: str
    pid: int
    generation: int
    restarts: int
    malformed: int
    last_fault: str
    stderr: tuple[str, ...]


class _Life:
    """One process: its pipes, its exit, and why it was killed, if it was by us."""

    def __init__(self, launch: Launch, generation: int) -> None:
        self.generation = generation
        # Not trio.lowlevel.open_process: that starts the process from a pool thread, and the
        # parent-death signal of the worker fires when the thread that started it ends.
        self.popen = subprocess.Popen(  # noqa: S603  # the arguments are our own
            launch.command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            pass_fds=(launch.arena_fd,),
            start_new_session=True,
            env=launch.environment(),
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

    def _streams(self) -> tuple[trio.lowlevel.FdStream, ...]:
        pipes = [p for p in (self.popen.stdin, self.popen.stdout, self.popen.stderr) if p]
        streams = tuple(trio.lowlevel.FdStream(os.dup(pipe.fileno())) for pipe in pipes)
        for pipe in pipes:
            pipe.close()
        return streams

    def send(self, command: signals.Command) -> None:
        try:
            self.pending.send_nowait(signals.line(command))
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
                await self.stdin.send_all(line)
        except trio.BrokenResourceError:
            self.pending.close()

    async def stop(self) -> None:
        """Ask it to finish, then make it."""
        self.send(signals.Stop())
        self.pending.close()
        with trio.move_on_after(STOP_WAIT_S):
            await self.write()
            await self.stdin.aclose()
            await self.wait()
        self.kill("it did not stop when asked")
        await self.wait()
        await self.close()

    async def close(self) -> None:
        os.close(self._exited)
        for pipe in (self.stdin, self.stdout, self.stderr):
            await pipe.aclose()


class Supervisor:
    """Keeps one worker running with the last configuration it was given.

    Args:
        launch: how to start it.
        hear: awaited with each report, in order.
    """

    def __init__(self, launch: Launch, hear: Hear) -> None:
        self._launch = launch
        self._hear = hear
        self._configure: signals.Configure | None = None
        self._changed = trio.Event()
        self._life: _Life | None = None
        self._generation = 0
        self._state = "none"
        self._restarts = 0
        self._malformed = 0
        self._last_fault = ""
        self._words = ""
        self._stderr: deque[str] = deque(maxlen=STDERR_LINES)
        self._log = logger("supervisor")

    def configure(self, configure: signals.Configure) -> None:
        """Have a worker with this configuration; one with another is replaced."""
        if configure != self._configure:
            self._configure = configure
            self._changed.set()

    def command(self, command: signals.Command) -> bool:
        """Queue ``command`` for the process there is; False when there is none."""
        if self._life is None:
            return False
        self._life.send(command)
        return True

    def end(self, reason: str) -> None:
        """Kill the process there is; another one follows."""
        if self._life is not None:
            self._life.kill(reason)

    def facts(self) -> WorkerFacts:
        pid = 0 if self._life is None else self._life.popen.pid
        return WorkerFacts(
            self._state,
            pid,
            self._generation,
            self._restarts,
            self._malformed,
            self._last_fault,
            tuple(self._stderr),
        )

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; no process is left on the way out."""
        task_status.started()
        failures = 0
        while True:
            if self._configure is None:
                await self._changed.wait()
            self._changed = trio.Event()
            began = trio.current_time()
            fault = await self._live()
            if fault is None:
                failures = 0
                continue
            failures = 1 if trio.current_time() - began > SETTLED_S else failures + 1
            await self._rest(fault, failures)

    async def _rest(self, fault: str, failures: int) -> None:
        longest = self._launch.backoff_max_s
        delay = min(self._launch.backoff_s * float(1 << min(failures - 1, 30)), longest)
        words = self._words
        self._restarts += 1
        self._state = "waiting"
        self._last_fault = f"{fault}; its last words: {words}" if words else fault
        self._log.error(
            "worker.died",
            generation=self._generation,
            reason=fault,
            words=words,
            restart_s=delay,
        )
        await self._hear(Died(self._generation, fault, words, delay))
        with trio.move_on_after(delay):
            await self._changed.wait()

    async def _live(self) -> str | None:
        """Run one process to its end; why it died, or None if its configuration changed."""
        self._generation += 1
        self._words = ""
        try:
            life = _Life(self._launch, self._generation)
        except OSError as error:
            return f"the worker could not be started: {error.strerror}"
        try:
            status = await self._attend(life)
        finally:
            self._life = None
            with trio.CancelScope(shield=True):
                await life.stop()
            self._state = "stopped"
        return None if status is None else self._explain(life, status)

    async def _attend(self, life: _Life) -> int | None:
        status: int | None = None
        async with trio.open_nursery() as nursery:
            if self._configure is not None:
                life.send(self._configure)
            self._life, self._state = life, "running"
            self._log.info("worker.started", generation=life.generation, pid=life.popen.pid)
            await self._hear(Started(life.generation, life.popen.pid))
            drained = trio.Event()
            nursery.start_soon(life.write)
            nursery.start_soon(self._end_on_change, nursery.cancel_scope)
            nursery.start_soon(self._read_all, life, drained)
            status = await life.wait()
            self._life = None
            with trio.move_on_after(DRAIN_WAIT_S):
                await drained.wait()
            nursery.cancel_scope.cancel()
        return status

    async def _end_on_change(self, scope: trio.CancelScope) -> None:
        await self._changed.wait()
        scope.cancel()

    async def _read_all(self, life: _Life, drained: trio.Event) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._read_stderr, life)
            await self._read_stdout(life)
        drained.set()

    async def _read_stdout(self, life: _Life) -> None:
        reader = _LineReader(life.stdout, signals.MAX_LINE_BYTES)
        try:
            while line := await reader.next():
                await self._hear(Said(life.generation, signals.parse_event(line)))
        except WorkerFault as fault:
            self._malformed += 1
            self._words = fault.message
            life.kill("what it said is not the worker protocol")

    async def _read_stderr(self, life: _Life) -> None:
        reader = _LineReader(life.stderr, STDERR_LINE_BYTES)
        while line := await reader.next():
            text = line.decode(errors="replace").rstrip()
            self._stderr.append(text)
            if not life.killed_for:
                self._words = text
            self._log.debug("worker.stderr", generation=life.generation, line=text)

    def _explain(self, life: _Life, status: int) -> str:
        if life.killed_for:
            how = f"was ended: {life.killed_for}"
        elif status == signals.EXIT_NO_MEMORY:
            limit = self._launch.memory_bytes
            how = "ran out of memory" + (f" (worker.memory_bytes = {limit})" if limit else "")
        elif status < 0:
            how = f"was killed by {signal.Signals(-status).name}"
        else:
            how = f"exited with status {status}"
        return f"the worker (pid {life.popen.pid}) {how}"


class _LineReader:
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
