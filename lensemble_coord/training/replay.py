"""Recomputes outer steps bit for bit from one state and the sums since, in one pass of pieces.

The step treats every parameter by itself, so a piece is taken through all rounds before the next is
read: nothing is held but one piece of each sum, and no state in between needs to be on disk.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing

import msgspec
import numpy as np

from lensemble.checkpoint import open_checkpoint
from lensemble.ids import Digest
from lensemble.params import FlatParameters, ParameterDigest, ParamLayout
from lensemble.workload import Workload
from lensemble_coord.training.aggregate import sum_pieces
from lensemble_coord.training.commit import zeros
from lensemble_coord.training.directory import StateDirectory
from lensemble_coord.training.outer_optimizer import OuterStep, step_terms
from lensemble_coord.training.record import ContributionRecord


class Replayed(msgspec.Struct, frozen=True):
    """What one round came to; compare with its record."""

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
        self._step = OuterStep(step_terms(workload, record.c_t))
        self._pieces = pieces
        self._weights = ParameterDigest(layout)
        self._momentum = ParameterDigest(layout)

    def advance(self, w: FlatParameters, v: FlatParameters) -> None:
        """Take one piece of parameters and momentum (float32) through this round, in place."""
        words = next(self._pieces)
        self._step.apply(w, v, np.frombuffer(words, dtype=np.uint32))
        self._weights.update(w.data.cast("B"))
        self._momentum.update(v.data.cast("B"))

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
    start = open_checkpoint(directory.checkpoint(base.next_digest)).pieces()
    velocity: Iterable[memoryview] = zeros(layout.nbytes)
    if base.momentum_digest is not None:
        velocity = open_checkpoint(directory.momentum_of(base.momentum_digest)).pieces()
    with ExitStack() as opened:
        rounds = []
        for record in later:
            sums = sum_pieces(directory.sum(record.field_sum_digest or Digest("")), layout)
            rounds.append(_Round(record, workload, layout, opened.enter_context(closing(sums))))
        done = 0
        for parameters, before in zip(start, velocity, strict=True):
            w = np.frombuffer(parameters, dtype=np.float32).copy()
            v = np.frombuffer(before, dtype=np.float32).copy()
            for each in rounds:
                each.advance(w, v)
            done += len(parameters)
            yield done
        for each in rounds:
            yield each.result()
