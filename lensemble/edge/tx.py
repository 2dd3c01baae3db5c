"""The sending end of an edge.

A slot belongs to the process or to the stream, and passes from one to the other by a signal.  The
process gets every slot when the stream opens, hands each back filled, and gets it again when the
stream has taken its bytes.  Handing back never waits; only a slot that is not there yet does.
"""

from typing import TypeAlias

import msgspec
from msgspec.structs import replace

from lensemble.errors import InvalidTransition
from lensemble.ids import SlotIndex
from lensemble.machine import Step

# ---- states ----


class Unbound(msgspec.Struct, frozen=True, tag=True):
    """Provisioned; the stream is not open yet."""

    slots: int
    capacity_bytes: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Open.  ``lent`` are with the process, ``stream`` are being sent, oldest first."""

    capacity_bytes: int
    lent: tuple[SlotIndex, ...]
    stream: tuple[SlotIndex, ...] = ()


class Ending(msgspec.Struct, frozen=True, tag=True):
    """The process fills no more; ``stream`` still has to go out, then the end."""

    stream: tuple[SlotIndex, ...] = ()


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The consumer's transport has everything and knows that nothing follows."""


class Faulted(msgspec.Struct, frozen=True, tag=True):
    reason: str


State: TypeAlias = Unbound | Ready | Ending | Ended | Faulted

# ---- events ----


class Opened(msgspec.Struct, frozen=True, tag=True):
    """The stream is open and its preamble written."""


class Filled(msgspec.Struct, frozen=True, tag=True):
    """The process hands back ``slot`` with a chunk of ``extent`` bytes."""

    slot: SlotIndex
    extent: int


class Sent(msgspec.Struct, frozen=True, tag=True):
    """The stream has taken the bytes of ``slot``."""

    slot: SlotIndex


class Done(msgspec.Struct, frozen=True, tag=True):
    """The process fills no more."""


class StreamEnded(msgspec.Struct, frozen=True, tag=True):
    """The end of the stream is acknowledged."""


class StreamLost(msgspec.Struct, frozen=True, tag=True):
    reason: str


Event: TypeAlias = Opened | Filled | Sent | Done | StreamEnded | StreamLost

# ---- actions ----


class SignalReleased(msgspec.Struct, frozen=True, tag=True):
    """Lend ``slot``, empty, to the process."""

    slot: SlotIndex


class SendSlot(msgspec.Struct, frozen=True, tag=True):
    """Send the first ``extent`` bytes of ``slot`` as the next frame."""

    slot: SlotIndex
    extent: int


class FinishStream(msgspec.Struct, frozen=True, tag=True):
    """End the stream in order, after the last frame."""


class SignalEnd(msgspec.Struct, frozen=True, tag=True):
    """Tell the process that everything it filled has arrived."""


class Report(msgspec.Struct, frozen=True, tag=True):
    """Tell whoever provisioned this end that it is ready, or why it faulted."""

    fault: str | None = None


Action: TypeAlias = SignalReleased | SendSlot | FinishStream | SignalEnd | Report

# ---- transition ----


def transition(state: State, event: Event) -> Step[State, Action]:
    match state, event:
        case Unbound(), Opened():
            ring = tuple(SlotIndex(index) for index in range(state.slots))
            return Ready(state.capacity_bytes, ring), (*map(SignalReleased, ring), Report())
        case Ready(), Filled() if event.slot in state.lent:
            return _fill(state, event)
        case ((Ready() | Ending()), Sent()) if event.slot in state.stream[:1]:
            return _release(state, event.slot)
        case Ready(), Done():
            return Ending(state.stream), (() if state.stream else (FinishStream(),))
        case Ending(()), StreamEnded():
            return Ended(), (SignalEnd(),)
        case _:
            return _lose(state, event)


def _lose(state: State, event: Event) -> Step[State, Action]:
    match state, event:
        case ((Unbound() | Ready() | Ending()), StreamLost()):
            return Faulted(event.reason), (Report(event.reason),)
        case (Ended(), StreamLost()) | (Faulted(), _):
            return state, ()
        case _:
            raise InvalidTransition(state, event)


def _fill(state: Ready, event: Filled) -> Step[State, Action]:
    if not 0 <= event.extent <= state.capacity_bytes:
        fault = f"extent {event.extent} exceeds the capacity of {state.capacity_bytes} bytes"
        return Faulted(fault), (Report(fault),)
    lent = tuple(slot for slot in state.lent if slot != event.slot)
    moved = replace(state, lent=lent, stream=(*state.stream, event.slot))
    return moved, (SendSlot(event.slot, event.extent),)


def _release(state: Ready | Ending, slot: SlotIndex) -> Step[State, Action]:
    stream = state.stream[1:]
    if isinstance(state, Ready):
        moved = replace(state, lent=(*state.lent, slot), stream=stream)
        return moved, (SignalReleased(slot),)
    return Ending(stream), (() if stream else (FinishStream(),))
