import errno
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import trio

from lensemble.edge.arena import Arena
from lensemble_node import signals, supervisor
from lensemble_node.supervisor import Died, Launch, Said, Started, Supervisor
from lensemble_node.worker import guard
from tests.node.worker_process import FEDERATION, NODE, noop

PATIENCE_S = 20.0
SAY_CONFIGURED = (
    'import sys, time\nsys.stdin.readline()\nprint(\'{"type":"Attached","edge":1}\', flush=True)\n'
)
STARTS_A_CHILD = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:], close_fds=False))"


def configure(state_dir: Path, parameters: int = 1000) -> signals.Configure:
    return signals.Configure(
        workload=noop(parameters).canonical().decode(),
        federation=FEDERATION,
        node=NODE,
        state_dir=str(state_dir),
        path="",
    )


class Ear:
    """Keeps what the supervisor reports, and waits for it."""

    def __init__(self) -> None:
        self.heard: list[supervisor.Report] = []
        self._send, self._receive = trio.open_memory_channel[supervisor.Report](1000)

    async def hear(self, report: supervisor.Report) -> None:
        await self._send.send(report)

    async def next(self) -> supervisor.Report:
        with trio.fail_after(PATIENCE_S):
            report = await self._receive.receive()
        self.heard.append(report)
        return report


@asynccontextmanager
async def supervised(
    code: str | None = None, **limits: object
) -> AsyncIterator[tuple[Supervisor, Ear]]:
    arena = Arena.create(1 << 20)
    launch = Launch(arena.fd, arena.nbytes, backoff_s=0.01, backoff_max_s=0.04)
    launch = msgspec.structs.replace(launch, **limits)
    if code is not None:
        launch = msgspec.structs.replace(launch, program=(sys.executable, "-c", code))
    ear = Ear()
    made = Supervisor(launch, ear.hear)
    async with trio.open_nursery() as nursery:
        await nursery.start(made.run)
        yield made, ear
        nursery.cancel_scope.cancel()
    arena.close()


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_a_worker_starts_configured_and_leaves_nothing_behind(tmp_path: Path) -> None:
    async with supervised() as (made, ear):
        assert made.facts().state == "none"
        assert not made.command(signals.Abandon(round=0, attempt=0))
        made.configure(configure(tmp_path))
        started = await ear.next()
        assert isinstance(started, Started)
        said = await ear.next()
        assert isinstance(said, Said)
        assert isinstance(said.signal, signals.Configured)
        assert made.facts().state == "running"
        assert made.facts().pid == started.pid
        # The same configuration again changes nothing.
        made.configure(configure(tmp_path))
        assert made.command(signals.Bind(round=0, attempt=0, prior_digest="1" * 64))
        said = await ear.next()
        assert isinstance(said, Said)
        assert said.signal == signals.Bound(round=0, attempt=0, holds_bytes=0)
    assert gone(started.pid)


async def test_the_worker_is_started_by_what_the_prefix_becomes(tmp_path: Path) -> None:
    mark = "LENSEMBLE_TEST_MARK=here"
    async with supervised(prefix=("env", mark)) as (made, ear):
        made.configure(configure(tmp_path))
        started = await ear.next()
        assert isinstance(started, Started)
        said = await ear.next()
        assert isinstance(said, Said)
        assert isinstance(said.signal, signals.Configured)
        environment = await trio.Path(f"/proc/{started.pid}/environ").read_bytes()
        assert mark.encode() in environment


async def test_a_prefix_that_does_not_become_the_worker_is_named(tmp_path: Path) -> None:
    async with supervised(prefix=(sys.executable, "-c", STARTS_A_CHILD)) as (made, ear):
        made.configure(configure(tmp_path))
        await ear.next()
        died = await ear.next()
        assert isinstance(died, Died)
        assert "is gone" in died.words


async def test_a_killed_worker_is_named_and_started_again(tmp_path: Path) -> None:
    async with supervised() as (made, ear):
        made.configure(configure(tmp_path))
        first = await ear.next()
        assert isinstance(first, Started)
        await ear.next()
        os.kill(first.pid, signal.SIGKILL)
        died = await ear.next()
        assert isinstance(died, Died)
        assert (died.generation, died.restart_s) == (1, 0.01)
        assert f"(pid {first.pid}) was killed by SIGKILL" in died.fault
        second = await ear.next()
        assert isinstance(second, Started)
        assert second.generation == 2
        said = await ear.next()
        assert isinstance(said, Said)
        assert isinstance(said.signal, signals.Configured)
        assert made.facts().restarts == 1


async def test_the_backoff_doubles_up_to_its_limit(tmp_path: Path) -> None:
    program = "import sys; sys.stderr.write('no luck today\\n'); sys.exit(3)"
    async with supervised(program) as (made, ear):
        made.configure(configure(tmp_path))
        delays = []
        while len(delays) < 4:
            report = await ear.next()
            if isinstance(report, Died):
                assert "exited with status 3" in report.fault
                assert report.words == "no luck today"
                delays.append(report.restart_s)
        assert delays == [0.01, 0.02, 0.04, 0.04]
        assert made.facts().stderr[-1] == "no luck today"


