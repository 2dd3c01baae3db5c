"""From a revealed sum to the next global state, durable and checked before it is named.

The order is what makes it safe::

    sum on disk -> next parameters and momentum on disk, read back -> one ledger record, which
    is the commit -> what need not be kept is retired in the ledger, then deleted

A crash before the record leaves orphans, which ``sweep`` removes; a crash after it loses nothing.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from lensemble.blob import SumDigest
from lensemble.checkpoint import (
    CheckpointWriter,
    Lineage,
    open_checkpoint,
    sweep_orphans,
)
from lensemble.errors import CheckpointIntegrityError
from lensemble.files import PIECE_BYTES
from lensemble.ids import Digest
from lensemble.outer_step import OuterStep, step_terms
from lensemble.params import PARAMETER_BYTES, FlatParameters, ParameterDigest, ParamLayout
from lensemble.secagg.plan import FieldPlan
from lensemble.secagg.scale import Moments, next_code, why_wide
from lensemble.workload import Workload
from lensemble_coord.training.aggregate import SUM_SUFFIX, Part, sum_parts
from lensemble_coord.training.directory import StateDirectory
from lensemble_coord.training.lanes import Lanes
from lensemble_coord.training.ledger import Ledger
from lensemble_coord.training.record import GENESIS_ROUND
from lensemble_coord.training.rows import ArtifactKind

STEP_BYTES = PIECE_BYTES // 2
"""Of a piece; three of each of five vectors are held, and stay in the heap from round to round."""
PIECE_WORDS = STEP_BYTES // PARAMETER_BYTES
KINDS: tuple[ArtifactKind, ...] = ("weights", "momentum", "sum")


class StepInputs(msgspec.Struct, frozen=True):
    """Everything the outer step of one round depends on; no momentum means zeros."""

    round_index: int
    prior_digest: Digest
    prior_momentum_digest: Digest | None
    field_sum_digest: Digest
    contributors: int
    plan: bytes = b""
    """Of the words of the sum, as ``FieldPlan`` takes it."""


class Prepared(msgspec.Struct, frozen=True):
    """A step whose results are durable and not committed yet."""

    next_digest: Digest
    momentum_digest: Digest
    next_plan: bytes = b""
    """Of the words of the round that follows."""


def zeros(nbytes: int, piece_bytes: int = PIECE_BYTES) -> Iterator[memoryview]:
    """The momentum before the first round, in pieces."""
    piece = memoryview(bytes(min(nbytes, piece_bytes)))
    for start in range(0, nbytes, piece_bytes):
        yield piece[: nbytes - start]


def apply_outer_step(
    directory: StateDirectory, workload: Workload, layout: ParamLayout, inputs: StepInputs
) -> Prepared:
    """Take the outer step and write its results as checkpoints; the global state does not move.

    Every input is hashed as it is used, and every piece of the results is read back from its file
    and compared with what the step came to.

    Raises:
        CheckpointIntegrityError: an input does not have its digest, or a result is not what a file
            gives back.
        AggregationError: nobody contributed, or the result is not finite.
        StorageError: the file system refuses.
    """
    weights_of = Lineage("weights", inputs.round_index, workload.digest, inputs.prior_digest)
    momentum_of = Lineage(
        "momentum", inputs.round_index, workload.digest, inputs.prior_momentum_digest
    )
    plan = FieldPlan(layout, workload.room, inputs.plan)
    moments = Moments(plan) if not why_wide(workload) else None
    with (
        CheckpointWriter(directory.checkpoints, layout, weights_of) as weights,
        CheckpointWriter(directory.momentum, layout, momentum_of) as momentum,
        Lanes(3, "outer-step") as lanes,
    ):
        read = _Inputs(directory, plan, inputs, lanes.kept)
        step = _Step(workload, plan, inputs.contributors, lanes.kept)
        for parameters, before, part in read.pieces():
            w, v = step.take(parameters, before, part)
            lanes.give(
                partial(_through, read.prior, parameters, weights, w, part),
                partial(_through, read.momentum, before, momentum, v, part),
                partial(_look_at_sum, read.total, moments, part),
            )
        lanes.finish()
        read.require_digests()
        next_digest, momentum_digest = _both(weights.commit, momentum.commit)
    open_checkpoint(directory.checkpoint(next_digest))
    open_checkpoint(directory.momentum_of(momentum_digest))
    next_plan = b"" if moments is None else next_code(moments, inputs.contributors)
    return Prepared(next_digest, momentum_digest, next_plan)


def _through(
    read: ParameterDigest,
    used: memoryview,
    written: CheckpointWriter,
    result: FlatParameters,
    part: Part,
) -> None:
    """Hash a piece of a vector as it was, and put it down as it is after the step."""
    read.update(used)
    written.write(part.first * PARAMETER_BYTES, result.data.cast("B"))


def _look_at_sum(digest: SumDigest, moments: Moments | None, part: Part) -> None:
    digest.update(part.raw)
    if moments is not None:
        moments.include(*part)


def _both(one: Callable[[], Digest], other: Callable[[], Digest]) -> tuple[Digest, Digest]:
    """The results of two calls that mostly wait for the disk."""
    with ThreadPoolExecutor(1, "commit") as beside:
        found = beside.submit(other)
        return one(), found.result()


class _Step:
    """Takes the step piece by piece, into vectors that stay until ``kept`` pieces later."""

    def __init__(self, workload: Workload, plan: FieldPlan, contributors: int, kept: int) -> None:
        self._plan = plan
        self._step = OuterStep(step_terms(workload, contributors), PIECE_WORDS)
        self._rooms = itertools.cycle(
            [np.empty((2, PIECE_WORDS), dtype=np.float32) for _ in range(kept)]
        )

    def take(
        self, parameters: memoryview, before: memoryview, part: Part
    ) -> tuple[FlatParameters, FlatParameters]:
        """Parameters and momentum after the step, from those before."""
        w, v = next(self._rooms)[:, : part.coordinates]
        np.copyto(w, np.frombuffer(parameters, dtype=np.float32))
        np.copyto(v, np.frombuffer(before, dtype=np.float32))
        self._step.apply_planned(w, v, self._plan, part.first, part.raw)
        return w, v


class _Inputs:
    """The three vectors that go into a step, piece by piece, and the digests of what was used.

    A piece is valid until the ``kept``-th after it.
    """

    def __init__(
        self, directory: StateDirectory, plan: FieldPlan, inputs: StepInputs, kept: int
    ) -> None:
        layout = plan.layout
        self._inputs = inputs
        state = open_checkpoint(directory.checkpoint(inputs.prior_digest))
        self._parameters = state.pieces(0, STEP_BYTES, kept)
        self._velocity: Iterable[memoryview] = zeros(layout.nbytes, STEP_BYTES)
        if inputs.prior_momentum_digest is not None:
            before = open_checkpoint(directory.momentum_of(inputs.prior_momentum_digest))
            self._velocity = before.pieces(0, STEP_BYTES, kept)
        self._sums = sum_parts(directory.sum(inputs.field_sum_digest), plan, PIECE_WORDS, kept)
        self.prior = ParameterDigest(layout)
        self.momentum = ParameterDigest(layout)
        self.total = SumDigest(plan)

    def pieces(self) -> Iterator[tuple[memoryview, memoryview, Part]]:
        """Parameters, momentum and sum."""
        return zip(self._parameters, self._velocity, self._sums, strict=True)

    def require_digests(self) -> None:
        """All pieces were used: they must have been those that the inputs name.

        Raises:
            CheckpointIntegrityError: one of the vectors does not have its digest.
        """
        momentum = self.momentum.hexdigest()
        for name, found, due in (
            ("prior parameters", self.prior.hexdigest(), self._inputs.prior_digest),
            ("prior momentum", momentum, self._inputs.prior_momentum_digest or momentum),
            ("field sum", self.total.hexdigest(), self._inputs.field_sum_digest),
        ):
            if found != due:
                raise CheckpointIntegrityError(
                    f"the {name} of round {self._inputs.round_index} have the digest {found} on "
                    f"disk, not {due}"
                )


# ---- what is kept ----


class Retention(msgspec.Struct, frozen=True):
    """Rounds, counted back from the newest; ``keep_every`` 0 keeps no older checkpoint for good."""

    keep_last: int
    keep_every: int
    verify_keep_rounds: int


class Kept(msgspec.Struct, frozen=True):
    """Rounds of which each kind of artifact stays."""

    weights: frozenset[int]
    momentum: frozenset[int]
    sums: frozenset[int]


def kept_rounds(newest: int, retention: Retention, restorable: Collection[int]) -> Kept:
    """What to keep when ``newest`` is the last committed round.

    The outer steps of the last ``verify_keep_rounds`` rounds are recomputed from one older state,
    the base, and the sums since; so a base is kept with its momentum, and the sums after it.  The
    base is one of ``restorable``, the rounds whose parameters and momentum are both there.
    """
    before = newest - retention.verify_keep_rounds
    base = max((each for each in restorable if each <= before), default=min(restorable))
    every = retention.keep_every or max(retention.verify_keep_rounds, 1)
    later_bases = {each for each in restorable if each >= base and each % every == 0}
    states = {base, *later_bases, *range(newest - retention.keep_last + 1, newest + 1)}
    forever = range(0, newest + 1, retention.keep_every) if retention.keep_every else ()
    return Kept(
        weights=frozenset(states | set(forever)),
        momentum=frozenset(states),
        sums=frozenset(range(base + 1, newest + 1)),
    )


def retire(directory: StateDirectory, ledger: Ledger, retention: Retention) -> int:
    """Retire and delete what ``retention`` does not keep; returns the number of artifacts.

    Raises:
        StorageError: the file system refuses.
    """
    present = {kind: ledger.present(kind) for kind in KINDS}
    restorable = [
        each for each in present["weights"] if each in {GENESIS_ROUND, *present["momentum"]}
    ]
    kept = kept_rounds(ledger.tail().round, retention, restorable)
    stays = {"weights": kept.weights, "momentum": kept.momentum, "sum": kept.sums}
    count = 0
    for kind in KINDS:
        gone = [each for each in present[kind] if each not in stays[kind]]
        if gone:
            ledger.retire(kind, gone)
            count += len(gone)
    if count:
        sweep(directory, ledger)
    return count


def named(directory: StateDirectory, ledger: Ledger) -> Iterator[tuple[Path, set[str]]]:
    """Each directory that the ledger accounts for, with the names in it that it holds."""
    yield directory.checkpoints, set(ledger.present("weights").values())
    yield directory.momentum, set(ledger.present("momentum").values())
    yield directory.manifests, {directory.manifest(each.run).name for each in ledger.runs()}
    yield directory.sums, {digest + SUM_SUFFIX for digest in ledger.present("sum").values()}


def orphans(directory: StateDirectory, ledger: Ledger) -> tuple[str, ...]:
    """Names under the state directory that the ledger does not name, relative to its root."""
    found = []
    for place, keep in named(directory, ledger):
        if place.is_dir():
            found += [
                f"{place.name}/{entry.name}"
                for entry in sorted(place.iterdir())
                if entry.name not in keep
            ]
    return tuple(found)


def sweep(directory: StateDirectory, ledger: Ledger) -> tuple[str, ...]:
    """Remove what a crash left and the ledger does not name; returns the names.

    Nothing may be under way in the directory: no spool open, no step being taken.

    Raises:
        StorageError: the file system refuses.
    """
    removed = []
    for place, keep in named(directory, ledger):
        removed += [f"{place.name}/{name}" for name in sweep_orphans(place, keep)]
    return tuple(removed)
