"""One attempt of a round as a node sees it: bind, fetch the state, train, send, be told the end.

The machine beside it, ``participation``, keeps the session and feeds this one only what belongs to
the attempt in hand; here is what follows from it.  With masks there is more to it::

    Fetching, Waiting      keys are published; roster -> shares dealt; go-ahead -> shares opened
    Training -> Masking    the release gets its masks, and leaves under them only
    Sent -> Asked          may this set of survivors be answered for?  Decided beside the secrets
    Agreed -> Spending     the release is marked as spent, durably, before
    Answered               the shares are revealed, once

No secret is in a state, an event or an action.  The rim has them, for the attempt in hand, and
forgets them as soon as ``holds_secrets`` is false.
"""

from enum import StrEnum
from typing import Literal, TypeAlias

import msgspec
from msgspec.structs import replace

from lensemble.errors import InvalidTransition, SecureAggregationError, WorkerFault
from lensemble.ids import Digest, EdgeId, NodeId
from lensemble.machine import Step
from lensemble.wire import messages
from lensemble.wire.messages import RoundOpen
from lensemble_node import signals

# ---- states ----


class Idle(msgspec.Struct, frozen=True, tag=True):
    """No attempt in hand."""


class Offered(msgspec.Struct, frozen=True, tag=True):
    """Asked to take part; the worker is still opening its dataset.  ``edge`` is for the update."""

    open: RoundOpen
    edge: EdgeId
    masked: bool = False


class Binding(msgspec.Struct, frozen=True, tag=True):
    """The worker looks up how much of the state it holds; ``root`` is that of its dataset."""

    open: RoundOpen
    edge: EdgeId
    root: Digest
    episodes: int
    masked: bool = False


class Go(StrEnum):
    """What has to come before this node may train, the state aside."""

    ROSTER = "roster"
    """Masked: who takes part, with their keys."""
    DEALING = "dealing"
    """Masked: the own shares, which are being made."""
    COLLECT = "collect"
    """The coordinator's word; when masked, the own shares are with it."""
    OPENING = "opening"
    """Masked: the shares of the others, which are being opened."""
    GIVEN = "given"


class Fetching(msgspec.Struct, frozen=True, tag=True):
    """Committed; the state comes in."""

    open: RoundOpen
    edge: EdgeId
    root: Digest
    go: Go
    masked: bool = False


class Waiting(msgspec.Struct, frozen=True, tag=True):
    """The state is held; the coordinator waits for other participants."""

    open: RoundOpen
    edge: EdgeId
    root: Digest
    go: Go
    masked: bool = False


class Training(msgspec.Struct, frozen=True, tag=True):
    open: RoundOpen
    edge: EdgeId
    root: Digest
    masked: bool = False


class Masking(msgspec.Struct, frozen=True, tag=True):
    """The worker looks what the release is like under its masks."""

    open: RoundOpen
    edge: EdgeId
    root: Digest
    trained: signals.Trained


class Sending(msgspec.Struct, frozen=True, tag=True):
    """Announced; the worker puts the blob on ``edge``.

    ``asked``: survivors of a request to unmask, which may overtake the word that all is sent.
    """

    open: RoundOpen
    edge: EdgeId
    nbytes: int
    masked: bool = False
    asked: tuple[NodeId, ...] = ()


class Sent(msgspec.Struct, frozen=True, tag=True):
    """The whole blob is with the transport; the coordinator has yet to close the round."""

    open: RoundOpen
    masked: bool = False


class Asked(msgspec.Struct, frozen=True, tag=True):
    """Whether the sum of ``survivors`` may be unmasked is being decided."""

    open: RoundOpen
    survivors: tuple[NodeId, ...]


class Agreed(msgspec.Struct, frozen=True, tag=True):
    """It may; the worker is not there to mark the release as spent."""

    open: RoundOpen


class Spending(msgspec.Struct, frozen=True, tag=True):
    """The worker marks the release as spent."""

    open: RoundOpen


