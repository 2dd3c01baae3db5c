"""Federations that live through a hundred seconds of trouble and must come out right."""

import os

import pytest
from msgspec.structs import replace

from lensemble.ids import NodeId
from lensemble_coord.training import outer_round as r
from tests.coord.round_play import PRIOR, RULES
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


class Federation:
    """One world with a coordinator and nodes, the faults of its seed, and its checkers."""

    def __init__(self, seed: int, rules: r.Rules = SIM_RULES) -> None:
        self.world = World(seed, Conditions())
        self.trouble = Trouble()
        self.coord = CoordinatorHost(self.world, rules, self.trouble)
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
    ):
        assert corner in said, corner
    assert any(record.attempt > 1 for life in lives for record in life.coord.disk.records)
    sizes = {len(record.contributors) for life in lives for record in life.coord.disk.records}
    assert sizes == set(range(QUORUM, NODES + 1))


def test_arrival_order_does_not_change_the_digest() -> None:
    """Without trouble the digests depend on who took part, never on when anything arrived."""
    ends = set()
    for seed in range(20):
        federation = Federation(seed)
        federation.world.conditions.jitter_s = 1.0
        assert federation.world.run(lambda f=federation: len(f.coord.sessions) == NODES, 60.0)
        federation.coord.ask(3)
        assert federation.world.run(lambda f=federation: f.coord.resting, QUIET_S)
        ends.add(federation.coord.disk.digest)
    assert len(ends) == 1


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
