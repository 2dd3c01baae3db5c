"""State directories after a power loss at any moment, opened by the real code.

The default run drops everything that was not flushed at each moment; the soak run also drops, or
keeps, each single change.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from lensemble import identity, state_dir
from lensemble.errors import CheckpointIntegrityError, ContractViolation, LensembleError
from lensemble.ids import FederationId, NodeId
from lensemble.ticket import Membership
from lensemble.workload import (
    FieldTerms,
    NoopTask,
    Privacy,
    Workload,
    initial_parameters,
    layout,
)
from lensemble_coord.config import CoordinatorConfig
from lensemble_coord.training.commit import Retention, orphans, retire
from lensemble_coord.training.store import Store
from lensemble_coord.training.verify import verify_state
from lensemble_node import home
from lensemble_node.worker.download import Inbound
from lensemble_node.worker.state_store import StateStore
from lensemble_node.worker.training.local_round import Trainer
from tests.coord.history import History
from tests.node import coming, worlds
from tests.power.disk import Recording, build, distinct, recording

TERMS = Workload(root_seed=5, task=NoopTask(parameters=300))
PRIVATE = Workload(
    task=NoopTask(parameters=300),
    field=FieldTerms(k=16),
    privacy=Privacy(enabled=True, epsilon=40.0),
)
TIGHT = Retention(keep_last=1, keep_every=0, verify_keep_rounds=1)
FEDERATION = FederationId("5" * 32)

every = pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.soak)])


@pytest.fixture
def room() -> Iterator[Path]:
    """On a memory file system: fast, and it reuses no inode."""
    memory = Path("/dev/shm")
    if not memory.is_dir():
        pytest.skip("no /dev/shm")
    with tempfile.TemporaryDirectory(dir=memory) as name:
        yield Path(name)


def each_loss(
    room: Path, recorded: Recording, check: Callable[[Path, tuple[str, ...]], None], *, every: bool
) -> None:
    """Have ``check`` open what each loss could leave, told what was promised before it."""
    count = 0
    for moment, what, image in distinct(recorded.moments, every=every):
        place = room / "after"
        build(image, place)
        try:
            check(place, moment.promised)
        except (AssertionError, LensembleError, OSError) as error:
            raise AssertionError(
                f"power lost before {moment.call}, leaving {what}: {error!r}; there are "
                f"{sorted(image)}"
            ) from error
        shutil.rmtree(place)
        count += 1
    print(f"{len(recorded.moments)} moments, {count} images")
    assert count > 1


# ---- coordinator ----


def _store(root: Path) -> Store:
    return Store(CoordinatorConfig(state_dir=root, workload=root / "w.toml"), TERMS)


@every
def test_a_coordinator_that_loses_power_as_it_begins_begins_again(room: Path, every: bool) -> None:
    root = room / "state"
    root.mkdir()
    with recording(root) as recorded:
        key = identity.load_or_create(root / state_dir.IDENTITY_NAME)
        recorded.promise(key.node)
        store = _store(root)
        recorded.promise(store.federation)
        store.add_invite("ab" * 32, 1e12, 1)
        recorded.promise("invite")
        run = store.begin_run(3)
        recorded.promise(run.run)
        store.close()

    def check(place: Path, promised: tuple[str, ...]) -> None:
        again = identity.load_or_create(place / state_dir.IDENTITY_NAME)
        opened = _store(place)
        kept = (again.node, opened.federation, "invite", opened.run.run if opened.run else "")
        assert kept[: len(promised)] == promised
        assert opened.position.round == 0
        if "invite" in promised:
            assert opened.invitation("ab" * 32) is not None
        opened.close()
        report = verify_state(place)
        assert report.sound, report.problems

    each_loss(room, recorded, check, every=every)


@every
@pytest.mark.parametrize("rounds", [0, 3])
def test_a_round_that_was_announced_outlives_a_power_loss(
    room: Path, every: bool, rounds: int
) -> None:
    """``rounds`` were committed before; a first round makes directories that a later one has."""
    root, due_root = room / "state", room / "due"
    first = History(root, TERMS)
    first.advance(rounds, TIGHT)
    first.ledger.close()
    shutil.copytree(root, due_root)
    other = History.reopened(due_root, TERMS)
    due = other.advance(1, TIGHT).next_digest
    other.ledger.close()
    with recording(root) as recorded:
        history = History.reopened(root, TERMS)
        record = history.prepare()
        history.ledger.append(record, history.run)
        recorded.promise("committed")
        retire(history.directory, history.ledger, TIGHT)
        history.ledger.close()

    def check(place: Path, promised: tuple[str, ...]) -> None:
        report = verify_state(place)
        assert report.sound, report.problems
        again = History.reopened(place, TERMS)
        tail = again.ledger.tail()
        assert tail.round in ({rounds} if promised else {rounds - 1, rounds})
        if tail.round < rounds:
            tail = again.advance(1, TIGHT)
        assert tail.next_digest == due
        assert orphans(again.directory, again.ledger) == ()
        again.ledger.close()
        assert verify_state(place).sound

    each_loss(room, recorded, check, every=every)


# ---- node ----


def _trainer(state: Path) -> Trainer:
    made = Trainer(PRIVATE, None, state, "n0", 1)
    made.account(FEDERATION)
    return made


def _release(state: Path, round_index: int, attempt: int = 0) -> bytes:
    order = {**worlds.order(PRIVATE, round_index), "attempt": attempt}
    return _trainer(state).train(initial_parameters(PRIVATE), **order).vector.tobytes()


@every
@pytest.mark.parametrize("rounds", [0, 1])
def test_what_a_node_released_stays_charged_and_what_it_spent_spent(
    room: Path, every: bool, rounds: int
) -> None:
    root = room / "state"
    root.mkdir()
    if rounds:
        _release(root, 0)
        assert _trainer(root).adopt(0)
    with recording(root) as recorded:
        said = _release(root, rounds)
        recorded.promise("released")
        _trainer(root).spend(rounds)
        recorded.promise("spent")

    def check(place: Path, promised: tuple[str, ...]) -> None:
        standing = _trainer(place).standing
        assert standing is not None
        assert standing.releases >= rounds + ("released" in promised)
        again = _release(place, rounds, 1)
        if "spent" in promised:
            assert again != said
        standing = _trainer(place).standing
        assert standing is not None
        made = rounds + 1 + (again != said and "released" in promised)
        assert standing.releases >= made, (standing.releases, made)
        assert _trainer(place).adopt(rounds)

    each_loss(room, recorded, check, every=every)


@every
def test_a_node_without_a_budget_loses_no_more_than_its_training(room: Path, every: bool) -> None:
    """What it released may be lost, but not that it did: it makes something else then."""
    root, workload = room / "state", worlds.noop(300)
    code = bytes([64 + 16]) * len(layout(workload).tensors)
    root.mkdir()

    def release(state: Path, round_index: int, attempt: int = 0) -> np.ndarray:
        prior, order = initial_parameters(workload), worlds.order(workload, round_index, attempt)
        trainer = Trainer(workload, None, state, "n0", 1)
        if attempt:
            trainer.spend_before(round_index, attempt)
        done = trainer.train(prior, **order, plan=code)
        found = np.empty(done.plan.layout.size)
        done.plan.decode(0, done.vector.data.cast("B"), found)
        return found

    release(root, 0)
    assert Trainer(workload, None, root, "n0", 1).adopt(0)
    with recording(root) as recorded:
        said = release(root, 1)
        recorded.promise("released")
        assert Trainer(workload, None, root, "n0", 1).adopt(1)
        recorded.promise("adopted")

    def check(place: Path, promised: tuple[str, ...]) -> None:
        if promised == ("released",) and list((place / "release").glob("round-1.json")):
            # Coordinates are within 1e-3; of the same data they would be two steps apart at most.
            assert np.abs(release(place, 1, 1) - said).max() > 1e-4
        release(place, 2, 1)
        assert Trainer(workload, None, place, "n0", 1).adopt(2)
        release(place, 3)

    each_loss(room, recorded, check, every=every)


@every
def test_a_power_loss_while_a_node_adopts_keeps_one_of_two_states(room: Path, every: bool) -> None:
    root = room / "state"
    root.mkdir()
    _release(root, 0)
    assert _trainer(root).adopt(0)
    _release(root, 1)
    with recording(root) as recorded:
        assert _trainer(root).adopt(1)
        recorded.promise("adopted")

    def check(place: Path, promised: tuple[str, ...]) -> None:
        trainer = _trainer(place)
        store = trainer._store
        _, _, cursor = store.read()
        assert cursor.round_index in ({1} if promised else {0, 1})
        assert trainer.adopt(1), "neither the candidate nor what became of it is there"
        _, _, cursor = store.read()
        assert cursor.round_index == 1
        assert trainer.standing is not None
        assert trainer.standing.releases == 2

    each_loss(room, recorded, check, every=every)


def come(place: Path, which: int, stop: int | None = None) -> int:
    """Get what is missing of state ``which``, or ``stop`` chunks of it; how many bytes came."""
    inbound = Inbound(
        StateStore(place / "global", coming.LAYOUT),
        coming.FEDERATION,
        coming.WORKLOAD,
        coming.LAYOUT,
    )
    goal, at = coming.STATES[which].goal, (which, 0)
    held = inbound.expect(at, goal, coming.steps_to(which))
    if held.nbytes == 2 * coming.LAYOUT.nbytes:
        return 0
    if held.follows:
        chunks = coming.sums(at, which, held.follows, held.of_sum)
    else:
        chunks = coming.whole(at, which, held.nbytes)
    came = [inbound.feed(memoryview(chunk)) for chunk in chunks[:stop]]
    assert stop is not None or goal.state in came
    return sum(map(len, chunks))


@every
@pytest.mark.parametrize("by", ["state", "sum"])
def test_a_state_half_down_is_never_believed_and_always_completed(
    room: Path, every: bool, by: str
) -> None:
    root = room / "state"
    root.mkdir()
    with recording(root) as recorded:
        if by == "sum":
            come(root, 1)
            recorded.note("held")
        come(root, 2, 4)
        recorded.note("more")
        come(root, 2)

    def check(place: Path, _: tuple[str, ...]) -> None:
        for tries in (1, 2, 3):
            try:
                come(place, 2)
                break
            except (ContractViolation, CheckpointIntegrityError):
                assert tries < 3, "what was wrong was kept"
        state = coming.STATES[2]
        store = StateStore(place / "global", coming.LAYOUT)
        assert store.holds(state.goal)
        assert np.array_equal(store.read(state.goal.state), state.parameters)
        assert len(list((place / "global").iterdir())) == 2

    each_loss(room, recorded, check, every=every)


@every
def test_a_node_knows_whom_it_joined(room: Path, every: bool) -> None:
    root = room / "state"
    root.mkdir()
    old, new = (
        Membership(NodeId(letter * 64), (f"127.0.0.1:{n}",), None, b"")
        for n, letter in enumerate("ab", 1)
    )
    with recording(root) as recorded:
        key = identity.load_or_create(root / state_dir.IDENTITY_NAME)
        recorded.promise("key")
        home.save_membership(root, old)
        recorded.promise("old")
        home.save_membership(root, new)
        recorded.promise("new")
        home.forget_membership(root)
        recorded.promise("none")

    def check(place: Path, promised: tuple[str, ...]) -> None:
        again = identity.load_or_create(place / state_dir.IDENTITY_NAME)
        assert not promised or again.node == key.node
        found = home.load_membership(place)
        may = {
            "": {None},
            "key": {None, old},
            "old": {old, new},
            "new": {new, None},
            "none": {None},
        }
        assert found in may[promised[-1] if promised else ""]

    each_loss(room, recorded, check, every=every)
