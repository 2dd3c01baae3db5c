"""What a worker promises its host before it does anything: not to outlive, outgrow or outrank."""

import ctypes
import os
import resource
import signal

from lensemble.errors import WorkerFault

_PR_SET_PDEATHSIG = 1


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


def keep_stdout_clean() -> int:
    """A descriptor for the protocol; whatever else prints to stdout ends up on stderr."""
    protocol = os.dup(1)
    os.dup2(2, 1)
    return protocol
