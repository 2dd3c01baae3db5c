"""A process of a group other than the first: `python -m lensemble_node.worker.follower`.

It is told what to do by rank 0, on its standard input, and trains its part of every batch.
"""

import argparse
import sys
from typing import NoReturn

from lensemble.errors import LensembleError, WorkerFault
from lensemble_node import signals
from lensemble_node.worker import guard
from lensemble_node.worker.port import DaemonGone, Port
from lensemble_node.worker.seat import Begin, GroupLost, Order, Seat, parse


def main() -> NoReturn:
    """Follow until rank 0 is gone: 0 then, 1 after a fault of its own, 71, 72 as a worker."""
    options = _options()
    guard.leave(_status(options))


def _status(options: argparse.Namespace) -> int:
    try:
        _follow(options)
    except DaemonGone:
        return 0
    except GroupLost as error:
        print(f"rank {options.rank}: {error}", file=sys.stderr)  # noqa: T201  # its log is stderr
        return signals.EXIT_GROUP_LOST
    except LensembleError as error:
        print(f"fatal: rank {options.rank}: {error.message}", file=sys.stderr)  # noqa: T201
        return 1
    except (MemoryError, OSError, RuntimeError, ImportError) as error:
        if not guard.is_out_of_memory(error):
            raise
        print(f"fatal: rank {options.rank}: {error!r}", file=sys.stderr)  # noqa: T201
        return signals.EXIT_NO_MEMORY


def _follow(options: argparse.Namespace) -> NoReturn:
    guard.die_with(options.parent)
    guard.limit(options.memory_bytes, options.niceness)
    seat = Seat(options.rank, options.ranks, options.timeout_s)
    port: Port[Order] = Port(0, 2, parse)
    begin = port.wait()
    if not isinstance(begin, Begin):
        raise WorkerFault(f"{type(begin).__name__} came first")
    # After the limits, which this import and its threads must obey.
    from lensemble_node.worker.training.following import Follower  # noqa: PLC0415

    Follower(seat, begin).obey(port)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="lensemble-node-follower", description=__doc__)
    for name in ("memory-bytes", "niceness", "parent", "rank", "ranks"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--timeout-s", type=float, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
