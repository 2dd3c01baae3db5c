import os
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lensemble.errors import ContractViolation, StorageError
from lensemble.ids import NodeId
from lensemble_coord.training.spool import Spool

ALICE, BOB = NodeId("a" * 64), NodeId("b" * 64)
SIZE = 1000
CONTENT = bytes(range(250)) * 4


def test_an_update_is_read_as_it_was_written_in_memory_and_on_disk(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", SIZE, SIZE)
    for participant, in_memory in ((ALICE, True), (BOB, False)):
        spooled = spool.open(participant, SIZE)
        assert spooled.in_memory is in_memory
        for at in range(0, SIZE, 300):
            spooled.pwrite(at, memoryview(CONTENT)[at : at + 300])
        assert spooled.complete
        assert b"".join(bytes(piece) for piece in spooled.pieces(64)) == CONTENT
        into = memoryview(bytearray(10))
        spooled.read_into(55, into)
        assert into == CONTENT[55:65]
    assert (spool.memory_bytes, spool.disk_bytes) == (SIZE, SIZE)
    assert len(list(tmp_path.glob("spool/*"))) == 1
    spool.close()
    assert (spool.memory_bytes, spool.disk_bytes) == (0, 0)
    assert list(tmp_path.glob("spool/*")) == []


def test_memory_that_is_given_back_is_used_again(tmp_path: Path) -> None:
    spool = Spool(tmp_path, SIZE, SIZE)
    with spool.open(ALICE, SIZE) as first:
        assert first.in_memory
        with spool.open(BOB, SIZE) as second:
            assert not second.in_memory
    first.close()
    with spool.open(BOB, SIZE) as third:
        assert third.in_memory


def test_gaps_overruns_and_other_sizes_are_refused(tmp_path: Path) -> None:
    spool = Spool(tmp_path, SIZE, SIZE)
    for size in (0, -4, SIZE + 4, 1 << 62):
        with pytest.raises(ContractViolation, match="have up to"):
            spool.open(ALICE, size)
    with spool.open(ALICE, SIZE) as spooled:
        spooled.pwrite(0, CONTENT[:10])
        for offset, size in ((11, 1), (-1, 4), (10, SIZE)):
            with pytest.raises(ContractViolation, match=ALICE):
                spooled.pwrite(offset, bytes(size))
        with pytest.raises(ContractViolation, match="10 of 1000"):
            list(spooled.pieces())
        spooled.pwrite(5, CONTENT[5:])
        assert spooled.complete


def test_what_a_crash_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "old-1.spool").write_bytes(b"x")
    (tmp_path / "other").write_bytes(b"x")
    Spool(tmp_path, 0, SIZE)
    assert [p.name for p in tmp_path.iterdir()] == ["other"]


def test_a_full_disk_is_said_with_both_figures(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    size = 2 * free + (1 << 40)
    spool = Spool(tmp_path, 0, size)
    with pytest.raises(StorageError, match=rf"no room for {size} bytes, \d+ are free"):
        spool.open(ALICE, size)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "spool").write_text("")
    with pytest.raises(StorageError, match="spool"):
        Spool(tmp_path / "spool", 0, SIZE)


def test_many_threads_fill_their_own_spools(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 3 * SIZE, SIZE)
    spools = [spool.open(NodeId(f"{n:064x}"), SIZE) for n in range(6)]

    def fill(index: int) -> None:
        for at in range(0, SIZE, 50):
            spools[index].pwrite(at, bytes([index]) * 50)

    threads = [threading.Thread(target=fill, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, spooled in enumerate(spools):
        assert b"".join(map(bytes, spooled.pieces(77))) == bytes([index]) * SIZE
    spool.close()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(-5, 40), st.binary(max_size=20)), max_size=12))
def test_any_writes_agree_with_a_list_of_bytes(
    tmp_path_factory: pytest.TempPathFactory, writes: list[tuple[int, bytes]]
) -> None:
    model = bytearray()
    with Spool(tmp_path_factory.mktemp("spool"), 32, 32).open(ALICE, 32) as spooled:
        for offset, piece in writes:
            if 0 <= offset <= len(model) and offset + len(piece) <= 32:
                spooled.pwrite(offset, piece)
                model[offset : offset + len(piece)] = piece
            else:
                with pytest.raises(ContractViolation):
                    spooled.pwrite(offset, piece)
        assert spooled.filled == len(model)
        if spooled.complete:
            assert b"".join(map(bytes, spooled.pieces(5))) == model
