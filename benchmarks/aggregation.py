"""How fast updates are folded and the outer step is taken, beside plain copies, and what it takes.

``python benchmarks/aggregation.py [--megabytes 100] [--participants 4] [--json]`` prints tables,
and one JSON line at the end: seconds for updates of 32 and of 16 bits a parameter, beside numpy
adding and copying arrays in memory; and the peak resident size against the number of updates and
the size of the model, each case in a process of its own.  Ratios are results; the absolute figures
belong to the machine.
"""

import argparse
import hashlib
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lensemble.checkpoint import CheckpointWriter, Lineage, open_checkpoint
from lensemble.ids import Digest, NodeId
from lensemble.params import ParamLayout
from lensemble.secagg.plan import BIAS, FieldPlan
from lensemble.workload import NoopTask, Workload
from lensemble.workload import layout as layout_of_workload
from lensemble_coord.training.aggregate import derive_sum, sum_digest, summed_pieces
from lensemble_coord.training.commit import StepInputs, apply_outer_step, zeros
from lensemble_coord.training.directory import StateDirectory
from lensemble_coord.training.spool import Spool, SpoolFile

MEGABYTE = 1_000_000
REPEATS = 3
NARROW_K = 12
IN_MEMORY, ON_DISK = 1 << 44, 0


def seconds(work: Callable[[], object]) -> float:
    """The best of ``REPEATS``."""
    best = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    answer = work()
    return time.perf_counter() - start, answer


