"""Whatever a crash leaves of the cache, weights are right in the end or refused."""

import os
import shutil
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from lensemble.errors import WeightsDigestMismatch
from lensemble_node.worker.inference import fetch
from lensemble_node.worker.inference.cache import JOURNAL, TENSORS
from lensemble_node.worker.inference.fetch import Order
from lensemble_node.worker.inference.intake import Intake
from tests.node.stage_weights import content, lies_there, order, parts

SIZES = {"tensors": 4, "nbytes": 100_000}
WHOLE = content(**SIZES)
EVERY = parts(WHOLE, **SIZES)
MAX_ATTEMPTS = 4


def feed(intake: Intake, most: int, step: int) -> None:
    """Up to ``most`` bytes of what is missing, ``step`` at a time."""
    for begin, length in intake.ranges:
        for at in range(begin, begin + length, step):
            end = min(at + step, begin + length)
            if most < end - at:
                return
            most -= end - at
            intake.take(at, memoryview(WHOLE[at:end]))


def damage(place: Path, data: st.DataObject) -> None:
    """Bytes of the file flip, the end of the journal is lost; the clock moves on."""
    (file,) = place.glob(f"*/{TENSORS}")
    (journal,) = place.glob(f"*/{JOURNAL}")
    with file.open("r+b") as opened:
        for at in data.draw(st.lists(st.integers(0, len(WHOLE) - 1), max_size=3)):
            opened.seek(at)
            byte = opened.read(1)[0]
            opened.seek(at)
            opened.write(bytes([byte ^ 1]))
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 10_000_000))
    text = journal.read_bytes()
    os.truncate(journal, data.draw(st.integers(len(text) // 2, len(text))))


def finished(wanted: Order) -> int:
    """Fetch the rest; the number of bytes that took."""
    taken = 0
    for _ in range(MAX_ATTEMPTS):
        intake = fetch.begin(wanted)
        feed(intake, len(WHOLE), 30_000)
        taken += intake.fetched_bytes
        try:
            weights = intake.finish()
        except WeightsDigestMismatch:
            intake.close()
            continue
        assert lies_there(weights.path, WHOLE, EVERY)
        weights.close()
        return taken
    raise AssertionError("damaged over and over")


@given(st.data())
@settings(max_examples=40)
def test_weights_are_right_whatever_a_crash_left(data: st.DataObject) -> None:
    place = Path(tempfile.mkdtemp())
    try:
        wanted = order(place, WHOLE, EVERY, "", source="edge")
        for _ in range(data.draw(st.integers(1, 3), label="crashes")):
            intake = fetch.begin(wanted)
            most = data.draw(st.integers(0, len(WHOLE)), label="bytes")
            feed(intake, most, data.draw(st.sampled_from([7_001, 65_536, 150_000])))
            intake._shelf.close()  # what the kernel does when the process is killed
            damage(place, data)
        finished(wanted)
        assert finished(wanted) == 0, "what is verified is not fetched again"
    finally:
        shutil.rmtree(place)
