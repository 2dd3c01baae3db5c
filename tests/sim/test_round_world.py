"""Federations that live through a hundred seconds of trouble and must come out right."""

import os

import pytest
from msgspec.structs import replace

from lensemble.ids import Digest, NodeId
from lensemble_coord.training import outer_round as r
from tests.coord.round_play import PRIOR, RULES
from tests.sim.mask_side import check_masks
from tests.sim.round_hosts import CoordinatorHost, NodeHost, Trouble
from tests.sim.world import Conditions, World

SEEDS = 200
NODES = 5
QUORUM = 3
TROUBLED_S = 100.0
QUIET_S = 400.0
"""Once trouble stops, what was asked for is done within this."""

SIM_RULES = replace(
    RULES,
    quorum=QUORUM,
    max_attempts=4,
    open_timeout_s=20.0,
    collect_timeout_s=30.0,
    on_commitment_mismatch="exclude",
)


def rules_of(seed: int) -> r.Rules:
    """Every other life is a masked one, and some of those want more answers than a majority."""
    threshold = QUORUM + 1 if seed % 4 == 3 else 0
    return replace(SIM_RULES, masked=seed % 2 == 1, threshold=threshold)


class Federation:
    """One world with a coordinator and nodes, the faults of its seed, and its checkers."""

    def __init__(self, seed: int) -> None:
        self.world = World(seed, Conditions())
        self.trouble = Trouble()
        self.coord = CoordinatorHost(self.world, rules_of(seed), self.trouble)
        keys = [NodeId(letter * 64) for letter in "abcdefgh"[:NODES]]
        self.nodes = [NodeHost(self.world, key, self.coord, self.trouble) for key in keys]
        for host in (self.coord, *self.nodes):
            self.world.add(host)
            self.world.boot(host)
        self.world.checks.append(self.check_ledger)
        self._checked = 0

    # ---- faults ----

    def make_trouble(self) -> None:
        """Draw what goes wrong in this life, and when."""
        chance, world = self.world.random, self.world
        world.conditions.jitter_s = chance.choice([0.0, 0.05, 1.0])
        world.conditions.breaks = chance.choice([0.0, 0.01, 0.05])
        for what, worst in (
            ("step_fails", 0.2),
            ("declines", 0.2),
            ("torn_update", 0.1),
            ("other_dataset", 0.1),
            ("repeats_itself", 0.3),
            ("slow", 0.2),
            ("shares_late", 0.1),
            ("answers_late", 0.2),
            ("dies_masking", 0.2),
        ):
            setattr(self.trouble, what, chance.choice([0.0, worst]))
        for host in (self.coord, *self.nodes):
            for _ in range(chance.choice([0, 1, 3])):
                dies = chance.uniform(0.0, TROUBLED_S)
                world.at(dies, lambda host=host: world.crash(host))
                back = dies + chance.uniform(0.1, 20.0)
                world.at(back, lambda host=host: world.boot(host))
        for _ in range(chance.choice([0, 0, 2])):
            world.at(chance.uniform(0.0, TROUBLED_S), self.abort)
        for _ in range(chance.choice([1, 3])):
            rounds = chance.randint(1, 3)
            world.at(chance.uniform(0.0, TROUBLED_S), lambda n=rounds: self.coord.ask(n))

    def abort(self) -> None:
        if self.coord.name in self.world.up:
            self.coord.feed(r.AbortAsked("an operator said so"))

    def end_trouble(self) -> None:
        self.world.conditions.breaks = 0.0
        self.world.conditions.jitter_s = 0.05
        for what in vars(self.trouble):
            setattr(self.trouble, what, 0.0)
        for host in (self.coord, *self.nodes):
            self.world.boot(host)

    # ---- checkers ----

    def check_ledger(self) -> None:
        """Every new record follows its predecessor and names who really sent."""
        records = self.coord.disk.records
        for index in range(self._checked, len(records)):
            record = records[index]
            assert record.round == index
            assert record.prior == (records[index - 1].digest if index else PRIOR)
            assert (record.round, record.attempt) in self.coord.disk.begun
            names = [c.node for c in record.contributors]
            assert names == sorted(set(names))
            assert len(names) >= QUORUM
            by_key = {node.node: node for node in self.nodes}
            for each in record.contributors:
                sent = (record.round, record.attempt, each.digest)
                assert sent in by_key[each.node].sent, "a contributor that did not send this"
                assert each.dataset_root == by_key[each.node].dataset_root
        self._checked = len(records)

    def check_masks(self) -> None:
        """A masked round is the sum of one set that was asked for; see ``mask_side``."""
        requests = {(each.round, each.attempt): each for each in self.coord.requests}
        for record in self.coord.disk.records if self.coord.rules.masked else ():
            names = tuple(c.node for c in record.contributors)
            at = (record.round, record.attempt)
            assert requests[at].survivors == names
            answers = [node for node in self.nodes if at in node.masks.answered]
            assert len(answers) >= self.coord.rules.threshold
        check_masks(self.coord.requests, [node.masks for node in self.nodes])

    def check_end(self) -> None:
        disk = self.coord.disk
        assert len(set(disk.begun)) == len(disk.begun), "an attempt number was used twice"
        assert disk.begun == sorted(disk.begun)
        for node in self.nodes:
            for round_index, digest in node.closed.items():
                assert disk.records[round_index].digest == digest

    # ---- a life ----

    def live(self) -> None:
        self.coord.ask(2)
        self.make_trouble()
        self.world.run(lambda: False, TROUBLED_S)
        self.end_trouble()
        assert self.world.run(lambda: self.coord.resting, QUIET_S), "a run did not end"
        reached = self.coord.disk.round
        self.coord.ask(2)
        assert self.world.run(lambda: self.coord.resting, QUIET_S), "a quiet run did not end"
        assert self.coord.disk.round == reached + 2
        assert self.coord.disk.outcomes[-1] == r.FinishRun(completed=True)
        self.check_end()
        self.check_masks()


