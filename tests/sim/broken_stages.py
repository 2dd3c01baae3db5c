"""Stages that are broken on purpose, to show that the checks of a model's life can fail."""

from typing import Any

from msgspec.structs import replace

from lensemble.machine import ArmTimer
from lensemble_coord.inference import sequence, staging, survival
from lensemble_node import stage
from tests.sim.model_checks import StageParts


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


def _hears_old_plans(state: Any, event: Any) -> Any:
    """``stage`` that carries out whatever plan comes, the newest or not."""
    if isinstance(event, stage.Provide) and not isinstance(state, stage.Vacant):
        draining = state if isinstance(state, stage.Draining) else None
        if draining is None:
            order = replace(state.order, run_epoch=-1)
            after, actions = stage.transition(replace(state, order=order), event)
            return replace(after, order=state.order), tuple(
                replace(each, order=state.order) if isinstance(each, stage.Stop) else each
                for each in actions
            )
    return stage.transition(state, event)


def _forgets_what_was_given(state: Any, event: Any) -> Any:
    """``sequence`` that begins again from the prompt alone."""
    if isinstance(event, sequence.Interrupted):
        event = sequence.Interrupted(())
    return sequence.transition(state, event)


def _counts_from_zero(state: Any, event: Any) -> Any:
    """``sequence`` that draws its next token as if it were the first, once it was interrupted."""
    after, actions = sequence.transition(state, event)
    if not isinstance(after, sequence.Prefilling):
        return after, actions
    return after, tuple(
        replace(each, sampling=replace(each.sampling, index=0))
        if isinstance(each, sequence.SendChunk) and each.sampling
        else each
        for each in actions
    )


def _keeps_its_slot(state: Any, event: Any) -> Any:
    """``sequence`` that goes on under the plan that is gone."""
    held = isinstance(state, sequence.Prefilling | sequence.Decoding)
    if isinstance(event, sequence.Interrupted) or (held and isinstance(event, sequence.Granted)):
        return state, ()
    return sequence.transition(state, event)


def _plans_with_the_dead(state: Any, event: Any) -> Any:
    """``survival`` that leaves nobody out."""
    after, actions = survival.transition(state, event)
    if isinstance(after, survival.Clearing):
        after = replace(after, ground=replace(after.ground, dropped=frozenset()))
    return after, actions


def _counts_no_plans(state: Any, event: Any) -> Any:
    """``survival`` that uses an epoch again."""
    if isinstance(event, survival.Planned) and state.ground.epoch > 0:
        state = replace(state, ground=replace(state.ground, epoch=state.ground.epoch - 1))
    return survival.transition(state, event)


def _tells_nobody(state: Any, event: Any) -> Any:
    """``survival`` whose requests do not hear that their plan is gone."""
    after, actions = survival.transition(state, event)
    return after, tuple(each for each in actions if not isinstance(each, survival.Interrupt))


def _tears_down_what_waits(state: Any, event: Any) -> Any:
    """``survival`` that ends a plan which requests wait for."""
    if isinstance(event, survival.DrainAsked):
        event = replace(event, active=0)
    return survival.transition(state, event)


def _never_plans_again(state: Any, event: Any) -> Any:
    """``survival`` that stops where a plan was cleared."""
    after, actions = survival.transition(state, event)
    return after, tuple(each for each in actions if not isinstance(each, survival.Plan))


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
    "stage: an old plan is heard": StageParts(stage=_hears_old_plans),
    "sequence: tokens are given twice": StageParts(sequence=_forgets_what_was_given),
    "sequence: an index comes twice": StageParts(sequence=_counts_from_zero),
    "sequence: goes on under an old plan": StageParts(sequence=_keeps_its_slot),
    "survival: a node to blame is planned with": StageParts(survival=_plans_with_the_dead),
    "survival: an epoch comes twice": StageParts(survival=_counts_no_plans),
    "survival: requests are not told": StageParts(survival=_tells_nobody),
    "survival: a teardown cuts requests short": StageParts(survival=_tears_down_what_waits),
    "survival: no plan follows": StageParts(survival=_never_plans_again),
}
