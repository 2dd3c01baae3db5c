import gc
import os
import subprocess
import sys

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lensemble.edge.arena import DEFAULT_ARENA_BYTES, PAGE_BYTES, Arena, Place, Region
from lensemble.edge.spec import EdgeSpec
from lensemble.errors import ArenaExhausted, InvariantError
from lensemble.ids import EdgeId, NodeId, SlotIndex


def spec(capacity: int, slots: int = 2) -> EdgeSpec:
    return EdgeSpec(EdgeId(1), NodeId("a"), NodeId("b"), capacity, slots)


def test_slots_are_views_of_one_memory_and_do_not_overlap() -> None:
    arena = Arena.create(1 << 20)
    region = arena.lease(spec(5000, slots=3))
    assert region is not None
    for index in range(3):
        slot = region.slot(SlotIndex(index))
        assert len(slot) == 5000
        slot[:] = bytes([index + 1]) * 5000
    again = Arena.attach(arena.fd).region(region.place)
    for index in range(3):
        assert again.slot(SlotIndex(index)) == bytes([index + 1]) * 5000


def test_another_process_maps_the_same_memory_and_needs_no_event_loop() -> None:
    arena = Arena.create()
    region = arena.lease(spec(100))
    assert region is not None
    region.slot(SlotIndex(1))[:5] = b"hello"
    program = (
        "import sys; from lensemble.edge.arena import Arena, Place\n"
        f"slot = Arena.attach({arena.fd}).region(Place({region.offset}, 100, 2)).slot(1)\n"
        "print(bytes(slot[:5]).decode(), 'trio' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        pass_fds=[arena.fd],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "hello False\n"


def test_memory_follows_what_is_leased_and_not_what_passed_through() -> None:
    arena = Arena.create()
    assert arena.nbytes == DEFAULT_ARENA_BYTES
    for _ in range(10):
        region = arena.lease(spec(1 << 20))
        assert region is not None
        region.slot(SlotIndex(0))[:] = bytes(range(256)) * 4096
        assert arena.resident_bytes() == 1 << 20
        arena.give_back(region)
        assert arena.resident_bytes() == 0
    region = arena.lease(spec(1 << 20))
    assert region is not None
    assert region.slot(SlotIndex(0)) == bytes(1 << 20), "a new lease shows nothing of an old one"


def test_a_lease_that_fits_later_is_not_had_now() -> None:
    arena = Arena.create(4 * PAGE_BYTES)
    first = arena.lease(spec(PAGE_BYTES, slots=3))
    assert first is not None
    assert arena.lease(spec(PAGE_BYTES, slots=2)) is None
    assert arena.lease(spec(1, slots=1)) is not None
    arena.give_back(first)
    assert arena.lease(spec(PAGE_BYTES, slots=2)) is not None


def test_a_lease_that_never_fits_is_refused_with_the_arithmetic() -> None:
    arena = Arena.create(4 * PAGE_BYTES)
    wanted = 5 * PAGE_BYTES
    with pytest.raises(ArenaExhausted, match=f"5 slots x {PAGE_BYTES} bytes = {wanted} bytes"):
        arena.lease(spec(1, slots=5))


def test_a_region_is_given_back_once() -> None:
    arena = Arena.create(1 << 20)
    region = arena.lease(spec(10))
    assert region is not None
    arena.give_back(region)
    with pytest.raises(InvariantError):
        arena.give_back(region)


@pytest.mark.parametrize("place", [Place(-PAGE_BYTES, 10, 1), Place(1 << 20, 10, 1)])
def test_a_place_outside_is_refused(place: Place) -> None:
    with pytest.raises(ArenaExhausted, match="outside"):
        Arena.create(1 << 20).region(place)


def test_the_arena_is_not_inherited_unless_passed_on() -> None:
    assert not os.get_inheritable(Arena.create(1 << 20).fd)


class FirstFit(RuleBasedStateMachine):
    """The allocator against a map of pages: no overlap, and first fit finds what there is."""

    PAGES = 24

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena.create(self.PAGES * PAGE_BYTES)
        self.owner: list[Region | None] = [None] * self.PAGES
        self.regions: list[Region] = []

    @rule(pages=st.integers(1, 3), slots=st.integers(1, 4))
    def lease(self, pages: int, slots: int) -> None:
        need = pages * slots
        starts = range(self.PAGES - need + 1)
        first = next((s for s in starts if not any(self.owner[s : s + need])), None)
        region = self.arena.lease(spec(pages * PAGE_BYTES, slots))
        if first is None:
            assert region is None
            return
        assert region is not None
        assert region.offset == first * PAGE_BYTES
        self.owner[first : first + need] = [region] * need
        self.regions.append(region)

    @precondition(lambda self: self.regions)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        region = self.regions.pop(data.draw(st.integers(0, len(self.regions) - 1)))
        self.arena.give_back(region)
        self.owner = [None if owner is region else owner for owner in self.owner]

    @invariant()
    def adds_up(self) -> None:
        assert self.arena.leased_bytes() == PAGE_BYTES * sum(o is not None for o in self.owner)

    def teardown(self) -> None:
        self.arena.close()


TestFirstFit = FirstFit.TestCase
TestFirstFit.settings = settings(max_examples=60, deadline=None)


def test_a_created_arena_closes_its_file_once_and_with_itself() -> None:
    """By number it may be another file's by then."""
    arena = Arena.create(PAGE_BYTES)
    fd = arena.fd
    arena.close()
    again = os.open(os.devnull, os.O_RDONLY)
    try:
        assert again == fd
        arena.close()
        del arena
        gc.collect()
        os.fstat(again)
    finally:
        os.close(again)
    dropped = Arena.create(PAGE_BYTES)
    fd = dropped.fd
    del dropped
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
