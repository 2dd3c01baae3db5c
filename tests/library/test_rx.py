import itertools

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lensemble.edge import rx
from lensemble.errors import InvalidTransition
from lensemble.ids import SlotIndex

SLOTS, CAPACITY = 3, 64
RING = tuple(SlotIndex(index) for index in range(SLOTS))
STATES: list[rx.State] = [
    rx.Unbound(SLOTS, CAPACITY),
    rx.Ready(CAPACITY, RING[1:], RING[:1]),
    rx.Ended(RING[:1]),
    rx.Faulted("lost"),
]
EVENTS: list[rx.Event] = [
    rx.Registered(),
    rx.Landed(SlotIndex(1), 1),
    rx.Landed(SlotIndex(0), 1),
    rx.Consumed(SlotIndex(0)),
    rx.Consumed(SlotIndex(1)),
    rx.StreamEnded(),
    rx.StreamLost("lost"),
]
ANSWERED = {
    (rx.Unbound, rx.Registered()),
    (rx.Unbound, rx.StreamLost("lost")),
    (rx.Ready, rx.Landed(SlotIndex(1), 1)),
    (rx.Ready, rx.Consumed(SlotIndex(0))),
    (rx.Ready, rx.StreamEnded()),
    (rx.Ready, rx.StreamLost("lost")),
    (rx.Ended, rx.Consumed(SlotIndex(0))),
    (rx.Ended, rx.StreamLost("lost")),
    *((rx.Faulted, event) for event in EVENTS),
}


@pytest.mark.parametrize(("state", "event"), list(itertools.product(STATES, EVENTS)))
def test_every_pair_is_answered_or_refused(state: rx.State, event: rx.Event) -> None:
    if (type(state), event) in ANSWERED:
        after, actions = rx.transition(state, event)
        for record in (after, *actions):
            assert msgspec.json.decode(msgspec.json.encode(record), type=type(record)) == record
    else:
        with pytest.raises(InvalidTransition):
            rx.transition(state, event)


@pytest.mark.parametrize("extent", [CAPACITY + 1, -1])
def test_an_extent_that_cannot_be_faults_the_edge(extent: int) -> None:
    state, actions = rx.transition(rx.Ready(CAPACITY, RING), rx.Landed(SlotIndex(0), extent))
    assert state == rx.Faulted(f"extent {extent} exceeds the capacity of {CAPACITY} bytes")
    assert actions == (rx.Report(state.reason),)


def test_chunks_that_were_lent_can_be_given_back_after_the_end() -> None:
    state, actions = rx.transition(rx.Ready(CAPACITY, (), RING), rx.StreamEnded())
    assert actions == (rx.SignalEnd(),)
    for slot in reversed(RING):
        state, actions = rx.transition(state, rx.Consumed(slot))
        assert actions == ()
    assert state == rx.Ended(())


class SlotOwnership(RuleBasedStateMachine):
    """A slot has exactly one owner, and chunks go to the process in the order they landed."""

    def __init__(self) -> None:
        super().__init__()
        self.state: rx.State = rx.Unbound(SLOTS, CAPACITY)
        self.stream: list[SlotIndex] = []
        self.process: list[SlotIndex] = []
        self.landed: list[tuple[SlotIndex, int]] = []
        self.driven: list[tuple[SlotIndex, int]] = []
        self.feed(rx.Registered())

    def feed(self, event: rx.Event) -> None:
        self.state, actions = rx.transition(self.state, event)
        for action in actions:
            match action:
                case rx.OfferSlot(slot):
                    self.stream.append(slot)
                case rx.SignalReady(slot, extent):
                    self.process.append(slot)
                    self.driven.append((slot, extent))

    @precondition(lambda self: self.stream)
    @rule(data=st.data(), extent=st.integers(0, CAPACITY))
    def land(self, data: st.DataObject, extent: int) -> None:
        slot = data.draw(st.sampled_from(sorted(self.stream)))
        self.stream.remove(slot)
        self.landed.append((slot, extent))
        self.feed(rx.Landed(slot, extent))

    @precondition(lambda self: self.process)
    @rule(data=st.data())
    def consume(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.process)))
        self.process.remove(slot)
        self.feed(rx.Consumed(slot))

    @invariant()
    def one_owner(self) -> None:
        assert sorted(self.process + self.stream) == list(RING)
        assert self.driven == self.landed
        assert isinstance(self.state, rx.Ready)
        assert sorted(self.state.stream) == sorted(self.stream)
        assert list(self.state.lent) == self.process


TestSlotOwnership = SlotOwnership.TestCase
TestSlotOwnership.settings = settings(max_examples=100, deadline=None)
