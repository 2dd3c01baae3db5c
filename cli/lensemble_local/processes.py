"""Daemons as child processes that cannot outlive the program that started them."""

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TypeVar

from lensemble.ctl.client import Client, DaemonUnreachable
from lensemble.errors import OperatorError

PR_SET_PDEATHSIG = 1
STOP_S = 5.0
START_S = 30.0
POLL_S = 0.05

Found = TypeVar("Found")


class Daemon:
    """One daemon: its process, its control socket and its log file."""

    def __init__(self, name: str, module: str, config: Path, socket: Path, log: Path) -> None:
        self.name = name
        self.socket = socket
        self.log = log
        self._command = [sys.executable, "-m", module, str(config)]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process id.

        Raises:
            OperatorError: it does not run.
        """
        if self._process is None:
            raise OperatorError(f"{self.name} was not started")
        return self._process.pid

    def start(self) -> None:
        """Start it and wait until its control socket answers.

        Raises:
            OperatorError: it exits, or does not serve in time; quotes the end of its log.
        """
        with self.log.open("ab") as log:
            self._process = spawn(self._command, log)
        self.until("it serves its control socket", self._answers, START_S)

    def _answers(self) -> bool:
        try:
            with Client(self.socket):
                return True
        except DaemonUnreachable:
            return False

    def ask(self) -> Client:
        """A connection to its control socket."""
        return Client(self.socket)

    def until(self, what: str, found: Callable[[], Found | None], longest_s: float) -> Found:
        """Wait until ``found`` gives something, and give that.

        Raises:
            OperatorError: the daemon exits first, or it takes longer than ``longest_s``.
        """
        end = time.monotonic() + longest_s
        while not (answer := found()):
            status = self._process.poll() if self._process is not None else 0
            if status is not None or time.monotonic() > end:
                why = f"exited with status {status}" if status is not None else "takes too long"
                raise OperatorError(
                    f"{self.name} {why} before {what}:\n{self._log_end()}", f"Read {self.log}."
                )
            time.sleep(POLL_S)
        return answer

    def _log_end(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-12:])

    def kill(self) -> None:
        """End it at once, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self) -> int:
        """End it in order; kills it when it does not follow.  Returns its exit status."""
        if self._process is None:
            return 0
        self._process.terminate()
        try:
            return self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def spawn(command: list[str], log: IO[bytes]) -> "subprocess.Popen[bytes]":
    """Start ``command``, its output into ``log``; it gets SIGKILL when this process dies."""
    parent = os.getpid()
    libc = ctypes.CDLL(None)

    def bind_to_parent() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        preexec_fn=bind_to_parent,  # noqa: PLW1509  # this process has no other thread
    )


@contextmanager
def started(daemons: list[Daemon]) -> Iterator[None]:
    """All of ``daemons``, in order; stopped in reverse, whatever happens."""
    begun: list[Daemon] = []
    try:
        for daemon in daemons:
            begun.append(daemon)
            daemon.start()
        yield
    finally:
        for daemon in reversed(begun):
            daemon.stop()


def own_directory(wanted: Path | None) -> Path:
    """``wanted``, made here, or a temporary directory; absolute.

    Raises:
        OperatorError: it exists.
    """
    if wanted is None:
        return Path(tempfile.mkdtemp(prefix="lensemble-demo-"))
    if wanted.exists():
        raise OperatorError(
            f"{wanted} exists", "Name a directory that does not, or leave --dir out."
        )
    wanted.mkdir(mode=0o700, parents=True)
    return wanted.absolute()
