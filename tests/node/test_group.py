"""Two real processes that train as one (gloo, on the CPU), against one that trains alone."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from lensemble.ids import Digest
from lensemble.workload import Gauge, Inner, Objective, Workload, initial_parameters, layout
from lensemble_local import arm
from lensemble_node import signals
from lensemble_node.worker import group
from lensemble_node.worker.training import probe
from lensemble_node.worker.training.source import DataSource
from tests.node import texts, worlds
from tests.node.worker_process import WorkerProcess, worker

TOLERANCE = 1e-4
"""Largest difference of an update's coordinates, as a part of its largest: float32 is summed in
another order, and the first steps of AdamW divide small gradients by their own size."""


def prepare(w: WorkerProcess, **more: object) -> Digest:
    w.configure(**more)
    w.attach()
    return w.fetch((0, 0), initial_parameters(w.workload))


def again(w: WorkerProcess, at: int, digest: Digest) -> signals.Trained:
    assert w.bind((at, 0), digest) == w.layout.nbytes
    assert w.hear() == signals.StateHeld(digest=digest, by="nothing")
    return w.train((at, 0), digest)


def second_update(
    place: Path, workload: Workload, processes: int, **more: object
) -> tuple[np.ndarray, list[signals.Trained]]:
    """Two rounds from the same prior, of which the first counts; the difference of the second."""
    with worker(place / str(processes), workload, processes=processes) as w:
        digest = prepare(w, **more)
        trained = [w.train((0, 0), digest)]
        w.tell(signals.Close(round=0, digest=digest, adopt=True))
        assert w.hear() == signals.Closed(round=0, adopted=True)
        trained.append(again(w, 1, digest))
        words = np.fromfile(w.state_dir / "release" / "round-1.u32", dtype="<u4")
        w.tell(signals.Stop())
        status, errors = w.end()
        assert (status, errors) == (0, "")
    return worlds.delta(words, workload), trained


def off(place: Path, workload: Workload, processes: int = 2, **more: object) -> float:
    """How far several processes' update is from that of one, relative to its largest coordinate."""
    alone, losses = second_update(place, workload, 1, **more)
    together, pooled = second_update(place, workload, processes, **more)
    for one, other in zip(losses, pooled, strict=True):
        assert other.loss_first == pytest.approx(one.loss_first, rel=1e-4)
        assert other.loss_last == pytest.approx(one.loss_last, rel=1e-3)
    assert np.abs(alone).max() > 1e-3
    for where in layout(workload).tensors:
        if where.name.endswith("attend.bias"):
            # Of keys: it moves all scores of a query alike and so has no gradient but what
            # rounding leaves, which AdamW divides by its own size.
            keys = slice(where.offset + where.size // 3, where.offset + 2 * where.size // 3)
            together[keys] = alone[keys]
    return float(np.abs(together - alone).max() / np.abs(alone).max())


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_two_processes_make_the_update_of_one(tmp_path: Path) -> None:
    folder = worlds.data(tmp_path / "data")
    found = off(tmp_path, worlds.small(), path=str(folder / "node0.h5"))
    print(f"sharded world model: off by {found:.1e}")
    assert found < TOLERANCE


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["state", "conv", "vit"])
def test_three_processes_make_the_anchored_and_aligned_update_of_one(
    tmp_path: Path, kind: str
) -> None:
    """Tensors that three do not divide, an encoder called twice in a step, pictures."""
    seeing = {"image_height": 16, "image_width": 16, "conv_width": 4, "patch": 4, "heads": 2}
    seen = worlds.SMALL.model_copy(update={"encoder": kind, **seeing} if kind != "state" else {})
    plain = Workload(task=seen, inner=Inner(steps=6, batch=18))
    folder = tmp_path / "data"
    size = 16 if seen.pictures else 0
    arm.make(folder, arm.Order(nodes=1, episodes=3, engine="numpy", pictures=size))
    keys = ("image",) if seen.pictures else ()
    public = DataSource(folder / "public.h5", image_keys=keys)
    made = probe.build(public, plain, initial_parameters(plain), 20)
    made.write(tmp_path / "probe.safetensors")
    workload = plain.model_copy(
        update={
            "objective": Objective(lambda_anc=0.5, probe_hash=made.digest),
            "gauge": Gauge(align=True, threshold_degrees=0.0),
        }
    )
    more = {"path": str(folder / "node0.h5"), "probe": str(tmp_path / "probe.safetensors")}
    found = off(tmp_path, workload, 3, **more)
    print(f"{kind}, anchored, three processes: off by {found:.1e}")
    assert found < TOLERANCE


