"""From trained weights to what leaves the node.

The order is fixed: guard, stages on the full weights (gauge alignment belongs there), difference to
the prior, stages on the difference (clip, noise, quantise, in this order); what comes of it is
encoded by ``words``.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from lensemble.errors import ContractViolation, ResidencyViolation
from lensemble.params import FlatParameters, ParamLayout

Stage: TypeAlias = Callable[[FlatParameters], FlatParameters]
_PIECE = 1 << 18


@dataclass(frozen=True)
class Pipeline:
    """Stages by what they act on, flat float32 vectors in layout order; each group in its order."""

    on_weights: tuple[Stage, ...] = ()
    on_difference: tuple[Stage, ...] = ()

    def released(self, difference: FlatParameters) -> "Difference":
        """``difference`` (float32, flat; may be written to) as it is to be encoded."""
        for stage in self.on_difference:
            difference = stage(difference)
        extent = Extent()
        for start in range(0, len(difference), _PIECE):
            extent.include(difference[start : start + _PIECE])
        return Difference(difference, extent)


@dataclass
class Extent:
    """Norm and peak of a vector measured piece by piece, in float64."""

    square: float = 0.0
    max_abs: float = 0.0

    def include(self, piece: FlatParameters) -> None:
        self.square += float(np.square(piece, dtype=np.float64).sum())
        peak = max(float(piece.max(initial=0.0)), -float(piece.min(initial=0.0)))
        self.max_abs = max(self.max_abs, peak)

    @property
    def l2_norm(self) -> float:
        return float(np.sqrt(self.square))


@dataclass(frozen=True)
class Difference:
    """What is to be released (float32, shape ``(size,)``), and its extent."""

    values: FlatParameters
    extent: Extent

    def pieces(self) -> Iterator[FlatParameters]:
        """The values in order, as views."""
        for start in range(0, len(self.values), _PIECE):
            yield self.values[start : start + _PIECE]


def gather(named: Mapping[str, FlatParameters], layout: ParamLayout) -> FlatParameters:
    """The tensors of ``named`` as one flat vector in layout order; nothing else can be in it.

    Raises:
        ResidencyViolation: a tensor that the layout does not name, such as an action head's.
        ContractViolation: a tensor of the layout missing or of another shape.
    """
    for name in named:
        if all(name != tensor.name for tensor in layout.tensors):
            raise ResidencyViolation(f"tensor {name!r} is not federated and must stay on this node")
    flat = np.empty(layout.size, dtype=np.float32)
    for tensor in layout.tensors:
        value = named.get(tensor.name)
        if value is None or value.shape != tensor.shape or value.dtype != np.float32:
            found = "missing" if value is None else f"{value.dtype} of {value.shape}"
            raise ContractViolation(f"tensor {tensor.name!r} is {found}, not {tensor.shape}")
        flat[tensor.offset : tensor.offset + tensor.size] = value.ravel()
    return flat


def release(
    named: Mapping[str, FlatParameters],
    prior: FlatParameters,
    layout: ParamLayout,
    pipeline: Pipeline | None = None,
) -> Difference:
    """What a node may send of its trained tensors ``named``, given the round's ``prior``.

    Raises:
        ResidencyViolation, ContractViolation: as ``gather``.
    """
    stages = pipeline or Pipeline()
    flat = gather(named, layout)
    for stage in stages.on_weights:
        flat = stage(flat)
    # Again against the prior, whatever the stages did to the weights.
    np.subtract(flat, prior, out=flat)
    return stages.released(flat)
