"""Runs the two programs of docs/edges.md as they are printed there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def program(name: str) -> str:
    text = (ROOT / "docs" / "edges.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return next(block for block in blocks if block.startswith(f"# {name}:"))


@pytest.mark.iroh
@pytest.mark.parametrize("size", [0, 1, 3_000_001])
def test_the_file_arrives(tmp_path: Path, size: int) -> None:
    for name in ("receive.py", "send.py"):
        (tmp_path / name).write_text(program(name), encoding="utf-8")
    original, copy = tmp_path / "original.bin", tmp_path / "copy.bin"
    original.write_bytes(bytes(range(251)) * (size // 251) + bytes(size % 251))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "receive.py", copy],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as receiver:
        assert receiver.stdout is not None
        where = receiver.stdout.readline().split()
        sender = [sys.executable, "send.py", original, *where]
        subprocess.run(sender, cwd=tmp_path, env=environment, check=True, timeout=60)
        assert receiver.wait(timeout=60) == 0
    assert copy.read_bytes() == original.read_bytes()
