"""The worker process: `python -m lensemble_node.worker`, started by a node's daemon only."""

import argparse
import sys

from lensemble.edge.arena import Arena
from lensemble.errors import LensembleError
from lensemble_node import signals
from lensemble_node.worker import guard
from lensemble_node.worker.port import DaemonGone, Port
from lensemble_node.worker.seat import GroupLost, Seat


def main() -> int:
    """Work until the daemon says stop or is gone: 0 then.

    After a fault 1, without memory 71, 72 when another process of its group is lost.
    """
    options = _options()
    status = _status(options)
    if options.ranks > 1:
        guard.leave(status)
    return status


def _status(options: argparse.Namespace) -> int:
    try:
        return _work(options)
    except DaemonGone:
        return 0
    except GroupLost as error:
        print(f"fatal: {error}", file=sys.stderr)  # noqa: T201  # its log is stderr
        return signals.EXIT_GROUP_LOST
    except LensembleError as error:
        print(f"fatal: {error.message}", file=sys.stderr)  # noqa: T201  # its log is stderr
        return 1
    except (MemoryError, OSError, RuntimeError, ImportError) as error:
        if not guard.is_out_of_memory(error):
            raise
        print(f"fatal: {error!r}", file=sys.stderr)  # noqa: T201  # its log is stderr
        return signals.EXIT_NO_MEMORY


def _work(options: argparse.Namespace) -> int:
    guard.die_with(options.parent)
    guard.limit(options.memory_bytes, options.niceness)
    port = Port(0, guard.keep_stdout_clean(), signals.parse_command)
    arena = Arena.attach(options.arena_fd)
    if arena.nbytes != options.arena_bytes:
        print(f"an arena of {arena.nbytes} bytes, not {options.arena_bytes}", file=sys.stderr)  # noqa: T201
        return 1
    # After the limits, which this import and its threads must obey.
    from lensemble_node.worker.work import Worker  # noqa: PLC0415

    seat = Seat(0, options.ranks, options.timeout_s, _descriptors(options.orders))
    Worker(port, arena, seat).run()
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="lensemble-node-worker", description=__doc__)
    for name in ("arena-fd", "arena-bytes", "memory-bytes", "niceness", "parent"):
        parser.add_argument(f"--{name}", type=int, required=True)
    # Of a group's first process.
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--timeout-s", type=float, default=0.0)
    parser.add_argument("--orders", default="")
    return parser.parse_args()


def _descriptors(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in text.split(",") if each)


if __name__ == "__main__":
    sys.exit(main())
