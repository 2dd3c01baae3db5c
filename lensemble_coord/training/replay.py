"""Recomputes outer steps bit for bit from one state and the sums since, in one pass of pieces.

The step treats every parameter by itself, so a piece is taken through all rounds before the next is
read: nothing is held but one piece of each vector, and no state in between needs to be on disk.
Hashing is nearly all of the work, and is spread over threads.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import pairwise

import msgspec
import numpy as np

from lensemble.checkpoint import open_checkpoint
from lensemble.ids import Digest
from lensemble.outer_step import OuterStep, step_terms
from lensemble.params import PARAMETER_BYTES, FlatParameters, ParameterDigest, ParamLayout
from lensemble.secagg.plan import FieldPlan
from lensemble.secagg.scale import Moments, next_code
from lensemble.workload import Workload
from lensemble_coord.training.aggregate import Part, sum_parts
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
    next_plan: bytes | None = None
    """Of the words of the round that follows; None where the record leaves it at 32 bits."""


class _Round:
    """One round on the way: its step, the pieces of its sum, running digests."""

    def __init__(
        self,
        record: ContributionRecord,
        workload: Workload,
        plan: FieldPlan,
        parts: Iterator[Part],
    ) -> None:
        layout = plan.layout
        self.round = record.round
        self._count = record.c_t
        self._plan = plan
        self._moments = Moments(plan) if record.following else None
        self._adopted = not record.refusal
        self._step = OuterStep(step_terms(workload, record.c_t), PIECE_WORDS)
        self._parts = parts
        self._weights = ParameterDigest(layout)
        self._momentum = ParameterDigest(layout)

    def advance(
        self, w: FlatParameters, v: FlatParameters, pool: ThreadPoolExecutor
    ) -> tuple["Future[None]", ...]:
        """Take one piece of parameters and momentum (float32) through this round, in place.

        Of a round whose step was rejected they stay as they are.  What comes back is done once
        the piece is hashed; wait for it before the next piece.
        """
        if not self._adopted:
            w, v = w.copy(), v.copy()
        part = next(self._parts)
        self._step.apply_planned(w, v, self._plan, part.first, part.raw)
        hashing = (
            pool.submit(self._weights.update, memoryview(w.tobytes())),
            pool.submit(self._momentum.update, memoryview(v.tobytes())),
        )
        if self._moments is None:
            return hashing
        return (*hashing, pool.submit(self._moments.include, *part))

    def result(self) -> Replayed:
        plan = None if self._moments is None else next_code(self._moments, self._count)
        return Replayed(self.round, self._weights.hexdigest(), self._momentum.hexdigest(), plan)


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
        for before_it, record in pairwise((base, *later)):
            plan = FieldPlan(layout, workload.room, before_it.following)
            named = directory.sum(record.field_sum_digest or Digest(""))
            parts = opened.enter_context(closing(sum_parts(named, plan, PIECE_WORDS)))
            rounds.append(_Round(record, workload, plan, parts))
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
