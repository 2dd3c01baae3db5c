"""One attempt of a round as a node sees it: bind, fetch the state, train, send, be told the end.

The machine beside it, ``participation``, keeps the session and feeds this one only what belongs to
the attempt in hand; here is what follows from it.
"""

from typing import Literal, TypeAlias

import msgspec

from lensemble.errors import InvalidTransition
from lensemble.ids import Digest, EdgeId
from lensemble.machine import Step
from lensemble.wire.messages import RoundOpen
from lensemble_node import signals

# ---- states ----


class Idle(msgspec.Struct, frozen=True, tag=True):
    """No attempt in hand."""


class Offered(msgspec.Struct, frozen=True, tag=True):
    """Asked to take part; the worker is still opening its dataset.  ``edge`` is for the update."""

    open: RoundOpen
    edge: EdgeId


class Binding(msgspec.Struct, frozen=True, tag=True):
    """The worker looks up how much of the state it holds; ``root`` is that of its dataset."""

    open: RoundOpen
    edge: EdgeId
    root: Digest
    episodes: int


class Fetching(msgspec.Struct, frozen=True, tag=True):
    """Committed; the state comes in.  ``collected``: the go-ahead to train is here already."""

    open: RoundOpen
    edge: EdgeId
    root: Digest
    collected: bool = False


class Waiting(msgspec.Struct, frozen=True, tag=True):
    """The state is held; the coordinator waits for other participants."""

    open: RoundOpen
    edge: EdgeId
    root: Digest


class Training(msgspec.Struct, frozen=True, tag=True):
    open: RoundOpen
    edge: EdgeId
    root: Digest


class Sending(msgspec.Struct, frozen=True, tag=True):
    """Announced; the worker puts the blob on ``edge``."""

    open: RoundOpen
    edge: EdgeId
    nbytes: int


class Sent(msgspec.Struct, frozen=True, tag=True):
    """The whole blob is with the transport; the coordinator has yet to close the round."""

    open: RoundOpen


class Withdrawn(msgspec.Struct, frozen=True, tag=True):
    """This node does not contribute to the attempt, and ``reason`` says why."""

    open: RoundOpen
    code: str
    reason: str


State: TypeAlias = (
    Idle | Offered | Binding | Fetching | Waiting | Training | Sending | Sent | Withdrawn
)
Active: TypeAlias = Offered | Binding | Fetching | Waiting | Training | Sending | Sent | Withdrawn

# ---- events ----


class Opened(msgspec.Struct, frozen=True, tag=True):
    """A newer attempt than the one in hand, or the same one asked again on new edges."""

    open: RoundOpen
    edge: EdgeId


class Objected(msgspec.Struct, frozen=True, tag=True):
    """A newer attempt whose terms this node does not accept."""

    open: RoundOpen
    code: str
    reason: str
    remediation: str = ""


class WorkerAble(msgspec.Struct, frozen=True, tag=True):
    """Only fed to ``Offered``."""

    root: Digest
    episodes: int


class WorkerLost(msgspec.Struct, frozen=True, tag=True):
    code: str
    reason: str
    remediation: str = ""


class Collected(msgspec.Struct, frozen=True, tag=True):
    """``Collect`` for this attempt; ``expected``: this node is on its roster."""

    expected: bool


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
    | signals.Sent
    | signals.Failed
)
Event: TypeAlias = (
    Opened
    | Objected
    | WorkerAble
    | WorkerLost
    | Collected
    | EdgeTorn
    | Turned
    | Ended
    | Interrupted
    | Signal
)

# ---- actions ----


class Commit(msgspec.Struct, frozen=True, tag=True):
    """Sign and say ``Commitment``."""

    open: RoundOpen
    root: Digest
    episodes: int
    holds_bytes: int


class Announce(msgspec.Struct, frozen=True, tag=True):
    """Sign and say ``Update``, then have the worker send the blob on ``edge``."""

    open: RoundOpen
    root: Digest
    trained: signals.Trained
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


Action: TypeAlias = Commit | Announce | Tell | Decline | Order | Tear | Ignore

# ---- transition ----


def transition(state: State, event: Event) -> Step[State, Action]:
    match event:
        case Opened() | Objected():
            return _begin(state, event)
        case Ended(counted=True):
            return Idle(), ()
        case Ended(retries):
            return Idle(), _abandon(state, continues=retries)
        case Interrupted():
            return Idle(), _abandon(state, continues=True, edges=False)
        case WorkerLost(code, reason, remediation):
            return _fail(state, code, reason, remediation)
        case EdgeTorn() | Turned():
            return _cut(state, event)
        case Collected(expected):
            return _collected(state, expected=expected)
        case _:
            return _work(state, event)


