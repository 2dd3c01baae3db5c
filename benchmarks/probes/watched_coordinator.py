"""The coordinator, with a look at its own loop and links; benchmarks start it.

On its way out it writes ``<state_dir>.watched.json``: ``late`` is a list of (time, seconds that a
task woke up late), ``closed`` one entry for each round: time, contributors, and bytes that its
links have sent and received by the transport's own counters.  Times are of ``time.monotonic``.
"""

import json
import sys
import time
from typing import Any

import trio

from lensemble import service
from lensemble.transport.driver import Driver
from lensemble_coord import __main__ as program
from lensemble_coord import daemon
from lensemble_coord.config import CoordinatorConfig
from lensemble_coord.training.coordinator import RoundEnded

PAUSE_S = 0.02
MAX_SAMPLES = 200_000


async def watched(
    config: CoordinatorConfig,
    driver: Driver,
    *,
    task_status: trio.TaskStatus[Any] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve as the daemon does, and watch beside it."""
    async with trio.open_nursery() as nursery:
        serving = await nursery.start(daemon.serve, config, driver)
        nursery.start_soon(watch, serving, config)
        task_status.started(serving)


async def watch(serving: daemon.Serving, config: CoordinatorConfig) -> None:
    late: list[tuple[float, float]] = []
    closed: list[dict[str, Any]] = []
    number = serving.rounds.published
    try:
        while len(late) < MAX_SAMPLES:
            due = trio.current_time() + PAUSE_S
            await trio.sleep_until(due)
            late.append((time.monotonic(), trio.current_time() - due))
            news, number = serving.rounds.news_since(number), serving.rounds.published
            ended = [each for each in news if isinstance(each, RoundEnded) and each.closed]
            closed += [describe(serving, each) for each in ended]
    finally:
        path = config.state_dir.with_suffix(".watched.json")
        path.write_text(json.dumps({"late": late, "closed": closed}), encoding="ascii")


def describe(serving: daemon.Serving, ended: RoundEnded) -> dict[str, Any]:
    facts = [each.link.facts() for each in serving.rounds.sessions.values()]
    return {
        "round": ended.round,
        "at": time.monotonic(),
        "contributors": len(ended.contributors),
        "sent_bytes": sum(each.sent_bytes for each in facts),
        "received_bytes": sum(each.received_bytes for each in facts),
        "seconds": dict(ended.seconds),
    }


def main() -> int:
    served = service.Program("coordinator", "lensemble-coord", "", program.PROGRAM.read, watched)
    return served.main(None)


if __name__ == "__main__":
    sys.exit(main())
