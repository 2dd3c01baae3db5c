"""The edge pair of this node: leased, open at both ends, attached to the worker, then given back.

Nothing is acknowledged before every end is registered and the worker is attached, so whoever hears
``Provisioned`` may send at once.  A ring goes back to the arena only when its pump has stopped and
the worker has let go of it.  One pair lives at a time; a newer one waits for the older to drain.
"""

from typing import TypeAlias

import msgspec

from lensemble.edge.spec import EdgeSpec
from lensemble.errors import InvalidTransition
from lensemble.ids import EdgeId
from lensemble.machine import Step


class Pair(msgspec.Struct, frozen=True):
    """What one session was told to make ready: ``state`` comes in, ``update`` goes out."""

    epoch: int
    state: EdgeSpec
    update: EdgeSpec

    @property
    def edges(self) -> tuple[EdgeId, EdgeId]:
        return self.state.edge, self.update.edge


# ---- states ----


class Bare(msgspec.Struct, frozen=True, tag=True):
    """No edge, no ring."""


class Leasing(msgspec.Struct, frozen=True, tag=True):
    """Waiting for room in the arena."""

    pair: Pair


class Opening(msgspec.Struct, frozen=True, tag=True):
    """Rings are leased; ``missing`` names the edges that the worker has not attached yet."""

    pair: Pair
    missing: tuple[EdgeId, ...]
    opened: bool = False


class Live(msgspec.Struct, frozen=True, tag=True):
    pair: Pair


class Draining(msgspec.Struct, frozen=True, tag=True):
    """Pumps stop and the worker lets go; ``held`` names the edges it has not let go of yet."""

    pair: Pair
    held: tuple[EdgeId, ...]
    stopped: bool = False
    then: Pair | None = None
    told: tuple[EdgeId, ...] = ()
    """Edges whose teardown was asked for and must be acknowledged."""


State: TypeAlias = Bare | Leasing | Opening | Live | Draining

# ---- events ----


class Provide(msgspec.Struct, frozen=True, tag=True):
    """Make ``pair`` ready; the worker is up."""

    pair: Pair


class Withdraw(msgspec.Struct, frozen=True, tag=True):
    """The coordinator asks for a teardown."""

    edges: tuple[EdgeId, ...]


class Leased(msgspec.Struct, frozen=True, tag=True):
    pair: Pair


class Opened(msgspec.Struct, frozen=True, tag=True):
    """The Rx is registered with the demux and the Tx has its stream."""

    pair: Pair


class Attached(msgspec.Struct, frozen=True, tag=True):
    edge: EdgeId


class Detached(msgspec.Struct, frozen=True, tag=True):
    edge: EdgeId


class EndFaulted(msgspec.Struct, frozen=True, tag=True):
    """One edge of the pair cannot be leased, opened or used any more."""

    edge: EdgeId
    reason: str


class Dropped(msgspec.Struct, frozen=True, tag=True):
    """This node gives the pair up itself: a half-sent blob must not stay on a live edge."""

    reason: str


class LinkGone(msgspec.Struct, frozen=True, tag=True):
    """There is nobody left to report to."""


class WorkerGone(msgspec.Struct, frozen=True, tag=True):
    """The worker process is dead; what it was attached to is attached to nothing."""

    reason: str


class Stopped(msgspec.Struct, frozen=True, tag=True):
    """Every task of the pair has ended."""

    pair: Pair


Event: TypeAlias = (
    Provide
    | Withdraw
    | Leased
    | Opened
    | Attached
    | Detached
    | EndFaulted
    | Dropped
    | LinkGone
    | WorkerGone
    | Stopped
)

# ---- actions ----


class Lease(msgspec.Struct, frozen=True, tag=True):
    """Wait for room for both rings; answered by ``Leased`` or ``EndFaulted``."""

    pair: Pair


class Open(msgspec.Struct, frozen=True, tag=True):
    """Register the Rx, open the Tx; answered by ``Opened`` or ``EndFaulted``."""

    pair: Pair


class Attach(msgspec.Struct, frozen=True, tag=True):
    """Give both rings to the worker; answered by ``Attached`` for each."""

    pair: Pair