def survive(seed: int, federation: Federation | None = None) -> Federation:
    """Live one life; a failure says how to live it again, and what happened in it."""
    federation = federation or Federation(seed)
    try:
        federation.live()
    except Exception as fault:
        again = f"SIM_SEED={seed} pytest tests/sim/test_round_world.py"
        raise AssertionError(
            f"{federation.world.transcript()}\n\n{type(fault).__name__}: {fault}\n{again}"
        ) from fault
    return federation


def test_federations_come_out_right() -> None:
    chosen = os.environ.get("SIM_SEED")
    for seed in range(SEEDS) if chosen is None else [int(chosen)]:
        survive(seed)


@pytest.mark.soak
def test_many_more_federations_come_out_right() -> None:
    for seed in range(SEEDS, 20 * SEEDS):
        survive(seed)


def test_the_same_seed_is_the_same_life() -> None:
    assert survive(7).world.transcript() == survive(7).world.transcript()


def test_troubled_lives_reach_every_corner() -> None:
    """The seeds are worth their time only if they abort, retry, refuse, crash and commit."""
    lives = [survive(seed) for seed in range(40)]
    said = "\n".join(life.world.transcript() for life in lives)
    for corner in (
        "code=fault_tolerance_exceeded",
        "code=storage",
        "code=commitment_mismatch",
        "code=contract_violation",
        "code=stopped",
        "code=stale",
        "code=duplicate",
        "coord    dies",
        "link breaks",
        "does AskAlso",
        "does DropUpdate",
        "does AnnounceClose",
        "does SendRoster",
        "does RequestUnmask",
        "code=secure_aggregation",
    ):
        assert corner in said, corner
    for masked in (False, True):
        same = [life.coord for life in lives if life.coord.rules.masked is masked]
        again = any(len(set(coord.commits)) < len(coord.commits) for coord in same)
        assert again == masked, "only a masked commit is tried again in place"
    sides = [node.masks for life in lives for node in life.nodes]
    assert any(len(set(side.releases.values())) < len(side.releases) for side in sides)
    assert any((t, a + 1) in side.releases for side in sides for t, a in side.answered)
    assert any(record.attempt > 1 for life in lives for record in life.coord.disk.records)
    sizes = {len(record.contributors) for life in lives for record in life.coord.disk.records}
    assert sizes == set(range(QUORUM, NODES + 1))


def test_arrival_order_does_not_change_the_digest() -> None:
    """Without trouble the digests depend on who took part, never on when anything arrived."""
    ends: dict[bool, set[Digest]] = {False: set(), True: set()}
    for seed in range(20):
        federation = Federation(seed)
        federation.world.conditions.jitter_s = 1.0
        assert federation.world.run(lambda f=federation: len(f.coord.sessions) == NODES, 60.0)
        federation.coord.ask(3)
        assert federation.world.run(lambda f=federation: f.coord.resting, QUIET_S)
        ends[federation.coord.rules.masked].add(federation.coord.disk.digest)
    assert [len(each) for each in ends.values()] == [1, 1]


def test_a_node_that_sends_a_spent_vector_again_is_noticed() -> None:
    caught = 0
    for seed in range(1, 60, 2):
        federation = Federation(seed)
        for node in federation.nodes:
            node.masks.renews = False
        try:
            federation.live()
        except AssertionError as fault:
            caught += "a vector was sent again after an answer" in str(fault)
    assert caught > 3


def test_a_failing_life_says_how_to_live_it_again() -> None:
    def nothing_is_ever_committed() -> None:
        assert not federation.coord.disk.records, "a record"

    federation = Federation(3)
    federation.world.checks.append(nothing_is_ever_committed)
    with pytest.raises(AssertionError) as failure:
        survive(3, federation)
    *life, again = str(failure.value).splitlines()
    assert again == "SIM_SEED=3 pytest tests/sim/test_round_world.py"
    assert "AssertionError: a record" in life
    assert any("is collecting: waiting for" in line for line in life)
    assert all(len(line) < 400 for line in life)
