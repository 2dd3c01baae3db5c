"""The receiving end of an edge.

A slot belongs to the stream or to the process, and passes from one to the other by a signal.
Chunks go to the process in the order in which they landed, each as soon as it is whole; several may
be with the process at once, as many as the ring is deep.  Bytes never come here: a chunk is its
slot and its extent.
"""

from typing import TypeAlias

import msgspec
from msgspec.structs import replace

from lensemble.errors import InvalidTransition
from lensemble.ids import SlotIndex
from lensemble.machine import Step

# ---- states ----


class Unbound(msgspec.Struct, frozen=True, tag=True):
    """Provisioned; the demux does not know this edge yet."""

    slots: int
    capacity_bytes: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Known to the demux.  ``stream`` are to be filled, ``lent`` are being read, oldest first."""

    capacity_bytes: int
    stream: tuple[SlotIndex, ...]
    lent: tuple[SlotIndex, ...] = ()


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The producer finished in order; ``lent`` chunks are still being read."""

    lent: tuple[SlotIndex, ...] = ()


class Faulted(msgspec.Struct, frozen=True, tag=True):
    reason: str


State: TypeAlias = Unbound | Ready | Ended | Faulted

# ---- events ----


class Registered(msgspec.Struct, frozen=True, tag=True):
    """The demux routes this edge's stream here."""


class Landed(msgspec.Struct, frozen=True, tag=True):
    """A whole chunk of ``extent`` bytes lies in ``slot``."""

    slot: SlotIndex
    extent: int


class Consumed(msgspec.Struct, frozen=True, tag=True):
    """The process is done with ``slot``."""

    slot: SlotIndex


class StreamEnded(msgspec.Struct, frozen=True, tag=True):
    """The stream ended in order, between two chunks."""


class StreamLost(msgspec.Struct, frozen=True, tag=True):
    reason: str


Event: TypeAlias = Registered | Landed | Consumed | StreamEnded | StreamLost

# ---- actions ----


class OfferSlot(msgspec.Struct, frozen=True, tag=True):
    """Let the stream fill ``slot``."""

    slot: SlotIndex


class SignalReady(msgspec.Struct, frozen=True, tag=True):
    """Lend ``slot`` with its chunk of ``extent`` bytes to the process."""

    slot: SlotIndex
    extent: int


class SignalEnd(msgspec.Struct, frozen=True, tag=True):
    """Tell the process that no chunk follows."""


class Report(msgspec.Struct, frozen=True, tag=True):
    """Tell whoever provisioned this end that it is ready, or why it faulted."""

    fault: str | None = None


Action: TypeAlias = OfferSlot | SignalReady | SignalEnd | Report

# ---- transition ----


def transition(state: State, event: Event) -> Step[State, Action]:
    match state, event:
        case Unbound(), Registered():
            ring = tuple(SlotIndex(index) for index in range(state.slots))
            return Ready(state.capacity_bytes, ring), (*map(OfferSlot, ring), Report())
        case Ready(), Landed() if event.slot in state.stream:
            return _land(state, event)
        case ((Ready() | Ended()), Consumed()) if event.slot in state.lent:
            return _reclaim(state, event.slot)
        case Ready(), StreamEnded():
            return Ended(state.lent), (SignalEnd(),)
        case ((Unbound() | Ready()), StreamLost()):
            return Faulted(event.reason), (Report(event.reason),)
        case Ended(), StreamLost():
            return state, ()
        case Faulted(), _:
            return state, ()
        case _:
            raise InvalidTransition(state, event)


def _land(state: Ready, event: Landed) -> Step[State, Action]:
    if not 0 <= event.extent <= state.capacity_bytes:
        fault = f"extent {event.extent} exceeds the capacity of {state.capacity_bytes} bytes"
        return Faulted(fault), (Report(fault),)
    moved = replace(
        state, stream=_without(state.stream, event.slot), lent=(*state.lent, event.slot)
    )
    return moved, (SignalReady(event.slot, event.extent),)


def _reclaim(state: Ready | Ended, slot: SlotIndex) -> Step[State, Action]:
    lent = _without(state.lent, slot)
    if isinstance(state, Ended):
        return Ended(lent), ()
    return replace(state, stream=(*state.stream, slot), lent=lent), (OfferSlot(slot),)


def _without(slots: tuple[SlotIndex, ...], slot: SlotIndex) -> tuple[SlotIndex, ...]:
    return tuple(other for other in slots if other != slot)
