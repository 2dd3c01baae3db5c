"""The worker process of one stage: started once, heard, ended; never started again.

What it was doing is lost with it, so its end is the end of its stage: an event with the status or
signal, the last lines of its log, and what it said itself of why it could not go on.
"""

import os
import sys
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import trio

from lensemble.errors import EngineMissing, WorkerFault
from lensemble_node import engine_environment, signals, stage_signals
from lensemble_node.config import InferenceSection
from lensemble_node.worker_life import (
    DRAIN_WAIT_S,
    STDERR_LINE_BYTES,
    STDERR_LINES,
    UNWILLING,
    Life,
    LineReader,
)

STOP_WAIT_S = 1.0
"""A worker that was asked to stop, or said that it failed, is killed after so long."""

PROGRAM = (
    sys.executable, "-P", "-X", "faulthandler", "-m", "lensemble_node.worker.inference",
)  # fmt: skip


class Engine(msgspec.Struct, frozen=True):
    """What computes stages here; ``reason`` says why nothing does, with the way out."""

    name: str
    environment: Mapping[str, str]
    reason: str = ""
    program: tuple[str, ...] = PROGRAM


def engine(settings: InferenceSection, cache_dir: Path) -> Engine:
    """The engine of this installation, which may be none."""
    if not settings.enabled:
        return Engine("", {}, "`inference.enabled` is false in this node's configuration")
    try:
        return Engine(
            engine_environment.engine_name(settings.device),
            engine_environment.stage_environment(cache_dir, settings.device, settings.threads),
        )
    except EngineMissing as error:
        return Engine("", {}, f"{error.message}. {error.remediation}")


class Launch(msgspec.Struct, frozen=True):
    """How the worker is started; ``memory_bytes`` limits its address space, 0 does not."""

    engine: Engine
    arena_fd: int
    arena_bytes: int
    memory_bytes: int = 0
    niceness: int = 0

    def command(self) -> list[str]:
        return [
            *self.engine.program,
            f"--arena-fd={self.arena_fd}",
            f"--arena-bytes={self.arena_bytes}",
            f"--memory-bytes={self.memory_bytes}",
            f"--niceness={self.niceness}",
            f"--parent={os.getpid()}",
        ]


class Ending(msgspec.Struct, frozen=True):
    """Why the process is gone; ``complaint`` where it had to be killed after being asked to end."""

    code: str
    reason: str
    remediation: str = ""
    stderr: tuple[str, ...] = ()
    complaint: str = ""


class StageProcess:
    """One worker.

    Args:
        launch: how to start it.
        hear: called with each of its lines but ``StageFailed``, in order.
    """

    def __init__(self, launch: Launch, hear: Callable[[stage_signals.Event], None]) -> None:
        self._launch = launch
        self._hear = hear
        self._waiting: list[stage_signals.Command] = []
        self._life: Life | None = None
        self._failed: stage_signals.StageFailed | None = None
        self._finish = trio.Event()
        self._kill = ""
        self._stderr: deque[str] = deque(maxlen=STDERR_LINES)

    @property
    def pid(self) -> int:
        """0 while there is none."""
        return 0 if self._life is None else self._life.popen.pid

    def command(self, command: stage_signals.Command) -> None:
        """Queue ``command``, also before the process is up."""
        if self._life is None:
            self._waiting.append(command)
        else:
            self._life.send(command)

    def ask(self) -> None:
        """Have it finish by itself, and killed if it does not."""
        if self._life is None:
            self.end("it was not needed any more")
        else:
            self._life.send(signals.Stop())
            self._finish.set()

    def end(self, reason: str) -> None:
        """Kill it."""
        self._kill = self._kill or reason
        if self._life is not None:
            self._life.kill(reason)

    async def run(self) -> Ending:
        """From its start to its end; a cancelled run leaves no process."""
        if self._kill:
            return Ending(WorkerFault.code, f"the worker was not started: {self._kill}")
        try:
            launch = self._launch
            life = Life(launch.command(), dict(launch.engine.environment), launch.arena_fd)
        except OSError as error:
            return Ending(WorkerFault.code, f"the worker could not be started: {error.strerror}")
        self._life = life
        try:
            status = await self._attend(life)
        finally:
            with trio.CancelScope(shield=True):
                life.kill("this daemon stops")
                await life.wait()
                await life.close()
            self._life = None
        return self._ending(life, status)

    async def _attend(self, life: Life) -> int:
        for command in self._waiting:
            life.send(command)
        drained = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(life.write)
            nursery.start_soon(self._insist, life)
            nursery.start_soon(self._read_all, life, drained)
            status = await life.wait()
            with trio.move_on_after(DRAIN_WAIT_S):
                await drained.wait()
            nursery.cancel_scope.cancel()
        return status

    async def _insist(self, life: Life) -> None:
        await self._finish.wait()
        await trio.sleep(STOP_WAIT_S)
        life.kill(UNWILLING)

    async def _read_all(self, life: Life, drained: trio.Event) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._read_stderr, life)
            await self._read_stdout(life)
        drained.set()

    async def _read_stdout(self, life: Life) -> None:
        reader = LineReader(life.stdout, stage_signals.MAX_LINE_BYTES)
        try:
            while line := await reader.next():
                signal = stage_signals.parse_event(line)
                if isinstance(signal, stage_signals.StageFailed):
                    self._failed = self._failed or signal
                    self._finish.set()
                    continue
                self._hear(signal)
                if isinstance(signal, signals.Filled):
                    # What was filled goes out before what else is said is read; twice, for the
                    # first time around this task may be ahead of the one that sends.
                    await trio.lowlevel.checkpoint()
                    await trio.lowlevel.checkpoint()
        except WorkerFault as fault:
            life.kill(f"what it said is not the stage protocol: {fault.message}")

    async def _read_stderr(self, life: Life) -> None:
        reader = LineReader(life.stderr, STDERR_LINE_BYTES)
        while line := await reader.next():
            self._stderr.append(line.decode(errors="replace").rstrip())

    def _ending(self, life: Life, status: int) -> Ending:
        limit = self._launch.memory_bytes
        memory = f"inference.address_space_bytes = {limit}" if limit else ""
        how, failed, said = life.ending(status, memory), self._failed, tuple(self._stderr)
        if failed is not None:
            return Ending(failed.code, failed.message, failed.remediation, said)
        complaint = UNWILLING if life.killed_for == UNWILLING else ""
        return Ending(WorkerFault.code, how, "", said, complaint)
