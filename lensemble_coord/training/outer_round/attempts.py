"""How an attempt begins and ends, when another follows, and when the run of rounds is over.

A run is the rounds asked for.  A round has at most ``max_attempts`` attempts in it, with a longer
pause before each; the run ends with its last round, with a failure that trying again does not
mend, or with an operator's stop.  A commit under way is never cut short: a stop waits behind it.
"""

from msgspec.structs import replace

from lensemble.errors import Response
from lensemble.ids import Digest
from lensemble.machine import ArmTimer, CancelTimer, Step
from lensemble_coord.training.outer_round.actions import (
    PHASE_TIMERS,
    Action,
    AnnounceAbort,
    AnnounceClose,
    FinishRun,
    OpenRound,
    Timer,
)
from lensemble_coord.training.outer_round.events import Declined, RoundsAsked
from lensemble_coord.training.outer_round.states import (
    Aborted,
    Aggregating,
    Closed,
    Committing,
    Ground,
    Open,
    Rules,
    State,
)

STOPPING_CODES = frozenset({"dp_budget_exceeded"})
"""What a node may say that ends the run: going on without it would spend what it cannot."""


def ask(state: State, event: RoundsAsked) -> Step[State, Action]:
    ground = replace(
        state.ground,
        remaining=state.ground.remaining + event.rounds,
        patience_s=state.ground.patience_s if event.patience_s is None else event.patience_s,
    )
    match state:
        case Closed() if state.ground.remaining == 0:
            return begin(replace(ground, tries=0))
        case Aborted(retrying=False):
            return begin(replace(ground, attempt=ground.attempt + 1, tries=0))
        case _:
            return replace(state, ground=ground), ()


def begin(ground: Ground) -> Step[State, Action]:
    timeout = ground.rules.open_timeout_s if ground.patience_s is None else ground.patience_s
    state = Open(replace(ground, tries=ground.tries + 1))
    return state, (
        OpenRound(ground.round, ground.attempt, ground.digest, ground.asked),
        ArmTimer(Timer.OPEN, timeout),
    )


def again(state: Aborted) -> Step[State, Action]:
    """The pause after an attempt is over."""
    if not state.retrying:
        return state, ()
    return begin(replace(state.ground, attempt=state.ground.attempt + 1))


def close(state: Committing, digest: Digest) -> Step[State, Action]:
    ground = state.ground
    nodes = tuple(c.node for c in state.contributors)
    announce = AnnounceClose(ground.round, ground.attempt, digest, nodes)
    after = replace(
        ground,
        round=ground.round + 1,
        attempt=0,
        digest=digest,
        remaining=ground.remaining - 1,
        tries=0,
        stopping="",
    )
    finish = FinishRun(
        completed=not ground.stopping,
        code="stopped" if ground.stopping else "",
        reason=ground.stopping,
    )
    if after.remaining == 0:
        return Closed(replace(after, patience_s=None)), (announce, finish)
    opened, actions = begin(after)
    if ground.stopping:
        # What remains was asked for after the stop, so it is another run.
        return opened, (announce, finish, *actions)
    return opened, (announce, *actions)


def stop(state: State, reason: str) -> Step[State, Action]:
    match state:
        case Committing():
            # The commit cannot be taken back once it is under way: the run ends behind it.
            ground = replace(state.ground, remaining=1, stopping=reason, patience_s=None)
            return replace(state, ground=ground), ()
        case Closed():
            return state, ()
        case Aborted(retrying=False):
            return state, ()
        case Aborted():
            ground = replace(state.ground, remaining=0, patience_s=None)
            finish = FinishRun(completed=False, code="stopped", reason=reason)
            return replace(state, ground=ground, retrying=False), (
                CancelTimer(Timer.RETRY),
                finish,
            )
        case Aggregating(reason=failure) if failure:
            after, actions = abort(state.ground, "stopped", reason, Response.STOP)
            return after, (CancelTimer(Timer.RETRY), *actions)
        case _:
            return abort(state.ground, "stopped", reason, Response.STOP)


def fail_closed(ground: Ground, event: Declined) -> Step[State, Action]:
    return abort(ground, event.code, f"node {event.node[:12]}: {event.reason}", Response.STOP)


def abort(ground: Ground, code: str, reason: str, response: Response) -> Step[State, Action]:
    retrying = (
        response is Response.RETRY
        and ground.tries < ground.rules.max_attempts
        and not ground.stopping
    )
    announce = AnnounceAbort(ground.round, ground.attempt, ground.digest, code, reason, retrying)
    cancels = tuple(CancelTimer(timer) for timer in PHASE_TIMERS)
    if retrying:
        wait = backoff(ground.rules, ground.tries)
        return Aborted(ground, code, reason, retrying=True), (
            *cancels,
            announce,
            ArmTimer(Timer.RETRY, wait),
        )
    finish = FinishRun(completed=False, code=code, reason=reason)
    stopped = replace(ground, remaining=0, patience_s=None, stopping="")
    return Aborted(stopped, code, reason, retrying=False), (*cancels, announce, finish)


def backoff(rules: Rules, tries: int) -> float:
    return float(min(rules.retry_backoff_s * 2.0 ** (tries - 1), rules.retry_backoff_max_s))
