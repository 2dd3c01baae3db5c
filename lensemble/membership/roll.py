"""The members that are known, in order, and whose turn it is."""

from bisect import bisect_left, insort

from lensemble.errors import InvariantError
from lensemble.ids import NodeId
from lensemble.membership.draw import Draw
from lensemble.membership.record import Record
from lensemble.wire.fence import MAX_PARTICIPANTS
from lensemble.wire.membership import Standing

MAX_MEMBERS = MAX_PARTICIPANTS + 1
"""The nodes of a roster and the coordinator."""

_FEW = 4
"""Times the wanted number: so many are drawn, or all of them are shuffled."""


class Roll:
    """Records by node; the present in sorted order; a seeded order in which they are visited."""

    def __init__(self, draw: Draw) -> None:
        self.records: dict[NodeId, Record] = {}
        self.present: list[NodeId] = []
        """Those that take part, alive or suspect, sorted."""
        self._dead: list[NodeId] = []
        self._order: list[NodeId] = []
        """Who is still to be visited in this turn, the next one last."""
        self._draw = draw

    def add(self, node: NodeId, now: float) -> None:
        """Know ``node``, and visit it at some moment of this turn.

        Raises:
            InvariantError: there are ``MAX_MEMBERS`` already.
        """
        if len(self.records) >= MAX_MEMBERS:
            raise InvariantError(
                f"a member beyond the limit of {MAX_MEMBERS}: {node}",
                "Forget those who do not belong to the federation.",
            )
        self.records[node] = Record(node, now)
        insort(self.present, node)
        self._order.insert(self._draw.below(len(self._order) + 1), node)

    def remove(self, node: NodeId) -> None:
        del self.records[node]
        for nodes in (self.present, self._dead):
            _discard(nodes, node)
        if node in self._order:
            self._order.remove(node)

    def moved(self, record: Record) -> None:
        """The standing of ``record`` is another one."""
        node = record.node
        for nodes, belongs in (
            (self.present, record.present),
            (self._dead, record.standing is Standing.DEAD),
        ):
            _discard(nodes, node)
            if belongs:
                insort(nodes, node)

    def next(self, busy: frozenset[NodeId] | set[NodeId]) -> Record | None:
        """Whose turn it is among the present who are not ``busy``; None if there is none."""
        for _ in range(2):
            while self._order:
                record = self.records.get(self._order.pop())
                if record is not None and record.present and record.node not in busy:
                    return record
            self._order = self._draw.shuffled(self.present)
        return None

    def some(self, most: int, apart_from: NodeId | None = None) -> list[NodeId]:
        """Up to ``most`` members drawn from those held for alive."""
        present, chosen = self.present, list[NodeId]()
        if len(present) <= _FEW * most:
            candidates = self._draw.shuffled(present)
        else:
            count = len(present)
            candidates = [present[self._draw.below(count)] for _ in range(_FEW * most)]
        for node in candidates:
            alive = self.records[node].standing is Standing.ALIVE
            if alive and node != apart_from and node not in chosen:
                chosen.append(node)
                if len(chosen) == most:
                    break
        return chosen

    @property
    def dead_count(self) -> int:
        return len(self._dead)

    def dead(self) -> Record | None:
        """One of the dead."""
        if not self._dead:
            return None
        return self.records[self._dead[self._draw.below(len(self._dead))]]


def _discard(nodes: list[NodeId], node: NodeId) -> None:
    place = bisect_left(nodes, node)
    if place < len(nodes) and nodes[place] == node:
        del nodes[place]
