"""Moves this process into a network namespace of its own, in which only loopback exists.

An iroh endpoint sends multicast on the local network even when it is bound to loopback; in here it
reaches nothing.  Children inherit the namespace.
"""

import ctypes
import fcntl
import os
import socket
import struct
from pathlib import Path

CLONE_NEWUSER = 0x1000_0000
CLONE_NEWNET = 0x4000_0000
SIOCGIFFLAGS = 0x8913
SIOCSIFFLAGS = 0x8914
IFF_UP = 0x1


def is_private() -> bool:
    """Whether loopback is the only interface here, so that nothing can leave this machine."""
    return [name for _, name in socket.if_nameindex()] == ["lo"]


def enter() -> str | None:
    """Enter a fresh namespace with ``lo`` up, or say why that is not possible here.

    Call it before the process starts a thread: without root it also needs a user namespace, which
    the kernel gives to single-threaded processes only.

    Returns:
        ``None`` when the process is now in a private namespace (or was before), else the reason.
    """
    try:
        if not is_private():
            _unshare()
        _raise_loopback()
    except OSError as error:
        return f"the kernel gives no private network namespace here: {error.strerror}"
    return None


def described(reason: str | None) -> str:
    """The network that a demo runs in, by what ``enter`` answered."""
    if reason is None:
        return "a private network namespace with loopback only: nothing leaves this machine"
    return f"this machine's; {reason}"


def _unshare() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    uid, gid = os.getuid(), os.getgid()
    if libc.unshare(CLONE_NEWNET) == 0:
        return
    if libc.unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1", encoding="ascii")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1", encoding="ascii")


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = fcntl.ioctl(probe, SIOCGIFFLAGS, struct.pack("16sH14x", b"lo", 0))
        _, flags = struct.unpack("16sH14x", request)
        if not flags & IFF_UP:
            fcntl.ioctl(probe, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | IFF_UP))
