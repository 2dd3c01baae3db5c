"""``Aggregating``, ``Aligning``, ``Committing``: our own work, once the contributors are fixed.

A failure ends the attempt, and another may follow.  A masked sum that is known and sound is the
exception: it is committed from what is here, after a pause, or the run stops; to collect again
would reveal another sum.
"""

from msgspec.structs import replace

from lensemble.errors import InvalidTransition, Response
from lensemble.machine import ArmTimer, Step
from lensemble_coord.training.outer_round import attempts
from lensemble_coord.training.outer_round.actions import Action, Commit, DeriveSum, Diagnose, Timer
from lensemble_coord.training.outer_round.events import (
    Advanced,
    Diagnosed,
    FromWork,
    StepFailed,
    SumDerived,
)
from lensemble_coord.training.outer_round.states import (
    Aborted,
    Aggregating,
    Aligning,
    Closed,
    Committing,
    Contribution,
    Dropped,
    Ground,
    State,
)

UNUSABLE_SUMS = frozenset({"secure_aggregation", "aggregation"})
"""Why a masked sum cannot be used: its masks do not come off, or no honest updates make it."""


def begin(
    ground: Ground, contributors: tuple[Contribution, ...], dropped: tuple[Dropped, ...]
) -> Step[Aggregating, Action]:
    """The contributors are fixed, and masked ones have told what takes the masks off."""
    return Aggregating(ground, contributors, dropped), (DeriveSum(contributors),)


def work(state: State, event: FromWork) -> Step[State, Action]:
    ground = state.ground
    ours = (event.round, event.attempt) == (ground.round, ground.attempt)
    under_way = isinstance(state, Committing) and not state.reason
    if isinstance(event, Advanced) and not (ours and under_way):
        # The ledger holds a record that this machine did not ask for: to go on would fork it.
        raise InvalidTransition(state, event)
    if not ours:
        return state, ()
    match state, event:
        case Aggregating(), SumDerived():
            aligning = Aligning(ground, state.contributors, state.dropped, event.field_sum)
            return aligning, (Diagnose(event.field_sum, state.contributors),)
        case Aligning(), Diagnosed():
            committing = Committing(ground, state.contributors, state.dropped, state.field_sum)
            return committing, (Commit(state.field_sum, state.contributors),)
        case Committing(), Advanced():
            return attempts.close(state, event.digest)
        case ((Aborted() | Closed()), _):
            return state, ()
        case _, StepFailed():
            return _fail(state, event)
        case _:
            raise InvalidTransition(state, event)


def _fail(state: State, event: StepFailed) -> Step[State, Action]:
    ground = state.ground
    match state:
        case Aggregating(reason=reason) | Committing(reason=reason) if reason:
            # Nothing is under way in the pause: this is the failure it already lasts for.
            return state, ()
        case Aggregating() | Committing() if _may_try_again(state, event):
            again = replace(state, failures=state.failures + 1, reason=event.reason)
            return again, (ArmTimer(Timer.RETRY, attempts.backoff(ground.rules, again.failures)),)
        case Aggregating() | Aligning() | Committing() if _is_revealed(state, event):
            return attempts.abort(ground, event.code, event.reason, Response.STOP)
        case _:
            return attempts.abort(ground, event.code, event.reason, event.response)


def _is_revealed(state: Aggregating | Aligning | Committing, event: StepFailed) -> bool:
    """Whether a masked sum is known and sound, so that nothing but our own work is wanting."""
    return state.ground.rules.masked and event.code not in UNUSABLE_SUMS


def _may_try_again(state: Aggregating | Committing, event: StepFailed) -> bool:
    """A revealed sum is committed from what is here or not at all: collecting reveals more."""
    rules = state.ground.rules
    return (
        _is_revealed(state, event)
        and event.response is Response.RETRY
        and state.failures + 1 < rules.max_attempts
        and not state.ground.stopping
    )


def again(state: Aggregating | Committing) -> Step[State, Action]:
    """The pause after a failure is over."""
    match state:
        case Aggregating(reason=reason) if reason:
            return replace(state, reason=""), (DeriveSum(state.contributors),)
        case Committing(reason=reason) if reason:
            return replace(state, reason=""), (Commit(state.field_sum, state.contributors),)
        case _:
            return state, ()