@pytest.mark.parametrize(
    "output",
    [
        "print('garbage', flush=True)",
        'print(\'{"type":"Ready","edge":1,"slot":0,"extent":1}\', flush=True)',
        "sys.stdout.write('x' * (1 << 19)); sys.stdout.flush()",
        "sys.stdout.buffer.write(b'\\xff\\xfe\\n'); sys.stdout.flush()",
    ],
)
async def test_output_that_does_not_parse_ends_that_process_only(
    tmp_path: Path, output: str
) -> None:
    async with supervised(f"{SAY_CONFIGURED}{output}\nsys.stdin.read()\n") as (made, ear):
        made.configure(configure(tmp_path))
        started = await ear.next()
        assert isinstance(started, Started)
        assert isinstance(await ear.next(), Said)
        died = await ear.next()
        assert isinstance(died, Died)
        # What it printed may be anything that was in its memory: it is told apart from the fault.
        assert died.fault.endswith("was ended: what it said is not the worker protocol")
        assert died.words
        assert made.facts().malformed == 1
        assert gone(started.pid)
        assert isinstance(await ear.next(), Started)


async def test_a_worker_that_does_not_read_is_ended(tmp_path: Path) -> None:
    async with supervised("import time; time.sleep(60)") as (made, ear):
        made.configure(configure(tmp_path))
        await ear.next()
        for _ in range(100_000):
            if not made.command(signals.Close(round=0, digest="0" * 64, adopt=False)):
                break
            await trio.lowlevel.checkpoint()
        died = await ear.next()
        assert isinstance(died, Died)
        assert "commands lie unread" in died.fault


async def test_a_worker_that_does_not_stop_is_made_to(tmp_path: Path) -> None:
    program = f"{SAY_CONFIGURED}time.sleep(60)\n"
    async with supervised(program) as (made, ear):
        made.configure(configure(tmp_path))
        started = await ear.next()
        assert isinstance(started, Started)
        await ear.next()
    assert gone(started.pid)


async def test_what_a_worker_started_ends_with_it(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        'print(\'{"type":"Attached","edge":%d}\' % child.pid, flush=True)\n'
        "sys.stdin.readline()\n"
        "sys.exit(1)\n"
    )
    async with supervised(program) as (made, ear):
        made.configure(configure(tmp_path))
        await ear.next()
        said = await ear.next()
        assert isinstance(said, Said)
        assert isinstance(said.signal, signals.Attached)
        child = os.pidfd_open(said.signal.edge)
        assert isinstance(await ear.next(), Died)
        with trio.fail_after(PATIENCE_S):
            await trio.lowlevel.wait_readable(child)
        os.close(child)


async def test_another_configuration_replaces_the_worker_without_a_fault(tmp_path: Path) -> None:
    async with supervised() as (made, ear):
        made.configure(configure(tmp_path))
        first = await ear.next()
        assert isinstance(first, Started)
        await ear.next()
        made.configure(configure(tmp_path, parameters=2000))
        second = await ear.next()
        assert isinstance(second, Started)
        assert second.generation == 2
        assert gone(first.pid)
        assert made.facts().restarts == 0


async def test_a_program_that_is_not_there_is_a_fault_with_a_reason(tmp_path: Path) -> None:
    async with supervised(program=("/nonexistent/python",)) as (made, ear):
        made.configure(configure(tmp_path))
        died = await ear.next()
        assert isinstance(died, Died)
        assert "could not be started: No such file" in died.fault


async def test_memory_limit_niceness_and_threads_are_set(tmp_path: Path) -> None:
    program = (
        "import os, sys\n"
        "sys.path.insert(0, os.environ['PYTHONPATH'].split(os.pathsep)[0])\n"
        "from lensemble_node.worker import guard\n"
        "import resource\n"
        "guard.limit(1 << 33, 3)\n"
        "import json\n"
        "limit = resource.getrlimit(resource.RLIMIT_AS)[0]\n"
        "sys.stderr.write(f'{limit} {os.nice(0)} {os.environ[\"OMP_NUM_THREADS\"]}\\n')\n"
    )
    async with supervised(program, threads=2) as (made, ear):
        made.configure(configure(tmp_path))
        while not isinstance(await ear.next(), Died):
            pass
        assert made.facts().stderr[-1] == f"{1 << 33} {os.nice(0) + 3} 2"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (ImportError("libx.so: failed to map segment: Cannot allocate memory"), True),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (RuntimeError("shape mismatch"), False),
    ],
)
def test_what_is_a_refusal_of_memory(error: Exception, expected: bool) -> None:
    assert guard.is_out_of_memory(error) is expected


async def test_a_worker_without_memory_is_told_apart(tmp_path: Path) -> None:
    program = f"import os; os._exit({signals.EXIT_NO_MEMORY})"
    async with supervised(program, memory_bytes=1 << 33) as (made, ear):
        made.configure(configure(tmp_path))
        while not isinstance(died := await ear.next(), Died):
            pass
        assert "ran out of memory (worker.memory_bytes = 8589934592)" in died.fault
