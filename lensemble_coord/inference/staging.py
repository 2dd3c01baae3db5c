"""One plan of a run, from its first order to its teardown; ``survival`` is the run over its plans.

Planned, Provisioning, Opening, Probing, then Provisioned or Running, Draining, Leaving, TornDown.
The first fault ends it from wherever it is; what the coordinator holds for it is given back and
every stage is told to end, whatever the end is.  How it ended and how its teardown went are kept
apart.  A torn edge or a stage that lost its neighbour is a symptom: its cause, which somebody
else reports a moment later, is waited for and wins.
"""

from typing import Literal, TypeAlias

import msgspec
from msgspec.structs import replace

from lensemble.errors import InvalidTransition
from lensemble.ids import NodeId
from lensemble.machine import ArmTimer, CancelTimer, Step, TimerExpired

SYMPTOMS = frozenset({"edge_fault", "link_lost", "upstream_lost", "downstream_lost"})
"""Codes of stage faults that have their cause elsewhere."""

PROBE, DRAIN, TEARDOWN, LAST_WORD = "probe", "drain", "teardown", "last word"
OWN_EDGES = "own edges"
"""Runs while the coordinator waits for room for its rings, and while its stream is opened."""

Outcome: TypeAlias = Literal["completed", "faulted", "stopped", "moved"]
"""Moved: nothing was wrong, and the next plan of the run leaves out one of its nodes."""

Teardown: TypeAlias = Literal["clean", "faulted", "timed out"]


class Rules(msgspec.Struct, frozen=True):
    """Seconds.  ``stall_s`` is the longest time a stage may spend without any progress."""

    stall_s: float = 60.0
    probe_s: float = 60.0
    drain_s: float = 600.0
    teardown_s: float = 10.0
    last_word_s: float = 1.0


class Loaded(msgspec.Struct, frozen=True):
    """What a stage that is ready has measured; bytes and seconds."""

    weights_bytes: int
    resident_bytes: int
    fetched_bytes: int
    seconds: float


class Place(msgspec.Struct, frozen=True):
    """How far one stage is: bytes while it fetches and loads, steps while it compiles."""

    node: NodeId
    phase: str = "asked"
    done: int = 0
    total: int = 0
    loaded: Loaded | None = None
    opened: bool = False


class Fault(msgspec.Struct, frozen=True):
    """Why a run cannot go on; ``stage`` is None where it is the coordinator's own."""

    code: str
    reason: str
    stage: int | None = None
    remediation: str = ""
    stderr: tuple[str, ...] = ()


class Ending(msgspec.Struct, frozen=True):
    outcome: Outcome
    reason: str = ""
    fault: Fault | None = None


# ---- states ----


class Planned(msgspec.Struct, frozen=True, tag=True):
    rules: Rules
    places: tuple[Place, ...]


class Provisioning(msgspec.Struct, frozen=True, tag=True):
    """Stages fetch, load and compile; ``told`` once they have been asked to."""

    rules: Rules
    places: tuple[Place, ...]
    told: bool = False
    symptom: Fault | None = None


class Opening(msgspec.Struct, frozen=True, tag=True):
    """Every stage is ready to receive; ``own`` once the coordinator's stream is open too."""

    rules: Rules
    places: tuple[Place, ...]
    own: bool = False
    symptom: Fault | None = None


class Probing(msgspec.Struct, frozen=True, tag=True):
    """Two chunks travel the real edges."""

    rules: Rules
    places: tuple[Place, ...]
    symptom: Fault | None = None


class Provisioned(msgspec.Struct, frozen=True, tag=True):
    """Ready, and at rest."""

    rules: Rules
    places: tuple[Place, ...]
    symptom: Fault | None = None


class Running(msgspec.Struct, frozen=True, tag=True):
    """``active`` requests, one or more, have not ended."""

    rules: Rules
    places: tuple[Place, ...]
    active: int
    symptom: Fault | None = None


class Draining(msgspec.Struct, frozen=True, tag=True):
    """Nothing more is taken on; ``active`` requests may end."""

    rules: Rules
    places: tuple[Place, ...]
    active: int
    symptom: Fault | None = None


