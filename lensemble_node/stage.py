"""The stage of one run on this node: leased, hosted, opened, at work, then given back.

A stage is ready when its rings are leased and attached, its inbound edge is registered, and its
worker has weights and kernels.  The first fault is said at once and ends it.  Its rings go back to
the arena only when every pump on them has stopped and the worker is gone; only then is a teardown
answered.  A newer plan of the run replaces the stage of an older one; what an older plan says is
refused.
"""

from typing import Any, Literal, TypeAlias

import msgspec
from msgspec.structs import replace

from lensemble.errors import InvalidTransition
from lensemble.ids import EdgeId
from lensemble.machine import Step
from lensemble.wire.fence import sentence
from lensemble.wire.stages import (
    STDERR_LINES,
    FromEdge,
    StageAnswer,
    StageFault,
    StageLook,
    StageOpen,
    StageOpened,
    StageOrder,
    StageProgress,
    StageProvision,
    StageReady,
    StageRefused,
    StageTeardown,
    StageTornDown,
    StageWants,
)
from lensemble_node import signals, stage_signals

MAX_TOLD = 64
"""Teardowns that wait for the same stage; more are answered when it is gone, as one."""


def edges(order: StageProvision) -> tuple[EdgeId, ...]:
    """The edges that end at the stage of ``order``, that of its weights last."""
    weights = (order.source.edge.edge,) if isinstance(order.source, FromEdge) else ()
    return (order.inbound.edge, order.outbound.edge, *weights)


def fence(order: StageOrder) -> dict[str, Any]:
    """Whose word it is that answers ``order``."""
    return {
        "federation": order.federation,
        "epoch": order.epoch,
        "run": order.run,
        "run_epoch": order.run_epoch,
        "stage": order.stage,
    }


def concerns(told: StageOrder, order: StageProvision) -> bool:
    """Whether ``told`` is about the stage of ``order``, in the same run."""
    return (told.run_epoch, told.stage) == (order.run_epoch, order.stage)


# ---- states ----


class Vacant(msgspec.Struct, frozen=True, tag=True):
    """Nothing of the run is here; ``newest`` is the newest plan that ever was."""

    newest: int = -1


class Leasing(msgspec.Struct, frozen=True, tag=True):
    """Waiting for room in the arena."""

    order: StageProvision


class Hosting(msgspec.Struct, frozen=True, tag=True):
    """The worker fetches, loads and compiles; ``missing`` are the edges it has not attached yet."""

    order: StageProvision
    missing: tuple[EdgeId, ...]
    registered: bool = False
    hosted: stage_signals.Hosted | None = None


class ReadyToOpen(msgspec.Struct, frozen=True, tag=True):
    order: StageProvision


class Opening(msgspec.Struct, frozen=True, tag=True):
    """The outbound stream is being opened, and a link to its consumer first if there is none."""

    order: StageProvision


class Live(msgspec.Struct, frozen=True, tag=True):
    order: StageProvision


class Draining(msgspec.Struct, frozen=True, tag=True):
    """``pumping``: a task of an edge-end still runs; ``working``: so does the worker."""

    order: StageProvision
    pumping: bool
    working: bool
    complaint: str = ""
    told: tuple[StageTeardown, ...] = ()
    then: StageProvision | None = None


Active: TypeAlias = Leasing | Hosting | ReadyToOpen | Opening | Live
State: TypeAlias = Vacant | Active | Draining

# ---- events ----


class Provide(msgspec.Struct, frozen=True, tag=True):
    """Host this; nothing speaks against it but what is here already."""

    order: StageProvision


class Open(msgspec.Struct, frozen=True, tag=True):
    order: StageOpen


class Look(msgspec.Struct, frozen=True, tag=True):
    """For a stage that is not here; the rim answers for one that is."""

    order: StageLook


class Withdraw(msgspec.Struct, frozen=True, tag=True):
    order: StageTeardown


class LinkGone(msgspec.Struct, frozen=True, tag=True):
    """The coordinator is not there any more; nobody is left to answer to."""


class Leased(msgspec.Struct, frozen=True, tag=True):
    run_epoch: int


class Registered(msgspec.Struct, frozen=True, tag=True):
    """Every end that receives is in the demux."""

    run_epoch: int


FromWorker: TypeAlias = (
    signals.Attached | stage_signals.Wants | stage_signals.Advanced | stage_signals.Hosted
)


class Said(msgspec.Struct, frozen=True, tag=True):
    """By the worker; its slot signals do not come here."""

    run_epoch: int
    signal: FromWorker


class Opened(msgspec.Struct, frozen=True, tag=True):
    """The outbound end has its stream."""

    run_epoch: int


class Faulted(msgspec.Struct, frozen=True, tag=True):
    """An edge or the link of one is lost, or a lease can never be had."""

    run_epoch: int
    code: str
    reason: str
    remediation: str = ""
    stderr: tuple[str, ...] = ()


