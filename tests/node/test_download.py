"""States coming in whole, as sums, cut short, damaged and again, against what they should be."""

import itertools
import shutil
import tempfile
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lensemble import blob
from lensemble.errors import (
    AggregationError,
    CheckpointIntegrityError,
    ContractViolation,
    FrameError,
    PeerError,
    StorageError,
)
from lensemble.packing import pack
from lensemble_node.worker.download import Held, Inbound
from lensemble_node.worker.state_store import Goal, StateStore
from tests.node.coming import (
    CHUNK,
    FEDERATION,
    LAYOUT,
    ROUNDS,
    STATES,
    WORKLOAD,
    steps_to,
    sums,
    whole,
)

GOALS = [state.goal for state in STATES]
ALL = 2 * LAYOUT.nbytes


def inbound_in(directory: Path) -> Inbound:
    return inbound_of(StateStore(directory, LAYOUT))


def inbound_of(store: StateStore) -> Inbound:
    return Inbound(store, FEDERATION, WORKLOAD, LAYOUT)


def receive(inbound: Inbound, chunks: list[bytes]) -> list[str | None]:
    return [inbound.feed(memoryview(chunk)) for chunk in chunks]


def require_held(directory: Path, which: int) -> None:
    """A process that has seen nothing of it yet finds that state whole, and right."""
    require_in(StateStore(directory, LAYOUT), which)


def require_in(store: StateStore, which: int) -> None:
    state = STATES[which]
    assert store.holds(state.goal)
    assert np.array_equal(store.read(state.goal.state), state.parameters)
    for item, flat in zip(
        store.items(state.goal), (state.parameters, state.velocity), strict=False
    ):
        assert b"".join(bytes(p) for p in store.pieces(item, LAYOUT.nbytes)) == flat.tobytes()


class Downloads(RuleBasedStateMachine):
    in_memory = False

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.attempt = 0
        self.which, self.whole = 0, False
        self.coming: list[bytes] = []
        self.damaged = False
        """Something on the disk may not be what was sent."""
        self.start()

    def teardown(self) -> None:
        shutil.rmtree(self.directory)

    @rule()
    def start(self) -> None:
        """The worker begins, or is killed and begins again."""
        self.store = StateStore(self.directory, LAYOUT, in_memory=self.in_memory)
        self.inbound = inbound_of(self.store)
        self.coming = []

    def require(self, which: int) -> None:
        require_held(self.directory, which)

    @rule(which=st.integers(0, len(STATES) - 1), by_sums=st.booleans())
    def bind(self, which: int, by_sums: bool) -> None:
        self.attempt += 1
        at = (0, self.attempt)
        if self.coming:
            # A coordinator replaces the edge before it sends another state.
            self.inbound.reset()
        held = self.inbound.expect(at, GOALS[which], steps_to(which))
        total = LAYOUT.nbytes * (1 if which == 0 else 2)
        assert held.nbytes % 4 == 0
        assert 0 <= held.nbytes <= total
        self.which, self.whole = which, False
        if held.nbytes == total:
            self.coming = []
            self.require(which)
        elif held.follows and by_sums:
            self.coming = sums(at, which, held.follows, held.of_sum)
        else:
            self.coming = whole(at, which, held.nbytes)

    @rule(count=st.integers(1, 20))
    def receive(self, count: int) -> None:
        for _ in range(min(count, len(self.coming))):
            try:
                done = self.inbound.feed(memoryview(self.coming.pop(0)))
            except (PeerError, CheckpointIntegrityError):
                # The trailer tells, and all of it is fetched again.
                assert self.damaged
                self.inbound.reset()
                self.coming = []
                return
            # A momentum that was here comes behind a state that was not, and is passed over.
            assert done is not None or self.coming or self.whole
            if done is not None:
                self.whole = True
                assert done == GOALS[self.which].state
                self.require(self.which)
            elif self.coming:
                done_bytes, total = self.inbound.progress
                assert 0 <= done_bytes <= total

    @rule(on=st.integers(0, 3), cut=st.integers(0, 30))
    def follow(self, on: int, cut: int) -> None:
        """A round or more has closed: of what leads there ``cut`` chunks are still on their way."""
        self.bind(min(self.which + on, len(STATES) - 1), by_sums=True)
        self.receive(max(0, len(self.coming) - cut))

    @rule()
    def lose_the_edge(self) -> None:
        self.inbound.reset()
        self.coming = []

    @rule(data=st.data())
    def receive_damaged(self, data: st.DataObject) -> None:
        if not self.coming:
            return
        chunk = bytearray(self.coming[0])
        position = data.draw(st.integers(0, len(chunk) - 1))
        chunk[position] ^= data.draw(st.integers(1, 255))
        self.coming = []
        self.damaged = True
        try:
            done = self.inbound.feed(memoryview(bytes(chunk)))
        except PeerError:
            done = None
        assert done is None
        self.inbound.reset()

    @rule(data=st.data())
    def rot(self, data: st.DataObject) -> None:
        """A bit flips on the disk while no worker runs."""
        self.damaged = True
        for path in self.directory.iterdir():
            raw = bytearray(path.read_bytes())
            if raw:
                raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1
                path.write_bytes(raw)
        self.start()
        # What rotted is either found out, or fetched again over what is held.
        store = StateStore(self.directory, LAYOUT)
        for which, goal in enumerate(GOALS):
            if store.holds(goal):
                require_held(self.directory, which)

    @invariant()
    def what_is_held_is_right(self) -> None:
        if not self.damaged:
            for which, goal in enumerate(GOALS):
                if self.store.holds(goal):
                    require_in(self.store, which)

    @invariant()
    def little_lies_on_the_disk(self) -> None:
        names = [path.name for path in self.directory.iterdir()]
        assert len([name for name in names if not name.endswith(".part")]) <= 4
        assert sum(path.stat().st_size for path in self.directory.iterdir()) <= 20 * LAYOUT.nbytes


