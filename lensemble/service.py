"""What both daemons do around their ``serve``: logs, signals, identity, endpoint, last words."""

import argparse
import ctypes
import gc
import os
import resource
import signal
import sys
import traceback
import types
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec
import trio

# Before numpy is loaded.  Its BLAS keeps a thread for each core, and these wait for work by
# spinning; what daemons ask of it are dot products of a few hundred thousand numbers.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from lensemble import files, identity, logs
from lensemble.config import differing
from lensemble.errors import LensembleError
from lensemble.notify import Notifier
from lensemble.settings import LogSection
from lensemble.state_dir import IDENTITY_NAME
from lensemble.transport.driver import Driver
from lensemble.transport.iroh_driver import IrohDriver
from lensemble.version import BUILD

EXIT_FATAL = 1
EXIT_CONFIG = 2
PRIVATE_UMASK = 0o007
YOUNG_OBJECTS = 20_000
"""Made since the garbage was last looked for; Python's own default is 700."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
LARGE_BYTES = 4 << 20
"""A buffer this long gets pages of its own, which go back to the kernel when it is freed."""

KEPT_BYTES = 16 << 20
"""Free memory at the end of the heap that is kept: every chunk on its way takes buffers of 256 KiB,
and pages that come and go with each cost a third of the time that moving it takes."""


class Listening(Protocol):
    """What both ``[listen]`` tables say about an endpoint."""

    @property
    def addresses(self) -> tuple[str, ...]: ...

    @property
    def heartbeat_s(self) -> float: ...

    @property
    def heartbeat_timeout_s(self) -> float: ...


class Configured(Protocol):
    """What both configurations, which are pydantic models, have."""

    @property
    def state_dir(self) -> Path: ...

    @property
    def listen(self) -> Listening: ...

    @property
    def log(self) -> LogSection: ...


class Served(Protocol):
    """What a daemon hands over once it serves; ``headline`` is what it does, in a line."""

    @property
    def headline(self) -> str: ...

    def adopt(self, config: Any) -> frozenset[str]:  # noqa: ANN401 - of either daemon
        """Go on by ``config``; returns the keys at which that is possible without a restart."""
        ...


Serve = Callable[..., Awaitable[None]]
"""Started with a ``Served``."""


class Program(msgspec.Struct, frozen=True):
    """A daemon's command: ``PROG CONFIG`` serves, ``PROG check CONFIG`` only looks.

    ``part`` is what it is ("coordinator"); ``read`` gives the checked configuration of a file.
    """

    part: str
    prog: str
    description: str
    read: Callable[[Path], Configured]
    serve: Serve

    def main(self, arguments: list[str] | None) -> int:
        """Parse, check, serve; returns the exit status."""
        parser = argparse.ArgumentParser(prog=self.prog, description=self.description)
        parser.add_argument("--version", action="version", version=BUILD)
        parser.add_argument("words", nargs="+", metavar="[check] CONFIG")
        words = parser.parse_args(arguments).words
        if len(words) > 2 or (len(words) == 2 and words[0] != "check"):
            parser.error("give one configuration file, or `check` and one")
        try:
            config = self.read(Path(words[-1]))
            notifier = Notifier.from_environment(os.environ)
        except LensembleError as error:
            return refuse(error)
        if len(words) == 2:
            sys.stdout.write(f"{words[-1]} is a valid configuration of a {self.part}.\n")
            return 0
        return run(self, Path(words[0]), config, notifier)


def run(program: Program, path: Path, config: Configured, notifier: Notifier) -> int:
    """Serve until SIGTERM or SIGINT, reading ``path`` again at SIGHUP; returns the exit status.

    ``serve(config, driver, task_status=...)`` is the daemon.  An error of ours ends it with a line
    that begins with ``fatal:`` and status 1; a fault of the program with its traceback before that.
    """
    os.umask(PRIVATE_UMASK)
    share_one_heap()
    _collect_seldom()
    _use_all_descriptors()
    logs.configure(config.log.level, config.log.format)
    sys.excepthook = _last_words
    status = 0
    try:
        trio.run(_until_signal, program, path, config, notifier)
    except* LensembleError as errors:
        first = _first(errors)
        sys.stderr.write(f"fatal: {first.message}\nTry: {first.remediation}\n")
        status = EXIT_FATAL
    return status


def share_one_heap() -> None:
    """Keep memory from growing with threads and nodes, and from being faulted in for each chunk.

    glibc gives each thread a heap of its own and keeps in it what chunks leave behind.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_ARENA_MAX, 1)
        libc.mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def _collect_seldom() -> None:
    """Look for garbage in cycles every so many objects; what is loaded by now is none.

    There is little of it, and to look takes the longer the more sessions a daemon has.
    """
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)


def _use_all_descriptors() -> None:
    """Open as many files as the system allows: each update in flight is one."""
    _, allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, allowed))


def refuse(error: LensembleError) -> int:
    """Say what is wrong before anything is served; returns the exit status."""
    sys.stderr.write(f"Error: {error.message}\nTry: {error.remediation}\n")
    return EXIT_CONFIG


def _last_words(
    kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
) -> None:
    """Everything about a fault of this program, and the line an operator looks for."""
    traceback.print_exception(kind, error, trace)
    sys.stderr.write(f"fatal: {error!r}\n")


def _first(errors: BaseExceptionGroup[LensembleError]) -> LensembleError:
    found: LensembleError | BaseExceptionGroup[LensembleError] = errors
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found


async def _until_signal(
    program: Program, path: Path, config: Configured, notifier: Notifier
) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
        async with trio.open_nursery() as nursery:
            serving: Served = await nursery.start(program.serve, config, endpoint(config))
            notifier.ready()
            nursery.start_soon(notifier.keep, lambda: serving.headline)
            async for received in signals:
                if received == signal.SIGHUP:
                    config = await _read_again(program, path, config, serving)
                    continue
                notifier.stopping()
                name = signal.Signals(received).name
                logs.logger(program.part).info(f"{program.part}.signal", signal=name)
                nursery.cancel_scope.cancel()
                return


async def _read_again(
    program: Program, path: Path, config: Configured, serving: Served
) -> Configured:
    """The configuration to go on by: that of the file, if it can be followed."""
    log = logs.logger(program.part)
    try:
        found = await trio.to_thread.run_sync(program.read, path)
    except LensembleError as error:
        log.warning("config.refused", reason=error.message, remedy=error.remediation)
        return config
    logs.configure(found.log.level, found.log.format)
    adopted = serving.adopt(found) | {"log.level", "log.format"}
    changed = differing(config, found)
    log.warning(
        "config.read",
        adopted=[key for key in changed if key in adopted],
        needs_restart=[key for key in changed if key not in adopted],
    )
    return found


def endpoint(config: Configured) -> Driver:
    """The QUIC endpoint of the identity in the state directory, which is made if it is missing."""
    with files.storage(config.state_dir):
        files.make_directory(config.state_dir)
    listen = config.listen
    return IrohDriver(
        identity.load_or_create(config.state_dir / IDENTITY_NAME),
        listen.addresses,
        heartbeat_s=listen.heartbeat_s,
        heartbeat_timeout_s=listen.heartbeat_timeout_s,
    )
