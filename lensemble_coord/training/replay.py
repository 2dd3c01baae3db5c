"""Recomputes outer steps bit for bit from one state and the sums since, in one pass of pieces.

The step treats every parameter by itself, so a piece is taken through all rounds before the next is
read: nothing is held but one piece of each vector, and no state in between needs to be on disk.
Hashing is nearly all of the work, and is spread over threads.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing

import msgspec
import numpy as np

from lensemble.checkpoint import open_checkpoint
from lensemble.ids import Digest
from lensemble.outer_step import OuterStep, step_terms
from lensemble.params import PARAMETER_BYTES, FlatParameters, ParameterDigest, ParamLayout
from lensemble.workload import Workload
from lensemble_coord.training.aggregate import sum_pieces
from lensemble_coord.training.commit import zeros
from lensemble_coord.training.directory import StateDirectory
from lensemble_coord.training.record import ContributionRecord

PIECE_WORDS = 1 << 16
"""Small, for a copy of each round's piece waits to be hashed."""


class Replayed(msgspec.Struct, frozen=True):
    """What the step of one round came to; compare with ``stepped`` of its record."""

    round: int
    next_digest: Digest
    momentum_digest: Digest


class _Round:
    """One round on the way: its step, the pieces of its sum, running digests."""

    def __init__(
        self,
        record: ContributionRecord,
        workload: Workload,
        layout: ParamLayout,
        pieces: Iterator[memoryview],
    ) -> None:
        self.round = record.round
        self._adopted = not record.refusal
        self._step = OuterStep(step_terms(workload, record.c_t), PIECE_WORDS)
        self._pieces = pieces
        self._weights = ParameterDigest(layout)
        self._momentum = ParameterDigest(layout)

    def advance(
        self, w: FlatParameters, v: FlatParameters, pool: ThreadPoolExecutor
    ) -> tuple["Future[None]", "Future[None]"]:
        """Take one piece of parameters and momentum (float32) through this round, in place.

        Of a round whose step was rejected they stay as they are.  What comes back is done once
        the piece is hashed; wait for it before the next piece.
        """
        if not self._adopted:
            w, v = w.copy(), v.copy()
        self._step.apply(w, v, np.frombuffer(next(self._pieces), dtype=np.uint32))
        return (
            pool.submit(self._weights.update, memoryview(w.tobytes())),
            pool.submit(self._momentum.update, memoryview(v.tobytes())),
        )

    def result(self) -> Replayed:
        return Replayed(self.round, self._weights.hexdigest(), self._momentum.hexdigest())


def replay(
    directory: StateDirectory,
    workload: Workload,
    layout: ParamLayout,
    base: ContributionRecord,
    later: Sequence[ContributionRecord],
) -> Iterator[Replayed | int]:
    """Take the state after ``base`` through the rounds of ``later``, which follow it in order.

    Yields the number of parameter bytes done after each piece, then one ``Replayed`` a round.

    Raises:
        CheckpointIntegrityError, StorageError: the state after ``base`` cannot be read.
        AggregationError: a sum is not of the layout's size, or a result is not finite.
    """
    size = PIECE_WORDS * PARAMETER_BYTES
    start = open_checkpoint(directory.checkpoint(base.next_digest)).pieces(0, size)
    velocity: Iterable[memoryview] = zeros(layout.nbytes, size)
    if base.momentum_digest is not None:
        velocity = open_checkpoint(directory.momentum_of(base.momentum_digest)).pieces(0, size)
    with ExitStack() as opened:
        rounds = []
        for record in later:
            sums = sum_pieces(directory.sum(record.field_sum_digest or Digest("")), layout, size)
            rounds.append(_Round(record, workload, layout, opened.enter_context(closing(sums))))
        pool = opened.enter_context(ThreadPoolExecutor(os.cpu_count(), "replay"))
        done = 0
        for parameters, before in zip(start, velocity, strict=True):
            w = np.frombuffer(parameters, dtype=np.float32).copy()
            v = np.frombuffer(before, dtype=np.float32).copy()
            hashing = [future for each in rounds for future in each.advance(w, v, pool)]
            for future in hashing:
                future.result()
            done += len(parameters)
            yield done
        for each in rounds:
            yield each.result()