class DownloadsInMemory(Downloads):
    """Steps are taken in memory, and what they come to is put down now and then."""

    in_memory = True

    def require(self, which: int) -> None:
        require_in(self.store, which)

    @rule(pieces=st.integers(1, 4))
    def put_down(self, pieces: int) -> None:
        """The worker rests, until something is asked of it or all is written."""
        owed = self.store.owes
        for _ in itertools.islice(self.store.putting_down(), pieces):
            assert self.store.owes
        if owed and not self.store.owes:
            store = StateStore(self.directory, LAYOUT)
            assert any(store.holds(goal) for goal in GOALS)
            assert len(list(self.directory.iterdir())) == 2


_SETTINGS = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestDownloads = Downloads.TestCase
TestDownloads.settings = _SETTINGS
TestDownloadsInMemory = DownloadsInMemory.TestCase
TestDownloadsInMemory.settings = _SETTINGS


def test_a_state_comes_with_its_momentum(tmp_path: Path) -> None:
    inbound = inbound_in(tmp_path)
    assert inbound.expect((0, 0), GOALS[2]) == Held(0)
    *early, last = receive(inbound, whole((0, 0), 2))
    assert set(early) == {None}
    assert last == GOALS[2].state
    require_held(tmp_path, 2)
    assert inbound.expect((0, 1), GOALS[2]) == Held(ALL)


@pytest.mark.parametrize("cut", [1, 3, 8, 9, 10, 15])
def test_a_state_and_its_momentum_go_on_where_they_were_cut(tmp_path: Path, cut: int) -> None:
    first = inbound_in(tmp_path)
    first.expect((0, 0), GOALS[1])
    receive(first, whole((0, 0), 1)[:cut])
    again = inbound_in(tmp_path)
    held = again.expect((0, 1), GOALS[1])
    chunks = whole((0, 1), 1, held.nbytes)
    assert receive(again, chunks)[-1] == GOALS[1].state
    require_held(tmp_path, 1)
    assert sum(map(len, chunks)) <= ALL - held.nbytes + 4 * 300


