"""The outer step: Nesterov momentum on the mean update, exactly rounded, piece by piece.

Every product and every sum is a ufunc call of its own, so that no compiler can fuse two of them
into one rounding: the same bits come out on every machine that has IEEE arithmetic.  Each element
depends on its own position only, so neither the size of the pieces nor the thread matters.

    m = float32(float64(int32(sum)) * 2**-k / C_t)
    v = mu * v + m
    W = W + eta * (m + mu * v)
"""

from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from lensemble.errors import AggregationError
from lensemble.params import FlatParameters
from lensemble.secagg.plan import FieldPlan
from lensemble.workload import Workload

PIECE_WORDS = 1 << 18
"""Parameters of one piece; small enough for the scratch of a step to stay in the cache."""

FieldWords = NDArray[np.uint32]
_Reals = NDArray[np.float32 | np.float64]


class StepTerms(msgspec.Struct, frozen=True):
    """What the step takes besides vectors: ``lr`` (eta), ``momentum`` (mu), field ``k``, C_t."""

    lr: float
    momentum: float
    dtype: Literal["fp32", "fp64"]
    k: int
    contributors: int


def step_terms(workload: Workload, contributors: int) -> StepTerms:
    """The terms of a round of ``workload`` with ``contributors`` summands.

    Raises:
        AggregationError: nobody contributed, or more than the field has room for.
    """
    if not 1 <= contributors <= workload.field.n_max:
        raise AggregationError(
            f"{contributors} contributors; the field takes 1 to {workload.field.n_max}"
        )
    outer = workload.outer
    return StepTerms(outer.lr, outer.momentum, outer.dtype, workload.field.k, contributors)


class OuterStep:
    """Applies one step to pieces of at most ``piece_words``; not shared between threads."""

    def __init__(self, terms: StepTerms, piece_words: int = PIECE_WORDS) -> None:
        self._real: type[np.float32 | np.float64] = (
            np.float32 if terms.dtype == "fp32" else np.float64
        )
        self._lr = self._real(terms.lr)
        self._momentum = self._real(terms.momentum)
        self._unit = np.float64(2.0**-terms.k)
        self._count = np.float64(terms.contributors)
        self._wide = np.empty(piece_words, dtype=np.float64)
        self._narrow = np.empty(piece_words, dtype=np.float32)
        self._move = np.empty(piece_words, dtype=self._real)
        wider = 0 if self._real is np.float32 else piece_words
        self._mean = np.empty(wider, dtype=self._real)
        self._velocity = np.empty(wider, dtype=self._real)
        self._weights = np.empty(wider, dtype=self._real)

    def mean(self, words: FieldWords) -> FlatParameters:
        """The mean update of ``words`` (uint32, at most a piece); valid until the next call."""
        wide = self._wide[: len(words)]
        np.copyto(wide, words.view(np.int32))
        np.multiply(wide, self._unit, out=wide)
        return self._divided(wide)

    def planned_mean(
        self, plan: FieldPlan, first: int, raw: memoryview, count: int
    ) -> FlatParameters:
        """The mean update of ``count`` coordinates from ``first`` on; valid until the next call.

        ``raw`` is the sum of ``plan`` from ``plan.byte_of(first)`` on.
        """
        wide = self._wide[:count]
        plan.decode(first, raw, wide)
        return self._divided(wide)

    def _divided(self, wide: NDArray[np.float64]) -> FlatParameters:
        narrow = self._narrow[: len(wide)]
        np.divide(wide, self._count, out=wide)
        np.copyto(narrow, wide, casting="same_kind")
        return narrow

    def apply(
        self, parameters: FlatParameters, velocity: FlatParameters, words: FieldWords
    ) -> None:
        """Advance one piece of ``parameters`` and ``velocity`` (float32) in place.

        Raises:
            AggregationError: a result is not finite.
        """
        self._advance(parameters, velocity, self.mean(words))

    def apply_planned(
        self,
        parameters: FlatParameters,
        velocity: FlatParameters,
        plan: FieldPlan,
        first: int,
        raw: memoryview,
    ) -> None:
        """As ``apply``, with the sum of ``plan`` from ``plan.byte_of(first)`` on.

        ``parameters`` begins with coordinate ``first``.

        Raises:
            AggregationError: a result is not finite.
        """
        self._advance(parameters, velocity, self.planned_mean(plan, first, raw, len(parameters)))

    def _advance(
        self, parameters: FlatParameters, velocity: FlatParameters, mean: FlatParameters
    ) -> None:
        size, wider = len(mean), self._real is not np.float32
        m: _Reals = mean
        v: _Reals = velocity
        w: _Reals = parameters
        if wider:
            m, v, w = self._mean[:size], self._velocity[:size], self._weights[:size]
            np.copyto(m, mean)
            np.copyto(v, velocity)
            np.copyto(w, parameters)
        move = self._move[:size]
        with np.errstate(over="ignore", invalid="ignore"):
            np.multiply(v, self._momentum, out=v)
            np.add(v, m, out=v)
            np.multiply(v, self._momentum, out=move)
            np.add(m, move, out=move)
            np.multiply(move, self._lr, out=move)
            np.add(w, move, out=w)
            if wider:
                np.copyto(velocity, v, casting="same_kind")
                np.copyto(parameters, w, casting="same_kind")
        if not (np.isfinite(parameters).all() and np.isfinite(velocity).all()):
            raise AggregationError(
                "the outer step leaves the range of float32",
                "Lower `outer.lr` or `outer.momentum` of the workload; its training diverges.",
            )
