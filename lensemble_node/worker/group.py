"""Starts several worker processes that train as one: `python -m lensemble_node.worker.group`.

This process holds no tensors.  Rank 0 gets its standard input and output and the arena, and is the
worker as the daemon knows it; the others hear from rank 0 only.  When one ends, all end.

It does what `torchrun --standalone` would, and sets the same variables, but keeps the promises of a
worker: every process is in the daemon's process group, gets the arena's descriptor, and is killed
by the kernel when its parent is gone.  `torchrun` closes inherited descriptors, puts its children
into sessions of their own and outlives a killed daemon.
"""

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from lensemble_node import signals
from lensemble_node.worker import guard
from lensemble_node.worker.seat import MAX_RANKS

AUTO = 0
END_WAIT_S = 5.0
_PYTHON = (sys.executable, "-P", "-X", "faulthandler", "-m")


def main() -> int:
    """Run until a process ends; its exit status if it was rank 0, else 72."""
    options = _options()
    guard.die_with(options.parent)
    ranks = options.processes if options.processes != AUTO else max(1, accelerators())
    children = _start(options, min(ranks, MAX_RANKS))
    # What only they need.
    os.close(options.arena_fd)
    try:
        status = _attend(children)
    finally:
        _end(children)
    if status < 0:
        # As rank 0 did.
        os.kill(os.getpid(), -status)
    return status


def accelerators(devices: Path = Path("/dev")) -> int:
    """How many accelerators there are, of those this process may see."""
    there = [path for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return len(there) if visible is None else min(len(there), len(visible.split(",")))


def _start(options: argparse.Namespace, ranks: int) -> list["subprocess.Popen[bytes]"]:
    pipes = [os.pipe() for _ in range(1, ranks)]
    sinks = tuple(sink for _, sink in pipes)
    limits = (
        f"--memory-bytes={options.memory_bytes}",
        f"--niceness={options.niceness}",
        f"--parent={os.getpid()}",
        f"--ranks={ranks}",
        f"--timeout-s={options.timeout_s}",
    )
    first = (
        f"--arena-fd={options.arena_fd}",
        f"--arena-bytes={options.arena_bytes}",
        f"--orders={','.join(map(str, sinks))}",
    )
    children = [
        subprocess.Popen(
            [*_PYTHON, "lensemble_node.worker", *limits, *first],
            pass_fds=(options.arena_fd, *sinks),
            env=_environment(0, ranks),
        )
    ]
    for rank, (source, _) in enumerate(pipes, start=1):
        command = [*_PYTHON, "lensemble_node.worker.follower", *limits, f"--rank={rank}"]
        environment = _environment(rank, ranks)
        children.append(subprocess.Popen(command, stdin=source, stdout=2, env=environment))
    for pipe in pipes:
        for end in pipe:
            os.close(end)
    return children


def _environment(rank: int, ranks: int) -> dict[str, str]:
    """That of this process, and what code written for ``torchrun`` looks for."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    # All are on this machine; without these the libraries bind whatever the host's name leads to.
    inside = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    return {**os.environ, **inside, **{name: str(value) for name, value in place.items()}}


def _attend(children: list["subprocess.Popen[bytes]"]) -> int:
    """Wait for the first end that matters and say whose it was; negative for a signal to rank 0."""
    # It leaves whoever ended to be reaped by its own object.
    os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
    first, *others = children
    if first.poll() is None and all(child.poll() in {None, 0} for child in others):
        # A follower that ends well has seen rank 0 go.
        first.wait()
    faults = [child for child in others if child.poll()]
    for child in faults:
        if child.returncode != signals.EXIT_GROUP_LOST:
            _tell(children.index(child), len(children), child)
            return signals.EXIT_GROUP_LOST
    # Else one that has seen another go is not whose end it was.
    return signals.EXIT_GROUP_LOST if first.poll() is None else first.returncode


def _tell(rank: int, ranks: int, child: "subprocess.Popen[bytes]") -> None:
    status = child.returncode
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with {status}"
    print(f"fatal: process {rank} of {ranks} (pid {child.pid}) {how}", file=sys.stderr)  # noqa: T201  # its log is stderr


def _end(children: list["subprocess.Popen[bytes]"]) -> None:
    for child in children:
        child.kill()
    for child in children:
        # One that the kernel does not let go of must not keep the daemon from hearing of it.
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(END_WAIT_S)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="lensemble-node-worker-group", description=__doc__)
    for name in ("arena-fd", "arena-bytes", "memory-bytes", "niceness", "parent", "processes"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--timeout-s", type=float, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