class Answered(msgspec.Struct, frozen=True, tag=True):
    """The shares are revealed; the coordinator has yet to close the round."""

    open: RoundOpen


class Withdrawn(msgspec.Struct, frozen=True, tag=True):
    """This node does not contribute to the attempt, and ``reason`` says why."""

    open: RoundOpen
    code: str
    reason: str
    remediation: str = ""


Unmasking: TypeAlias = Asked | Agreed | Spending | Answered
Active: TypeAlias = (
    Offered
    | Binding
    | Fetching
    | Waiting
    | Training
    | Masking
    | Sending
    | Sent
    | Unmasking
    | Withdrawn
)
State: TypeAlias = Idle | Active


def holds_secrets(state: State) -> bool:
    """Whether the secrets of this attempt are still needed."""
    match state:
        case Fetching(masked=masked) | Waiting(masked=masked) | Training(masked=masked):
            return masked
        case Sending(masked=masked) | Sent(masked=masked):
            return masked
        case _:
            return isinstance(state, Masking | Unmasking)


# ---- events ----


class Opened(msgspec.Struct, frozen=True, tag=True):
    """A newer attempt than the one in hand, or the same one asked again on new edges."""

    open: RoundOpen
    edge: EdgeId
    masked: bool = False


class Objected(msgspec.Struct, frozen=True, tag=True):
    """A newer attempt whose terms this node does not accept."""

    open: RoundOpen
    code: str
    reason: str
    remediation: str = ""


class WorkerAble(msgspec.Struct, frozen=True, tag=True):
    """Only fed to those who wait for it: ``Offered`` and ``Agreed``."""

    root: Digest
    episodes: int


class WorkerLost(msgspec.Struct, frozen=True, tag=True):
    code: str
    reason: str
    remediation: str = ""


class Collected(msgspec.Struct, frozen=True, tag=True):
    """``Collect`` for this attempt; ``expected``: this node is on its roster."""

    expected: bool
    envelopes: tuple[messages.Envelope, ...] = ()


class RosterCame(msgspec.Struct, frozen=True, tag=True):
    """``Roster`` for this attempt; nothing in it is checked yet."""

    roster: messages.Roster


class UnmaskAsked(msgspec.Struct, frozen=True, tag=True):
    """``UnmaskRequest`` for this attempt; nothing in it is checked yet."""

    survivors: tuple[NodeId, ...]


class SharesDealt(msgspec.Struct, frozen=True, tag=True):
    """The roster is as it must be; both fields are as in ``Shares``."""

    round: int
    attempt: int
    commitments: bytes
    sealed: tuple[bytes, ...]


class SharesOpened(msgspec.Struct, frozen=True, tag=True):
    """All that was dealt to this node is what its dealers committed to."""

    round: int
    attempt: int


class Consented(msgspec.Struct, frozen=True, tag=True):
    """The sum that was asked about may be unmasked."""

    round: int
    attempt: int


class MasksRefused(msgspec.Struct, frozen=True, tag=True):
    """What the coordinator sent cannot be gone along with."""

    round: int
    attempt: int
    reason: str
    remediation: str = ""


class EdgeTorn(msgspec.Struct, frozen=True, tag=True):
    """The coordinator has dropped this node from the attempt, unless it asks again."""

    reason: str


