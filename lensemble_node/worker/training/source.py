"""Where a node's data is, as its configuration says it."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class DataSource:
    """A file of trajectories.

    Without ``observation_keys``, every float vector among the observations is used, keys sorted.
    """

    path: Path
    observation_keys: tuple[str, ...] = ()
    embodiment: str = ""
