"""The same federation twice: through the daemons, masked, and in one process; digests compared.

The daemons are the product's own, over an in-process network, with real worker processes; run by
``learning.py --daemons``.
"""

import time
from pathlib import Path
from typing import Any

import trio

from lensemble import identity
from lensemble.config import commented
from lensemble.params import FlatParameters
from lensemble.state_dir import IDENTITY_NAME
from lensemble.transport.memory_driver import MemoryNetwork
from lensemble.workload import Workload
from lensemble_coord.config import CoordinatorConfig, RoundsSection
from lensemble_local import rounds
from lensemble_local.simulate import Simulated, simulate
from lensemble_node.config import DataSection, NodeConfig
from lensemble_node.worker.training import baseline


def _identity(place: Path) -> str:
    place.mkdir(mode=0o700, parents=True)
    return str(identity.load_or_create(place / IDENTITY_NAME).node)


def compare(
    place: Path, workload: Workload, data: list[Path], warm: FlatParameters, count: int
) -> dict[str, Any]:
    """``count`` rounds both ways from ``warm``: digests, whether equal, seconds; parameters too."""
    hub = place / "coordinator"
    _identity(hub)
    members = {_identity(place / f"node-{index}"): path for index, path in enumerate(data)}
    (place / "workload.toml").write_text(
        commented(Workload, "A workload of a benchmark.", workload.model_dump(mode="json"))
    )
    start = place / "warm.safetensors"
    baseline.write_parameters(start, workload, warm)
    coordinator = CoordinatorConfig(
        state_dir=hub,
        workload=place / "workload.toml",
        warm_start=start,
        rounds=RoundsSection(aggregation="masked", min_participants=len(data)),
    )
    nodes = [
        NodeConfig(
            name=f"node-{index}",
            state_dir=place / f"node-{index}",
            data=DataSection(path=path),
        )
        for index, path in enumerate(data)
    ]
    began = time.perf_counter()
    ended: Simulated = trio.run(simulate, coordinator, nodes, count, MemoryNetwork(seed=0))
    federated_s = time.perf_counter() - began
    alone = rounds.Federation(
        workload, rounds.trainers(workload, members, place / "in-process"), warm
    )
    for _ in range(count):
        alone.round()
    return {
        "daemons": ended.digest,
        "in_process": alone.digest,
        "equal": ended.digest == alone.digest and ended.completed,
        "contributors": list(ended.contributors_per_round),
        "aggregation": coordinator.rounds.aggregation,
        "daemons_s": round(federated_s, 1),
        "parameters": alone.parameters,
    }
