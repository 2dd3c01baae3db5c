"""How far training has turned a node's latents, from its worker to who asks for its status."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import trio

from lensemble.ctl import replies, requests
from lensemble.ctl.client import Client
from lensemble.version import VERSION
from lensemble.workload import Gauge, Objective, Workload, initial_parameters
from lensemble_node.worker.training import probe
from lensemble_node.worker.training.source import DataSource
from tests.node import worlds
from tests.node.scripted import PATIENCE_S, stage


def _status(socket: Path) -> replies.NodeStatus:
    with Client(socket, version=VERSION) as client:
        status = client.ask(requests.Status())
    assert isinstance(status, replies.NodeStatus)
    return status


def _world(folder: Path, gauge: Gauge) -> tuple[Workload, Path]:
    """A workload whose probe is at the path, and ``node0.h5`` beside it."""
    worlds.data(folder)
    plain = worlds.small(lr=1e-2)
    made = probe.build(DataSource(folder / "public.h5"), plain, initial_parameters(plain), 20)
    made.write(folder / "probe.safetensors")
    objective = Objective(probe_hash=made.digest)
    terms = plain.model_copy(update={"objective": objective, "gauge": gauge})
    return terms, folder / "probe.safetensors"


@pytest.mark.parametrize("align", [True, pytest.param(False, marks=pytest.mark.soak)])
async def test_drift_goes_from_the_worker_to_status(tmp_path: Path, align: bool) -> None:
    terms, public = _world(tmp_path / "arm", Gauge(align=align, threshold_degrees=0.0))
    data = tmp_path / "arm" / "node0.h5"
    async with stage(tmp_path) as s:
        s.workload = terms
        running = await s.start_node(data={"path": str(data), "probe": str(public)})
        session = await s.joined()
        socket = running.serving.member.config.socket_path
        assert (await trio.to_thread.run_sync(_status, socket)).drift is None
        await session.whole_round()
        with trio.fail_after(PATIENCE_S):
            told = (await trio.to_thread.run_sync(_status, socket)).drift
        node = running.serving.member.who.node
    # The same release again, in this process.
    trainer = worlds.trainer(terms, tmp_path / "arm", tmp_path / "alone", node)
    trainer.pin(public, terms.objective.probe_hash)
    released = trainer.train(initial_parameters(terms), **worlds.order(terms))
    assert told is not None
    assert msgspec.structs.asdict(told) == msgspec.structs.asdict(released.drift)
    assert told.aligned == align
    assert (told.after < told.before) == align
    assert np.isfinite([told.before, told.rms_degrees, told.std]).all()
    assert 0 < told.rms_degrees <= told.max_degrees


@pytest.mark.soak
async def test_without_a_probe_status_tells_of_no_drift(tmp_path: Path) -> None:
    worlds.data(tmp_path / "arm")
    async with stage(tmp_path) as s:
        s.workload = worlds.small()
        running = await s.start_node(data={"path": str(tmp_path / "arm" / "node0.h5")})
        session = await s.joined()
        await session.whole_round()
        assert running.serving.answers.status().drift is None
