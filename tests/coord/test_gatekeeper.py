"""A coordinator that tests its states, with a real small process as the testing program."""

import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from lensemble.ctl import replies
from lensemble_coord.config import GateSection
from lensemble_coord.training import outer_round
from lensemble_coord.training.gatekeeper import EVALUATED, MAX_FAULTS, decode
from lensemble_coord.training.verify import verify_state
from tests.coord import scripted_gate
from tests.coord.scripted_node import ScriptedNode
from tests.coord.test_coordinator import Bench, bench

GOOD = {"finite": True, "std": 1.0, "probe_r2": 0.9, "latent_error": 0.3, "state_error": 0.5}
BAD = {**GOOD, "std": 0.04, "probe_r2": 0.1}


def answer(figures: dict[str, Any]) -> dict[str, Any]:
    return {"figures": figures}


class Gated:
    def __init__(self, coordinator: Bench, a: ScriptedNode, b: ScriptedNode, plan: Path) -> None:
        self.coordinator, self.a, self.b, self.plan = coordinator, a, b, plan
        self.gate = coordinator.rounds.gate
        self.observer = coordinator.serving.answers.observer

    async def run(self, rounds: int) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.coordinator.serving.run_rounds, rounds)
            for _ in range(rounds):
                nursery.start_soon(self.b.take_part, 3 << 20)
                close = await self.a.take_part(1 << 20)
                assert close.outcome == "closed"

    @property
    def starts(self) -> list[int]:
        return [int(line) for line in self.plan.with_suffix(".started").read_text().split()]

    @property
    def asked(self) -> list[dict[str, str]]:
        lines = self.plan.with_suffix(".asked").read_text().splitlines()
        return [json.loads(line) for line in lines]

    async def events(self, name: str) -> list[dict[str, Any]]:
        """The events of that name, once there is one."""
        while True:
            written = self.coordinator.rounds.journal.written
            if found := self.coordinator.serving.store.events_of(name, 100):
                return [json.loads(each.event) for each in found]
            await written.wait()


@asynccontextmanager
async def gated(place: Path, plan: list[object], **terms: Any) -> AsyncIterator[Gated]:
    plan_file = place / "plan.json"
    plan_file.write_text(json.dumps(plan))
    program = (sys.executable, scripted_gate.__file__, str(plan_file))
    gate = GateSection(data=place / "public.h5", **{"timeout_s": 60.0, **terms})
    async with (
        bench(place, gate=gate, gate_program=program) as coordinator,
        coordinator.node("a") as a,
        coordinator.node("b") as b,
    ):
        await coordinator.serving.wait_for_nodes(2)
        yield Gated(coordinator, a, b, plan_file)


async def test_a_committed_state_is_tested_behind_the_round(tmp_path: Path) -> None:
    plan = [answer(GOOD), answer(GOOD), answer(BAD)]
    async with gated(tmp_path, plan) as federation:
        await federation.run(2)
        await federation.gate.tested()
        start, first, second = federation.asked
        assert (start["prior"], first["prior"], second["prior"]) == (
            "",
            start["state"],
            first["state"],
        )
        assert len(federation.starts) == 1
        store = federation.coordinator.serving.store
        assert second["state"].endswith(store.tail().next_digest)
        status = federation.observer.status()
        assert any("round 1, public data: std 0.04" in each for each in status.alerts)
        listed = federation.observer.rounds(5).rounds
        assert [len(each.alerts) for each in listed] == [0, 3]
        detail = federation.observer.round(1)
        assert detail is not None
        assert isinstance(detail.public, replies.PublicFigures)
        assert (detail.public.std, detail.public.state_error) == (0.04, 0.5)
    async with bench(tmp_path) as later:
        told = [json.loads(e.event) for e in later.serving.store.events_of(EVALUATED, 9)]
        assert [(each["round"], each["std"]) for each in told] == [(-1, 1.0), (0, 1.0), (1, 0.04)]
    assert verify_state(tmp_path / "state").sound


async def test_what_was_found_outlives_the_daemon(tmp_path: Path) -> None:
    async with gated(tmp_path, [answer(GOOD)]) as federation:
        await federation.run(1)
        await federation.gate.tested()
    async with gated(tmp_path, [answer(GOOD)]) as federation:
        verdict = federation.gate.verdict(0)
        assert verdict is not None
        assert verdict.figures.latent_error == 0.3
        await federation.run(1)
        await federation.gate.tested()
        # The state before is known already: only the one after it is asked for.
        assert len(federation.asked) == 3


async def test_a_state_that_fails_is_not_adopted(tmp_path: Path) -> None:
    plan = [answer(GOOD), answer(BAD), answer(GOOD), answer(BAD)]
    async with gated(tmp_path, plan, mode="reject") as federation:
        store = federation.coordinator.serving.store
        start = store.tail().next_digest
        await federation.run(1)
        rejected = store.tail()
        assert (rejected.round, rejected.next_digest, rejected.c_t) == (0, start, 2)
        assert (rejected.momentum_digest, rejected.field_sum_digest is None) == (None, False)
        assert "collapsed" in rejected.refusal
        assert federation.coordinator.serving.digest == start
        await federation.run(2)
        adopted, again = (each.record for each in store.ledger.committed(1))
        assert adopted.next_digest != start
        assert not adopted.refusal
        assert (again.next_digest, again.momentum_digest) == (
            adopted.next_digest,
            adopted.momentum_digest,
        )
        assert again.refusal
        (alert,) = federation.observer.rounds(1).rounds[0].alerts
        assert alert.startswith("REJECTED, the state is the one before: std 0.04")
        ended = federation.coordinator.serving.closed_rounds
        assert [bool(each.refusal) for each in ended] == [True, False, True]
        # Figures of the state that is kept are what the next one is compared with.
        assert [each["prior"][-64:] for each in federation.asked] == [
            "",
            start,
            start,
            adopted.next_digest,
        ]
    report = verify_state(tmp_path / "state")
    assert report.sound, report.problems
    assert (report.recomputed, report.checkpoints) == (3, 3)
    assert [note for note in report.notes if "rejected" in note] == [
        f"the step of round {t} was rejected: {r.refusal}" for t, r in ((0, rejected), (2, again))
    ]
    assert not any("named by no record" in note for note in report.notes)


