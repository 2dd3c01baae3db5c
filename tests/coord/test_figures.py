"""The coordinator's figures for Prometheus: they say what its status says."""

import subprocess
import sys
from pathlib import Path

import httpx2
import trio
from prometheus_client.parser import text_string_to_metric_families

from tests.coord.test_coordinator import Bench, bench

Told = dict[tuple[str, tuple[tuple[str, str], ...]], float]


async def figures(coordinator: Bench) -> Told:
    url = f"http://{coordinator.serving.surfaces['http']}/metrics"
    told = await trio.to_thread.run_sync(httpx2.get, url)
    assert told.status_code == 200
    families = list(text_string_to_metric_families(told.text))
    names = [family.name for family in families]
    assert len(set(names)) == len(names)
    assert all(name.startswith("lensemble_") for name in names)
    assert all(family.documentation for family in families)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


async def test_figures_of_rounds_agree_with_status(tmp_path: Path) -> None:
    async with (
        bench(tmp_path, http={"enabled": True, "address": "127.0.0.1:0"}) as coordinator,
        coordinator.node("a") as a,
        coordinator.node("b") as b,
    ):
        await coordinator.serving.wait_for_nodes(2)
        before = await figures(coordinator)
        assert before["lensemble_rounds_total", (("outcome", "closed"),)] == 0
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(coordinator.serving.run_rounds, 2)
                for value in (5, 7):
                    async with trio.open_nursery() as both:
                        both.start_soon(b.take_part, value)
                        both.start_soon(a.take_part, value)
        told = await figures(coordinator)
        status = coordinator.serving.answers.observer.status()
        assert status.last_round is not None
        assert told["lensemble_rounds_total", (("outcome", "closed"),)] == 2
        assert told["lensemble_rounds_total", (("outcome", "aborted"),)] == 0
        assert told["lensemble_round_contributors", ()] == len(status.last_round.contributors) == 2
        assert told["lensemble_round_state", (("state", str(status.round.state)),)] == 1
        assert told["lensemble_round_index", ()] == status.round.index
        spent = sum(
            value for (name, _), value in told.items() if name == "lensemble_round_seconds_sum"
        )
        ended = coordinator.serving.closed_rounds
        assert abs(spent - sum(sum(each.seconds.values()) for each in ended)) < 1e-6
        assert told["lensemble_round_seconds_count", (("state", "collecting"),)] == 2
        for edge in status.edges:
            labels = (("direction", edge.direction), ("node", edge.peer))
            assert told["lensemble_edge_bytes_total", labels] == edge.bytes > 0
        assert status.storage is not None
        assert told["lensemble_spool_bytes", ()] == status.storage.spool_bytes
        assert told["lensemble_checkpoint_bytes", ()] == status.storage.checkpoint_bytes
        assert told["lensemble_resident_bytes", ()] > 1e7
        assert told["lensemble_event_loop_pass_seconds_count", ()] > 10
        assert ("lensemble_public_std", ()) not in told


WITHOUT = """
import sys
sys.modules.update({"hypercorn": None, "starlette": None, "prometheus_client": None})
import trio
from lensemble.errors import ConfigError
from lensemble_coord.config import CoordinatorConfig
from lensemble_coord.http import door
from lensemble_node import metrics

async def main():
    async with trio.open_nursery() as nursery:
        config = CoordinatorConfig(metrics={"address": "127.0.0.1:0"})
        assert await nursery.start(door.serve, config, None) == {}
        assert await nursery.start(metrics.serve, None, "127.0.0.1:0") == ""
        try:
            await door.serve(CoordinatorConfig(http={"enabled": True}), None)
        except ConfigError as error:
            assert "lensemble[http]" in error.remediation, error.remediation
            print(error.message)

trio.run(main)
"""


def test_without_the_packages_figures_are_left_out_and_the_api_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "http.enabled needs the package" in done.stdout
    assert done.stdout.count("metrics.unavailable") == 2
