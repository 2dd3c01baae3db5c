"""A run over all its plans: what ends it, what it outlives, and who is left out of the next plan.

::

    Planning -> Carrying -> Clearing -> Planning -> Carrying -> ... -> Finishing -> Over

Each plan is carried out by a ``staging`` machine of its own, under a run epoch and edge ids of its
own.  When that machine says that its plan is lost, this one decides: the run ends with the fault,
or its requests wait while the stages are torn down, another plan without the node to blame is
made, and carried out.  A link that broke without anything else being known has two ends; the far
one is suspected, and left out when it is suspected again.
"""

from typing import TypeAlias

import msgspec
from msgspec.structs import replace

from lensemble.errors import InvalidTransition
from lensemble.ids import NodeId
from lensemble.machine import Step
from lensemble_coord.inference import staging
from lensemble_coord.inference.staging import Ending, Fault, Teardown

LOSSES = frozenset({"worker_fault", "out_of_memory", "link_lost", "stage_stalled"})
"""Codes of faults in which a stage is lost, by no fault of what was asked of it."""

NEIGHBOURS = {"upstream_lost": -1, "downstream_lost": 1, "unreachable": 1, "edge_fault": 0}
"""Codes of broken links, and which stage, seen from the one that tells, is at the far end."""


class Rules(msgspec.Struct, frozen=True):
    """``replaces``: a lost stage is replaced, so often at most."""

    replaces: bool = False
    most: int = 3


class Ground(msgspec.Struct, frozen=True):
    """What every state stands on.

    ``epoch`` is of the latest plan, 0 before the first.  ``dropped`` are left out of all further
    plans.  ``replaced`` counts the plans that were lost.  ``held``: one plan was ready.
    ``draining`` is why the run is to end when its requests have.
    """

    rules: Rules
    epoch: int = 0
    nodes: tuple[NodeId, ...] = ()
    dropped: frozenset[NodeId] = frozenset()
    suspects: frozenset[NodeId] = frozenset()
    replaced: int = 0
    held: bool = False
    draining: str = ""


# ---- states ----


class Planning(msgspec.Struct, frozen=True, tag=True):
    """No stage is anywhere; ``lost`` is why, if a plan was lost."""

    ground: Ground
    lost: Fault | None = None


class Carrying(msgspec.Struct, frozen=True, tag=True):
    """The plan of ``ground.nodes`` is carried out; ``ready`` once it takes requests."""

    ground: Ground
    ready: bool = False


class Clearing(msgspec.Struct, frozen=True, tag=True):
    """The stages of a plan that is lost, or to be left, are torn down; another one will come."""

    ground: Ground
    lost: Fault | None


class Finishing(msgspec.Struct, frozen=True, tag=True):
    """The stages of the last plan are torn down."""

    ground: Ground
    ending: Ending


class Over(msgspec.Struct, frozen=True, tag=True):
    ground: Ground
    ending: Ending
    teardown: Teardown = "clean"
    complaints: tuple[str, ...] = ()


State: TypeAlias = Planning | Carrying | Clearing | Finishing | Over
Live: TypeAlias = Planning | Carrying | Clearing | Finishing

# ---- events ----


class Planned(msgspec.Struct, frozen=True, tag=True):
    """The stages of the next plan are to be on ``nodes``, in this order."""

    nodes: tuple[NodeId, ...]


