"""State directories on file systems of their own, small, full or read-only as a test says."""

import errno
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PAGE = 4096


class Room:
    """A tmpfs at ``path`` in a mount namespace that this process is not in.

    ``command`` goes before that of a daemon which is to see it; ``outside`` is where the test does.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        path.mkdir(mode=0o700)
        self.path = path
        script = f'mount -t tmpfs -o size={nbytes},mode=700 room "$1" && echo ready && exec cat'
        self._keeper = subprocess.Popen(
            ["unshare", "--mount", "--propagation=private", "sh", "-c", script, "sh", str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._keeper.stdout is not None
        assert self._keeper.stdout.readline() == b"ready\n"
        self.command = ["nsenter", f"--mount=/proc/{self._keeper.pid}/ns/mnt"]
        self.outside = Path(f"/proc/{self._keeper.pid}/root{path}")

    def remount(self, options: str) -> None:
        words = ["mount", "-o", f"remount,{options}", str(self.path)]
        subprocess.run([*self.command, *words], check=True)

    def leave(self, nbytes: int) -> None:
        """Fill the room until ``nbytes``, a multiple of the page size, are free."""
        self.empty()
        facts = os.statvfs(self.outside)
        ballast = facts.f_bavail * facts.f_frsize - nbytes
        fd = os.open(self._ballast, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(fd, 0, ballast)
        finally:
            os.close(fd)

    def empty(self) -> None:
        """Take the filling out again."""
        self._ballast.unlink(missing_ok=True)

    @property
    def _ballast(self) -> Path:
        return self.outside / "ballast"

    def close(self) -> None:
        self._keeper.stdin.close()  # type: ignore[union-attr]  # it was asked for
        self._keeper.wait(5)
        self._keeper.stdout.close()  # type: ignore[union-attr]  # it was asked for


@contextmanager
def room(path: Path, nbytes: int) -> Iterator[Room]:
    """A room for one state directory; skips the test where none can be made."""
    if reason := refusal():
        pytest.skip(reason)
    made = Room(path, nbytes)
    try:
        yield made
    finally:
        made.close()


def refusal() -> str:
    """Why this process cannot mount; empty if it can."""
    if os.geteuid() != 0:
        return "only root mounts file systems"
    with tempfile.TemporaryDirectory() as place:
        tried = subprocess.run(
            ["unshare", "--mount", "mount", "-t", "tmpfs", "room", place],
            check=False,
            capture_output=True,
        )
    return os.strerror(errno.EPERM) if tried.returncode else ""