@pytest.mark.soak
def test_a_task_of_ones_own_is_shared_too(tmp_path: Path) -> None:
    workload, more = texts.workload(steps=6), texts.configured(tmp_path / "texts")
    found = off(tmp_path, workload, **more)
    print(f"copied task: off by {found:.1e}")
    assert found < TOLERANCE


@pytest.mark.soak
@pytest.mark.parametrize(
    ("number", "told"),
    [
        (signal.SIGKILL, "fatal: process 1 of 2 (pid {pid}) was killed by SIGKILL"),
        (signal.SIGSTOP, "fatal: a process of the group is gone or hangs"),
    ],
)
def test_a_process_that_dies_or_hangs_in_a_step_ends_the_group(
    tmp_path: Path, number: signal.Signals, told: str
) -> None:
    workload, more = texts.workload(steps=100_000), texts.configured(tmp_path / "texts")
    with worker(tmp_path, workload, processes=2, group_timeout_s=2.0) as w:
        digest = prepare(w, **more)
        pids = children(w.process.pid)
        w.tell(w.train_command((0, 0), digest))
        assert isinstance(w.hear(), signals.Worked)
        os.kill(pids[1], number)
        status, errors = w.end()
        assert status == signals.EXIT_GROUP_LOST
        assert told.format(pid=pids[1]) in errors
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


STUMBLING = """
import os
from lensemble_local.letters import Letters
class Mine(Letters):
    def __init__(self, setting):
        super().__init__(setting)
        self.trip = setting.data / f"trip-{os.environ['RANK']}"
    def loss(self, parameters, examples):
        if self.trips():
            raise ValueError("for this once")
        return super().loss(parameters, examples)
    def trips(self):
        there = self.trip.exists()
        self.trip.unlink(missing_ok=True)
        return there
"""


@pytest.mark.soak
def test_a_group_goes_on_after_a_fault_of_the_task_and_after_a_stop(tmp_path: Path) -> None:
    (tmp_path / "stumbling.py").write_text(STUMBLING)
    workload = texts.workload(steps=1500)
    task = workload.task.model_copy(update={"entry": "stumbling:Mine"})
    workload = workload.model_copy(update={"task": task})
    more = texts.configured(tmp_path / "texts")
    code = {"task_entry": "stumbling:Mine", "task_folder": str(tmp_path)}
    with worker(tmp_path / "state", workload, processes=2) as w:
        digest = prepare(w, **(more | code))
        for rank, told in ((0, "loss raised ValueError at stumbling.py:10"), (1, "other process")):
            (tmp_path / "texts" / f"trip-{rank}").touch()
            w.tell(w.train_command((0, rank), digest))
            failed = w.hear()
            assert isinstance(failed, signals.Failed)
            assert failed.code == "task"
            assert told in failed.message.replace("another", "other")
        w.tell(w.train_command((0, 2), digest))
        assert isinstance(w.hear_until(signals.Worked), signals.Worked)
        w.tell(signals.Abandon(round=0, attempt=2))
        assert not again(w, 1, digest).reused
        w.tell(signals.Stop())
        assert w.end()[0] == 0


def test_nobody_survives_the_first_process(tmp_path: Path) -> None:
    with worker(tmp_path, processes=2) as w:
        w.configure()
        pids = children(w.process.pid)
        assert len(pids) == 2
        os.kill(pids[0], signal.SIGKILL)
        status, errors = w.end()
        assert (status, errors) == (-signal.SIGKILL, "")
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.soak
def test_a_batch_that_cannot_be_shared_equally_is_refused(tmp_path: Path) -> None:
    workload = texts.workload(batch=15)
    reason = r"inner\.batch is 15, which 2 processes cannot"
    with (
        worker(tmp_path, workload, processes=2) as w,
        pytest.raises(AssertionError, match=reason),
    ):
        w.configure(**texts.configured(tmp_path / "texts"))


def test_auto_counts_the_accelerators_that_may_be_seen(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert group.accelerators(tmp_path) == 2
    assert group.accelerators(tmp_path / "nothing") == 0