@pytest.mark.parametrize("missed", [1, 2, 3])
def test_a_node_that_missed_rounds_follows_by_their_sums(tmp_path: Path, missed: int) -> None:
    inbound = inbound_in(tmp_path)
    begun = len(STATES) - 1 - missed
    inbound.expect((0, 0), GOALS[begun])
    receive(inbound, whole((0, 0), begun))
    assert inbound.expect((1, 0), GOALS[-1], steps_to(len(STATES) - 1)) == Held(0, missed)
    *early, last = receive(inbound, sums((1, 0), len(STATES) - 1, missed))
    assert set(early) == {None}
    assert last == GOALS[-1].state
    require_held(tmp_path, len(STATES) - 1)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_node_that_missed_more_asks_for_the_state(tmp_path: Path) -> None:
    inbound = inbound_in(tmp_path)
    inbound.expect((0, 0), GOALS[1])
    receive(inbound, whole((0, 0), 1))
    assert inbound.expect((1, 0), GOALS[5], steps_to(5)) == Held(0)


def test_without_the_momentum_no_step_is_taken(tmp_path: Path) -> None:
    inbound = inbound_in(tmp_path)
    inbound.expect((0, 0), GOALS[1])
    receive(inbound, whole((0, 0), 1)[:10])
    assert inbound.expect((1, 0), GOALS[2], steps_to(2)) == Held(0)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_sum_goes_on_where_it_was_cut(tmp_path: Path, cut: int) -> None:
    first = inbound_in(tmp_path)
    first.expect((0, 0), GOALS[1])
    receive(first, whole((0, 0), 1))
    first.expect((1, 0), GOALS[2], steps_to(2))
    receive(first, sums((1, 0), 2, 1)[: 1 + cut])
    again = inbound_in(tmp_path)
    held = again.expect((1, 1), GOALS[2], steps_to(2))
    assert (held.follows, held.of_sum) == (1, 60 * cut)
    chunks = sums((1, 1), 2, 1, held.of_sum)
    assert len(chunks) == len(sums((1, 1), 2, 1)) - cut
    assert receive(again, chunks)[-1] == GOALS[2].state
    require_held(tmp_path, 2)


def test_a_step_that_comes_to_something_else_is_refused_and_the_state_is_fetched(
    tmp_path: Path,
) -> None:
    """What the coordinator came to is not what the sum leads to: one of the two is wrong."""
    inbound = inbound_in(tmp_path)
    inbound.expect((0, 0), GOALS[1])
    receive(inbound, whole((0, 0), 1))
    wrong = GOALS[4]
    lie = msgspec.structs.replace(ROUNDS[1].step, end=wrong.state, end_momentum=wrong.momentum)
    assert inbound.expect((1, 0), wrong, (lie,)) == Held(0, 1)
    *most, last = sums((1, 0), 2, 1)
    receive(inbound, most)
    with pytest.raises(CheckpointIntegrityError, match=f"the coordinator's has {wrong.state}"):
        inbound.feed(memoryview(last))
    inbound.reset()
    require_held(tmp_path, 1)
    assert len(list(tmp_path.iterdir())) == 2
    assert inbound.expect((1, 0), wrong, (lie,)) == Held(0)
    assert receive(inbound, whole((1, 0), 4))[-1] == wrong.state
    require_held(tmp_path, 4)


def test_a_step_from_a_state_that_rotted_is_refused(tmp_path: Path) -> None:
    inbound = inbound_in(tmp_path)
    inbound.expect((0, 0), GOALS[1])
    receive(inbound, whole((0, 0), 1))
    path = tmp_path / f"{GOALS[1].momentum}.momentum.f32"
    path.write_bytes(bytes(LAYOUT.nbytes))
    inbound.expect((1, 0), GOALS[2], steps_to(2))
    with pytest.raises(CheckpointIntegrityError):
        receive(inbound, sums((1, 0), 2, 1))


def test_steps_that_lead_nowhere_are_refused(tmp_path: Path) -> None:
    inbound = inbound_in(tmp_path)
    for steps in (steps_to(2), (ROUNDS[0].step, ROUNDS[2].step)):
        with pytest.raises(ContractViolation, match="do not lead to"):
            inbound.expect((1, 0), GOALS[3], steps)


def test_a_sum_that_was_not_asked_for_is_refused(tmp_path: Path) -> None:
    inbound = inbound_in(tmp_path)
    with pytest.raises(FrameError, match="no state was asked for"):
        receive(inbound, sums((0, 0), 2, 1))
    inbound.expect((0, 0), GOALS[2], steps_to(2))
    with pytest.raises(ContractViolation, match="kind is sum; expected state"):
        receive(inbound, sums((0, 0), 2, 1))


