"""A captured computation that is called without the engine gives what the engine gives, bit by bit.

It runs in a process of its own, for the engine reads its environment when it is imported.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from lensemble_node.engine_environment import available, stage_environment

pytestmark = pytest.mark.skipif(bool(available()), reason=available())

PROGRAM = """
import mmap, random
import numpy as np
from lensemble_node.worker.inference import engine

WIDTH, ROWS, PLACES = 96, 4, 3
draws = np.random.default_rng(7)
weight = engine.constant(draws.standard_normal((WIDTH, WIDTH)).astype(np.float32))
cache = engine.zeros(16, WIDTH)
start = engine.position("start", 12)
memory = [memoryview(mmap.mmap(-1, 4096)) for _ in range(2 * PLACES)]
values = [np.frombuffer(each, np.float32)[: ROWS * WIDTH] for each in memory]
tensors = [engine.over(each, ROWS, WIDTH) for each in memory]

def computation(x, into, start):
    h = (x @ weight).contiguous().realize()
    cache[start : start + ROWS].assign(h).realize()
    seen = cache[start : start + ROWS] + x[1:2] * start
    return into.assign((h + seen).contiguous() @ weight).realize()

def run(replay, given, into, at):
    values[into][:] = 0
    replay((tensors[given], tensors[into]), (start, at))
    return values[into].tobytes()

for each in values[:PLACES]:
    each[:] = draws.standard_normal(ROWS * WIDTH)
replay = engine.Replay(computation)
run(replay, 0, PLACES, 0)
kernels, count = replay._kernels, engine.KernelCount()
assert kernels is not None, "it is not called directly"
places = random.Random(3)
for number in range(20):
    given, into = places.randrange(PLACES), PLACES + places.randrange(PLACES)
    at = places.randrange(13)
    direct = run(replay, given, into, at)
    replay._kernels = None
    assert direct == run(replay, given, into, at), (number, given, into, at)
    replay._kernels = kernels
    assert any(direct)
print(kernels.count, count.made)
"""


def test_called_directly_it_gives_what_the_engine_gives(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=stage_environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    calls, made = map(int, done.stdout.split())
    assert calls >= 3
    assert made == 0
