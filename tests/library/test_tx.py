import itertools

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lensemble.edge import tx
from lensemble.errors import InvalidTransition
from lensemble.ids import SlotIndex

SLOTS, CAPACITY = 3, 64
RING = tuple(SlotIndex(index) for index in range(SLOTS))
STATES: list[tx.State] = [
    tx.Unbound(SLOTS, CAPACITY),
    tx.Ready(CAPACITY, RING[:1], RING[1:]),
    tx.Ending(RING[1:]),
    tx.Ending(()),
    tx.Ended(),
    tx.Faulted("lost"),
]
EVENTS: list[tx.Event] = [
    tx.Opened(),
    tx.Filled(SlotIndex(0), 1),
    tx.Filled(SlotIndex(1), 1),
    tx.Sent(SlotIndex(1)),
    tx.Sent(SlotIndex(2)),
    tx.Done(),
    tx.StreamEnded(),
    tx.StreamLost("lost"),
]
ANSWERED = [
    (tx.Unbound(SLOTS, CAPACITY), {0, 7}),
    (tx.Ready(CAPACITY, RING[:1], RING[1:]), {1, 3, 5, 7}),
    (tx.Ending(RING[1:]), {3, 7}),
    (tx.Ending(()), {6, 7}),
    (tx.Ended(), {7}),
    (tx.Faulted("lost"), set(range(8))),
]


@pytest.mark.parametrize(("state", "number"), list(itertools.product(STATES, range(len(EVENTS)))))
def test_every_pair_is_answered_or_refused(state: tx.State, number: int) -> None:
    event = EVENTS[number]
    if any(state == known and number in numbers for known, numbers in ANSWERED):
        after, actions = tx.transition(state, event)
        for record in (after, *actions):
            assert msgspec.json.decode(msgspec.json.encode(record), type=type(record)) == record
    else:
        with pytest.raises(InvalidTransition):
            tx.transition(state, event)


def test_the_process_gets_the_whole_ring_when_the_stream_opens() -> None:
    state, actions = tx.transition(tx.Unbound(SLOTS, CAPACITY), tx.Opened())
    assert state == tx.Ready(CAPACITY, RING)
    assert actions == (*map(tx.SignalReleased, RING), tx.Report())


@pytest.mark.parametrize("extent", [CAPACITY + 1, -1])
def test_an_extent_that_cannot_be_faults_the_edge(extent: int) -> None:
    state, actions = tx.transition(tx.Ready(CAPACITY, RING), tx.Filled(SlotIndex(0), extent))
    assert state == tx.Faulted(f"extent {extent} exceeds the capacity of {CAPACITY} bytes")
    assert actions == (tx.Report(state.reason),)


def test_the_end_follows_the_last_frame() -> None:
    state, actions = tx.transition(tx.Ready(CAPACITY, (), RING[:2]), tx.Done())
    assert actions == ()
    state, actions = tx.transition(state, tx.Sent(RING[0]))
    assert actions == ()
    state, actions = tx.transition(state, tx.Sent(RING[1]))
    assert actions == (tx.FinishStream(),)
    state, actions = tx.transition(state, tx.StreamEnded())
    assert (state, actions) == (tx.Ended(), (tx.SignalEnd(),))


class SlotOwnership(RuleBasedStateMachine):
    """A slot has exactly one owner, and frames are sent in the order they were handed back."""

    def __init__(self) -> None:
        super().__init__()
        self.state: tx.State = tx.Unbound(SLOTS, CAPACITY)
        self.process: list[SlotIndex] = []
        self.stream: list[SlotIndex] = []
        self.filled: list[tuple[SlotIndex, int]] = []
        self.sent: list[tuple[SlotIndex, int]] = []
        self.feed(tx.Opened())

    def feed(self, event: tx.Event) -> None:
        self.state, actions = tx.transition(self.state, event)
        for action in actions:
            match action:
                case tx.SignalReleased(slot):
                    self.process.append(slot)
                case tx.SendSlot(slot, extent):
                    self.stream.append(slot)
                    self.sent.append((slot, extent))

    @precondition(lambda self: self.process)
    @rule(data=st.data(), extent=st.integers(0, CAPACITY))
    def fill(self, data: st.DataObject, extent: int) -> None:
        slot = data.draw(st.sampled_from(sorted(self.process)))
        self.process.remove(slot)
        self.filled.append((slot, extent))
        self.feed(tx.Filled(slot, extent))

    @precondition(lambda self: self.stream)
    @rule()
    def send(self) -> None:
        self.feed(tx.Sent(self.stream.pop(0)))

    @invariant()
    def one_owner(self) -> None:
        assert sorted(self.process + self.stream) == list(RING)
        assert self.sent == self.filled
        assert isinstance(self.state, tx.Ready)
        assert list(self.state.lent) == self.process
        assert list(self.state.stream) == self.stream


TestSlotOwnership = SlotOwnership.TestCase
TestSlotOwnership.settings = settings(max_examples=100, deadline=None)
