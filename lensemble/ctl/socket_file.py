"""The socket file: made where only the right people reach it, and never over somebody else's."""

import grp
import os
import pwd
import socket
import stat
import struct
from pathlib import Path

from lensemble.errors import ConfigError, StorageError
from lensemble.state_dir import GROUP

SOCKET_MODE = 0o660
DIRECTORY_MODE = 0o750
MAX_PATH_BYTES = 107
PROBE_TIMEOUT_S = 1.0
_CREDENTIALS = struct.Struct("3i")
CREDENTIALS_BYTES = _CREDENTIALS.size


def bind(path: Path, backlog: int) -> socket.socket:
    """A listening unix socket at ``path``, mode 0660; its directory is made, mode 0750, if absent.

    Raises:
        ConfigError: the path is too long for a socket.
        StorageError: something that is not a stale socket lies there, a daemon answers there, or
            the file system refuses.
    """
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise ConfigError(
            f"the control socket's path is over {MAX_PATH_BYTES} bytes: {path}",
            "Give [ctl] socket a shorter path, such as /run/lensemble/coord/ctl.sock.",
        )
    try:
        path.parent.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
        _clear(path)
        return _bound(path, backlog)
    except OSError as error:
        raise StorageError(
            f"cannot make the control socket {path}: {error.strerror}",
            "Give the daemon's user a directory for [ctl] socket that it can write to.",
        ) from error


def remove(path: Path, bound: os.stat_result) -> None:
    """Unlink ``path`` if it is still the file ``bound`` describes."""
    try:
        now = os.lstat(path)
        if (now.st_dev, now.st_ino) == (bound.st_dev, bound.st_ino):
            os.unlink(path)
    except FileNotFoundError:
        return


def credentials(raw: bytes) -> tuple[int, int]:
    """User and group id in the ``CREDENTIALS_BYTES`` of ``SO_PEERCRED``."""
    _, uid, gid = _CREDENTIALS.unpack(raw)
    return uid, gid


def may_ask(uid: int, gid: int) -> bool:
    """Whether that user may use the socket: root, the daemon's own user, group ``lensemble``.

    Looks other users up in the system's database, which may take its time.
    """
    if uid in {0, os.geteuid()}:
        return True
    try:
        wanted = grp.getgrnam(GROUP).gr_gid
        return wanted in os.getgrouplist(pwd.getpwuid(uid).pw_name, gid)
    except KeyError:
        return False


def _clear(path: Path) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise StorageError(
            f"{path} exists and is not a socket",
            "Move that file away, or give [ctl] socket another path.",
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_TIMEOUT_S)
        try:
            probe.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except (TimeoutError, BlockingIOError):
            pass
    raise StorageError(
        f"another daemon answers at {path}",
        "Stop it first, or give this one a state_dir and [ctl] socket of its own.",
    )


def _bound(path: Path, backlog: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    before = os.umask(0o777 & ~SOCKET_MODE)
    try:
        listener.bind(os.fspath(path))
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(before)
    _give_to_group(path)
    listener.listen(backlog)
    return listener


def _give_to_group(path: Path) -> None:
    """Let group ``lensemble`` open the socket, where there is one that we may give files to."""
    try:
        os.chown(path, -1, grp.getgrnam(GROUP).gr_gid)
    except (KeyError, PermissionError):
        return