class Leaving(msgspec.Struct, frozen=True, tag=True):
    """The stages in ``waiting`` have not said yet that they are gone."""

    rules: Rules
    places: tuple[Place, ...]
    ending: Ending
    waiting: frozenset[int]
    edges_held: bool = True
    complaints: tuple[str, ...] = ()
    teardown: Teardown = "clean"


class TornDown(msgspec.Struct, frozen=True, tag=True):
    rules: Rules
    places: tuple[Place, ...]
    ending: Ending
    teardown: Teardown
    complaints: tuple[str, ...] = ()


Live: TypeAlias = Provisioning | Opening | Probing | Provisioned | Running | Draining
State: TypeAlias = Planned | Live | Leaving | TornDown

# ---- events ----


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Carry the plan out."""


class EdgesTaken(msgspec.Struct, frozen=True, tag=True):
    """The coordinator's rings are leased and its receiving end is registered."""


class EdgesGiven(msgspec.Struct, frozen=True, tag=True):
    """The coordinator's ends are over and their leases are given back."""


class Progressed(msgspec.Struct, frozen=True, tag=True):
    stage: int
    phase: str
    done: int
    total: int


class Wanted(msgspec.Struct, frozen=True, tag=True):
    """The weights edge of ``stage`` is registered; it asks for these (offset, length)."""

    stage: int
    ranges: tuple[tuple[int, int], ...]


class Ready(msgspec.Struct, frozen=True, tag=True):
    stage: int
    loaded: Loaded


class Opened(msgspec.Struct, frozen=True, tag=True):
    stage: int


class OwnOpened(msgspec.Struct, frozen=True, tag=True):
    """The coordinator's stream to the first stage is open."""


class Probed(msgspec.Struct, frozen=True, tag=True):
    """The probe came back."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A stage refuses, faults or stalls, or the coordinator cannot do its own part."""

    fault: Fault


class NodeLost(msgspec.Struct, frozen=True, tag=True):
    node: NodeId
    reason: str


class SequenceBegan(msgspec.Struct, frozen=True, tag=True):
    pass


class SequenceEnded(msgspec.Struct, frozen=True, tag=True):
    pass


class DrainAsked(msgspec.Struct, frozen=True, tag=True):
    """Let requests end, then tear down."""

    reason: str


class StopAsked(msgspec.Struct, frozen=True, tag=True):
    """End requests and tear down."""

    reason: str


class MoveAsked(msgspec.Struct, frozen=True, tag=True):
    """Tear down, for another plan takes over."""

    reason: str


class StageGone(msgspec.Struct, frozen=True, tag=True):
    """A stage answered its teardown; ``complaint`` where that was not clean."""

    stage: int
    complaint: str = ""


Event: TypeAlias = (
    Begin
    | EdgesTaken
    | EdgesGiven
    | Progressed
    | Wanted
    | Ready
    | Opened
    | OwnOpened
    | Probed
    | Failed
    | NodeLost
    | SequenceBegan
    | SequenceEnded
    | DrainAsked
    | StopAsked
    | MoveAsked
    | StageGone
    | TimerExpired
)

# ---- actions ----


class TakeEdges(msgspec.Struct, frozen=True, tag=True):
    """Lease the coordinator's rings and register its receiving end: ``EdgesTaken``."""


class ProvisionStages(msgspec.Struct, frozen=True, tag=True):
    pass


class SendWeights(msgspec.Struct, frozen=True, tag=True):
    stage: int
    ranges: tuple[tuple[int, int], ...]


class OpenEdges(msgspec.Struct, frozen=True, tag=True):
    """Tell every stage to open, and open the coordinator's own stream: ``OwnOpened``."""


class SendProbe(msgspec.Struct, frozen=True, tag=True):
    """Let two chunks travel round: ``Probed``."""


class EndSequences(msgspec.Struct, frozen=True, tag=True):
    """No request goes on under this plan."""

    reason: str
    fault: Fault | None = None


