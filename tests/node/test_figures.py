"""The node's figures for Prometheus: they say what its status says."""

from pathlib import Path

import httpx2
import trio
from prometheus_client.parser import text_string_to_metric_families

from lensemble import identity
from lensemble.config import validate
from lensemble.transport.memory_driver import MemoryNetwork
from lensemble_node import daemon
from lensemble_node.config import NodeConfig
from lensemble_node.stage_process import Engine


async def test_figures_agree_with_status(tmp_path: Path) -> None:
    tree = {
        "name": "n",
        "metrics": {"address": "127.0.0.1:0"},
        "inference": {"memory_bytes": 1 << 20},
    }
    config = validate(tree, NodeConfig, path=tmp_path / "node.toml")
    config.state_dir.mkdir(parents=True)
    who = identity.load_or_create(config.state_dir / "identity.key")
    driver = MemoryNetwork().driver(who.node)
    engine = Engine("scripted", {})
    async with trio.open_nursery() as nursery:
        here = await nursery.start(
            lambda task_status: daemon.serve(config, driver, engine=engine, task_status=task_status)
        )
        url = f"http://{here.metrics}/metrics"
        raw = await trio.to_thread.run_sync(httpx2.get, url)
        missing = await trio.to_thread.run_sync(httpx2.get, f"http://{here.metrics}/other")
        other = await trio.to_thread.run_sync(
            lambda: httpx2.get(url, headers={"host": "evil.example"})
        )
        assert other.status_code == 421
        told = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(raw.text)
            for sample in family.samples
        }
        status = here.answers.status()
        nursery.cancel_scope.cancel()
    assert missing.status_code == 404
    assert raw.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert told["lensemble_link_state", (("state", status.link.state),)] == 1
    assert told["lensemble_contributions_total", ()] == status.contributions == 0
    assert status.worker is not None
    assert told["lensemble_worker_state", (("state", status.worker.state),)] == 1
    assert told["lensemble_worker_restarts_total", ()] == status.worker.restarts
    assert status.hosting is not None
    offered = told["lensemble_hosting_bytes", (("what", "offered"),)]
    assert offered == status.hosting.memory_bytes
    assert told["lensemble_resident_bytes", ()] > 1e7
    assert ("lensemble_epsilon_spent", ()) not in told
    assert ("lensemble_drift_after", ()) not in told
