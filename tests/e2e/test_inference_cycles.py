"""Real daemons after many runs, most of them aborted at some moment: nothing has grown."""

import os
import random
import subprocess
from pathlib import Path

import msgspec
import pytest

from lensemble.ctl import requests
from lensemble.ctl.client import Client
from tests.e2e.federation import until
from tests.e2e.serving import Serving, serving

pytestmark = [pytest.mark.e2e, pytest.mark.soak]

CYCLES = int(os.environ.get("RUN_CYCLES", "200"))
SPLITS = ("0:2@node-0,2:4@node-1", "0:3@node-1,3:4@node-0", "0:4@node-0")
PHASES = ("asked", "fetching", "loading", "compiling", "ready")
MAX_GROWTH_BYTES = 12 << 20


class Held(msgspec.Struct, frozen=True):
    rss_bytes: int
    descriptors: int
    threads: int
    children: int


def held(pid: int) -> Held:
    place = Path(f"/proc/{pid}")
    status = dict(
        line.split(":", 1) for line in (place / "status").read_text().splitlines() if ":" in line
    )
    children = (place / "task" / str(pid) / "children").read_text().split()
    return Held(
        int(status["VmRSS"].split()[0]) << 10,
        len(os.listdir(place / "fd")),
        int(status["Threads"]),
        len(children),
    )


def measure(here: Serving) -> dict[str, Held]:
    return {each.name: held(each.pid) for each in here.processes()}


def reached(here: Serving, run: str, phase: str) -> None:
    """Wait until a stage of ``run`` is as far as ``phase``."""
    wanted = set(PHASES[PHASES.index(phase) :])
    until(
        f"a stage of {run} is {phase}",
        lambda: not wanted.isdisjoint(each.phase for each in here.inspect(run).stages),
        60.0,
    )


def cycle(here: Serving, draw: random.Random, number: int) -> str:
    """One run; every tenth is used, the others end at some moment of their beginning."""
    wish = {"model": str(here.model), "ctx": 64, "rows": 8, "split": draw.choice(SPLITS)}
    if number % 10 == 0:
        run = here.provision(wish["split"]).run
        here.ask(run, "hello", most=3)
        if number % 20 == 0:
            (pid,) = here.workers("node-0")
            subprocess.run(["kill", "-KILL", str(pid)], check=True)
            return here.until_over(run).outcome
    else:
        run = here.coordinator.ask(requests.ProvisionModel(**wish, detach=True)).run
        reached(here, run, draw.choice(PHASES))
    with Client(here.coordinator.socket, timeout_s=60) as client:
        return client.ask(requests.StopRun(run=run)).outcome


def test_runs_and_aborts_leave_daemons_as_they_were(tmp_path: Path) -> None:
    draw = random.Random(3)
    with serving(tmp_path, 2) as here:
        warm = max(2, CYCLES // 5)
        before: dict[str, Held] = {}
        for number in range(CYCLES):
            outcome = cycle(here, draw, number)
            assert outcome in {"stopped", "faulted"}, number
            if number == warm:
                before = measure(here)
        after = measure(here)
        for name, was in before.items():
            now = after[name]
            print(f"{name}: {(now.rss_bytes - was.rss_bytes) / 1e6:+.1f} MB, {was} -> {now}")
            assert now.descriptors <= was.descriptors + 2, (name, was, now)
            assert now.threads <= was.threads + 2, (name, was, now)
            assert now.children <= was.children, (name, was, now)
            assert now.rss_bytes - was.rss_bytes < MAX_GROWTH_BYTES, (name, was, now)
        assert here.workers("node-0") == here.workers("node-1") == []
