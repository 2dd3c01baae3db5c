"""The node's figures for Prometheus; the facts are those of ``lensemblectl status``.

Labels are states, directions, ids of runs with a stage here, and nothing that grows without bound.
"""

from collections import Counter
from collections.abc import Callable, Iterator

import msgspec
import trio
from prometheus_client.core import Metric

from lensemble import loop_lag
from lensemble.ctl import replies
from lensemble.logs import logger
from lensemble.loop_lag import LoopLag
from lensemble.web import figures, serving
from lensemble.web.figures import Name, counter, gauge, of_daemon, one

LINK_STATES = ("unconfigured", "dialing", "waiting", "joined", "refused")
WORKER_STATES = ("starting", "ready", "busy", "stopped", "waiting")
DRIFT = {
    "before": "Untouched, in latent variances.",
    "after": "As released, in latent variances.",
    "mean_degrees": "Mean principal angle, in degrees.",
    "max_degrees": "Largest principal angle, in degrees.",
    "dimension": "Effective dimension of the latent.",
    "std": "Spread of the latent.",
}


async def serve(
    status: Callable[[], replies.NodeStatus],
    address: str,
    *,
    task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Tell figures at ``address`` until cancelled; starts with the bound address.

    Raises:
        ConfigError: it cannot be bound.
    """
    with loop_lag.watching() as lag:

        async def collect() -> list[Metric]:
            return list(of_node(status(), lag))

        async with trio.open_nursery() as nursery:
            app = figures.app(collect)
            bound = await nursery.start(serving.serve, app, address, "metrics.address")
            logger("http").info("http.serving", what="metrics", address=bound)
            task_status.started(bound)


def of_node(status: replies.NodeStatus, lag: LoopLag) -> Iterator[Metric]:
    """Everything, as ``status`` says it."""
    yield from of_daemon("node", status.uptime_s, lag)
    yield from _of_link(status)
    yield from _of_training(status)
    yield from _of_stages(status)
    yield one(Name("arena_leased_bytes", "Of the arena, by all edges."), status.leased_bytes)
    yield one(Name("resident_bytes", "Memory of the daemon."), status.rss_bytes)
    refused = {(reason,): float(count) for reason, count in status.refused.items()}
    yield counter(Name("refused", "Refused input, by reason.", ("reason",)), refused)


def _of_link(status: replies.NodeStatus) -> Iterator[Metric]:
    link = status.link
    yield gauge(
        Name("link_state", "1 for the state of the link to the coordinator.", ("state",)),
        {(state,): float(link.state == state) for state in LINK_STATES},
    )
    rtt = None if link.rtt_ms is None else link.rtt_ms / 1e3
    yield one(Name("link_rtt_seconds", "Round trip to the coordinator."), rtt)
    moved: Counter[tuple[str]] = Counter()
    for edge in status.edges:
        moved[edge.direction,] += edge.bytes
    yield counter(
        Name("edge_bytes", "Over the edges of the session there is.", ("direction",)),
        {labels: float(count) for labels, count in moved.items()},
    )


def _of_training(status: replies.NodeStatus) -> Iterator[Metric]:
    yield counter(
        Name("contributions", "Rounds that have an update of this node."),
        {(): status.contributions},
    )
    worker = status.worker
    if worker is not None:
        yield gauge(
            Name("worker_state", "1 for the state of the training worker.", ("state",)),
            {(state,): float(worker.state == state) for state in WORKER_STATES},
        )
        again = "Starts of the training worker after its first."
        yield counter(Name("worker_restarts", again), {(): worker.restarts})
        yield one(Name("worker_resident_bytes", "Memory of that worker."), worker.rss_bytes)
    use = "Largest coordinate of the last update over the room there is."
    yield one(Name("field_use_ratio", use), status.field_use)
    privacy = status.privacy
    if privacy is not None:
        yield one(Name("epsilon_spent", "By the releases of this node."), privacy.spent)
        yield one(Name("epsilon_budget", "The most that may be spent."), privacy.epsilon)
        left = "Releases that the budget allows."
        yield one(Name("privacy_rounds_left", left), privacy.rounds_left)
        clipped = "Part of the updates that were scaled down."
        yield one(Name("clip_fraction", clipped), privacy.clip_fraction)
    drift = {} if status.drift is None else msgspec.structs.asdict(status.drift)
    for field, what in DRIFT.items():
        yield one(Name(f"drift_{field}", f"Of the last training. {what}"), drift.get(field))


def _of_stages(status: replies.NodeStatus) -> Iterator[Metric]:
    hosting = status.hosting
    if hosting is not None:
        yield gauge(
            Name("hosting_bytes", "Memory for stages of models.", ("what",)),
            {("offered",): hosting.memory_bytes, ("taken",): hosting.taken_bytes},
        )
    here = status.stages
    by_run = ("run", "stage")
    chunks = {(each.run, str(each.stage)): float(each.computed) for each in here}
    yield counter(Name("stage_chunks", "Chunks that a stage has computed.", by_run), chunks)
    held = {(each.run, str(each.stage)): float(each.held) for each in here}
    yield gauge(Name("stage_chunks_held", "Chunks that wait for the worker.", by_run), held)
    memory = {(each.run, str(each.stage)): float(each.rss_bytes) for each in here}
    yield gauge(Name("stage_resident_bytes", "Memory of the worker of a stage.", by_run), memory)
    last = {
        (each.run, str(each.stage)): None if each.last_step_ms is None else each.last_step_ms / 1e3
        for each in here
    }
    yield gauge(Name("stage_compute_seconds", "Of a stage's last chunk.", by_run), last)
