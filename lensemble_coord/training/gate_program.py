"""The testing program as a child process: one line asked, one line answered.

It is started when first needed, killed when it is late or says what is not an answer, and never
outlives this daemon.  Everything that can go wrong with it is an ``EvaluationError``.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec
import trio

from lensemble.errors import EvaluationError
from lensemble_coord.training.public_gate import Figures

PROGRAM = (sys.executable, "-P", "-X", "faulthandler", "-m", "lensemble_node.worker.training.gate")
"""What tests states: a program, because it needs torch, and this daemon holds no tensors."""

MAX_LINE_BYTES = 1 << 14
MAX_STDERR_BYTES = 2000
EXIT_WAIT_S = 1.0
_READ_BYTES = 1 << 14
_SOURCE = Path(__file__).resolve().parents[2]


class Ready(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    ready: int


class Answered(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    figures: Figures


class Refused(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    refused: str


class Failed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    failed: str


Line: TypeAlias = Ready | Answered | Refused | Failed
_KINDS: dict[str, type[Line]] = {
    "ready": Ready,
    "figures": Answered,
    "refused": Refused,
    "failed": Failed,
}


def parse(line: bytes) -> Line:
    """One line of the program.

    Raises:
        EvaluationError: it is none.
    """
    try:
        (key,) = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
        return msgspec.json.decode(line, type=_KINDS[key])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError, KeyError) as error:
        shown = line[:80].decode(errors="replace").strip()
        raise EvaluationError(f"the testing program said {shown!r}, which is no answer") from error


def environment() -> dict[str, str]:
    """That of the daemon, with the code the daemon runs, one thread, and no accelerator."""
    path = os.pathsep.join(p for p in (str(_SOURCE), os.environ.get("PYTHONPATH", "")) if p)
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return {**os.environ, **threads, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}


class GateProcess:
    """One run of the program, from its start to its end.

    Raises:
        EvaluationError: it cannot be started.
    """

    def __init__(self, command: Sequence[str]) -> None:
        # Not trio.lowlevel.open_process: the parent-death signal of the child fires when the
        # thread that started it ends, and that one starts it from a pool.
        try:
            self._popen = subprocess.Popen(  # noqa: S603  # the arguments are our own
                [*command, f"--parent={os.getpid()}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
                env=environment(),
            )
        except OSError as error:
            raise EvaluationError(f"the testing program cannot be started: {error}") from error
        pipes = [p for p in (self._popen.stdin, self._popen.stdout, self._popen.stderr) if p]
        streams = [trio.lowlevel.FdStream(os.dup(pipe.fileno())) for pipe in pipes]
        for pipe in pipes:
            pipe.close()
        self._stdin, self._stdout, self._stderr = streams
        self._buffer = bytearray()
        self._complaint = b""

    async def drain(self) -> None:
        """Read what it complains about until its end; the last words are kept."""
        try:
            async for piece in self._stderr:
                self._complaint = (self._complaint + piece)[-MAX_STDERR_BYTES:]
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return

    async def ask(self, request: bytes) -> Line:
        """What it answers to one line.

        Raises:
            EvaluationError: it ended, or said what is no answer.
        """
        try:
            await self._stdin.send_all(request + b"\n")
        except trio.BrokenResourceError:
            await self._raise_end()
        return await self.hear()

    async def hear(self) -> Line:
        """The next line it says; raises as ``ask``."""
        while (end := self._buffer.find(b"\n")) < 0:
            if len(self._buffer) > MAX_LINE_BYTES:
                raise EvaluationError(f"the testing program said over {MAX_LINE_BYTES} bytes")
            piece = await self._stdout.receive_some(_READ_BYTES)
            if not piece:
                await self._raise_end()
            self._buffer += piece
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return parse(line)

    async def _raise_end(self) -> None:
        exited = os.pidfd_open(self._popen.pid)
        try:
            with trio.move_on_after(EXIT_WAIT_S):
                await trio.lowlevel.wait_readable(exited)
        finally:
            os.close(exited)
        status = self._popen.poll()
        how = "closed its output" if status is None else _ending(status)
        last = self._complaint.decode(errors="replace").strip().splitlines()[-1:]
        words = f": {last[0][:200]}" if last else ""
        raise EvaluationError(f"the testing program {how}{words}")

    async def end(self) -> None:
        """Kill it and everything it started."""
        if self._popen.poll() is None:
            os.killpg(self._popen.pid, signal.SIGKILL)
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(self._popen.wait)
            for stream in (self._stdin, self._stdout, self._stderr):
                await stream.aclose()


def _ending(status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"exited with status {status}"