class Turned(msgspec.Struct, frozen=True, tag=True):
    """The coordinator refused something this node said."""

    code: str
    reason: str


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The attempt is over.

    ``retries``: the same work will be asked for again at once.  ``counted``: our update is in, so
    the whole blob has arrived, even if the worker's word of it is still on its way.
    """

    retries: bool
    counted: bool = False


class Interrupted(msgspec.Struct, frozen=True, tag=True):
    """The session is over; work already begun may serve the next one."""


Signal: TypeAlias = (
    signals.Bound
    | signals.StateHeld
    | signals.Worked
    | signals.Trained
    | signals.Masked
    | signals.Sent
    | signals.Spent
    | signals.Failed
)
FromSecrets: TypeAlias = SharesDealt | SharesOpened | Consented | MasksRefused
Event: TypeAlias = (
    Opened
    | Objected
    | WorkerAble
    | WorkerLost
    | Collected
    | RosterCame
    | UnmaskAsked
    | FromSecrets
    | EdgeTorn
    | Turned
    | Ended
    | Interrupted
    | Signal
)

# ---- actions ----


class Commit(msgspec.Struct, frozen=True, tag=True):
    """Sign and say ``Commitment``, with fresh keys if ``masked``."""

    open: RoundOpen
    root: Digest
    episodes: int
    held: signals.Bound
    masked: bool = False


class Deal(msgspec.Struct, frozen=True, tag=True):
    """Check the roster and share the secrets; answered by ``SharesDealt`` or ``MasksRefused``."""

    open: RoundOpen
    roster: messages.Roster


class GiveShares(msgspec.Struct, frozen=True, tag=True):
    """Say ``Shares``."""

    open: RoundOpen
    commitments: bytes
    sealed: tuple[bytes, ...]


class OpenShares(msgspec.Struct, frozen=True, tag=True):
    """Answered by ``SharesOpened`` or ``MasksRefused``."""

    open: RoundOpen
    envelopes: tuple[messages.Envelope, ...]


class MaskUpdate(msgspec.Struct, frozen=True, tag=True):
    """Give the worker its masks with ``Mask``."""

    open: RoundOpen


class Decide(msgspec.Struct, frozen=True, tag=True):
    """May this set be answered for?  Answered by ``Consented`` or ``MasksRefused``."""

    open: RoundOpen
    survivors: tuple[NodeId, ...]


class Answer(msgspec.Struct, frozen=True, tag=True):
    """Sign and say ``UnmaskAnswer`` for the set that was consented to."""

    open: RoundOpen


class Announce(msgspec.Struct, frozen=True, tag=True):
    """Sign and say ``Update``, then have the worker send the blob on ``edge``."""

    open: RoundOpen
    root: Digest
    trained: signals.Trained
    digest: Digest
    """Of the blob as it is sent."""
    edge: EdgeId


Phase: TypeAlias = Literal["fetching", "waiting", "training", "releasing", "sending", "sent"]


class Tell(msgspec.Struct, frozen=True, tag=True):
    """Say ``Progress``."""

    open: RoundOpen
    phase: Phase
    done: int
    total: int


class Decline(msgspec.Struct, frozen=True, tag=True):
    """Say ``Fault``."""

    open: RoundOpen
    code: str
    reason: str
    remediation: str = ""


class Order(msgspec.Struct, frozen=True, tag=True):
    """Give the worker a command."""

    command: signals.Command


class Tear(msgspec.Struct, frozen=True, tag=True):
    """Give up the edges: a blob lies half-sent on one of them."""

    reason: str


class Ignore(msgspec.Struct, frozen=True, tag=True):
    """Count a message that has no meaning here."""

    reason: str


OnSecrets: TypeAlias = Deal | OpenShares | MaskUpdate | Decide | Answer
Action: TypeAlias = (
    Commit | Announce | GiveShares | Tell | Decline | Order | Tear | Ignore | OnSecrets
)

# ---- transition ----


def transition(state: State, event: Event) -> Step[State, Action]:
    match event:
        case Opened() | Objected():
            return _begin(state, event)
        case Ended() | Interrupted():
            return Idle(), _end(state, event)
        case WorkerLost(code, reason, remediation):
            return _fail(state, code, reason, remediation)
        case EdgeTorn() | Turned():
            return _cut(state, event)
        case Collected():
            return _collected(state, event)
        case RosterCame() | UnmaskAsked():
            return _of_masks(state, event)
        case SharesDealt() | SharesOpened() | Consented() | MasksRefused():
            return _secrets(state, event)
        case _:
            return _work(state, event)


def _begin(state: State, event: Opened | Objected) -> Step[State, Action]:
    if isinstance(event, Opened):
        offered = Offered(event.open, event.edge, event.masked)
        return offered, _abandon(state, continues=_again(state, event.open))
    after = Withdrawn(event.open, event.code, event.reason)
    declined = Decline(event.open, event.code, event.reason, event.remediation)
    return after, (*_abandon(state, continues=False), declined)


def _end(state: State, event: Ended | Interrupted) -> tuple[Action, ...]:
    match event:
        case Interrupted():
            return _abandon(state, continues=True, edges=False)
        case Ended(counted=True):
            return ()
        case Ended(retries):
            return _abandon(state, continues=retries)


def _work(state: State, event: WorkerAble | Signal) -> Step[State, Action]:
    match state, event:
        case Offered(opened, edge, masked), WorkerAble(root, episodes):
            return Binding(opened, edge, root, episodes, masked), (Order(_bind(opened)),)
        case Agreed(opened), WorkerAble():
            spend = signals.Spend(round=opened.round, attempt=opened.attempt)
            return Spending(opened), (Order(spend),)
        case _, WorkerAble():
            raise InvalidTransition(state, event)
        case Idle(), _:
            return state, ()
        case _, signals.StateHeld(digest=digest):
            return _held(state) if digest == state.open.prior_digest else (state, ())
        case _, _ if (event.round, event.attempt) == (state.open.round, state.open.attempt):
            return _signal(state, event)
        case _:
            # A leftover of an attempt that was abandoned meanwhile.
            return state, ()


def _signal(state: Active, signal: Signal) -> Step[State, Action]:
    match state, signal:
        case _, signals.Failed():
            return _fail(state, signal.code, signal.message, signal.remediation)
        case Binding(opened, edge, root, episodes, masked), signals.Bound(holds_bytes=nbytes):
            told = Tell(opened, "fetching", nbytes, opened.state_bytes)
            go = Go.ROSTER if masked else Go.COLLECT
            fetching = Fetching(opened, edge, root, go, masked)
            return fetching, (Commit(opened, root, episodes, signal, masked), told)
        case ((Fetching() | Training() | Sending()), signals.Worked(phase=phase)):
            return state, (Tell(state.open, phase, signal.done, signal.total),)
        case _:
            return _released(state, signal)


def _released(state: Active, signal: Signal) -> Step[State, Action]:
    match state, signal:
        case Training(opened, edge, root, masked=True), signals.Trained(nbytes=nbytes):
            told = Tell(opened, "releasing", 0, nbytes)
            return Masking(opened, edge, root, signal), (MaskUpdate(opened), told)
        case Training(opened, edge, root), signals.Trained(digest=str(digest)):
            sending = Sending(opened, edge, signal.nbytes)
            return sending, _announce(sending, root, signal, Digest(digest))
        case Training(), signals.Trained():
            return _fail(state, WorkerFault.code, "the worker names no digest of its update", "")
        case Masking(opened, edge, root, trained), signals.Masked(digest=digest):
            sending = Sending(opened, edge, trained.nbytes, masked=True)
            return sending, _announce(sending, root, trained, Digest(digest))
        case Sending(opened, nbytes=nbytes), signals.Sent():
            told = Tell(opened, "sent", nbytes, nbytes)
            if state.asked:
                return Asked(opened, state.asked), (told, Decide(opened, state.asked))
            return Sent(opened, state.masked), (told,)
        case Spending(opened), signals.Spent():
            return Answered(opened), (Answer(opened),)
        case _:
            return state, ()


def _announce(
    sending: Sending, root: Digest, trained: signals.Trained, digest: Digest
) -> tuple[Action, ...]:
    told = Tell(sending.open, "sending", 0, sending.nbytes)
    return Announce(sending.open, root, trained, digest, sending.edge), told


def _held(state: Active) -> Step[State, Action]:
    if not isinstance(state, Fetching):
        return state, ()
    if state.go is Go.GIVEN:
        return _train(state)
    waiting = Waiting(state.open, state.edge, state.root, state.go, state.masked)
    return waiting, (Tell(state.open, "waiting", 0, 0),)


def _collected(state: State, event: Collected) -> Step[State, Action]:
    if not isinstance(state, Fetching | Waiting) or state.go in {Go.OPENING, Go.GIVEN}:
        return state, (Ignore("collect_out_of_place"),)
    if not event.expected:
        reason = "the coordinator goes on without this node: it is not on the roster"
        return Withdrawn(state.open, "not_on_roster", reason), ()
    if state.go is not Go.COLLECT:
        return _refuse(state, "the coordinator has this node train before it has dealt its shares")
    if state.masked:
        return replace(state, go=Go.OPENING), (OpenShares(state.open, event.envelopes),)
    return _given(state)


def _given(state: Fetching | Waiting) -> Step[State, Action]:
    return _train(state) if isinstance(state, Waiting) else (replace(state, go=Go.GIVEN), ())


def _train(state: Fetching | Waiting) -> Step[State, Action]:
    opened = state.open
    command = signals.Train(
        round=opened.round,
        attempt=opened.attempt,
        prior_digest=opened.prior_digest,
        sketch_seed=opened.sketch_seed,
        global_step=opened.global_step,
        spent_before=opened.spent_before,
        plan=opened.field.plan,
    )
    told = Tell(opened, "training", 0, opened.inner_steps)
    return Training(opened, state.edge, state.root, state.masked), (Order(command), told)


# ---- masks ----


def _of_masks(state: State, event: RosterCame | UnmaskAsked) -> Step[State, Action]:
    match state, event:
        case ((Fetching(go=Go.ROSTER) | Waiting(go=Go.ROSTER)), RosterCame(roster)):
            return replace(state, go=Go.DEALING), (Deal(state.open, roster),)
        case Sent(opened, masked=True), UnmaskAsked(survivors):
            return Asked(opened, survivors), (Decide(opened, survivors),)
        case Sending(masked=True, asked=()), UnmaskAsked(survivors) if survivors:
            return replace(state, asked=survivors), ()
        case ((Idle() | Withdrawn() | Answered()), _):
            return state, (Ignore(f"{_name(event)}_out_of_place"),)
        case _ if holds_secrets(state):
            return _refuse(state, _COMPLAINTS[type(event)])
        case _:
            return state, (Ignore(f"{_name(event)}_out_of_place"),)


_COMPLAINTS: dict[type, str] = {
    RosterCame: "the coordinator sends a second roster of one attempt",
    UnmaskAsked: "the coordinator asks to unmask a sum that this node's update cannot be in yet, "
    "or asks again",
}


def _name(event: RosterCame | UnmaskAsked) -> str:
    return "roster" if isinstance(event, RosterCame) else "unmask"


def _secrets(state: State, event: FromSecrets) -> Step[State, Action]:
    if isinstance(state, Idle) or not holds_secrets(state):
        return state, ()
    if (event.round, event.attempt) != (state.open.round, state.open.attempt):
        return state, ()
    match state, event:
        case Answered(), _:
            return state, ()
        case _, MasksRefused(reason=reason, remediation=remediation):
            return _refuse(state, reason, remediation)
        case ((Fetching(go=Go.DEALING) | Waiting(go=Go.DEALING)), SharesDealt()):
            give = GiveShares(state.open, event.commitments, event.sealed)
            return replace(state, go=Go.COLLECT), (give,)
        case ((Fetching(go=Go.OPENING) | Waiting(go=Go.OPENING)), SharesOpened()):
            return _given(state)
        case Asked(opened), Consented():
            return Agreed(opened), ()
        case _:
            return state, ()


def _refuse(state: Active, reason: str, remediation: str = "") -> Step[State, Action]:
    """Take no part in what could reveal more than a sum; nothing is revealed any more."""
    code = SecureAggregationError.code
    torn = (Tear(reason),) if isinstance(state, Fetching) else ()
    left = _abandon(state, continues=True)
    after = Withdrawn(state.open, code, reason)
    return after, (Decline(state.open, code, reason, remediation), *left, *torn)


# ---- what goes wrong ----

OUTWARD = {
    "checkpoint_integrity": "what the node keeps is damaged, or the outer step, taken there, does "
    "not come to the digests of this round",
    "config": "the node's configuration does not fit the workload",
    "dataset": "the node's data set cannot be used",
    "dp_budget_exceeded": "the node's privacy budget has no room for another release",
    "field_bound_exceeded": "the node's update does not fit the field",
    "out_of_memory": "the node's worker was refused memory",
    "probe": "the node's probe cannot be used",
    "storage": "the node's storage failed",
    "training_diverged": "the node's local training diverged",
}
"""What the coordinator is told of a failure inside this node, by code.

