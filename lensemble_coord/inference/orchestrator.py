"""Every run of this coordinator: plans them, starts them, finds them, hears their nodes."""

import secrets
from collections import deque

import msgspec
import trio

from lensemble.ctl.replies import ModelRunStatus
from lensemble.errors import OperatorError
from lensemble.ids import NodeId
from lensemble.wire.stages import StageAnswer
from lensemble_coord.config import CoordinatorConfig
from lensemble_coord.inference import library, placement, run_status, split, staging
from lensemble_coord.inference.chain import COORDINATOR, Link, Offer, Task
from lensemble_coord.inference.footprint import Wanted
from lensemble_coord.inference.library import Library
from lensemble_coord.inference.model_run import ModelRun, Surroundings
from lensemble_coord.inference.models import Model

DEFAULT_CTX = 2048
MAX_OVER = 64
"""Runs that are over and can still be inspected."""

RTT_GRAIN_NS = 100_000
"""Round-trip times are planned with so finely, so that noise does not move a plan."""


class Wish(msgspec.Struct, frozen=True):
    """What is to be run; ``ctx`` 0 takes what the model was trained for, up to 2048."""

    model: str
    ctx: int = 0
    sessions: int = 1
    rows: int = 32
    split: str = ""
    fetch: str = "edge"


class Orchestrator:
    """Runs of models over the nodes that are here.

    ``changed`` is set, and replaced, whenever a run begins or ends.
    """

    def __init__(self, config: CoordinatorConfig, around: Surroundings) -> None:
        self.runs: dict[str, ModelRun] = {}
        self.over: deque[ModelRunStatus] = deque(maxlen=MAX_OVER)
        self.changed = trio.Event()
        self._config = config.inference
        self.around = around
        self._peers = around.peers
        self._library = Library(config.state_dir / "models")
        self._rules = staging.Rules(
            stall_s=config.inference.stall_timeout_s,
            probe_s=3 * config.inference.step_deadline_s,
            teardown_s=config.inference.teardown_timeout_s,
        )
        self._nursery: trio.Nursery

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve runs until cancelled."""
        self._peers.listen(self)
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            await trio.sleep_forever()

    # ---- what sessions bring ----

    def node_said(self, node: NodeId, message: StageAnswer) -> None:
        """Every run looks for itself whether that is about one of its stages."""
        for run in self.runs.values():
            run.node_said(node, message)

    def node_lost(self, node: NodeId, reason: str) -> None:
        for run in self.runs.values():
            run.node_lost(node, reason)

    # ---- what operators ask ----

    async def plan(self, wish: Wish) -> tuple[Model, placement.Plan]:
        """Read the model's header and place its layers on the nodes that are here.

        Raises:
            PlanInfeasible: it does not fit.
            ConfigError: the split by hand is wrong, or there is no such file.
            ModelFileError, UnsupportedModel, StorageError, WeightsError: it cannot be used.
        """
        library.check(wish.model, wish.fetch)
        model = await self._library.header(wish.model)
        offers = [Offer(each.node, each.name, each.inventory) for each in self._peers.here.values()]
        facts = model.facts
        segments = split.parse(wish.split, facts.layers, offers) if wish.split else ()
        wanted = Wanted(wish.ctx or min(facts.trained_ctx, DEFAULT_CTX), wish.sessions, wish.rows)
        task = Task(facts, model.tensors, wanted, segments)
        links = self._links()
        return model, await trio.to_thread.run_sync(placement.plan, task, offers, links)

    def _links(self) -> dict[tuple[NodeId, NodeId], Link]:
        links = {}
        for peer in self._peers.here.values():
            rtt_ms = peer.facts().rtt_ms
            if rtt_ms is not None:
                grains = max(1, round(rtt_ms * 1e6 / RTT_GRAIN_NS))
                links[COORDINATOR, peer.node] = Link(grains * RTT_GRAIN_NS)
        return links

    async def provision(self, wish: Wish) -> ModelRun:
        """Plan and start a run; it goes on by itself.

        Raises:
            OperatorError: too many runs.
            PlanInfeasible and what else ``plan`` raises.
        """
        model, plan = await self.plan(wish)
        if len(self.runs) >= self._config.max_runs:
            raise OperatorError(
                f"{len(self.runs)} runs are provisioned (inference.max_runs)",
                "Tear one down: lensemblectl teardown RUN.",
            )
        material = await self._library.open(model, wish.fetch)
        run = ModelRun(secrets.token_hex(8), self.around, material, plan, self._rules)
        self.runs[run.run] = run
        self._nursery.start_soon(self._keep, run)
        self._announce()
        return run

    async def _keep(self, run: ModelRun) -> None:
        try:
            await run.serve()
        finally:
            del self.runs[run.run]
            self.over.append(run_status.run(run))
            self._announce()

    def look(self, beginning: str) -> ModelRun | ModelRunStatus:
        """The run whose id begins so, or how it ended; without a beginning the only one there is.

        Raises:
            OperatorError: there is none, or several.
        """
        found = [run for run in self.runs.values() if run.run.startswith(beginning)]
        if len(found) > 1:
            ids = ", ".join(run.run for run in found)
            raise OperatorError(f"{len(found)} runs are meant: {ids}", "Name one by its id.")
        if found:
            return found[0]
        over = [status for status in self.over if status.run.startswith(beginning)]
        if not over:
            raise OperatorError(
                f"no run {beginning!r}" if beginning else "no model is provisioned",
                "List runs with `lensemblectl runs`; start one with `lensemblectl provision`.",
            )
        return over[-1]

    def find(self, beginning: str) -> ModelRun:
        """As ``look``, of the runs that go on.

        Raises:
            OperatorError: there is none, or several, or it is over.
        """
        found = self.look(beginning)
        if isinstance(found, ModelRunStatus):
            raise OperatorError(
                f"run {found.run} is over: {found.outcome}, {found.reason}",
                "Provision the model again with `lensemblectl provision`.",
            )
        return found

    def _announce(self) -> None:
        self.changed.set()
        self.changed = trio.Event()
