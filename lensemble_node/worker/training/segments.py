"""A run of inner steps, and what is said of it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Segment:
    """``steps`` steps from ``global_step`` on, under the sketch of ``sketch_seed``.

    ``stream`` names another sequence of batches than the node's usual one.
    """

    steps: int
    global_step: int
    sketch_seed: int
    stream: str = ""


@dataclass(frozen=True)
class Losses:
    first: float
    last: float
