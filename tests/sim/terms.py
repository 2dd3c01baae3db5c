"""The terms of the federations that live in the worlds: a small no-op workload."""

from lensemble.ids import FederationId, NodeId
from lensemble.workload import NoopTask, Workload, layout

COORDINATOR = NodeId("c0" * 32)
FEDERATION = FederationId("fe" * 16)
WORKLOAD = Workload(name="noop", root_seed=5, task=NoopTask(parameters=750))
CANONICAL = WORKLOAD.canonical()
CONFIG_HASH = WORKLOAD.digest
LAYOUT = layout(WORKLOAD)
CAPACITY_BYTES = 1 << 12
SLOTS = 2