class TearDown(msgspec.Struct, frozen=True, tag=True):
    """Tell every stage to end."""

    reason: str


class GiveEdges(msgspec.Struct, frozen=True, tag=True):
    """End what ``TakeEdges`` began, done or not: ``EdgesGiven``."""


class Close(msgspec.Struct, frozen=True, tag=True):
    """Nothing is held any more; no event follows."""


Action: TypeAlias = (
    TakeEdges
    | ProvisionStages
    | SendWeights
    | OpenEdges
    | SendProbe
    | EndSequences
    | TearDown
    | GiveEdges
    | Close
    | ArmTimer
    | CancelTimer
)

# ---- transition ----

_NAMES: dict[type[msgspec.Struct], str] = {Leaving: "tearing down", TornDown: "torn down"}


def public_state(state: State) -> str:
    """One word or two for people: planned, provisioning, ..., faulted, tearing down, torn down."""
    if isinstance(state, Leaving) and state.ending.outcome == "faulted":
        return "faulted"
    return _NAMES.get(type(state), type(state).__name__.lower())


def takes_requests(state: State) -> bool:
    """Whether a request may be begun."""
    return isinstance(state, Provisioned | Running)


def stall_timer(stage: int) -> str:
    """Name of the timer that runs while ``stage`` makes no progress."""
    return f"stall {stage}"


def transition(state: State, event: Event) -> Step[State, Action]:
    match state:
        case Planned():
            return _begin(state, event)
        case Leaving():
            return _leave_on(state, event)
        case TornDown():
            return state, ()
    match event:
        case Failed() | NodeLost() | StopAsked() | DrainAsked() | MoveAsked():
            return _end(state, event)
        case TimerExpired(timer):
            return _expire(state, timer)
        case SequenceBegan() | SequenceEnded():
            return _count(state, event)
        case _:
            return _prepare(state, event)


def _begin(state: Planned, event: Event) -> Step[State, Action]:
    match event:
        case Begin():
            arm = ArmTimer(OWN_EDGES, state.rules.stall_s)
            return Provisioning(state.rules, state.places), (TakeEdges(), arm)
        case StopAsked() | DrainAsked() | MoveAsked():
            moved = isinstance(event, MoveAsked)
            ending = Ending("moved" if moved else "stopped", event.reason)
            return TornDown(state.rules, state.places, ending, "clean"), (Close(),)
        case NodeLost():
            return state, ()
        case _:
            raise InvalidTransition(state, event)


# ---- getting ready ----


def _prepare(state: Live, event: Event) -> Step[State, Action]:
    match state, event:
        case Provisioning(), _:
            return _provision(state, event)
        case Opening(), Progressed():
            return _progress(state, event)
        case Opening(), (Opened() | OwnOpened()):
            return _opened(state, event)
        case Probing(), Probed():
            settled = Provisioned(state.rules, state.places, state.symptom)
            return settled, (CancelTimer(PROBE),)
        case _, Begin():
            raise InvalidTransition(state, event)
        case _, _:
            return state, ()


def _provision(state: Provisioning, event: Event) -> Step[State, Action]:
    match event:
        case EdgesTaken() if not state.told:
            arm = tuple(_watch(state, stage) for stage in range(len(state.places)))
            return replace(state, told=True), (CancelTimer(OWN_EDGES), ProvisionStages(), *arm)
        case Wanted(stage, ranges):
            return _moved(state, stage, (SendWeights(stage, ranges),))
        case Ready():
            return _ready(state, event)
        case Progressed():
            return _progress(state, event)
        case Begin():
            raise InvalidTransition(state, event)
        case _:
            return state, ()


def _watch(state: Live, stage: int) -> ArmTimer:
    return ArmTimer(stall_timer(stage), state.rules.stall_s)


def _moved(
    state: Provisioning | Opening, stage: int, then: tuple[Action, ...] = ()
) -> Step[State, Action]:
    return state, (_watch(state, stage), *then)


def _set(places: tuple[Place, ...], stage: int, place: Place) -> tuple[Place, ...]:
    return (*places[:stage], place, *places[stage + 1 :])


