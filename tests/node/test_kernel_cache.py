import sqlite3
from pathlib import Path

import pytest

from lensemble_node.worker.inference import kernel_cache


def written(path: Path, rows: int = 500) -> Path:
    """A database such as the engine keeps."""
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE kernels (key text PRIMARY KEY, val blob)")
        database.executemany(
            "INSERT INTO kernels VALUES (?, ?)", [(f"{n:064}", bytes(2000)) for n in range(rows)]
        )
    database.close()
    return path


def test_a_sound_file_stays_and_a_missing_one_is_no_matter(tmp_path: Path) -> None:
    path = written(tmp_path / "kernels.db")
    before = path.read_bytes()
    assert not kernel_cache.make_usable(path)
    assert path.read_bytes() == before
    assert not kernel_cache.make_usable(tmp_path / "deeper" / "kernels.db")
    assert (tmp_path / "deeper").is_dir()


@pytest.mark.parametrize("damage", ["garbage", "truncated", "overwritten"])
def test_a_damaged_file_is_removed_with_what_lies_beside_it(tmp_path: Path, damage: str) -> None:
    path = written(tmp_path / "kernels.db")
    raw = bytearray(path.read_bytes())
    if damage == "garbage":
        raw = bytearray(b"\x00\xffgarbage" * 1000)
    elif damage == "truncated":
        del raw[len(raw) // 2 :]
    else:
        raw[4096:40960] = b"\xa5" * (40960 - 4096)
    path.write_bytes(raw)
    beside = tmp_path / "kernels.db-wal"
    beside.write_bytes(b"left behind")
    assert kernel_cache.make_usable(path)
    assert not path.exists()
    assert not beside.exists()


def test_a_locked_file_is_left_to_whoever_writes_it(tmp_path: Path) -> None:
    path = written(tmp_path / "kernels.db")
    writer = sqlite3.connect(path)
    writer.execute("PRAGMA journal_mode=WAL")
    writer.execute("BEGIN IMMEDIATE")
    assert not kernel_cache.make_usable(path)
    assert path.exists()
    writer.close()


def test_a_file_that_has_grown_too_big_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "kernels.db"
    with path.open("wb") as file:
        file.truncate(kernel_cache.MAX_BYTES + 1)
    assert kernel_cache.make_usable(path)
    assert not path.exists()
