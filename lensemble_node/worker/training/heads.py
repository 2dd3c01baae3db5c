"""A node's action heads in one set of arrays, each embodiment's under its own name.

A node may go over to data of another embodiment and back: the head of each, and the moments of its
optimiser, stay as they were, while moments of shared parameters go on.  Names of the embodiment
without a label are bare; those of another begin with the label and a slash.
"""

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from lensemble_node.worker.training.inner_loop import LocalState

Arrays: TypeAlias = Mapping[str, NDArray[np.float32]]
_HEAD = "head."


def mine(head: Arrays, optimizer: Arrays, batches: int, embodiment: str) -> LocalState:
    """What of the stored arrays a learner of ``embodiment`` starts from; no head, a fresh one."""
    start = _prefix(embodiment)
    shared = {name: each for name, each in optimizer.items() if not _is_of_a_head(name)}
    moments = {
        name: optimizer[start + name]
        for name in (f"{_HEAD}{part}" for part in ("exp_avg", "exp_avg_sq", "step"))
        if start + name in optimizer
    }
    own = {
        name.removeprefix(start): each
        for name, each in head.items()
        if name.rpartition("/")[0] == embodiment
    }
    return LocalState(own, shared | moments, batches)


def with_others(
    kept: LocalState, head: Arrays, optimizer: Arrays, embodiment: str
) -> tuple[dict[str, NDArray[np.float32]], dict[str, NDArray[np.float32]]]:
    """Head and optimiser arrays to store: ``kept``, and what other embodiments had before."""
    start = _prefix(embodiment)
    heads = {n: each for n, each in head.items() if n.rpartition("/")[0] != embodiment}
    heads |= {start + name: each for name, each in kept.head.items()}
    moments = {
        n: each
        for n, each in optimizer.items()
        if _is_of_a_head(n) and n.rpartition("/")[0] != embodiment
    }
    for name, each in kept.optimizer.items():
        moments[start + name if name.startswith(_HEAD) else name] = each
    return heads, moments


def _prefix(embodiment: str) -> str:
    return f"{embodiment}/" if embodiment else ""


def _is_of_a_head(name: str) -> bool:
    return name.rpartition("/")[2].startswith(_HEAD)