class Unplanned(msgspec.Struct, frozen=True, tag=True):
    """Nothing fits the nodes that are left, or the plan cannot be carried out."""

    fault: Fault


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The plan takes requests."""


class Left(msgspec.Struct, frozen=True, tag=True):
    """The plan leaves its nodes, for this reason."""

    ending: Ending


class Cleared(msgspec.Struct, frozen=True, tag=True):
    """The plan is torn down; its stages hold nothing any more, or did not say so in time."""

    teardown: Teardown
    complaints: tuple[str, ...] = ()


class StopAsked(msgspec.Struct, frozen=True, tag=True):
    reason: str


class DrainAsked(msgspec.Struct, frozen=True, tag=True):
    """End when the requests have ended, of which there are ``active``."""

    reason: str
    active: int


class MoveAsked(msgspec.Struct, frozen=True, tag=True):
    """``node`` is to be left: nothing is wrong with it."""

    node: NodeId
    reason: str


OfPlan: TypeAlias = Ready | Left | Cleared
Asked: TypeAlias = StopAsked | DrainAsked | MoveAsked
Event: TypeAlias = Planned | Unplanned | OfPlan | Asked

# ---- actions ----


class Plan(msgspec.Struct, frozen=True, tag=True):
    """Find nodes for the next plan: ``Planned`` or ``Unplanned``."""

    without: frozenset[NodeId]


class Carry(msgspec.Struct, frozen=True, tag=True):
    """Carry the plan out, under ``epoch``."""

    epoch: int


class Tell(msgspec.Struct, frozen=True, tag=True):
    """To the machine of the plan that is carried out."""

    event: staging.StopAsked | staging.DrainAsked | staging.MoveAsked


class Interrupt(msgspec.Struct, frozen=True, tag=True):
    """Every request waits for the next plan."""

    reason: str
    fault: Fault | None


class EndRequests(msgspec.Struct, frozen=True, tag=True):
    """With ``fault``, or because the run was stopped."""

    fault: Fault | None


class Close(msgspec.Struct, frozen=True, tag=True):
    """Nothing is held any more; no event follows."""


Action: TypeAlias = Plan | Carry | Tell | Interrupt | EndRequests | Close

# ---- transition ----


def takes_requests(state: State) -> bool:
    """Whether a request may be begun, or would wait for the next plan."""
    draining = bool(state.ground.draining)
    return state.ground.held and not draining and isinstance(state, Carrying | Clearing | Planning)


def ending(state: State) -> Ending | None:
    """How the run ends or ended, None while it goes on."""
    return state.ending if isinstance(state, Finishing | Over) else None


def transition(state: State, event: Event) -> Step[State, Action]:
    match state, event:
        case Over(), _:
            return state, ()
        case _, (StopAsked() | DrainAsked() | MoveAsked()):
            return _asked(state, event)
        case Planning(ground, lost), Planned(nodes):
            ground = replace(ground, nodes=nodes, epoch=ground.epoch + 1)
            return Carrying(ground), (Carry(ground.epoch),)
        case Planning(ground, lost), Unplanned(fault):
            return _give_up(ground, fault, lost)
        case Carrying(), (Ready() | Left() | Unplanned()):
            return _carry_on(state, event)
        case Clearing(ground, lost), Cleared():
            return Planning(ground, lost), (Plan(ground.dropped),)
        case Finishing(ground, end), Cleared(teardown, complaints):
            return Over(ground, end, teardown, complaints), (Close(),)
        case _:
            raise InvalidTransition(state, event)


# ---- a plan that is carried out ----


def _carry_on(state: Carrying, event: Ready | Left | Unplanned) -> Step[State, Action]:
    ground = state.ground
    match event:
        case Ready():
            ground = replace(ground, held=True)
            drain = staging.DrainAsked(ground.draining)
            return Carrying(ground, ready=True), (Tell(drain),) if ground.draining else ()
        case Unplanned(fault):
            return _give_up(ground, fault, None)
        case Left(Ending("moved", reason)):
            return Clearing(ground, None), (Interrupt(reason, None),)
        case Left(end):
            return _lose(ground, end)


def _lose(ground: Ground, end: Ending) -> Step[State, Action]:
    if end.fault is None or not (ground.rules.replaces and _is_loss(ground, end.fault)):
        return Finishing(ground, end), (EndRequests(end.fault),)
    if ground.replaced >= ground.rules.most:
        times = f"{ground.replaced} time" + ("" if ground.replaced == 1 else "s")
        reason = f"{end.fault.reason}; stages were replaced {times} before"
        fault = replace(end.fault, reason=reason)
        return Finishing(ground, Ending("faulted", reason, fault)), (EndRequests(fault),)
    ground = _blame(replace(ground, replaced=ground.replaced + 1), end.fault)
    return Clearing(ground, end.fault), (Interrupt(end.reason, end.fault),)


def _is_loss(ground: Ground, fault: Fault) -> bool:
    """Whether another plan may do better; once answers depend on it, whatever a stage has."""
    if fault.code in LOSSES or fault.code in NEIGHBOURS:
        return True
    return ground.held and fault.stage is not None


def _blame(ground: Ground, fault: Fault) -> Ground:
    if fault.stage is None:
        return ground
    far = fault.stage + NEIGHBOURS.get(fault.code, 0)
    # At the far end of the first and of the last edge is the coordinator itself.
    node = ground.nodes[far if 0 <= far < len(ground.nodes) else fault.stage]
    if fault.code in NEIGHBOURS and node not in ground.suspects:
        return replace(ground, suspects=ground.suspects | {node})
    return replace(ground, dropped=ground.dropped | {node})


def _give_up(ground: Ground, fault: Fault, lost: Fault | None) -> Step[State, Action]:
    if lost is not None:
        reason = f"{lost.reason}; nothing replaces it: {fault.reason}"
        fault = replace(fault, reason=reason, stderr=lost.stderr)
    return Over(ground, Ending("faulted", fault.reason, fault)), (EndRequests(fault), Close())


# ---- what operators ask ----


def _asked(state: Live, event: Asked) -> Step[State, Action]:
    match state, event:
        case Carrying(), _:
            return _pass_on(state, event)
        case Finishing(), _:
            return state, ()
        case ((Planning() | Clearing()), StopAsked(reason)):
            return _break_off(state, reason)
        case ((Planning() | Clearing()), DrainAsked(reason, active)):
            if not active:
                return _break_off(state, reason)
            return replace(state, ground=replace(state.ground, draining=reason)), ()
        case _:
            # The next plan leaves out what is to be left.
            return state, ()


def _pass_on(state: Carrying, event: Asked) -> Step[State, Action]:
    match event:
        case StopAsked(reason):
            return state, (Tell(staging.StopAsked(reason)),)
        case DrainAsked(reason, active):
            state = replace(state, ground=replace(state.ground, draining=reason))
            # Requests that wait for this plan are told of to its machine when it is ready.
            waits = active and not state.ready
            return state, () if waits else (Tell(staging.DrainAsked(reason)),)
        case MoveAsked(node, reason):
            moves = node in state.ground.nodes
            return state, (Tell(staging.MoveAsked(reason)),) if moves else ()


def _break_off(state: Planning | Clearing, reason: str) -> Step[State, Action]:
    end = Ending("stopped", reason)
    if isinstance(state, Clearing):
        return Finishing(state.ground, end), (EndRequests(None),)
    return Over(state.ground, end), (EndRequests(None), Close())
