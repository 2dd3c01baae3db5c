import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lensemble import blob
from lensemble.params import parameter_digest
from lensemble.workload import NoopTask, Workload
from lensemble_node import signals
from tests.node.worker_process import (
    FEDERATION,
    NODE,
    STATE_EDGE,
    UPDATE_EDGE,
    noop,
    warm_start,
    worker,
)


def test_a_round_from_bind_to_close(tmp_path: Path) -> None:
    with worker(tmp_path) as w:
        facts = w.configure()
        assert facts.layout_digest == w.layout.digest
        w.attach()
        flat = warm_start(w.workload)
        digest = w.fetch((0, 0), flat)
        assert (tmp_path / "global" / f"{digest}.f32").read_bytes() == flat.tobytes()
        trained = w.train((0, 0), digest)
        assert not trained.reused
        assert trained.nbytes == w.layout.nbytes
        reader = blob.BlobReader(
            blob.Expected("update", FEDERATION, 0, 0, w.layout, trained.digest),
            verify=lambda _, signature: signature == b"\xab" * 64,
        )
        events = [reader.feed(memoryview(chunk)) for chunk in w.send((0, 0))]
        assert isinstance(events[-1], blob.Complete)
        w.tell(signals.Close(round=0, digest=digest, adopt=True), signals.Stop())
        assert w.hear() == signals.Closed(round=0, adopted=True)
        assert w.end()[0] == 0


def test_a_retry_sends_the_same_bytes_and_fetches_nothing(tmp_path: Path) -> None:
    with worker(tmp_path) as w:
        w.configure()
        w.attach()
        digest = w.fetch((0, 0), warm_start(w.workload))
        first = w.train((0, 0), digest)
        w.tell(signals.Abandon(round=0, attempt=0))
        assert w.bind((0, 1), digest) == w.layout.nbytes
        assert w.hear() == signals.StateHeld(digest=digest, by="nothing")
        again = w.train((0, 1), digest)
        assert again.reused
        assert again.digest == first.digest


def test_a_killed_worker_resumes_the_state_where_it_was(tmp_path: Path) -> None:
    workload = noop(100_000)
    flat = np.arange(100_000, dtype=np.float32)
    with worker(tmp_path, workload) as w:
        w.configure()
        w.attach()
        digest = parameter_digest(w.layout, flat)
        assert w.bind((3, 0), digest) == 0
        for chunk in list(w.chunks((3, 0), flat))[:4]:
            w.give(chunk)
        w.process.send_signal(signal.SIGKILL)
    with worker(tmp_path, workload) as w:
        w.configure()
        w.attach()
        held = w.bind((3, 1), digest)
        assert held == 3 * w.capacity_bytes
        said: list[signals.Event] = []
        for chunk in w.chunks((3, 1), flat, held):
            said += w.give(chunk)
        assert said == [signals.StateHeld(digest=digest)]
    assert (tmp_path / "global" / f"{digest}.f32").read_bytes() == flat.tobytes()


def test_a_damaged_partial_state_is_fetched_again_from_its_start(tmp_path: Path) -> None:
    flat = warm_start(noop())
    with worker(tmp_path) as w:
        digest = parameter_digest(w.layout, flat)
        (tmp_path / "global").mkdir()
        (tmp_path / "global" / f"{digest}.f32.part").write_bytes(b"\x01" * 4000)
        w.configure()
        w.attach()
        assert w.bind((0, 0), digest) == 4000
        said: list[signals.Event] = []
        for chunk in w.chunks((0, 0), flat, 4000):
            said += w.give(chunk)
        failed, spoiled = said
        assert isinstance(failed, signals.Failed)
        assert (failed.code, failed.round) == ("contract_violation", 0)
        assert spoiled == signals.Spoiled(edge=STATE_EDGE, reason="contract_violation")
        # Nothing more is believed on that edge until it is replaced.
        assert w.give(b"anything") == []
        for edge in (STATE_EDGE, UPDATE_EDGE):
            w.tell(signals.Detach(edge=edge))
            assert w.hear() == signals.Detached(edge=edge)
        w.attach()
        assert w.bind((0, 1), digest) == 0
        for chunk in w.chunks((0, 1), flat):
            said += w.give(chunk)
        assert said[-1] == signals.StateHeld(digest=digest)


def test_a_state_that_came_whole_without_its_trailer_is_verified_before_it_is_held(
    tmp_path: Path,
) -> None:
    flat = warm_start(noop())
    with worker(tmp_path) as w:
        digest = parameter_digest(w.layout, flat)
        (tmp_path / "global").mkdir()
        (tmp_path / "global" / f"{digest}.f32.part").write_bytes(flat.tobytes())
        w.configure()
        w.attach()
        held = w.bind((0, 0), digest)
        assert held == w.layout.nbytes - 4
        said: list[signals.Event] = []
        for chunk in w.chunks((0, 0), flat, held):
            said += w.give(chunk)
        assert said == [signals.StateHeld(digest=digest)]
        w.train((0, 0), digest)


def test_a_complete_state_that_rotted_is_fetched_again(tmp_path: Path) -> None:
    flat = warm_start(noop())
    with worker(tmp_path) as w:
        digest = parameter_digest(w.layout, flat)
        (tmp_path / "global").mkdir()
        rotten = bytearray(flat.tobytes())
        rotten[17] ^= 1
        (tmp_path / "global" / f"{digest}.f32").write_bytes(rotten)
        w.configure()
        assert w.bind((0, 0), digest) == 0