async def test_a_status_says_that_a_round_waits_for_a_test(tmp_path: Path) -> None:
    async with gated(tmp_path, ["sleep"], mode="reject", timeout_s=3.0) as federation:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(federation.run, 1)
            await federation.coordinator.state(outer_round.Committing)
            while not federation.gate.weighing:
                await trio.lowlevel.checkpoint()
            assert "on public data before" in federation.observer.status().round.reason
        assert not federation.gate.weighing


async def test_rejection_survives_a_restart(tmp_path: Path) -> None:
    async with gated(tmp_path, [answer(GOOD), answer(BAD)], mode="reject") as federation:
        await federation.run(1)
    async with gated(tmp_path, [answer(GOOD)], mode="reject") as federation:
        store = federation.coordinator.serving.store
        assert store.position.round == 1
        await federation.run(1)
        assert not store.tail().refusal
        assert store.tail().prior_digest != store.tail().next_digest


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("die", "exited with status 1: out of luck"),
        ("sleep", "no answer within 3 s"),
        ("hello there", "said 'hello there', which is no answer"),
        ('{"figures": {"finite": 7}}', "which is no answer"),
        ('{"figures": {}, "refused": ""}', "which is no answer"),
        ("x" * 40_000, "over 16384 bytes"),
        ({"refused": "weights of another model"}, "weights of another model"),
        ({"ready": 1}, "said twice that it is ready"),
    ],
)
@pytest.mark.parametrize("mode", ["alert", "reject"])
async def test_a_test_that_fails_holds_no_round(
    tmp_path: Path, mode: str, entry: object, reason: str
) -> None:
    timeout_s = 3.0 if entry == "sleep" else 60.0
    async with gated(tmp_path, [entry], mode=mode, timeout_s=timeout_s) as federation:
        await federation.run(1)
        await federation.gate.tested()
        (alert,) = (
            each for each in federation.observer.status().alerts if "states are not tested" in each
        )
        assert reason in alert
        assert not federation.coordinator.serving.store.tail().refusal
        (told,) = await federation.events("gate.failed")
        assert (told["round"], told["faults"]) == (0, 1)
        for pid in federation.starts:
            assert not _lives(pid)


async def test_a_state_that_was_not_tested_is_after_a_restart(tmp_path: Path) -> None:
    async with gated(tmp_path, [answer(GOOD)], mode="off") as federation:
        await federation.run(2)
    async with gated(tmp_path, [answer(GOOD)]) as federation:
        await federation.gate.tested()
        tail = federation.coordinator.serving.store.tail()
        assert [each["state"][-64:] for each in federation.asked] == [
            tail.prior_digest,
            tail.next_digest,
        ]


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_program_that_fails_again_and_again_is_left_alone(tmp_path: Path) -> None:
    async with gated(tmp_path, ["die"]) as federation:
        federation.gate.pause_s = 0.0
        for _ in range(MAX_FAULTS + 2):
            await federation.run(1)
            await federation.gate.tested()
        assert len(federation.starts) == MAX_FAULTS
        assert any("no more is tried" in each for each in federation.observer.status().alerts)


async def test_after_a_failure_nothing_is_started_for_a_while(tmp_path: Path) -> None:
    async with gated(tmp_path, ["die"]) as federation:
        federation.gate.pause_s = 3600.0
        for _ in range(3):
            await federation.run(1)
            await federation.gate.tested()
        assert len(federation.starts) == 1
        told = await federation.events("gate.skipped")
        assert "out of luck" in told[0]["reason"]


async def test_the_program_ends_with_the_daemon(tmp_path: Path) -> None:
    async with gated(tmp_path, [answer(GOOD)]) as federation:
        await federation.run(1)
        await federation.gate.tested()
        (pid,) = federation.starts
        assert _lives(pid)
    assert not _lives(pid)


@pytest.mark.parametrize("terms", [{"mode": "off"}, {"data": None}])
async def test_nothing_is_started_unless_it_is_asked_for(
    tmp_path: Path, terms: dict[str, Any]
) -> None:
    program = (sys.executable, "-c", "raise SystemExit('started')")
    gate = GateSection(**{"data": tmp_path / "public.h5", **terms})
    async with (
        bench(tmp_path, gate=gate, gate_program=program) as coordinator,
        coordinator.node("a") as a,
        coordinator.node("b") as b,
    ):
        await coordinator.serving.wait_for_nodes(2)
        await Gated(coordinator, a, b, tmp_path / "plan").run(1)
        assert coordinator.rounds.gate.alerts == ()


def test_an_event_that_tells_no_verdict_is_none() -> None:
    assert decode('{"event":"gate.evaluated"}') is None
    assert decode('{"event":"gate.evaluated","finite":true,"std":"wide","round":1}') is None
