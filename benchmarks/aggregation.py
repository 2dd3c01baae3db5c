"""How fast updates are folded, beside numpy adding arrays in memory and a plain copy.

``python benchmarks/aggregation.py [--megabytes 100] [--participants 4]`` prints a table, and one
JSON line at the end.  Ratios are results; the absolute figures belong to the machine.
"""

import argparse
import hashlib
import json
import resource
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from lensemble.checkpoint import CheckpointWriter, Lineage, open_checkpoint
from lensemble.ids import NodeId
from lensemble.workload import NoopTask, Workload
from lensemble.workload import layout as layout_of_workload
from lensemble_coord.training.aggregate import derive_sum, sum_digest, summed_pieces
from lensemble_coord.training.commit import StepInputs, apply_outer_step, zeros
from lensemble_coord.training.directory import StateDirectory
from lensemble_coord.training.spool import Spool, SpoolFile

MEGABYTE = 1_000_000
REPEATS = 3
PEAK = "peak resident MB"


def seconds(work: Callable[[], object]) -> float:
    """The best of ``REPEATS``."""
    best = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def filled(spool: Spool, participants: int) -> list[SpoolFile]:
    piece = np.random.default_rng(0).integers(0, 1 << 16, 1 << 18, dtype=np.uint32)
    raw = piece.data.cast("B")
    spools = [spool.open(NodeId(f"{n:064x}"), spool.update_bytes) for n in range(participants)]
    for each in spools:
        for at in range(0, spool.update_bytes, len(raw)):
            each.pwrite(at, raw[: spool.update_bytes - at])
    return spools


def add_in_memory(words: int, participants: int) -> float:
    """Seconds to add ``participants`` whole arrays into one accumulator: the floor of a fold."""
    total = np.zeros(words, dtype=np.uint32)
    term = np.ones(words, dtype=np.uint32)

    def work() -> None:
        for _ in range(participants):
            np.add(total, term, out=total)

    return seconds(work)


def copy_in_memory(words: int, participants: int) -> float:
    source = np.ones(words, dtype=np.uint32)
    target = np.empty_like(source)

    def work() -> None:
        for _ in range(participants):
            np.copyto(target, source)

    return seconds(work)


def hash_once(nbytes: int) -> float:
    piece = bytes(1 << 20)

    def work() -> None:
        running = hashlib.sha256()
        for _ in range(0, nbytes, len(piece)):
            running.update(piece)

    return seconds(work)


def measure(root: Path, nbytes: int, participants: int) -> dict[str, float]:
    workload = Workload(task=NoopTask(parameters=nbytes // 4))
    layout = layout_of_workload(workload)
    directory = StateDirectory(root)
    found: dict[str, float] = {}
    with CheckpointWriter(
        directory.checkpoints, layout, Lineage("weights", -1, workload.digest)
    ) as writer:
        offset = 0
        for piece in zeros(layout.nbytes):
            writer.write(offset, piece)
            offset += len(piece)
        first = writer.commit()
    for where, budget in (("memory", 1 << 44), ("disk", 0)):
        spool = Spool(directory.spool, budget, layout.nbytes)
        spools = filled(spool, participants)

        def fold(spools: list[SpoolFile] = spools) -> None:
            for _ in summed_pieces(spools, layout.nbytes):
                pass

        found[f"fold, spooled in {where}"] = seconds(fold)
        if where == "memory":
            found["fold and hash"] = seconds(partial(sum_digest, spools, layout))
            start = time.perf_counter()
            facts = derive_sum(spools, layout, workload.field, directory.sums)
            found["sum twice, stored"] = time.perf_counter() - start
        spool.close()
    inputs = StepInputs(0, first, None, facts.field_sum_digest, participants)
    start = time.perf_counter()
    apply_outer_step(directory, workload, layout, inputs)
    found["outer step, committed"] = time.perf_counter() - start
    stored = open_checkpoint(directory.checkpoint(first))
    found["verify a checkpoint"] = seconds(stored.verify)
    found[PEAK] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MEGABYTE
    found["numpy add in memory"] = add_in_memory(layout.size, participants)
    found["copy in memory"] = copy_in_memory(layout.size, participants)
    found["SHA-256, one vector"] = hash_once(layout.nbytes)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--participants", type=int, default=4)
    options = parser.parse_args()
    nbytes, participants = options.megabytes * MEGABYTE, options.participants
    with tempfile.TemporaryDirectory() as root:
        found = measure(Path(root), nbytes, participants)
    peak = found.pop(PEAK)
    print(f"{participants} updates of {options.megabytes} MB")
    for name, taken in found.items():
        print(f"{name:24} {taken * 1e3:9.1f} ms {participants * nbytes / taken / 1e9:8.2f} GB/s in")
    fold = found["fold, spooled in memory"]
    line = {
        "benchmark": "aggregation",
        "megabytes": options.megabytes,
        "participants": participants,
        "seconds": {name: round(taken, 4) for name, taken in found.items()},
        "fold_gb_per_s": round(participants * nbytes / fold / 1e9, 3),
        "fold_over_numpy_add": round(fold / found["numpy add in memory"], 3),
        "fold_over_copy": round(fold / found["copy in memory"], 3),
        "peak_rss_mb": round(peak, 1),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