def test_abandoning_while_sending_stops_and_leaves_the_worker_usable(tmp_path: Path) -> None:
    with worker(tmp_path) as w:
        w.configure()
        w.attach()
        digest = w.fetch((0, 0), warm_start(w.workload))
        w.train((0, 0), digest)
        w.tell(signals.Send(edge=UPDATE_EDGE, round=0, attempt=0, signature="00" * 64))
        # Two slots, never released: the worker now waits for one.
        assert isinstance(w.hear(), signals.Filled)
        assert isinstance(w.hear(), signals.Filled)
        w.tell(signals.Abandon(round=0, attempt=0), signals.Detach(edge=UPDATE_EDGE))
        assert w.hear() == signals.Detached(edge=UPDATE_EDGE)
        assert w.bind((0, 1), digest) == w.layout.nbytes


def test_sending_without_a_release_fails_and_the_worker_goes_on(tmp_path: Path) -> None:
    with worker(tmp_path) as w:
        w.configure()
        w.attach()
        w.tell(signals.Send(edge=UPDATE_EDGE, round=0, attempt=0, signature="00" * 64))
        failed = w.hear()
        assert isinstance(failed, signals.Failed)
        assert (failed.round, failed.attempt, failed.fatal) == (0, 0, False)
        w.tell(signals.Stop())
        assert w.end()[0] == 0


def test_a_world_model_without_data_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with worker(tmp_path, Workload()) as w:
        w.tell(
            signals.Configure(
                workload=w.workload.canonical().decode(),
                federation=FEDERATION,
                node=NODE,
                state_dir=str(tmp_path),
                path="",
            )
        )
        failed = w.hear()
        assert isinstance(failed, signals.Failed)
        assert failed.fatal
        assert failed.code == "config"
        status, errors = w.end()
        assert status == 1
        assert "fatal: " in errors.splitlines()[-1]


@pytest.mark.parametrize("line", [b"nonsense\n", b'{"type":"Nothing"}\n', b"x" * (1 << 19)])
def test_what_is_no_command_ends_the_worker_with_a_word(tmp_path: Path, line: bytes) -> None:
    with worker(tmp_path) as w:
        assert w.process.stdin is not None
        try:
            w.process.stdin.write(line)
            w.process.stdin.flush()
        except BrokenPipeError:
            pass
        status = w.process.wait(timeout=10)
        assert status == 1
        assert w.process.stderr is not None
        assert b"fatal: " in w.process.stderr.read()


def test_closing_stdin_ends_the_worker(tmp_path: Path) -> None:
    with worker(tmp_path) as w:
        w.configure()
        assert w.end() == (0, "")


def test_the_worker_dies_with_its_parent(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys, time\n"
        "from pathlib import Path\n"
        "from tests.node.worker_process import WorkerProcess, noop\n"
        f"w = WorkerProcess(Path({str(tmp_path)!r}), noop())\n"
        "w.configure()\n"
        "print(w.process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    root = Path(__file__).parents[2]
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=root)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    pidfd = os.pidfd_open(pid)
    parent.kill()
    parent.communicate()
    ready, _, _ = select.select([pidfd], [], [], 5)
    os.close(pidfd)
    assert ready


def test_learning_late_that_a_round_counted_keeps_the_one_in_flight(tmp_path: Path) -> None:
    with worker(tmp_path) as w:
        w.configure()
        w.attach()
        digest = w.fetch((0, 0), warm_start(w.workload))
        w.train((0, 0), digest)
        w.tell(signals.Close(round=0, digest=digest, adopt=True))
        assert w.hear() == signals.Closed(round=0, adopted=True)
        first = w.train((1, 0), digest)
    with worker(tmp_path) as w:
        w.configure()
        w.attach()
        # A returning node is told again of the newest committed round.
        w.tell(signals.Close(round=0, digest=digest, adopt=True))
        assert w.hear() == signals.Closed(round=0, adopted=True)
        w.fetch((1, 1), warm_start(w.workload))
        again = w.train((1, 1), digest)
        assert again.reused
        assert again.digest == first.digest


def test_what_a_newer_round_asks_for_ends_the_older_work(tmp_path: Path) -> None:
    slow = Workload(name="noop", task=NoopTask(parameters=1000, step_seconds=0.05))
    with worker(tmp_path, slow) as w:
        w.configure()
        w.attach()
        digest = w.fetch((0, 0), warm_start(slow))
        w.tell(w.train_command((0, 0), digest))
        # The first report comes after half a second: by then it trains.
        assert isinstance(w.hear(), signals.Worked)
        w.tell(
            signals.Close(round=0, digest="3" * 64, adopt=False),
            signals.Bind(round=1, attempt=0, prior_digest="4" * 64),
        )
        said = [w.hear(), w.hear()]
        assert signals.Closed(round=0, adopted=False) in said
        assert signals.Bound(round=1, attempt=0, holds_bytes=0) in said


def test_a_stop_ends_training_at_once(tmp_path: Path) -> None:
    slow = Workload(name="noop", task=NoopTask(parameters=1000, step_seconds=0.05))
    with worker(tmp_path, slow) as w:
        w.configure()
        w.attach()
        digest = w.fetch((0, 0), warm_start(slow))
        w.tell(w.train_command((0, 0), digest))
        assert isinstance(w.hear(), signals.Worked)
        w.tell(w.train_command((0, 1), digest), signals.Stop())
        assert w.end()[0] == 0
