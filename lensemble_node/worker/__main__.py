"""The worker process: `python -m lensemble_node.worker`, started by a node's daemon only."""

import argparse
import sys

from lensemble.edge.arena import Arena
from lensemble.errors import LensembleError
from lensemble_node import signals
from lensemble_node.worker import guard
from lensemble_node.worker.port import DaemonGone, Port


def main() -> int:
    """Work until the daemon says stop or is gone: 0 then, 1 after a fault, 71 without memory."""
    options = _options()
    try:
        return _work(options)
    except DaemonGone:
        return 0
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

    Worker(port, arena).run()
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="lensemble-node-worker", description=__doc__)
    for name in ("arena-fd", "arena-bytes", "memory-bytes", "niceness", "parent"):
        parser.add_argument(f"--{name}", type=int, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