def test_without_outer_momentum_there_is_none_to_keep(tmp_path: Path) -> None:
    inbound = inbound_in(tmp_path)
    bare = [Goal(GOALS[0].state), Goal(GOALS[1].state)]
    step = msgspec.structs.replace(ROUNDS[0].step, end_momentum=None)
    inbound.expect((0, 0), bare[0])
    receive(inbound, whole((0, 0), 0))
    assert inbound.expect((1, 0), bare[1], (step,)) == Held(0, 1)
    assert receive(inbound, sums((1, 0), 1, 1))[-1] == bare[1].state
    assert [path.name for path in tmp_path.iterdir()] == [f"{bare[1].state}.f32"]


def test_a_state_that_rotted_under_way_is_fetched_from_its_start(tmp_path: Path) -> None:
    inbound = inbound_in(tmp_path)
    inbound.expect((0, 0), GOALS[0])
    receive(inbound, whole((0, 0), 0)[:4])
    inbound.reset()
    part = tmp_path / f"{GOALS[0].state}.f32.part"
    raw = bytearray(part.read_bytes())
    raw[5] ^= 1
    part.write_bytes(raw)
    held = inbound.expect((0, 1), GOALS[0]).nbytes
    assert held == 3 * CHUNK
    *most, last = whole((0, 1), 0, held)
    receive(inbound, most)
    with pytest.raises(PeerError, match="digest"):
        inbound.feed(memoryview(last))
    assert inbound.expect((0, 2), GOALS[0]).nbytes == 0


@pytest.mark.parametrize("which", [0, 2])
def test_a_blob_for_a_state_completed_meanwhile_is_read_and_kept_nowhere(
    tmp_path: Path, which: int
) -> None:
    inbound = inbound_in(tmp_path)
    inbound.expect((0, 0), GOALS[which])
    first = whole((0, 0), which)
    receive(inbound, first[:3])
    # The retry binds while the first blob is still on its way, so a second one follows it.
    held = inbound.expect((0, 1), GOALS[which]).nbytes
    assert held == 2 * CHUNK
    assert receive(inbound, first[3:])[-1] == GOALS[which].state
    assert set(receive(inbound, whole((0, 1), which, held))) == {None}
    require_held(tmp_path, which)


def test_a_sum_that_was_taken_meanwhile_is_read_and_kept_nowhere(tmp_path: Path) -> None:
    inbound = inbound_in(tmp_path)
    inbound.expect((0, 0), GOALS[1])
    receive(inbound, whole((0, 0), 1))
    inbound.expect((1, 0), GOALS[3], steps_to(3))
    first = sums((1, 0), 3, 2)
    receive(inbound, first[:3])
    held = inbound.expect((1, 1), GOALS[3], steps_to(3))
    assert receive(inbound, first[3:])[-1] == GOALS[3].state
    assert set(receive(inbound, sums((1, 1), 3, 2, held.of_sum))) == {None}
    require_held(tmp_path, 3)


def test_a_state_that_is_not_held_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointIntegrityError):
        StateStore(tmp_path, LAYOUT).read(GOALS[0].state)


def test_a_sum_that_comes_damaged_is_not_taken_again(tmp_path: Path) -> None:
    """Whether the coordinator's disk or the way is at fault: the state itself is the way out."""
    inbound = inbound_in(tmp_path)
    inbound.expect((0, 0), GOALS[1])
    receive(inbound, whole((0, 0), 1))
    assert inbound.by == "state"
    inbound.expect((1, 0), GOALS[2], steps_to(2))
    damaged = sums((1, 0), 2, 1)
    damaged[1] = pack(memoryview(bytes(60)))
    *most, last = damaged
    receive(inbound, most)
    assert inbound.by == "sum"
    with pytest.raises(ContractViolation, match="a blob with the digest"):
        inbound.feed(memoryview(last))
    inbound.reset()
    require_held(tmp_path, 1)
    assert inbound.expect((1, 1), GOALS[2], steps_to(2)) == Held(0)
    # For a later state sums are taken again.
    assert inbound.expect((2, 0), GOALS[3], steps_to(3)) == Held(0, 2)