class WorkerEnded(msgspec.Struct, frozen=True, tag=True):
    """The process is gone; ``complaint`` where it had to be killed after being asked to stop."""

    run_epoch: int
    code: str
    reason: str
    remediation: str = ""
    stderr: tuple[str, ...] = ()
    complaint: str = ""


class Stopped(msgspec.Struct, frozen=True, tag=True):
    """Every task of the stage's ends has ended."""

    run_epoch: int


OfStage: TypeAlias = Leased | Registered | Said | Opened | Faulted | WorkerEnded | Stopped
"""What becomes of one plan's stage."""

FromCoordinator: TypeAlias = Provide | Open | Look | Withdraw | LinkGone
Event: TypeAlias = FromCoordinator | OfStage

# ---- actions ----


class Lease(msgspec.Struct, frozen=True, tag=True):
    """Wait for room for every ring; answered by ``Leased`` or ``Faulted``."""

    order: StageProvision


class Host(msgspec.Struct, frozen=True, tag=True):
    """Register what receives (``Registered``), then start the worker and attach it."""

    order: StageProvision


class OpenEdge(msgspec.Struct, frozen=True, tag=True):
    """Have a link to the consumer and open the stream; answered by ``Opened`` or ``Faulted``."""

    order: StageProvision


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End every task (``Stopped``) and the worker (``WorkerEnded``), ``kill`` it or ask first."""

    order: StageProvision
    kill: bool


class GiveBack(msgspec.Struct, frozen=True, tag=True):
    """Return every ring to the arena."""

    order: StageProvision


class Say(msgspec.Struct, frozen=True, tag=True):
    message: StageAnswer


Action: TypeAlias = Lease | Host | OpenEdge | Stop | GiveBack | Say

# ---- transition ----


def transition(state: State, event: Event) -> Step[State, Action]:
    match event:
        case Provide() | Open() | Look() | Withdraw() | LinkGone():
            return _asked(state, event)
        case _ if isinstance(state, Vacant) or event.run_epoch != state.order.run_epoch:
            # The last words of what is gone.
            return state, ()
        case _ if isinstance(state, Draining):
            return _drain_on(state, event)
        case Faulted() | WorkerEnded():
            return _fail(state, event)
        case _:
            return _progress(state, event)


# ---- what the coordinator asks for ----


def _asked(state: State, event: FromCoordinator) -> Step[State, Action]:
    match event:
        case Provide(order):
            return _provide(state, order)
        case Open(order):
            return _open(state, order)
        case Look(order):
            return state, (Say(_absent(order)),)
        case Withdraw(order):
            return _withdraw(state, order)
        case LinkGone():
            return _lose_link(state)


def _provide(state: State, order: StageProvision) -> Step[State, Action]:
    newest, where = _newest(state)
    if order.run_epoch <= newest:
        field = "run_epoch" if order.run_epoch < newest else "run"
        have = f"run {order.run} is at plan {newest} here{where}"
        return state, (Say(_refused(order, field, have, f"plan {order.run_epoch}")),)
    match state:
        case Vacant():
            return Leasing(order), (Lease(order),)
        case Draining():
            return replace(state, then=order), ()
        case _:
            return _drain(state, then=order)


def _newest(state: State) -> tuple[int, str]:
    match state:
        case Vacant(newest):
            return newest, ""
        case Draining(order=order, then=then):
            return (order if then is None else then).run_epoch, ", which is ending"
        case _:
            return state.order.run_epoch, f", as stage {state.order.stage}"


def _open(state: State, order: StageOpen) -> Step[State, Action]:
    if isinstance(state, Vacant | Draining) or not concerns(order, state.order):
        return state, (Say(_absent(order)),)
    match state:
        case ReadyToOpen(of):
            opening = StageProgress(**fence(of), phase="opening", done=0, total=1)
            return Opening(of), (Say(opening), OpenEdge(of))
        case Opening() | Live():
            return state, ()
        case _:
            have = "the stage is not ready"
            return state, (Say(_refused(order, "phase", have, "to be opened")),)


def _withdraw(state: State, told: StageTeardown) -> Step[State, Action]:
    match state:
        case Vacant():
            return state, (Say(_torn_down(told)),)
        case Draining():
            return _withdraw_draining(state, told)
        case _ if told.run_epoch < state.order.run_epoch or told.stage != state.order.stage:
            return state, (Say(_torn_down(told)),)
        case _:
            return _drain(state, told=(told,))


def _withdraw_draining(state: Draining, told: StageTeardown) -> Step[State, Action]:
    then = state.then
    if then is not None and then.run_epoch <= told.run_epoch:
        state = replace(state, then=None)
    if told.run_epoch < state.order.run_epoch or len(state.told) >= MAX_TOLD:
        return state, (Say(_torn_down(told)),)
    return replace(state, told=(*state.told, told)), ()


def _lose_link(state: State) -> Step[State, Action]:
    match state:
        case Vacant():
            return state, ()
        case Draining(order):
            return replace(state, told=(), then=None), (Stop(order, kill=True),)
        case _:
            return _drain(state, kill=True)


# ---- how a stage gets ready ----


def _progress(
    state: Active, event: Leased | Registered | Said | Opened | Stopped
) -> Step[State, Action]:
    match state, event:
        case Leasing(order), Leased():
            return Hosting(order, edges(order)), (Host(order),)
        case Hosting(), Registered():
            return _when_hosted(replace(state, registered=True))
        case Opening(order), Opened():
            return Live(order), (Say(StageOpened(**fence(order))),)
        case ((Hosting() | ReadyToOpen() | Opening() | Live()), Said()):
            return _said(state, event)
        case _:
            raise InvalidTransition(state, event)


def _said(state: Hosting | ReadyToOpen | Opening | Live, event: Said) -> Step[State, Action]:
    match state, event.signal:
        case Hosting(order), stage_signals.Advanced(phase=phase, done=done, total=total):
            return state, (Say(StageProgress(**fence(order), phase=phase, done=done, total=total)),)
        case Hosting(order), stage_signals.Wants(ranges=ranges) if (
            isinstance(order.source, FromEdge) and state.registered
        ):
            return state, (Say(StageWants(**fence(order), ranges=ranges)),)
        case Hosting(missing=missing), signals.Attached(edge=edge):
            return _when_hosted(replace(state, missing=tuple(e for e in missing if e != edge)))
        case Hosting(hosted=None), stage_signals.Hosted():
            return _when_hosted(replace(state, hosted=event.signal))
        case _, (stage_signals.Advanced() | signals.Attached()):
            return state, ()
        case _:
            said = type(event.signal).__name__
            reason = f"the worker said {said} while the stage was {_doing(state)}"
            return _fail(state, Faulted(event.run_epoch, "worker_fault", reason))


def _doing(state: Active) -> str:
    return {Hosting: "getting ready", ReadyToOpen: "ready"}.get(
        type(state), type(state).__name__.lower()
    )


def _when_hosted(state: Hosting) -> Step[State, Action]:
    if not state.registered or state.missing or state.hosted is None:
        return state, ()
    ready = StageReady(
        **fence(state.order),
        weights_bytes=state.hosted.weights_bytes,
        resident_bytes=state.hosted.resident_bytes,
        fetched_bytes=state.hosted.fetched_bytes,
        seconds=max(0.0, state.hosted.seconds),
    )
    return ReadyToOpen(state.order), (Say(ready),)


# ---- how it ends ----


def _fail(state: Active, event: Faulted | WorkerEnded) -> Step[State, Action]:
    fault = StageFault(
        **fence(state.order),
        code=event.code[:64],
        reason=sentence(event.reason),
        remediation=sentence(event.remediation),
        stderr=tuple(map(sentence, event.stderr[-STDERR_LINES:])),
    )
    after, actions = _drain(state, kill=True, gone=isinstance(event, WorkerEnded))
    return after, (Say(fault), *actions)


def _drain(
    state: Active,
    *,
    told: tuple[StageTeardown, ...] = (),
    then: StageProvision | None = None,
    kill: bool = False,
    gone: bool = False,
) -> Step[State, Action]:
    working = not (gone or isinstance(state, Leasing))
    draining = Draining(state.order, pumping=True, working=working, told=told, then=then)
    return draining, (Stop(state.order, kill),)


def _drain_on(state: Draining, event: OfStage) -> Step[State, Action]:
    match event:
        case Stopped():
            return _when_drained(replace(state, pumping=False))
        case WorkerEnded(complaint=complaint):
            return _when_drained(replace(state, working=False, complaint=complaint))
        case _:
            return state, ()


def _when_drained(state: Draining) -> Step[State, Action]:
    if state.pumping or state.working:
        return state, ()
    answers = tuple(Say(_torn_down(told, state.complaint)) for told in state.told)
    done: tuple[Action, ...] = (GiveBack(state.order), *answers)
    if state.then is None:
        return Vacant(state.order.run_epoch), done
    return Leasing(state.then), (*done, Lease(state.then))


# ---- what is said ----


def _absent(order: StageOpen | StageLook) -> StageRefused:
    have = "no such stage of this run is here"
    return _refused(order, "run", have, f"stage {order.stage} of plan {order.run_epoch}")


def _refused(order: StageOrder, field: str, have: str, want: str) -> StageRefused:
    return StageRefused(**fence(order), field=field, have=have, want=want)


def _torn_down(told: StageTeardown, complaint: str = "") -> StageTornDown:
    outcome: Literal["clean", "faulted"] = "faulted" if complaint else "clean"
    return StageTornDown(**fence(told), outcome=outcome, reason=sentence(complaint))
