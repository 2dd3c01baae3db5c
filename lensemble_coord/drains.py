"""Nodes that an operator wants to be left alone: durable, until that is taken back.

A drained node holds what it holds and finishes what it is at; it gets no further stages and is not
expected in rounds that open later.
"""

from lensemble.ids import NodeId
from lensemble_coord.node_list import NodeList

BARRED = "it is drained"


class Drains(NodeList):
    """The drained nodes of a coordinator."""

    FILE, STATE, VERB = "drained.json", "drained", "drain"

    def why(self, node: NodeId) -> str:
        """Why nothing is to be placed on ``node``; empty if something may."""
        return BARRED if node in self.nodes else ""
