"""The worker process of one stage: `python -m lensemble_node.worker.inference`.

Started by a node's daemon only, in the environment of ``lensemble_node.engine_environment``.
"""

import argparse
import os
import sys
from contextlib import suppress
from pathlib import Path

from lensemble.edge.arena import Arena
from lensemble.errors import LensembleError, OutOfMemory
from lensemble_node import signals, stage_signals
from lensemble_node.worker import guard
from lensemble_node.worker.inference import kernel_cache
from lensemble_node.worker.port import DaemonGone, Port


def main() -> int:
    """Work until the daemon says stop or is gone: 0 then, 1 after a fault, 71 without memory."""
    options = _options()
    if not {"DEV", "CACHEDB"} <= os.environ.keys() or os.environ.get("DEBUG") != "0":
        print("fatal: not started in the environment of a stage", file=sys.stderr)  # noqa: T201
        return 1
    guard.die_with(options.parent)
    # What is mapped of the arena takes address space and no memory.
    most = options.memory_bytes and options.memory_bytes + options.arena_bytes
    guard.limit(most, options.niceness)
    port = Port(
        0, guard.keep_stdout_clean(), stage_signals.parse_command, stage_signals.MAX_LINE_BYTES
    )
    try:
        return _work(options, port)
    except DaemonGone:
        return 0
    except LensembleError as error:
        print(f"fatal: {error.message}", file=sys.stderr)  # noqa: T201  # its log is stderr
        return 1
    except (MemoryError, OSError, RuntimeError, ImportError) as error:
        if not guard.is_out_of_memory(error):
            raise
        print(f"fatal: {error!r}", file=sys.stderr)  # noqa: T201  # its log is stderr
        _say_no_memory(port, options.memory_bytes)
        return signals.EXIT_NO_MEMORY


def _say_no_memory(port: Port[stage_signals.Command], limit: int) -> None:
    bound = f" within {limit} bytes beside the arena" if limit else ""
    with suppress(DaemonGone):
        port.say(
            stage_signals.StageFailed(
                code=OutOfMemory.code,
                message=f"the stage does not fit in memory{bound}",
                remediation="Give the node more memory, or plan for less context or fewer layers.",
            )
        )


def _work(options: argparse.Namespace, port: Port[stage_signals.Command]) -> int:
    arena = Arena.attach(options.arena_fd)
    if arena.nbytes != options.arena_bytes:
        print(f"an arena of {arena.nbytes} bytes, not {options.arena_bytes}", file=sys.stderr)  # noqa: T201
        return 1
    kernel_cache.make_usable(Path(os.environ["CACHEDB"]))
    # After the limits, which this import must obey.
    from lensemble_node.worker.inference.stage_work import StageWorker  # noqa: PLC0415

    StageWorker(port, arena).run()
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="lensemble-stage-worker", description=__doc__)
    for name in ("arena-fd", "arena-bytes", "memory-bytes", "niceness", "parent"):
        parser.add_argument(f"--{name}", type=int, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