def _progress(state: Provisioning | Opening, event: Progressed) -> Step[State, Action]:
    place = state.places[event.stage]
    done_with = place.opened if isinstance(state, Opening) else place.loaded is not None
    if done_with or (place.phase, place.done) == (event.phase, event.done):
        return state, ()
    moved = replace(place, phase=event.phase, done=event.done, total=event.total)
    return _moved(replace(state, places=_set(state.places, event.stage, moved)), event.stage)


def _ready(state: Provisioning, event: Ready) -> Step[State, Action]:
    if state.places[event.stage].loaded is not None:
        return state, ()
    place = replace(state.places[event.stage], phase="ready", done=0, total=0, loaded=event.loaded)
    places = _set(state.places, event.stage, place)
    if not all(each.loaded is not None for each in places):
        return replace(state, places=places), (CancelTimer(stall_timer(event.stage)),)
    opening = tuple(replace(each, phase="opening") for each in places)
    arm = tuple(_watch(state, stage) for stage in range(len(places)))
    own = ArmTimer(OWN_EDGES, state.rules.stall_s)
    return Opening(state.rules, opening, symptom=state.symptom), (OpenEdges(), own, *arm)


def _opened(state: Opening, event: Opened | OwnOpened) -> Step[State, Action]:
    actions: tuple[Action, ...] = ()
    match event:
        case Opened(stage):
            place = replace(state.places[stage], phase="opened", opened=True)
            state = replace(state, places=_set(state.places, stage, place))
            actions = (CancelTimer(stall_timer(stage)),)
        case OwnOpened():
            state = replace(state, own=True)
            actions = (CancelTimer(OWN_EDGES),)
    if not (state.own and all(each.opened for each in state.places)):
        return state, actions
    places = tuple(replace(each, phase="ready") for each in state.places)
    probing = Probing(state.rules, places, state.symptom)
    return probing, (*actions, SendProbe(), ArmTimer(PROBE, state.rules.probe_s))


# ---- at work ----


def _count(state: Live, event: SequenceBegan | SequenceEnded) -> Step[State, Action]:
    match state, event:
        case Provisioned(), SequenceBegan():
            return Running(state.rules, state.places, 1, state.symptom), ()
        case ((Running() | Draining()), SequenceBegan()):
            return replace(state, active=state.active + 1), ()
        case ((Running() | Draining()), SequenceEnded()) if state.active > 1:
            return replace(state, active=state.active - 1), ()
        case Running(), SequenceEnded():
            return Provisioned(state.rules, state.places, state.symptom), ()
        case Draining(), SequenceEnded():
            return _leave(state, Ending("completed"))
        case _:
            raise InvalidTransition(state, event)


# ---- ends ----


def _end(
    state: Live, event: Failed | NodeLost | StopAsked | DrainAsked | MoveAsked
) -> Step[State, Action]:
    match event:
        case Failed(fault):
            return _fail(state, fault)
        case NodeLost():
            return _lose(state, event)
        case StopAsked():
            return _leave(state, Ending("stopped", event.reason))
        case MoveAsked():
            return _leave(state, Ending("moved", event.reason))
        case DrainAsked():
            return _drain(state, event)


def _drain(state: Live, event: DrainAsked) -> Step[State, Action]:
    match state:
        case Running():
            draining = Draining(state.rules, state.places, state.active, state.symptom)
            return draining, (ArmTimer(DRAIN, state.rules.drain_s),)
        case Draining():
            return state, ()
        case Provisioned():
            return _leave(state, Ending("completed", event.reason))
        case _:
            return _leave(state, Ending("stopped", event.reason))


def _fail(state: Live, fault: Fault) -> Step[State, Action]:
    if fault.code not in SYMPTOMS:
        return _leave(state, Ending("faulted", fault.reason, fault))
    if state.symptom is None:
        waiting = replace(state, symptom=fault)
        return waiting, (ArmTimer(LAST_WORD, state.rules.last_word_s),)
    if state.symptom.stage is None and fault.stage is not None:
        return replace(state, symptom=fault), ()
    return state, ()


