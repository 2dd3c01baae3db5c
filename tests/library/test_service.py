"""What the daemons' common part does to its own process, seen in processes of their own."""

import subprocess
import sys

import pytest

PROGRAMS = ("lensemble_coord.__main__", "lensemble_node.__main__")
WITH_CHUNKS = """
import resource
from lensemble import service
{first}
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def chunks():
    return [bytearray(b"x") * (256 << 10) for _ in range(8)]
chunks()
before = faults()
for _ in range(50):
    chunks()
print(faults() - before)
"""
"""Prints the page faults of fifty times eight buffers of a chunk."""


def _said(program: str) -> int:
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_libraries_of_a_daemon_bring_no_threads(program: str) -> None:
    count = f"import os, {program}, numpy\nprint(len(os.listdir('/proc/self/task')))"
    assert _said(count) == 1


def test_buffers_of_chunks_keep_their_pages() -> None:
    without = _said(WITH_CHUNKS.format(first=""))
    with_settings = _said(WITH_CHUNKS.format(first="service.share_one_heap()"))
    assert with_settings < 200, without
    assert without > 10 * with_settings, "the loop does not show what it is for"
