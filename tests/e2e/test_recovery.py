"""Coordinators that are killed and start again, and what their files say afterwards."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from lensemble.ctl import replies
from lensemble_coord.training.verify import verify_state
from tests.e2e.federation import Federation, federation, until

pytestmark = pytest.mark.e2e
TERMS = {"workload": {"task": {"step_seconds": 0.02}, "inner": {"steps": 20, "batch": 1}}}


def _restart(members: Federation) -> float:
    """Kill the coordinator and start it again; seconds until both nodes are back."""
    members.coordinator.kill()
    began = time.monotonic()
    members.start("coordinator")
    members.wait_for()
    return time.monotonic() - began


def _essence(rounds: tuple[replies.RoundSummary, ...]) -> list[tuple[int, int, str, float | None]]:
    return [(each.index, each.attempt, each.digest, each.closed_unix_s) for each in rounds]


def _verify(state_dir: Path) -> tuple[int, list[dict[str, object]]]:
    """Exit status and problems of the verifier, as another machine would run it."""
    module = "lensemble_coord.training.verify"
    done = subprocess.run(
        [sys.executable, "-m", module, str(state_dir), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)["problems"]


def test_a_killed_coordinator_goes_on_where_it_was(tmp_path: Path) -> None:
    with federation(tmp_path, 2, **TERMS) as members:
        members.run(5)
        before = _essence((members.wait_closed(0),))
        members.wait_training(round_index=1)
        took = [_restart(members)]
        assert _essence(members.closed())[:1] == before
        resumed = members.status()
        assert resumed.run is not None
        assert (resumed.run.rounds, resumed.run.remaining <= 4) == (5, True)
        members.wait_closed(2)
        before = _essence(members.closed())
        took.append(_restart(members))
        after = _essence(members.closed())
        assert after[: len(before)] == before
        members.wait_rest()
        rounds = members.closed()
        assert [each.index for each in rounds] == list(range(5))
        assert _essence(rounds)[: len(before)] == before
        assert all(len(each.contributors) == 2 for each in rounds)
        assert rounds[1].attempt == 1, "the attempt in flight is not taken up again"
        # The socket of the killed daemon did not stand in the way, and nothing of it is left over.
        left = {path.name for path in (members.state_dir / "spool").glob("*")}
        assert not left
        print("coordinator start to nodes ready (s):", *(f"{each:.2f}" for each in took))
        _each_flip_is_named(members, tmp_path / "copy")


def _each_flip_is_named(members: Federation, copy: Path) -> None:
    """``verify`` on a copy of what live daemons made, whole and with single bytes changed."""
    assert members.coordinator.stop() == 0
    shutil.copytree(members.state_dir, copy)
    assert _verify(copy) == (0, [])
    generator = np.random.default_rng(11)
    for pattern in (
        "checkpoints/*/weights.safetensors",
        "checkpoints/*/header.json",
        "momentum/*/weights.safetensors",
        "momentum/*/header.json",
        "sums/*.u32",
        "ledger.sqlite",
    ):
        path = max(copy.glob(pattern))
        content = path.read_bytes()
        # The zeros of the ledger are mostly free space, which says nothing.
        used = [at for at, byte in enumerate(content) if byte]
        at = used[int(generator.integers(len(used)))]
        flipped = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        path.write_bytes(flipped)
        problems = verify_state(copy).problems
        path.write_bytes(content)
        named = str(path.relative_to(copy))
        where = {each.where.partition(":")[0] for each in problems}
        assert where, (named, at)
        assert all(named.startswith(each) for each in where), (problems, at)
    path.write_bytes(flipped)
    assert _verify(copy)[0] == 1
    path.write_bytes(content)
    assert _verify(copy) == (0, [])


@pytest.mark.parametrize("times", [pytest.param(20, marks=pytest.mark.soak)])
def test_a_coordinator_killed_at_any_time_loses_no_round(tmp_path: Path, times: int) -> None:
    generator = np.random.default_rng(5)
    with federation(tmp_path, 2, **TERMS) as members:
        members.run(1000)
        for _ in range(times):
            members.wait_training()
            before = _essence(members.closed())
            moment = time.monotonic() + float(generator.uniform(0, 0.8))
            until("the moment to kill", lambda due=moment: time.monotonic() > due)
            _restart(members)
            after = _essence(members.closed())
            assert after[: len(before)] == before
            assert [each[0] for each in after] == list(range(len(after)))
        members.wait_closed(len(after))
        assert members.coordinator.stop() == 0
        assert _verify(members.state_dir) == (0, [])
