"""``Collecting``: an update is announced and arrives, and who makes no progress is left out.

A contribution is verified once its two halves are here and agree.  A node that is lost, declines,
or stands still is dropped, unless its contribution is verified already.  Whoever is verified when
this state is left is a contributor, and nobody else.
"""

from bisect import bisect_left
from operator import attrgetter

from msgspec.structs import replace

from lensemble.errors import Response
from lensemble.ids import NodeId
from lensemble.machine import ArmTimer, CancelTimer, Step
from lensemble_coord.training import patience, quorum
from lensemble_coord.training.outer_round import attempts, committing, reasons, unmasking, verdicts
from lensemble_coord.training.outer_round.actions import (
    Action,
    BeginCollect,
    DropUpdate,
    Refuse,
    Timer,
)
from lensemble_coord.training.outer_round.events import BlobArrived, Progressed, UpdateAnnounced
from lensemble_coord.training.outer_round.states import (
    Binding,
    Collecting,
    Contribution,
    Dropped,
    Ground,
    State,
)


def begin(
    ground: Ground,
    expected: tuple[Binding, ...],
    dropped: tuple[Dropped, ...] = (),
    threshold: int = 0,
) -> Step[State, Action]:
    begin = BeginCollect(tuple(b.node for b in expected))
    rules = ground.rules
    cap = (ArmTimer(Timer.COLLECT_END, rules.collect_max_s),) if rules.collect_max_s else ()
    advances = tuple(patience.Advance(b.node) for b in expected)
    collecting = Collecting(
        ground, expected, dropped=dropped, threshold=threshold, advances=advances
    )
    return collecting, (
        begin,
        ArmTimer(Timer.COLLECT, patience.check_every_s(rules.collect_timeout_s)),
        *cap,
    )


def announce(state: Collecting, event: UpdateAnnounced) -> Step[State, Action]:
    refusal = _cannot_send(state, event.node) or _twice(state.announced, event)
    if refusal is not None:
        return state, (refusal,)
    binding = next(b for b in state.expected if b.node == event.node)
    if event.dataset_root != binding.dataset_root:
        return _mismatch(state, event, binding)
    return _pair_up(replace(state, announced=(*state.announced, event)), event.node)


def _mismatch(state: Collecting, event: UpdateAnnounced, binding: Binding) -> Step[State, Action]:
    reason = (
        f"the update names dataset root {event.dataset_root[:16]}, "
        f"the commitment {binding.dataset_root[:16]}"
    )
    refuse = Refuse(event.node, "commitment_mismatch", reason)
    if state.ground.rules.on_commitment_mismatch == "exclude":
        after, actions = drop(state, Dropped(event.node, "commitment_mismatch", reason))
        return after, (refuse, *actions)
    after, actions = attempts.abort(
        state.ground, "commitment_mismatch", f"node {event.node[:12]}: {reason}", Response.STOP
    )
    return after, (refuse, *actions)


def arrive(state: Collecting, event: BlobArrived) -> Step[State, Action]:
    refusal = _cannot_send(state, event.node) or _twice(state.arrived, event)
    if refusal is not None:
        return state, (refusal,)
    return _pair_up(replace(state, arrived=(*state.arrived, event)), event.node)


def _cannot_send(state: Collecting, node: NodeId) -> Refuse | None:
    if all(b.node != node for b in state.expected):
        return Refuse(node, "unbound", "no commitment of this node for this attempt")
    if any(d.node == node for d in state.dropped):
        return Refuse(node, "dropped", "this node was dropped from this attempt")
    return None


def _twice(
    heard: tuple[UpdateAnnounced, ...] | tuple[BlobArrived, ...],
    event: UpdateAnnounced | BlobArrived,
) -> Refuse | None:
    if any(e.node == event.node for e in heard):
        return Refuse(event.node, "duplicate", f"a second {type(event).__name__} of one attempt")
    return None


