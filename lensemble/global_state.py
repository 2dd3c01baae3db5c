"""What the two facades speak of: the state a round starts from, and what comes out of a node."""

import msgspec
import numpy as np
from numpy.typing import NDArray

from lensemble.ids import Digest


class GlobalState(msgspec.Struct, frozen=True):
    """The committed parameters, by reference, and what fixes the next round.

    ``round_index`` is the round that starts from ``digest``; ``sketch_seed`` is its shared seed;
    ``probe_hash`` is None while the objective has no anchor.
    """

    digest: Digest
    round_index: int
    sketch_seed: int
    config_hash: Digest
    layout_digest: Digest
    probe_hash: Digest | None = None


class PseudoGradient(msgspec.Struct, frozen=True):
    """One released update, local minus global, as it would leave its node.

    ``field`` is uint32 of shape (layout.size,), the integer encoding of ``delta``; ``l2_norm`` is
    the norm of the released vector in float32.
    """

    field: NDArray[np.uint32]
    digest: Digest
    l2_norm: float
    dataset_root: Digest
    round_index: int
