"""What the coordinator sends, taken in by what a node's worker does with it."""

from pathlib import Path
from typing import cast

import pytest
import trio

from lensemble.errors import StorageError
from lensemble.ids import Digest, SlotIndex
from lensemble.secagg.plan import FieldPlan
from lensemble.transport.ends import TxEnd
from lensemble.workload import NoopTask, Outer, Workload
from lensemble_coord.config import CoordinatorConfig
from lensemble_coord.training import record as records
from lensemble_coord.training.commit import Retention
from lensemble_coord.training.downlink import Downlink, Origin
from lensemble_coord.training.outer_round import Holding
from lensemble_coord.training.store import Store
from lensemble_node.worker.download import Inbound
from lensemble_node.worker.state_store import Goal, StateStore
from tests.coord.history import FEDERATION, KEEP_ALL, History

CAPACITY = 1 << 12
WORKLOAD = Workload(root_seed=7, task=NoopTask(parameters=10_000))
BYTES = 4 * 10_000
AT = (9, 0)


class Way:
    """A tx edge whose other end is ``inbound``."""

    def __init__(self, inbound: Inbound) -> None:
        self.inbound = inbound
        self.region = self
        self.sent = 0
        self.held: Digest | None = None
        self._room = memoryview(bytearray(CAPACITY))

    def slot(self, _: SlotIndex) -> memoryview:
        return self._room

    async def acquire(self) -> SlotIndex:
        return SlotIndex(0)

    def filled(self, _: SlotIndex, extent: int) -> None:
        self.held = self.inbound.feed(self._room[:extent])

    def count(self, extent: int) -> None:
        self.sent += extent


class Grounds:
    """A coordinator's files after some rounds, and a node that follows them."""

    def __init__(self, root: Path, workload: Workload = WORKLOAD) -> None:
        self.workload = workload
        self.history = History(root / "coordinator", workload)
        self.inbound = Inbound(
            StateStore(root / "node", self.history.layout),
            FEDERATION,
            workload,
            self.history.layout,
        )
        self.downlink = Downlink(
            FEDERATION,
            self.history.layout,
            workload.room,
            self.history.directory,
            CAPACITY,
        )

    def advance(self, rounds: int = 1, retention: Retention = KEEP_ALL) -> Origin:
        self.history.advance(rounds, retention)
        return self.origin()

    def origin(self) -> Origin:
        root = self.history.directory.root
        config = CoordinatorConfig(state_dir=root, workload=root / "workload.toml")
        store = Store(config, self.workload)
        try:
            return store.origin()
        finally:
            store.close()

    def follow(self, origin: Origin) -> tuple[str, int]:
        """How the node came to ``origin``, and the bytes that took."""
        held = self.inbound.expect(AT, Goal(origin.state, origin.momentum), origin.steps)
        offer = self.downlink.offer(origin, Holding(*held), AT)
        way = Way(self.inbound)
        trio.run(self.downlink.send, offer, cast(TxEnd, way), way.count)
        assert way.held == (origin.state if offer.parts else None)
        return offer.by, way.sent


@pytest.fixture
def grounds(tmp_path: Path) -> Grounds:
    (tmp_path / "coordinator").mkdir()
    return Grounds(tmp_path)


def test_a_node_fetches_once_and_follows_from_then_on(grounds: Grounds) -> None:
    assert grounds.follow(grounds.origin()) == ("state", BYTES)
    for _ in range(3):
        by, sent = grounds.follow(grounds.advance())
        assert by == "sum"
        assert sent < BYTES
    assert grounds.follow(grounds.origin()) == ("nothing", 0)


def test_a_node_that_begins_late_gets_the_momentum_too(grounds: Grounds) -> None:
    assert grounds.follow(grounds.advance(2)) == ("state", 2 * BYTES)
    assert grounds.follow(grounds.advance())[0] == "sum"


@pytest.mark.parametrize(("missed", "by"), [(2, "sum"), (3, "sum"), (4, "state")])
def test_missed_rounds_are_caught_up_while_that_is_less(
    grounds: Grounds, missed: int, by: str
) -> None:
    grounds.follow(grounds.advance())
    assert grounds.follow(grounds.advance(missed))[0] == by


