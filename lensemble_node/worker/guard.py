"""What a worker promises its host before it does anything: not to outlive, outgrow or outrank."""

import ctypes
import errno
import os
import resource
import signal
import sys
from typing import NoReturn

from lensemble.errors import WorkerFault

_PR_SET_PDEATHSIG = 1
_NO_MEMORY_PHRASES = ("can't allocate memory", "cannot allocate memory", "out of memory")


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends.

    Raises:
        WorkerFault: the kernel refuses, or ``parent`` is gone already.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise WorkerFault(f"no parent-death signal: {os.strerror(ctypes.get_errno())}")
    # It may have ended between starting this process and the call above.
    if os.getppid() != parent:
        raise WorkerFault(f"the daemon (pid {parent}) is gone")


def limit(memory_bytes: int, niceness: int) -> None:
    """Bound the address space (0: not at all) and lower the priority."""
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    if niceness:
        os.nice(niceness)


def is_out_of_memory(error: Exception) -> bool:
    """Whether ``error`` is a refusal of memory, which libraries tell in several ways."""
    match error:
        case MemoryError() | OSError(errno=errno.ENOMEM):
            return True
        case RuntimeError() | ImportError() | OSError():
            said = str(error).lower()
            return any(phrase in said for phrase in _NO_MEMORY_PHRASES)
        case _:
            return False


def keep_stdout_clean() -> int:
    """A descriptor for the protocol; whatever else prints to stdout ends up on stderr."""
    protocol = os.dup(1)
    os.dup2(2, 1)
    return protocol


def leave(status: int) -> NoReturn:
    """End at once.  An orderly end of a process group aborts when a peer of it is gone."""
    sys.stderr.flush()
    os._exit(status)
