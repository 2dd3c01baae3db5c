"""What a run is told when it begins, and what it remembers of the plans it has left."""

from collections.abc import Awaitable, Callable

import msgspec

from lensemble.ctl.replies import Replacement
from lensemble.ids import NodeId
from lensemble_coord.inference import staging, survival
from lensemble_coord.inference.placement import Plan
from lensemble_coord.inference.staging import Fault
from lensemble_coord.inference.wiring import Material

MAX_REPLACED = 64
"""Plans that were left and are still told of."""

Replan = Callable[[frozenset[NodeId]], Awaitable[Plan]]
"""Plans the same again, without these nodes."""

Keep = Callable[[str], Awaitable[None]]
"""Makes durable where the run of this id is, before any node hears of it."""


class Terms(msgspec.Struct, frozen=True):
    """What a run is: its id, its model, its first plan, and what it does when a stage is lost.

    ``ground`` is where it stands before its first plan here; its epoch is that of the last plan
    that an earlier process carried out; ``before`` is what that one told of its plans.
    """

    run: str
    model: Material
    plan: Plan
    ground: survival.Ground
    rules: staging.Rules
    replan: Replan
    keep: Keep
    before: tuple[Replacement, ...] = ()


class Left(msgspec.Struct):
    """A plan that was replaced, and how long that took; seconds count from the loss."""

    run_epoch: int
    plan: Plan
    fault: Fault | None
    reason: str
    at: float
    dropped: NodeId | None = None
    teardown: staging.Teardown | None = None
    complaints: tuple[str, ...] = ()
    cleared_s: float | None = None
    planned_s: float | None = None
    ready_s: float | None = None
