"""Owns the worker process: starts it, hears it, limits it, ends it, starts it again.

Every process is a new generation, and what is heard carries its number, so that the last words of
a dead one are told apart.  A line that does not parse ends its process and nothing else.
"""

import os
import sys
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import msgspec
import trio

from lensemble.errors import WorkerFault
from lensemble.logs import logger
from lensemble_node import signals
from lensemble_node.worker_life import (
    DRAIN_WAIT_S,
    SOURCE,
    STDERR_LINE_BYTES,
    STDERR_LINES,
    Life,
    LineReader,
)

SETTLED_S = 60.0
"""A process that lived this long starts the backoff anew."""


class Launch(msgspec.Struct, frozen=True):
    """How a worker is started; ``memory_bytes`` limits its address space, 0 does not.

    ``prefix`` comes before everything and has to become the worker.  ``program`` replaces the
    interpreter and module, everything else stays.  ``processes`` other than 1 make a group, 0 as
    many as there are accelerators; one of them that lets the others wait for ``group_timeout_s``
    ends it.
    """

    arena_fd: int
    arena_bytes: int
    threads: int = 1
    memory_bytes: int = 0
    niceness: int = 0
    backoff_s: float = 1.0
    backoff_max_s: float = 30.0
    processes: int = 1
    group_timeout_s: float = 300.0
    prefix: tuple[str, ...] = ()
    program: tuple[str, ...] = ()

    def command(self) -> list[str]:
        alone = self.processes == 1
        module = "lensemble_node.worker" if alone else "lensemble_node.worker.group"
        python = (sys.executable, "-P", "-X", "faulthandler", "-m", module)
        group = (
            ()
            if alone
            else (
                f"--processes={self.processes}",
                f"--timeout-s={self.group_timeout_s}",
            )
        )
        return [
            *self.prefix,
            *(self.program or python),
            *group,
            f"--arena-fd={self.arena_fd}",
            f"--arena-bytes={self.arena_bytes}",
            f"--memory-bytes={self.memory_bytes}",
            f"--niceness={self.niceness}",
            f"--parent={os.getpid()}",
        ]

    def environment(self) -> dict[str, str]:
        """That of the daemon, with the code the daemon runs and the thread limit."""
        path = os.pathsep.join(p for p in (str(SOURCE), os.environ.get("PYTHONPATH", "")) if p)
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
        self._life: Life | None = None
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
            launch = self._launch
            life = Life(launch.command(), launch.environment(), launch.arena_fd)
        except OSError as error:
            return f"the worker could not be started: {error.strerror}"
        try:
            status = await self._attend(life)
        finally:
            self._life = None
            with trio.CancelScope(shield=True):
                await life.stop()
            self._state = "stopped"
        limit = self._launch.memory_bytes
        memory = f"worker.memory_bytes = {limit}" if limit else ""
        return None if status is None else life.ending(status, memory)

    async def _attend(self, life: Life) -> int | None:
        status: int | None = None
        async with trio.open_nursery() as nursery:
            if self._configure is not None:
                life.send(self._configure)
            self._life, self._state = life, "running"
            self._log.info("worker.started", generation=self._generation, pid=life.popen.pid)
            await self._hear(Started(self._generation, life.popen.pid))
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

    async def _read_all(self, life: Life, drained: trio.Event) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._read_stderr, life)
            await self._read_stdout(life)
        drained.set()

    async def _read_stdout(self, life: Life) -> None:
        reader = LineReader(life.stdout, signals.MAX_LINE_BYTES)
        try:
            while line := await reader.next():
                await self._hear(Said(self._generation, signals.parse_event(line)))
        except WorkerFault as fault:
            self._malformed += 1
            self._words = fault.message
            life.kill("what it said is not the worker protocol")

    async def _read_stderr(self, life: Life) -> None:
        reader = LineReader(life.stderr, STDERR_LINE_BYTES)
        while line := await reader.next():
            text = line.decode(errors="replace").rstrip()
            self._stderr.append(text)
            if not life.killed_for:
                self._words = text
            self._log.debug("worker.stderr", generation=self._generation, line=text)
