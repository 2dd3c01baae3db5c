"""Nodes that may not come back, whatever they show: a lost key, an agreement that ended."""

from lensemble_coord.node_list import NodeList


class Revocations(NodeList):
    """The revoked nodes of a coordinator."""

    FILE, STATE, VERB = "revoked.json", "revoked", "revoke"
