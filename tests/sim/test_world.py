"""Federations that live through a minute of trouble and must come out right."""

from pathlib import Path

import pytest

from lensemble.ids import Digest
from tests.sim import soak
from tests.sim.federation import QUIET_S, Federation
from tests.sim.model_life import ModelLife

SEEDS = 500
"""Of each default run; ``make soak`` lives through thousands."""


def lived(seed: int) -> Federation:
    federation, violation = soak.live(seed)
    if violation is not None:
        raise AssertionError(soak.report(violation, soak.TRANSCRIPTS))
    return federation


def test_federations_come_out_right() -> None:
    result = soak.batch(list(range(SEEDS)))
    assert not result.violations, "\n\n".join(
        soak.report(each, soak.TRANSCRIPTS) for each in result.violations[:3]
    )
    assert result.rounds > 2 * SEEDS


@pytest.mark.soak
def test_many_more_federations_come_out_right() -> None:
    assert soak.main(["--seeds", "5000", "--first", str(SEEDS)]) == 0


def test_the_same_seed_is_the_same_life() -> None:
    assert lived(7).world.transcript() == lived(7).world.transcript()


def test_troubled_lives_reach_every_corner() -> None:
    """The seeds are worth their time only if everything that can go wrong does."""
    lives = [lived(seed) for seed in range(100)]
    said = "\n".join(life.world.transcript() for life in lives)
    for corner in (
        "code=fault_tolerance_exceeded",
        "code=storage",
        "code=commitment_mismatch",
        "code=contract_violation",
        "code=secure_aggregation",
        "code=stopped",
        "code=stale",
        "code=duplicate",
        "code=misplaced",
        "coord    dies",
        "coord    loses power",
        "node-a   dies",
        "node-a   loses power",
        "link breaks",
        "node-a   =| coord",
        "coord    =| node-a",
        "worker was killed by SIGKILL",
        "worker ran out of memory",
        "worker does nothing more",
        "worker was ended: it did not let go of its edges",
        "edges broken",
        "cannot write",
        "edges Draining after EndFaulted",
        "edges Draining after Dropped",
        "edges Draining after WorkerGone",
        "edges Draining after LinkGone",
        "edges Leasing after Detached",
        "edges Bare after WorkerGone",
        "does AskAlso",
        "does DropUpdate",
        "sends 1 sums",
        "sends 2 sums",
        "sends the state from 0 ",
        "refuses the step",
        "does AnnounceClose",
        "does SendRoster",
        "does RequestUnmask",
        "counts Count(reason=no_edges",
        "counts Count(reason=collect_out_of_place",
        "adopt=True adopted=True",
        "no progress for 24 s",
        "is Withdrawn",
        "is Answered",
    ):
        assert corner in said, f"no life reaches: {corner}"
    vectors = [life.revealed for life in lives if life.rules.masked]
    assert any(len(set(each.sent.values())) < len(each.sent) for each in vectors), "no reuse"
    assert any(len(life.checks.truth) > 4 for life in lives)
    attempts = {record.attempt for life in lives for record in life.checks.truth}
    assert max(attempts) > 2
    outcomes = {run.outcome for life in lives for run in life.coord.books.ledger.runs}
    assert {"completed", "stopped"} <= outcomes


def test_troubled_lives_of_models_reach_every_corner() -> None:
    lives = [ModelLife(seed) for seed in range(150)]
    assert not [each for each in map(soak.violation_of, lives) if each is not None]
    endings = [each for life in lives for each in life.checks.endings.values()]
    assert {each.outcome for each in endings} == {"completed", "faulted", "stopped", "moved"}
    faults = {each.fault.code for each in endings if each.fault is not None}
    assert faults >= {"link_lost", "worker_fault", "edge_fault", "stage_refused", "unreachable"}
    said = "\n".join(life.world.transcript() for life in lives)
    for corner in (
        "outcome=faulted",
        "Provide Draining",
        "LinkGone Draining",
        "SequenceEnded",
        "interrupted Decoding",
        "interrupted Prefilling",
        "interrupted Queued",
        "MoveAsked Carrying",
        "Unplanned Planning",
        "says again",
    ):
        assert corner in said, f"no life reaches: {corner}"
    ends = [each for life in lives for each in life.checks.ends.values()]
    assert {each.outcome for each in ends} == {"completed", "faulted", "stopped"}
    assert max(epoch for life in lives for epoch in life.checks.epochs.values()) > 2


def test_arrival_order_does_not_change_the_digest() -> None:
    """Without trouble the digests depend on who took part, never on when anything arrived."""
    ends: dict[bool, set[Digest]] = {False: set(), True: set()}
    for seed in range(0, 40, 8):
        for masked in (0, 1):
            federation = Federation(seed + masked)
            federation.world.conditions.jitter_s = 1.0
            assert federation.world.run(federation._all_here, 60.0)
            federation.coord.ask(3)
            federation.world.run(lambda f=federation: f.coord.books.run is not None, 5.0)
            assert federation.world.run(lambda f=federation: f.coord.resting, QUIET_S)
            ends[federation.rules.masked].add(federation.coord.books.tail().next_digest)
    assert len(ends[False]) == 1


def test_a_violation_says_how_to_live_it_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A node that says it has given its rings back and keeps one: the end of its life shows it."""
    federation = Federation(4)
    node = federation.nodes[0]
    federation.world.at(70.0, lambda: node.arena.lease(1, lambda _: None))
    with pytest.raises(AssertionError, match="node-a holds 1 rings"):
        federation.live()
    violation = soak.Violation(3, "AssertionError: a ring", federation.world.transcript())
    *life, again = soak.report(violation, tmp_path).splitlines()
    assert again == "python -m tests.sim.soak --seeds 1 --first 3"
    assert "AssertionError: a ring" in life
    assert "is collecting: waiting for" in (tmp_path / "seed-3.txt").read_text(encoding="utf-8")
    assert len(life) <= soak.LAST_LINES + 4
    assert all(len(line) < 400 for line in life)
    assert soak.main(["--seeds", "2", "--json", "--transcripts", str(tmp_path)]) == 0
    assert '"violations": 0' in capsys.readouterr().out