class Detach(msgspec.Struct, frozen=True, tag=True):
    edge: EdgeId


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End all tasks of the pair: reset what is sent, refuse what comes; answered by ``Stopped``."""

    pair: Pair


class GiveBack(msgspec.Struct, frozen=True, tag=True):
    """Return both rings to the arena."""

    pair: Pair


class Acknowledge(msgspec.Struct, frozen=True, tag=True):
    """Say ``Provisioned``; the pair may be used."""

    pair: Pair


class AcknowledgeTeardown(msgspec.Struct, frozen=True, tag=True):
    edges: tuple[EdgeId, ...]


class ReportLost(msgspec.Struct, frozen=True, tag=True):
    """Say ``EdgeLost``; the pair must not be used any more."""

    pair: Pair
    edge: EdgeId
    reason: str


class Unusable(msgspec.Struct, frozen=True, tag=True):
    """The pair must not be used any more, and nobody needs to be told."""

    pair: Pair
    reason: str


Action: TypeAlias = (
    Lease
    | Open
    | Attach
    | Detach
    | Stop
    | GiveBack
    | Acknowledge
    | AcknowledgeTeardown
    | ReportLost
    | Unusable
)

# ---- transition ----


def transition(state: State, event: Event) -> Step[State, Action]:
    if isinstance(state, Bare):
        return _bare(state, event)
    if isinstance(state, Draining):
        return _draining(state, event)
    match event:
        case Provide(pair):
            return _replace(state, pair)
        case Withdraw(edges):
            return _withdraw(state, edges)
        case EndFaulted() | Dropped() | WorkerGone() | LinkGone():
            return _lose(state, event)
        case _:
            return _progress(state, event)


def _bare(state: Bare, event: Event) -> Step[State, Action]:
    match event:
        case Provide(pair):
            return Leasing(pair), (Lease(pair),)
        case Withdraw(edges):
            return state, (AcknowledgeTeardown(edges),)
        case EndFaulted() | Dropped() | LinkGone() | WorkerGone() | Attached() | Detached():
            return state, ()
        case _:
            raise InvalidTransition(state, event)


def _progress(state: Leasing | Opening | Live, event: Event) -> Step[State, Action]:
    match state, event:
        case Leasing(pair), Leased() if event.pair == pair:
            return Opening(pair, pair.edges), (Attach(pair), Open(pair))
        case Opening(pair, missing), Opened() if event.pair == pair:
            return _when_complete(Opening(pair, missing, opened=True))
        case Opening(pair, missing, opened), Attached(edge):
            return _when_complete(Opening(pair, tuple(e for e in missing if e != edge), opened))
        case _, (Attached() | Detached()):
            return state, ()
        case _:
            raise InvalidTransition(state, event)


def _when_complete(state: Opening) -> Step[State, Action]:
    if state.opened and not state.missing:
        return Live(state.pair), (Acknowledge(state.pair),)
    return state, ()


def _replace(state: Leasing | Opening | Live, pair: Pair) -> Step[State, Action]:
    if set(pair.edges) & set(state.pair.edges):
        return state, ()
    return _drain(state, Unusable(state.pair, "replaced by a newer pair"), then=pair)


def _withdraw(state: Leasing | Opening | Live, edges: tuple[EdgeId, ...]) -> Step[State, Action]:
    if not set(edges) & set(state.pair.edges):
        return state, (AcknowledgeTeardown(edges),)
    return _drain(state, Unusable(state.pair, "torn down by the coordinator"), told=edges)


def _lose(
    state: Leasing | Opening | Live, event: EndFaulted | Dropped | WorkerGone | LinkGone
) -> Step[State, Action]:
    pair, update = state.pair, state.pair.update.edge
    match event:
        case EndFaulted(edge, _) if edge not in state.pair.edges:
            return state, ()
        case EndFaulted(edge, reason):
            return _drain(state, ReportLost(pair, edge, reason))
        case Dropped(reason):
            return _drain(state, ReportLost(pair, update, reason))
        case WorkerGone(reason):
            return _drain(state, ReportLost(pair, update, reason), worker=False)
        case LinkGone():
            return _drain(state, Unusable(state.pair, "the link is gone"))


def _drain(
    state: Leasing | Opening | Live,
    notice: ReportLost | Unusable,
    *,
    then: Pair | None = None,
    told: tuple[EdgeId, ...] = (),
    worker: bool = True,
) -> Step[State, Action]:
    held = state.pair.edges if worker and not isinstance(state, Leasing) else ()
    draining = Draining(state.pair, held, then=then, told=told)
    return draining, (notice, Stop(state.pair), *(Detach(edge) for edge in held))


def _draining(state: Draining, event: Event) -> Step[State, Action]:
    match event:
        case Provide(pair):
            return msgspec.structs.replace(state, then=pair), ()
        case Withdraw(edges):
            return _withdraw_draining(state, edges)
        case Detached(edge):
            held = tuple(e for e in state.held if e != edge)
            return _when_drained(msgspec.structs.replace(state, held=held))
        case WorkerGone():
            then = msgspec.structs.replace(state, held=(), then=None)
            notice = _lost_before_it_lived(state.then)
            after, actions = _when_drained(then)
            return after, (*notice, *actions)
        case Stopped(pair) if pair == state.pair:
            return _when_drained(msgspec.structs.replace(state, stopped=True))
        case LinkGone():
            return msgspec.structs.replace(state, then=None, told=()), ()
        case Dropped() | EndFaulted() | Attached() | Leased() | Opened():
            return state, ()
        case _:
            raise InvalidTransition(state, event)


def _withdraw_draining(state: Draining, edges: tuple[EdgeId, ...]) -> Step[State, Action]:
    then = state.then
    if then is not None and set(edges) & set(then.edges):
        then = None
    return msgspec.structs.replace(state, then=then, told=(*state.told, *edges)), ()


def _lost_before_it_lived(pair: Pair | None) -> tuple[Action, ...]:
    if pair is None:
        return ()
    return (ReportLost(pair, pair.update.edge, "the worker ended before it was attached"),)


def _when_drained(state: Draining) -> Step[State, Action]:
    if not state.stopped or state.held:
        return state, ()
    done: tuple[Action, ...] = (GiveBack(state.pair),)
    if state.told:
        done = (*done, AcknowledgeTeardown(state.told))
    if state.then is None:
        return Bare(), done
    return Leasing(state.then), (*done, Lease(state.then))