def _pair_up(state: Collecting, node: NodeId) -> Step[State, Action]:
    """A contribution is verified once its announcement and its blob are both here and agree."""
    announced = next((a for a in state.announced if a.node == node), None)
    arrived = next((b for b in state.arrived if b.node == node), None)
    if announced is None or arrived is None:
        return state, ()
    if (announced.digest, announced.signature) != (arrived.digest, arrived.signature):
        reason = f"the blob is {arrived.digest[:16]}, announced was {announced.digest[:16]}"
        after, actions = drop(state, Dropped(node, "contract_violation", reason))
        return after, (Refuse(node, "contract_violation", reason), *actions)
    binding = next(b for b in state.expected if b.node == node)
    contribution = Contribution(
        node, binding.dataset_root, binding.signature, arrived.digest, arrived.signature
    )
    return consider(replace(state, verified=(*state.verified, contribution)), hurry=False)


def drop(state: Collecting, dropped: Dropped) -> Step[State, Action]:
    """Take a node out of this attempt, unless its update is already in or it was never expected."""
    node = dropped.node
    settled = {c.node for c in state.verified} | {d.node for d in state.dropped}
    if node in settled or all(b.node != node for b in state.expected):
        return state, ()
    after, actions = consider(replace(state, dropped=(*state.dropped, dropped)), hurry=False)
    return after, (DropUpdate(node), *actions)


def progress(state: State, event: Progressed) -> Step[State, Action]:
    """Whoever comes further is waited for; anything else said of progress changes nothing."""
    at = (event.round, event.attempt)
    if not isinstance(state, Collecting) or at != (state.ground.round, state.ground.attempt):
        return state, ()
    place = bisect_left(state.advances, event.node, key=attrgetter("node"))
    if place == len(state.advances) or state.advances[place].node != event.node:
        return state, ()
    advance = patience.further(state.advances[place], event.phase, event.done, event.total)
    advances = (*state.advances[:place], advance, *state.advances[place + 1 :])
    return replace(state, advances=advances), ()


def check_progress(state: Collecting) -> Step[State, Action]:
    """Leave out who has been still for too long; wait on for who moves."""
    timeout_s, due = state.ground.rules.collect_timeout_s, verdicts.outstanding(state)
    checks = state.checks + 1
    if patience.is_over(checks):
        return consider(state, hurry=True)
    advances = tuple(replace(each, still=each.still + 1) for each in state.advances)
    stalled = tuple(
        Dropped(each.node, "timeout", f"no progress for {timeout_s:g} s: {patience.describe(each)}")
        for each in advances
        if each.node in due and patience.is_stalled(each)
    )
    watched = replace(state, advances=advances, checks=checks, dropped=(*state.dropped, *stalled))
    drops = tuple(DropUpdate(each.node) for each in stalled)
    after, actions = consider(watched, hurry=False)
    again = (ArmTimer(Timer.COLLECT, patience.check_every_s(timeout_s)),)
    more = again if isinstance(after, Collecting) else ()
    return after, (*drops, *actions, *more)


def consider(state: Collecting, *, hurry: bool) -> Step[State, Action]:
    ground = state.ground
    possible = len(state.expected) - len(state.dropped)
    if not hurry and quorum.surely_waits(
        verdicts.needed_to_aggregate(state), len(state.verified), possible
    ):
        return state, ()
    late = verdicts.outstanding(state)
    match verdicts.to_aggregate(state, hurry=hurry):
        case quorum.Enough():
            contributors = tuple(sorted(state.verified, key=lambda c: c.node))
            reason = "its update was not in when no more could be waited for"
            dropped = (*state.dropped, *(Dropped(n, "timeout", reason) for n in sorted(late)))
            drops = tuple(DropUpdate(n) for n in sorted(late))
            frozen = replace(state, dropped=dropped)
            after, actions = _freeze(frozen, contributors)
            cancels = (CancelTimer(Timer.COLLECT), CancelTimer(Timer.COLLECT_END))
            return after, (*cancels, *drops, *actions)
        case quorum.TooFew(reason=reason):
            text = reasons.with_reasons(reason, state.dropped)
            return attempts.abort(ground, "fault_tolerance_exceeded", text, Response.RETRY)
        case quorum.NotYet():
            return state, ()


def _freeze(state: Collecting, contributors: tuple[Contribution, ...]) -> Step[State, Action]:
    if state.ground.rules.masked:
        return unmasking.begin(state, contributors)
    return committing.begin(state.ground, contributors, state.dropped)