def test_sums_that_are_kept_no_more_are_not_named(grounds: Grounds) -> None:
    grounds.follow(grounds.advance())
    origin = grounds.advance(2, Retention(keep_last=1, keep_every=0, verify_keep_rounds=1))
    assert len(origin.steps) < 3
    grounds.follow(origin)
    held = grounds.inbound.expect(AT, Goal(origin.state, origin.momentum))
    assert held.nbytes == 2 * BYTES


def test_words_of_both_widths_are_followed(tmp_path: Path) -> None:
    (tmp_path / "coordinator").mkdir()
    task = NoopTask(parameters=10_000)
    grounds = Grounds(tmp_path, WORKLOAD.model_copy(update={"task": task}))
    grounds.follow(grounds.advance())
    origin = grounds.advance(2)
    codes = [step.plan for step in origin.steps]
    assert codes[0] == b""
    assert all(codes[1:])
    by, sent = grounds.follow(origin)
    assert by == "sum"
    assert sent <= 2 * 2.1 * 10_000


def test_without_outer_momentum_none_is_sent(tmp_path: Path) -> None:
    (tmp_path / "coordinator").mkdir()
    grounds = Grounds(tmp_path, WORKLOAD.model_copy(update={"outer": Outer(momentum=0.0)}))
    assert grounds.follow(grounds.advance(2)) == ("state", BYTES)
    assert grounds.follow(grounds.advance())[0] == "sum"


def test_a_round_whose_step_was_rejected_is_no_step(grounds: Grounds) -> None:
    before = grounds.advance()
    grounds.follow(before)
    history = grounds.history
    history.ledger.append(records.rejected(history.prepare(), "it got worse"), history.run)
    after = grounds.origin()
    assert (after.state, after.momentum) == (before.state, before.momentum)
    assert [step.end for step in after.steps] == [step.end for step in before.steps]
    assert grounds.follow(after) == ("nothing", 0)
    assert grounds.follow(grounds.advance())[0] == "sum"


def test_a_sum_that_cannot_be_read_is_offered_to_nobody_again(grounds: Grounds) -> None:
    grounds.follow(grounds.advance())
    origin = grounds.advance()
    grounds.history.directory.sum(Digest(origin.steps[-1].total)).unlink()
    with pytest.raises(StorageError):
        grounds.follow(origin)
    assert grounds.follow(origin) == ("state", 2 * BYTES)


def test_a_sum_that_was_prepared_is_sent_from_there(grounds: Grounds) -> None:
    grounds.follow(grounds.advance())
    origin = grounds.advance()
    step = origin.steps[-1]
    plan = FieldPlan(grounds.history.layout, WORKLOAD.room, step.plan)
    trio.run(grounds.downlink.prepare, step.total, plan)
    grounds.history.directory.sum(Digest(step.total)).unlink()
    assert list(grounds.history.directory.spool.iterdir()) == []
    assert grounds.follow(origin)[0] == "sum"


def test_a_disk_that_refuses_beforehand_is_no_fault_yet(grounds: Grounds) -> None:
    plan = FieldPlan(grounds.history.layout, WORKLOAD.room)
    trio.run(grounds.downlink.prepare, Digest("0" * 64), plan)


def test_packed_sums_are_let_go_of(grounds: Grounds) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(6):
        grounds.follow(grounds.advance())
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 6
    trio.run(grounds.downlink.close)


def test_what_a_node_says_it_can_follow_is_held_against_what_is_known(grounds: Grounds) -> None:
    """A node that claims more steps than were told gets the state."""
    origin = grounds.advance()
    assert grounds.downlink.offer(origin, Holding(0, 3), AT).by == "state"
    assert grounds.downlink.offer(origin, Holding(0, 1), AT).by == "sum"
    beyond = grounds.downlink.offer(origin, Holding(0, 1, 10 * BYTES), AT)
    assert [part.offset <= part.nbytes for part in beyond.parts] == [True]
