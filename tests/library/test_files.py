import errno
import os
from pathlib import Path

import pytest

from lensemble import files
from lensemble.errors import OutOfMemory, StorageError


def test_a_file_is_replaced_whole_with_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "file"
    files.write_durably(path, b"one")
    files.write_durably(path, b"two", mode=0o640)
    assert path.read_bytes() == b"two"
    assert path.stat().st_mode & 0o777 == 0o640
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_refused_write_leaves_the_old_file_and_no_part(tmp_path: Path) -> None:
    path = tmp_path / "directory"
    path.mkdir()
    with pytest.raises(StorageError, match="directory"):
        files.write_durably(path, b"x")
    assert [p.name for p in tmp_path.iterdir()] == ["directory"]
    with pytest.raises(StorageError, match="absent"):
        files.write_durably(tmp_path / "absent" / "file", b"x")


def test_pieces_cover_the_range_in_order(tmp_path: Path) -> None:
    path = tmp_path / "file"
    content = os.urandom(1000)
    path.write_bytes(content)
    with path.open("rb") as file:
        for start, stop, size in ((0, 1000, 300), (7, 993, 1), (5, 5, 8), (0, 1000, 5000)):
            pieces = b"".join(bytes(p) for p in files.read_pieces(file.fileno(), start, stop, size))
            assert pieces == content[start:stop]
        with pytest.raises(StorageError, match="ends at byte 1000"):
            list(files.read_pieces(file.fileno(), 900, 1100, 64))


def test_a_file_over_its_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert files.read_limited(path, 5) == b"12345"
    with pytest.raises(StorageError, match="larger than 4 bytes"):
        files.read_limited(path, 4)
    with pytest.raises(StorageError, match="absent"):
        files.read_limited(tmp_path / "absent", 5)


@pytest.mark.parametrize(
    ("number", "kind", "message", "remedy"),
    [
        (errno.ENOSPC, StorageError, "no room for 7 bytes", "Free space"),
        (errno.ENOMEM, OutOfMemory, "no memory for 7 bytes", "worker.memory_bytes"),
        (errno.EMFILE, StorageError, "Too many open files", "LimitNOFILE"),
        (errno.EROFS, StorageError, "Read-only file system", "state directory"),
    ],
)
def test_each_refusal_has_its_own_way_out(
    tmp_path: Path, number: int, kind: type[StorageError], message: str, remedy: str
) -> None:
    with pytest.raises(kind, match=message) as caught, files.storage(tmp_path / "file", 7):
        raise OSError(number, "as the kernel says")
    assert remedy in caught.value.remediation
