"""Updates that wait to travel on other messages: the least told first, each a few times."""

import math
from itertools import islice

from lensemble.ids import NodeId
from lensemble.wire.membership import Update

SPREAD = 4
"""Each update is told this many times for each decimal digit of the number of members."""


class Rumours:
    """At most one update about each member, the latest."""

    __slots__ = ("_told", "_waiting", "_where")

    def __init__(self) -> None:
        self._where: dict[NodeId, int] = {}
        """How often what is waiting about a member was told."""
        self._waiting: list[dict[NodeId, Update]] = [{}]
        """By how often they were told, and in each the newest last: it is told first."""
        self._told = 1

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, node: NodeId) -> bool:
        return node in self._where

    def resize(self, members: int) -> None:
        """From here on updates are told as often as this many members need."""
        self._told = SPREAD * math.ceil(math.log10(members + 1))
        while len(self._waiting) < self._told:
            self._waiting.append({})

    def add(self, update: Update) -> None:
        """Tell ``update`` from the start, and no more what was to be told of its member."""
        self.drop(update.node)
        self._where[update.node] = 0
        self._waiting[0][update.node] = update

    def drop(self, node: NodeId) -> None:
        told = self._where.pop(node, None)
        if told is not None:
            del self._waiting[told][node]

    def take(self, most: int, to: NodeId) -> list[Update]:
        """Up to ``most`` updates to tell ``to``, who needs none about itself."""
        taken: list[Update] = []
        if not self._where:
            return taken
        for waiting in self._waiting:
            if waiting:
                # One more than is wanted, in case ``to`` is among them.
                for node in islice(reversed(waiting), most - len(taken) + 1):
                    if node != to and len(taken) < most:
                        taken.append(waiting[node])
                if len(taken) == most:
                    break
        for update in taken:
            self._count(update)
        return taken

    def _count(self, update: Update) -> None:
        node = update.node
        told = self._where[node]
        del self._waiting[told][node]
        if told + 1 < self._told:
            self._where[node] = told + 1
            self._waiting[told + 1][node] = update
        else:
            del self._where[node]