def test_a_step_on_impossible_terms_is_refused_once(tmp_path: Path) -> None:
    inbound = inbound_in(tmp_path)
    inbound.expect((0, 0), GOALS[1])
    receive(inbound, whole((0, 0), 1))
    crowd = msgspec.structs.replace(ROUNDS[1].step, contributors=WORKLOAD.field.n_max + 1)
    assert inbound.expect((1, 0), GOALS[2], (crowd,)).follows == 1
    with pytest.raises(AggregationError, match="contributors"):
        receive(inbound, sums((1, 0), 2, 1))
    inbound.reset()
    assert inbound.expect((1, 1), GOALS[2], (crowd,)) == Held(0)
    require_held(tmp_path, 1)


def test_what_is_gone_from_the_disk_meanwhile_is_not_followed_from_twice(tmp_path: Path) -> None:
    inbound = inbound_in(tmp_path)
    inbound.expect((0, 0), GOALS[1])
    receive(inbound, whole((0, 0), 1))
    (tmp_path / f"{GOALS[1].momentum}.momentum.f32").unlink()
    assert inbound.expect((1, 0), GOALS[2], steps_to(2)).follows == 1
    with pytest.raises(StorageError):
        receive(inbound, sums((1, 0), 2, 1))
    inbound.reset()
    assert inbound.expect((1, 1), GOALS[2], steps_to(2)).follows == 0


# ---- steps in memory ----


def in_memory(directory: Path) -> tuple[StateStore, Inbound]:
    """State 1 whole, in files, as a worker that steps in memory begins."""
    store = StateStore(directory, LAYOUT, in_memory=True)
    inbound = inbound_of(store)
    if not store.holds(GOALS[1]):
        inbound.expect((0, 0), GOALS[1])
        receive(inbound, whole((0, 0), 1))
    return store, inbound


def files_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_what_a_step_in_memory_comes_to_is_in_no_file_until_it_is_put_down(tmp_path: Path) -> None:
    store, inbound = in_memory(tmp_path)
    before = files_in(tmp_path)
    for which in (2, 3):
        assert inbound.expect((which, 0), GOALS[which], steps_to(which)) == Held(0, 1)
        assert receive(inbound, sums((which, 0), which, 1))[-1] == GOALS[which].state
        require_in(store, which)
        assert store.remembers(GOALS[which].state)
        assert not store.read(GOALS[which].state).flags.writeable
        assert files_in(tmp_path) == before
    assert inbound.expect((3, 1), GOALS[3]) == Held(ALL)
    assert store.owes
    assert len(list(store.putting_down())) == 2
    assert not store.owes
    assert list(store.putting_down()) == []
    require_held(tmp_path, 3)
    assert len(files_in(tmp_path)) == 2


def test_after_a_crash_it_follows_from_what_was_put_down_last(tmp_path: Path) -> None:
    store, inbound = in_memory(tmp_path)
    for which in (2, 3):
        inbound.expect((which, 0), GOALS[which], steps_to(which))
        receive(inbound, sums((which, 0), which, 1))
    next(store.putting_down())
    _, again = in_memory(tmp_path)
    assert again.expect((4, 0), GOALS[4], steps_to(4)).follows == 3
    assert receive(again, sums((4, 0), 4, 3))[-1] == GOALS[4].state


@pytest.mark.parametrize("cut", [1, 2, 3])
@pytest.mark.parametrize("before", [0, 1])
def test_a_step_in_memory_goes_on_where_the_edge_was_cut(
    tmp_path: Path, cut: int, before: int
) -> None:
    store, inbound = in_memory(tmp_path)
    first = sums((1, 0), 2 + before, 1 + before)
    inbound.expect((1, 0), GOALS[2 + before], steps_to(2 + before))
    done = before * len(sums((1, 0), 2, 1))
    receive(inbound, first[: done + 1 + cut])
    inbound.reset()
    held = inbound.expect((1, 1), GOALS[2 + before], steps_to(2 + before))
    assert (held.follows, held.of_sum) == (1, 60 * cut)
    # Even if it comes again from further back.
    again = sums((1, 1), 2 + before, 1, held.of_sum - 60)
    assert receive(inbound, again)[-1] == GOALS[2 + before].state
    require_in(store, 2 + before)