def _lose(state: Live, event: NodeLost) -> Step[State, Action]:
    for stage, place in enumerate(state.places):
        if place.node == event.node:
            reason = f"its node is gone: {event.reason}"
            fault = Fault("link_lost", reason, stage)
            return _leave(state, Ending("faulted", reason, fault), gone=event.node)
    return state, ()


def _expire(state: Live, timer: str) -> Step[State, Action]:
    if timer == LAST_WORD and state.symptom is not None:
        return _leave(state, Ending("faulted", state.symptom.reason, state.symptom))
    if timer == PROBE:
        reason = f"the probe did not come back within {state.rules.probe_s:g} s"
        return _fail(state, Fault("stage_stalled", reason))
    if timer == OWN_EDGES:
        return _fail(state, _own_edges_fault(state))
    if timer == DRAIN:
        reason = f"requests did not end within {state.rules.drain_s:g} s"
        return _leave(state, Ending("stopped", reason))
    for stage, place in enumerate(state.places):
        if timer == stall_timer(stage):
            far = f" ({place.done} of {place.total})" if place.total else ""
            reason = f"no progress for {state.rules.stall_s:g} s while {place.phase}{far}"
            return _fail(state, Fault("stage_stalled", reason, stage))
    return state, ()


def _own_edges_fault(state: Live) -> Fault:
    within = f"within {state.rules.stall_s:g} s"
    if isinstance(state, Opening):
        return Fault("stage_stalled", f"the stream to the first stage did not open {within}")
    return Fault(
        "arena_exhausted",
        f"no room for the coordinator's own rings in the arena {within}",
        remediation="Raise `edges.arena_bytes` of the coordinator, or end a run.",
    )


def _leave(state: Live, ending: Ending, gone: NodeId | None = None) -> Step[State, Action]:
    """End the run: its requests, every stage but those on ``gone``, the coordinator's own ends."""
    timers = (OWN_EDGES, PROBE, DRAIN, LAST_WORD, *map(stall_timer, range(len(state.places))))
    actions: tuple[Action, ...] = tuple(map(CancelTimer, timers))
    actions += (EndSequences(ending.reason, ending.fault), TearDown(ending.reason), GiveEdges())
    actions += (ArmTimer(TEARDOWN, state.rules.teardown_s),)
    told = not isinstance(state, Provisioning) or state.told
    places = enumerate(state.places)
    waiting = frozenset(stage for stage, place in places if told and place.node != gone)
    return Leaving(state.rules, state.places, ending, waiting), actions


def _leave_on(state: Leaving, event: Event) -> Step[State, Action]:
    match event:
        case StageGone(stage, complaint):
            state = _without(state, {stage}, complaint)
        case NodeLost():
            # It frees what it holds by itself when its link is lost.
            stages = {s for s, place in enumerate(state.places) if place.node == event.node}
            state = _without(state, stages)
        case EdgesGiven():
            state = replace(state, edges_held=False)
        case TimerExpired(timer) if timer == TEARDOWN and state.waiting:
            late = ", ".join(str(stage) for stage in sorted(state.waiting))
            complaint = f"no word within {state.rules.teardown_s:g} s from stage {late}"
            state = replace(
                state,
                waiting=frozenset(),
                teardown="timed out",
                complaints=(*state.complaints, complaint),
            )
        case Begin():
            raise InvalidTransition(state, event)
        case _:
            return state, ()
    if state.waiting or state.edges_held:
        return state, ()
    over = TornDown(state.rules, state.places, state.ending, state.teardown, state.complaints)
    return over, (CancelTimer(TEARDOWN), Close())


def _without(state: Leaving, stages: set[int], complaint: str = "") -> Leaving:
    if not stages & state.waiting:
        return state
    complaints, teardown = state.complaints, state.teardown
    if complaint:
        complaints = (*complaints, f"stage {min(stages)}: {complaint}")
        teardown = "faulted" if teardown == "clean" else teardown
    return replace(state, waiting=state.waiting - stages, complaints=complaints, teardown=teardown)