def filled(spool: Spool, plan: FieldPlan, participants: int) -> list[SpoolFile]:
    """Updates of small random words; the tail says that each is one, and nothing was cut off."""
    tail = np.zeros((plan.nbytes - plan.tail) // 4, dtype=np.uint32)
    tail[:1] = 1
    piece = np.random.default_rng(0).integers(0, 1 << 8, 1 << 18, dtype=np.uint32)
    raw = piece.data.cast("B")
    spools = [spool.open(NodeId(f"{n:064x}"), plan.nbytes) for n in range(participants)]
    for each in spools:
        for at in range(0, plan.tail, len(raw)):
            each.pwrite(at, raw[: plan.tail - at])
        each.pwrite(plan.tail, tail.data.cast("B"))
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


def first_state(directory: StateDirectory, layout: ParamLayout, workload: Workload) -> Digest:
    lineage = Lineage("weights", -1, workload.digest)
    with CheckpointWriter(directory.checkpoints, layout, lineage) as writer:
        offset = 0
        for piece in zeros(layout.nbytes):
            writer.write(offset, piece)
            offset += len(piece)
        return writer.commit()


class Case:
    """Updates of a no-op model of ``nbytes`` float32 bytes, with words of ``bits``."""

    def __init__(self, root: Path, nbytes: int, bits: int) -> None:
        self.workload = Workload(task=NoopTask(parameters=nbytes // 4))
        self.layout = layout_of_workload(self.workload)
        self.code = b"" if bits == 32 else bytes([BIAS + NARROW_K]) * len(self.layout.tensors)
        self.plan = FieldPlan(self.layout, self.workload.room, self.code)
        self.directory = StateDirectory(root)
        self.first = first_state(self.directory, self.layout, self.workload)

    def spooled(self, participants: int, budget: int) -> tuple[Spool, list[SpoolFile]]:
        spool = Spool(self.directory.spool, budget, self.layout.nbytes)
        return spool, filled(spool, self.plan, participants)

    def fold(self, spools: list[SpoolFile]) -> None:
        for _ in summed_pieces(spools, self.plan):
            pass

    def sum(self, spools: list[SpoolFile]) -> Digest:
        room = self.workload.room
        return derive_sum(spools, self.plan, room, self.directory.sums).field_sum_digest

    def step(self, field_sum: Digest, participants: int) -> None:
        inputs = StepInputs(0, self.first, None, field_sum, participants, self.code)
        apply_outer_step(self.directory, self.workload, self.layout, inputs)


def measure(root: Path, nbytes: int, participants: int, bits: int) -> dict[str, float]:
    """Seconds of each part."""
    case, found = Case(root, nbytes, bits), {}
    for where, budget in (("memory", IN_MEMORY), ("disk", ON_DISK)):
        spool, spools = case.spooled(participants, budget)
        found[f"fold, spooled in {where}"] = seconds(partial(case.fold, spools))
        if where == "memory":
            found["fold and hash"] = seconds(partial(sum_digest, spools, case.plan))
            found["sum twice, stored"], field_sum = timed(partial(case.sum, spools))
        spool.close()
    found["outer step, committed"], _ = timed(partial(case.step, field_sum, participants))
    stored = open_checkpoint(case.directory.checkpoint(case.first))
    found["verify a checkpoint"] = seconds(stored.verify)
    words = case.plan.nbytes // 4
    found["numpy add in memory"] = add_in_memory(words, participants)
    found["copy in memory"] = copy_in_memory(words, participants)
    found["SHA-256, one vector"] = hash_once(nbytes)
    return found


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MEGABYTE


def grown(root: Path, nbytes: int, participants: int) -> dict[str, float]:
    """Megabytes that summing and stepping add to the peak of this process."""
    case = Case(root, nbytes, 32)
    before = peak_mb()
    spool, spools = case.spooled(participants, IN_MEMORY)
    case.step(case.sum(spools), participants)
    spool.close()
    return {"grown_mb": round(peak_mb() - before, 1), "peak_mb": round(peak_mb(), 1)}


def child(work: str, megabytes: int, participants: int, bits: int = 32) -> dict[str, float]:
    """The figures of one case, from a process of its own."""
    role = [work, str(megabytes), str(participants), str(bits)]
    command = [sys.executable, __file__, "--role", *role]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    answer: dict[str, float] = json.loads(done.stdout)
    return answer


def be_child(role: list[str]) -> None:
    work, megabytes, participants, bits = role[0], *map(int, role[1:])
    with tempfile.TemporaryDirectory() as root:
        nbytes = megabytes * MEGABYTE
        if work == "grow":
            print(json.dumps(grown(Path(root), nbytes, participants)))
        else:
            print(json.dumps(measure(Path(root), nbytes, participants, bits)))


def compared(found: dict[str, float], nbytes: int, participants: int) -> dict[str, Any]:
    fold = found["fold, spooled in memory"]
    step = found["outer step, committed"]
    return {
        "seconds": {name: round(taken, 4) for name, taken in found.items()},
        "fold_gb_per_s": round(participants * nbytes / fold / 1e9, 3),
        "step_gb_per_s": round(nbytes / step / 1e9, 3),
        "fold_over_numpy_add": round(fold / found["numpy add in memory"], 3),
        "fold_over_copy": round(fold / found["copy in memory"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--participants", type=int, default=4)
    parser.add_argument("--counts", type=int, nargs="*", default=[2, 8, 64], help="of updates")
    parser.add_argument("--sizes", type=int, nargs="*", default=[10, 50, 200], help="megabytes")
    parser.add_argument("--growth-megabytes", type=int, default=10, help="of each of the updates")
    parser.add_argument("--json", action="store_true", help="only the JSON object")
    parser.add_argument("--role", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        be_child(options.role)
        return
    megabytes, participants = options.megabytes, options.participants
    line: dict[str, Any] = {"megabytes": megabytes, "participants": participants}
    for bits in (32, 16):
        found = child("time", megabytes, participants, bits)
        nbytes = megabytes * MEGABYTE * bits // 32
        line[f"bits_{bits}"] = compared(found, nbytes, participants)
        if not options.json:
            print(f"{participants} updates of {megabytes} MB of parameters, {bits} bits each")
            for name, taken in found.items():
                rate = participants * nbytes / taken / 1e9
                print(f"{name:24} {taken * 1e3:9.1f} ms {rate:8.2f} GB/s in")
    line["grown_mb_by_count"] = {
        count: child("grow", options.growth_megabytes, count)["grown_mb"]
        for count in options.counts
    }
    line["grown_mb_by_size"] = {size: child("grow", size, 2)["grown_mb"] for size in options.sizes}
    if not options.json:
        print("peak resident MB added, by updates:", line["grown_mb_by_count"])
        print("peak resident MB added, by megabytes:", line["grown_mb_by_size"])
    print(json.dumps({"aggregation": line}))


if __name__ == "__main__":
    main()