def _begin(state: State, event: Opened | Objected) -> Step[State, Action]:
    if isinstance(event, Opened):
        return Offered(event.open, event.edge), _abandon(state, continues=_again(state, event.open))
    after = Withdrawn(event.open, event.code, event.reason)
    declined = Decline(event.open, event.code, event.reason, event.remediation)
    return after, (*_abandon(state, continues=False), declined)


def _work(state: State, event: WorkerAble | Signal) -> Step[State, Action]:
    match state, event:
        case Offered(opened, edge), WorkerAble(root, episodes):
            return Binding(opened, edge, root, episodes), (Order(_bind(opened)),)
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
        case Binding(opened, edge, root, episodes), signals.Bound(holds_bytes=held):
            told = Tell(opened, "fetching", held, opened.state_bytes)
            return Fetching(opened, edge, root), (Commit(opened, root, episodes, held), told)
        case ((Fetching() | Training() | Sending()), signals.Worked(phase=phase)):
            return state, (Tell(state.open, phase, signal.done, signal.total),)
        case Training(opened, edge, root), signals.Trained(nbytes=nbytes):
            told = Tell(opened, "sending", 0, nbytes)
            return Sending(opened, edge, nbytes), (Announce(opened, root, signal, edge), told)
        case Sending(opened, _, nbytes), signals.Sent():
            return Sent(opened), (Tell(opened, "sent", nbytes, nbytes),)
        case _:
            return state, ()


def _held(state: Active) -> Step[State, Action]:
    if not isinstance(state, Fetching):
        return state, ()
    if state.collected:
        return _train(state)
    waiting = Waiting(state.open, state.edge, state.root)
    return waiting, (Tell(state.open, "waiting", 0, 0),)


def _collected(state: State, *, expected: bool) -> Step[State, Action]:
    match state:
        case Fetching(collected=False) | Waiting() if not expected:
            reason = "the coordinator goes on without this node: it is not on the roster"
            return Withdrawn(state.open, "not_on_roster", reason), ()
        case Fetching(collected=False):
            return msgspec.structs.replace(state, collected=True), ()
        case Waiting():
            return _train(state)
        case _:
            return state, (Ignore("collect_out_of_place"),)


def _train(state: Fetching | Waiting) -> Step[State, Action]:
    opened = state.open
    command = signals.Train(
        round=opened.round,
        attempt=opened.attempt,
        prior_digest=opened.prior_digest,
        sketch_seed=opened.sketch_seed,
        global_step=opened.global_step,
    )
    told = Tell(opened, "training", 0, opened.inner_steps)
    return Training(opened, state.edge, state.root), (Order(command), told)


def _cut(state: State, event: EdgeTorn | Turned) -> Step[State, Action]:
    """What was promised cannot be kept any more, and the coordinator knows it."""
    match state, event:
        case ((Idle() | Sent() | Withdrawn()), _):
            return state, ()
        case Sending(opened), Turned(code, reason):
            torn = Tear(f"the coordinator refused the update: {reason}")
            return Withdrawn(opened, code, reason), (_forget(opened), torn)
        case ((Fetching() | Waiting()), Turned(code, reason)):
            return Withdrawn(state.open, code, reason), ()
        case Sending(opened), EdgeTorn(reason):
            return Withdrawn(opened, "edge_fault", reason), (_forget(opened),)
        case _, EdgeTorn(reason):
            # Training goes on: its release serves the next attempt of the round.
            return Withdrawn(state.open, "edge_fault", reason), ()
        case _:
            return state, ()


def _fail(state: State, code: str, reason: str, remediation: str) -> Step[State, Action]:
    if isinstance(state, Idle | Sent | Withdrawn):
        return state, ()
    torn = (Tear(reason),) if isinstance(state, Fetching | Sending) else ()
    after = Withdrawn(state.open, code, reason)
    return after, (Decline(state.open, code, reason, remediation), *torn)


def _again(state: State, opened: RoundOpen) -> bool:
    """Whether the work in hand is what ``opened`` asks for."""
    return not isinstance(state, Idle) and (
        (state.open.round, state.open.prior_digest) == (opened.round, opened.prior_digest)
    )


def _abandon(state: State, *, continues: bool, edges: bool = True) -> tuple[Action, ...]:
    match state:
        case Idle() | Offered() | Sent():
            return ()
        case Sending():
            torn = (Tear("the attempt ended before its update was sent"),) if edges else ()
            return (_forget(state.open), *torn)
        case _ if continues:
            return ()
        case _:
            return (_forget(state.open),)


def _bind(opened: RoundOpen) -> signals.Bind:
    return signals.Bind(
        round=opened.round, attempt=opened.attempt, prior_digest=opened.prior_digest
    )


def _forget(opened: RoundOpen) -> Order:
    return Order(signals.Abandon(round=opened.round, attempt=opened.attempt))
