"""The participants of one attempt, as all of them must see it."""

import hashlib
from collections.abc import Mapping

from lensemble.errors import ContractViolation
from lensemble.ids import Digest, NodeId
from lensemble.secagg.graph import degree, neighbourhoods, quorum
from lensemble.secagg.keys import Context, PublicKeys, node_bytes, tagged

MIN_PARTICIPANTS = 2
MAX_PARTICIPANTS = 4096
_MAX_SEED = (1 << 63) - 1


class Roster:
    """Nodes with their public keys, the threshold, and who masks with whom.

    ``threshold`` is how many must be present at the end for a sum to be revealed; ``quorum`` how
    many of one node's holders reconstruct its secret.  ``digest`` covers all of it, and is bound
    into every encrypted share: participants who were shown different rosters cannot go on.

    Args:
        context: the attempt.
        keys: what each participant published; the caller has verified the signatures.
        threshold: above half of the participants.
        round_seed: public, 0 to 2**63 - 1; the graph is drawn from it and from all the keys, so
            that nobody knows it before the last participant has committed itself.

    Raises:
        ContractViolation: too few or too many nodes, no majority, a malformed id or seed.
        MaskingFault: names the node whose keys are not usable.
    """

    def __init__(
        self,
        context: Context,
        keys: Mapping[NodeId, PublicKeys],
        threshold: int,
        round_seed: int,
    ) -> None:
        size = len(keys)
        if not MIN_PARTICIPANTS <= size <= MAX_PARTICIPANTS:
            raise ContractViolation(
                f"masks need {MIN_PARTICIPANTS} to {MAX_PARTICIPANTS} participants, not {size}"
            )
        if not size < 2 * threshold <= 2 * size:
            raise ContractViolation(
                f"a threshold of {threshold} among {size} participants; "
                f"it must be {size // 2 + 1} to {size}"
            )
        if not 0 <= round_seed <= _MAX_SEED:
            raise ContractViolation(f"{round_seed} is no seed of a round")
        self.context = context
        self.nodes = tuple(sorted(keys))
        self.keys = {node: keys[node] for node in self.nodes}
        self.threshold = threshold
        self.quorum = quorum(size, threshold)
        self.digest = self._digest(round_seed)
        self._neighbours = neighbourhoods(self.nodes, bytes.fromhex(self.digest))
        self._holders: dict[NodeId, tuple[NodeId, ...]] = {}

    def _digest(self, round_seed: int) -> Digest:
        numbers = (self.threshold, round_seed, len(self.nodes))
        text = [tagged("roster", self.context, *(each.to_bytes(8, "big") for each in numbers))]
        for node, keys in self.keys.items():
            keys.check(node)
            text += (node_bytes(node), keys.mask_key, keys.share_key, keys.self_commitment)
        return Digest(hashlib.sha256(b"".join(text)).hexdigest())

    @property
    def degree(self) -> int:
        """Neighbours of each participant."""
        return degree(len(self.nodes))

    def neighbours(self, node: NodeId) -> tuple[NodeId, ...]:
        """Those ``node`` masks with, sorted, without itself.

        Raises:
            ContractViolation: it is not on the roster.
        """
        if node not in self._neighbours:
            raise ContractViolation(f"{node} is not on the roster of {self.context}")
        return self._neighbours[node]

    def holders(self, node: NodeId) -> tuple[NodeId, ...]:
        """Those who hold a share of the secrets of ``node``: its neighbours and itself, sorted.

        The relation is symmetric: it also lists those of whose secrets ``node`` holds a share.
        """
        # Asked for at every share, of which a node has dozens.
        if node not in self._holders:
            self._holders[node] = tuple(sorted((*self.neighbours(node), node)))
        return self._holders[node]
