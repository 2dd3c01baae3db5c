"""How fast one update is masked, beside encoding and copying it; what more participants cost.

``python benchmarks/mask_streams.py [--parameters 25000000] [--neighbours 3]`` prints a table, and
one JSON line at the end.  Ratios are results; the absolute figures belong to the machine.
"""

import argparse
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable

import numpy as np

from lensemble.ids import FederationId, NodeId
from lensemble.secagg.field import encode
from lensemble.secagg.keys import Context
from lensemble.secagg.masks import MaskStream, Term
from lensemble.secagg.participant import Drawn
from lensemble.secagg.roster import Roster
from lensemble.secagg.shares import PAIR_BYTES, SEALED_BYTES, SHARE_BYTES, envelopes_for
from lensemble.secagg.unmask import Recovery, leftover
from lensemble.workload import FieldTerms

CHUNK_WORDS = 1 << 16
REPEATS = 3
SIZES = (4, 8, 16, 32, 33, 64, 100)
CONTEXT = Context(FederationId("0" * 32), 0, 0)


def seconds(work: Callable[[], object]) -> float:
    """The best of ``REPEATS``."""
    best = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def measure_streams(parameters: int, neighbours: int) -> dict[str, float]:
    values = np.zeros(parameters, dtype=np.float32)
    words, copy = np.zeros(parameters, dtype=np.uint32), np.zeros(parameters, dtype=np.uint32)
    field = FieldTerms()
    terms = [Term(os.urandom(32), negative=index % 2 == 1) for index in range(neighbours + 1)]

    def mask(into: np.ndarray = words) -> None:
        stream = MaskStream(terms)
        for start in range(0, parameters, CHUNK_WORDS):
            stream.add(start, into[start : start + CHUNK_WORDS])

    def two_threads() -> None:
        threads = [threading.Thread(target=mask, args=(into,)) for into in (words, copy)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return {
        "copy": seconds(lambda: np.copyto(copy, words)),
        "encode": seconds(lambda: encode(values, field, words)),
        f"mask, {neighbours} neighbours": seconds(mask),
        "mask two, in two threads": seconds(two_threads),
    }


def measure_attempt(size: int) -> dict[str, float]:
    """CPU milliseconds and bytes of an attempt of ``size``, one participant or the coordinator."""
    names = [NodeId(hashlib.sha256(b"%d" % index).hexdigest()) for index in range(size)]
    drawn = {node: Drawn(CONTEXT, node) for node in names}
    keys = {node: each.public for node, each in drawn.items()}
    roster = Roster(CONTEXT, keys, size // 2 + 1, 0)
    start = time.process_time()
    dealt = {node: each.deal(roster) for node, each in drawn.items()}
    dealing = time.process_time() - start
    dealings = {node: each.dealing for node, each in dealt.items()}
    start = time.process_time()
    bound = {
        node: each.receive(envelopes_for(roster, dealings, node)) for node, each in dealt.items()
    }
    terms = {node: len(each.terms()) for node, each in bound.items()}
    receiving = time.process_time() - start
    survivors = roster.nodes[: size - size // 10]
    recovery = Recovery(roster, dealings, survivors)
    answers = {node: bound[node].answer(CONTEXT, survivors) for node in survivors}
    start = time.process_time()
    for node, answer in answers.items():
        recovery.accept(node, answer)
    left = leftover(roster, recovery.reveal())
    holders = roster.degree + 1
    return {
        "masks": max(terms.values()),
        "sent_bytes": 3 * SHARE_BYTES + holders * (PAIR_BYTES + SHARE_BYTES + SEALED_BYTES),
        "deal_ms": 1e3 * dealing / size,
        "receive_ms": 1e3 * receiving / size,
        "reveal_ms": 1e3 * (time.process_time() - start),
        "masks_left": len(left),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=25_000_000)
    parser.add_argument("--neighbours", type=int, default=3)
    options = parser.parse_args()
    found = measure_streams(options.parameters, options.neighbours)
    nbytes = 4 * options.parameters
    print(f"{options.parameters} parameters, chunks of {4 * CHUNK_WORDS >> 10} KiB")
    for name, taken in found.items():
        print(f"{name:26} {taken * 1e3:9.1f} ms {nbytes / taken / 1e6:9.0f} MB/s")
    attempts = {size: measure_attempt(size) for size in SIZES}
    for size, costs in attempts.items():
        print(f"n={size:<4}", *(f"{name} {cost:<9.4g}" for name, cost in costs.items()))
    mask = found[f"mask, {options.neighbours} neighbours"]
    line = {
        "benchmark": "mask_streams",
        "parameters": options.parameters,
        "neighbours": options.neighbours,
        "seconds": {name: round(taken, 4) for name, taken in found.items()},
        "mask_mb_per_s": round(nbytes / mask / 1e6, 1),
        "keystream_gb_per_s": round((options.neighbours + 1) * nbytes / mask / 1e9, 3),
        "mask_over_encode": round(mask / found["encode"], 3),
        "mask_over_copy": round(mask / found["copy"], 3),
        "masks_per_participant": {size: costs["masks"] for size, costs in attempts.items()},
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
