import os
import subprocess
import sys
from pathlib import Path

import pytest

from lensemble import state_dir
from lensemble.errors import StorageError

HOLD = """
import sys
from pathlib import Path
from lensemble import state_dir
with state_dir.held(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_daemon_is_refused_and_told_the_pid_of_the_first(tmp_path: Path) -> None:
    path = tmp_path / "state"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    assert holder.stdin is not None
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(StorageError, match=f"pid {holder.pid}"), state_dir.held(path):
        pass
    holder.kill()
    holder.wait()
    holder.stdin.close()
    holder.stdout.close()
    with state_dir.held(path):
        assert (path / state_dir.LOCK_NAME).read_text() == f"{os.getpid()}\n"


def test_it_is_private_and_released_in_order(tmp_path: Path) -> None:
    path = tmp_path / "a" / "state"
    with state_dir.held(path):
        assert path.stat().st_mode & 0o777 == 0o700
    with state_dir.held(path):
        pass


def test_what_a_crash_left_half_written_is_removed_and_nothing_else(tmp_path: Path) -> None:
    root = tmp_path / "state"
    (root / ".part-directory").mkdir(parents=True)
    for name in (".part-abc", ".part-ledger.sqlite-wal", f".{state_dir.IDENTITY_NAME}.123"):
        (root / name).write_bytes(b"x")
    for name in (state_dir.IDENTITY_NAME, "ledger.sqlite", ".keep"):
        (root / name).write_bytes(b"x")
    with state_dir.held(root):
        found = {path.name for path in root.iterdir()}
    assert found == {
        ".part-directory",
        state_dir.IDENTITY_NAME,
        "ledger.sqlite",
        ".keep",
        state_dir.LOCK_NAME,
    }
