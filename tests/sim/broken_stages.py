"""Stages that are broken on purpose, to show that the checks of a model's life can fail."""

from typing import Any

from msgspec.structs import replace

from lensemble.machine import ArmTimer
from lensemble_coord.inference import staging
from lensemble_node import stage
from tests.sim.model_life import StageParts


def _keeps_rings(state: Any, event: Any) -> Any:
    """``stage`` that is not told that its coordinator is gone."""
    return (state, ()) if isinstance(event, stage.LinkGone) else stage.transition(state, event)


def _without(kind: type) -> Any:
    """``stage`` whose actions of ``kind`` are forgotten."""

    def transition(state: Any, event: Any) -> Any:
        after, actions = stage.transition(state, event)
        return after, tuple(each for each in actions if not isinstance(each, kind))

    return transition


def _answers_early(state: Any, event: Any) -> Any:
    """``stage`` that answers a teardown before it has let go."""
    after, actions = stage.transition(state, event)
    if isinstance(event, stage.Withdraw) and isinstance(after, stage.Draining):
        _, early = stage.transition(stage.Vacant(), event)
        return replace(after, told=()), (*actions, *early)
    return after, actions


def _forgets_its_newest(state: Any, event: Any) -> Any:
    """``stage`` that lets a newer plan begin beside the one that ends."""
    if isinstance(event, stage.Provide) and not isinstance(state, stage.Vacant):
        return stage.Leasing(event.order), (stage.Lease(event.order),)
    return stage.transition(state, event)


def _does_not_hear_of_losses(state: Any, event: Any) -> Any:
    """``staging`` that waits for nodes that are gone, and for no time."""
    if isinstance(event, staging.NodeLost):
        return state, ()
    return _never_expires(staging.TEARDOWN)(state, event)


def _never_expires(timer: str) -> Any:
    """``staging`` without this timer."""

    def transition(state: Any, event: Any) -> Any:
        after, actions = staging.transition(state, event)
        kept = (each for each in actions if not _arms(each, timer))
        return after, tuple(kept)

    return transition


def _arms(action: Any, timer: str) -> bool:
    return isinstance(action, ArmTimer) and action.timer == timer


def _changes_its_mind(state: Any, event: Any) -> Any:
    """``staging`` whose outcome is that of the last word."""
    after, actions = staging.transition(state, event)
    if isinstance(state, staging.Leaving) and isinstance(event, staging.Failed):
        ending = staging.Ending("faulted", event.fault.reason, event.fault)
        return replace(after, ending=ending), actions
    return after, actions


FOUND: dict[str, StageParts] = {
    "stage: kept when its coordinator is gone": StageParts(stage=_keeps_rings),
    "stage: its rings are not given back": StageParts(stage=_without(stage.GiveBack)),
    "stage: its worker is not stopped": StageParts(stage=_without(stage.Stop)),
    "stage: a teardown is answered early": StageParts(stage=_answers_early),
    "stage: two plans side by side": StageParts(stage=_forgets_its_newest),
    "staging: a lost node is waited for": StageParts(staging=_does_not_hear_of_losses),
    "staging: its own rings are waited for without end": StageParts(
        staging=_never_expires(staging.OWN_EDGES)
    ),
    "staging: an outcome changes": StageParts(staging=_changes_its_mind),
}
