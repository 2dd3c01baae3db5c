"""Who masks with whom: everybody up to 32 participants, few neighbours each above.

Above, the nodes stand in a circle in an order drawn from a public seed, and each takes the nearest
on both sides: a Harary graph, regular, symmetric and connected, as Bell et al. 2020 use it.
"""

import hashlib
from collections.abc import Iterable

from lensemble.ids import NodeId

COMPLETE_UP_TO = 32
MAX_HOLDERS = 73
"""Of the shares of one node, itself included, in the largest federation (4096 participants)."""


def degree(participants: int) -> int:
    """Neighbours of each of ``participants``: all others up to 32, about ``6 log2 n`` above.

    At the border both rules agree.  With it, a fifth of the nodes may drop out, or collude, and
    neighbourhoods with half of them gone stay improbable.
    """
    if participants <= COMPLETE_UP_TO:
        return participants - 1
    return 2 * ((participants**3).bit_length() - 1)


def neighbourhoods(nodes: Iterable[NodeId], seed: bytes) -> dict[NodeId, tuple[NodeId, ...]]:
    """The neighbours of each node, sorted and without itself; a function of set and ``seed``."""
    ordered = sorted(nodes)
    size, half = len(ordered), degree(len(ordered)) // 2
    if size <= COMPLETE_UP_TO:
        return {node: tuple(each for each in ordered if each != node) for node in ordered}
    circle = sorted(ordered, key=lambda node: hashlib.sha256(seed + node.encode()).digest())
    steps = [step for step in range(-half, half + 1) if step]
    return {
        node: tuple(sorted(circle[(place + step) % size] for step in steps))
        for place, node in enumerate(circle)
    }


def quorum(participants: int, threshold: int) -> int:
    """How many holders reconstruct a secret, if ``threshold`` of all must be present for a sum.

    In a neighbourhood: the same fraction of its holders, rounded up, and always a majority.
    """
    holders = degree(participants) + 1
    return max(holders // 2 + 1, -(-threshold * holders // participants))