def test_a_sum_of_a_step_that_was_taken_in_memory_meanwhile_is_passed_over(tmp_path: Path) -> None:
    store, inbound = in_memory(tmp_path)
    inbound.expect((1, 0), GOALS[3], steps_to(3))
    first = sums((1, 0), 3, 2)
    receive(inbound, first[:3])
    held = inbound.expect((1, 1), GOALS[3], steps_to(3))
    assert (held.follows, held.of_sum) == (2, 120)
    assert receive(inbound, first[3:])[-1] == GOALS[3].state
    assert set(receive(inbound, sums((1, 1), 3, 2, held.of_sum))) == {None}
    require_in(store, 3)


def test_a_damaged_sum_shows_in_the_parameters_and_the_state_is_fetched(tmp_path: Path) -> None:
    store, inbound = in_memory(tmp_path)
    inbound.expect((1, 0), GOALS[2], steps_to(2))
    damaged = sums((1, 0), 2, 1)
    damaged[1] = pack(memoryview(bytes(60)))
    *most, last = damaged
    receive(inbound, most)
    with pytest.raises(CheckpointIntegrityError, match=f"the coordinator's has {GOALS[2].state}"):
        inbound.feed(memoryview(last))
    assert not store.holds(GOALS[2])
    assert not store.owes
    inbound.reset()
    assert inbound.expect((1, 1), GOALS[2], steps_to(2)) == Held(0)
    assert receive(inbound, whole((1, 1), 2))[-1] == GOALS[2].state
    require_held(tmp_path, 2)
    # From there steps are taken again.
    assert inbound.expect((2, 0), GOALS[3], steps_to(3)) == Held(0, 1)
    assert receive(inbound, sums((2, 0), 3, 1))[-1] == GOALS[3].state
    require_in(store, 3)


def test_a_state_that_comes_whole_takes_the_place_of_what_was_in_memory(tmp_path: Path) -> None:
    store, inbound = in_memory(tmp_path)
    inbound.expect((1, 0), GOALS[2], steps_to(2))
    receive(inbound, sums((1, 0), 2, 1)[:3])
    inbound.reset()
    inbound.expect((1, 1), GOALS[5])
    receive(inbound, whole((1, 1), 5))
    require_held(tmp_path, 5)
    assert not store.owes
    assert len(files_in(tmp_path)) == 2


def test_the_first_step_starts_without_the_momentum_that_was_in_memory(tmp_path: Path) -> None:
    """A federation that began anew: where its first state comes, another one's momentum was."""
    store, inbound = in_memory(tmp_path)
    inbound.expect((1, 0), GOALS[2], steps_to(2))
    receive(inbound, sums((1, 0), 2, 1))
    inbound.expect((2, 0), GOALS[0])
    assert receive(inbound, whole((2, 0), 0))[-1] == GOALS[0].state
    assert inbound.expect((3, 0), GOALS[1], steps_to(1)) == Held(0, 1)
    assert receive(inbound, sums((3, 0), 1, 1))[-1] == GOALS[1].state
    require_in(store, 1)


def test_states_without_momentum_are_stepped_in_memory(tmp_path: Path) -> None:
    store = StateStore(tmp_path, LAYOUT, in_memory=True)
    inbound = inbound_of(store)
    bare = [Goal(GOALS[0].state), Goal(GOALS[1].state)]
    step = msgspec.structs.replace(ROUNDS[0].step, end_momentum=None)
    inbound.expect((0, 0), bare[0])
    receive(inbound, whole((0, 0), 0))
    assert inbound.expect((1, 0), bare[1], (step,)) == Held(0, 1)
    assert receive(inbound, sums((1, 0), 1, 1))[-1] == bare[1].state
    assert [*store.putting_down()] == [None]
    assert files_in(tmp_path) == {f"{bare[1].state}.f32"}


def test_no_sum_but_one_whose_step_is_verified_goes_unhashed() -> None:
    expected = blob.Expected("state", FEDERATION, 0, 0, LAYOUT, GOALS[0].state)
    with pytest.raises(ContractViolation, match="nobody verifies"):
        blob.BlobReader(expected, unhashed_from=0)