The worker's own words name files, episodes and columns: they stay in the node's status and log.
"""

_ASK_ITS_OPERATOR = "The node's own status and log say more: ask its operator."


def _cut(state: State, event: EdgeTorn | Turned) -> Step[State, Action]:
    """What was promised cannot be kept any more, and the coordinator knows it."""
    match state, event:
        case ((Idle() | Sent() | Asked() | Agreed() | Spending() | Answered() | Withdrawn()), _):
            return state, ()
        case Sending(opened), Turned(code, reason):
            torn = Tear(f"the coordinator refused the update: {reason}")
            return Withdrawn(opened, code, reason), (_forget(opened), torn)
        case ((Fetching() | Waiting()), Turned(code, reason)):
            return Withdrawn(state.open, code, reason), ()
        case ((Masking() | Sending()), EdgeTorn(reason)):
            return Withdrawn(state.open, "edge_fault", reason), (_forget(state.open),)
        case _, EdgeTorn(reason):
            # Training goes on: its release serves the next attempt of the round.
            return Withdrawn(state.open, "edge_fault", reason), ()
        case _:
            return state, ()


def _fail(state: State, code: str, reason: str, remediation: str) -> Step[State, Action]:
    if isinstance(state, Idle | Sent | Asked | Answered | Withdrawn):
        return state, ()
    outward = OUTWARD.get(code, "the node's worker failed")
    torn = (Tear(outward),) if isinstance(state, Fetching | Sending) else ()
    after = Withdrawn(state.open, code, reason, remediation)
    return after, (Decline(state.open, code, outward, _ASK_ITS_OPERATOR), *torn)


def _again(state: State, opened: RoundOpen) -> bool:
    """Whether the work in hand is what ``opened`` asks for."""
    return not isinstance(state, Idle) and (
        (state.open.round, state.open.prior_digest) == (opened.round, opened.prior_digest)
    )


def _abandon(state: State, *, continues: bool, edges: bool = True) -> tuple[Action, ...]:
    match state:
        case Idle() | Offered() | Sent() | Asked() | Agreed() | Spending() | Answered():
            return ()
        case Masking():
            return (_forget(state.open),)
        case Sending():
            torn = (Tear("the attempt ended before its update was sent"),) if edges else ()
            return (_forget(state.open), *torn)
        case _ if continues:
            return ()
        case _:
            return (_forget(state.open),)


def _bind(opened: RoundOpen) -> signals.Bind:
    return signals.Bind(
        round=opened.round,
        attempt=opened.attempt,
        prior_digest=opened.prior_digest,
        prior_momentum=opened.prior_momentum,
        steps=opened.steps,
    )


def _forget(opened: RoundOpen) -> Order:
    return Order(signals.Abandon(round=opened.round, attempt=opened.attempt))
