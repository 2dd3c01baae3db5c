"""Every run of this coordinator: plans them, starts them, finds them, hears their nodes.

Runs are durable: what an earlier process of this coordinator left behind is told of as over, or
comes back under a higher run epoch when it replaces what it loses.
"""

import secrets
from collections import deque
from functools import partial

import msgspec
import trio

from lensemble.ctl.replies import ModelRunStatus, Replacement
from lensemble.ctl.requests import StopRun, TeardownRun
from lensemble.errors import (
    LensembleError,
    OperatorError,
    StorageError,
    WeightsChanged,
)
from lensemble.ids import NodeId
from lensemble.logs import logger
from lensemble.wire.stages import BurstAnswer, StageAnswer
from lensemble_coord.config import CoordinatorConfig
from lensemble_coord.drains import Drains
from lensemble_coord.inference import library, placement, run_status, staging, survival
from lensemble_coord.inference.deployment import Surroundings
from lensemble_coord.inference.library import Library
from lensemble_coord.inference.measuring import Measuring
from lensemble_coord.inference.model_run import ModelRun
from lensemble_coord.inference.models import Model
from lensemble_coord.inference.places import Places
from lensemble_coord.inference.revival import Revival, restarted, stopped
from lensemble_coord.inference.run_rows import MAX_OVER, RunRow, RunRows, Wish
from lensemble_coord.inference.run_terms import Terms
from lensemble_coord.inference.wiring import Material

LONGEST_WORD_S = 1.5
"""A stage's neighbours are not waited for longer to name the cause of what they saw."""


class Chosen(msgspec.Struct, frozen=True):
    """What was asked for, and the model that it names, open."""

    wish: Wish
    model: Model
    material: Material


class Orchestrator:
    """Runs of models over the nodes that are here.

    ``changed`` is set, and replaced, whenever a run begins or ends.
    """

    def __init__(self, config: CoordinatorConfig, around: Surroundings, drains: Drains) -> None:
        self.runs: dict[str, ModelRun] = {}
        self.reviving: dict[str, Revival] = {}
        self.over: deque[ModelRunStatus] = deque(maxlen=MAX_OVER)
        self.changed = trio.Event()
        self.drains = drains
        self.config = config.inference
        self.around = around
        self._peers = around.peers
        self._places = Places(around.peers, drains, around.paths)
        self._measuring = Measuring(
            around.federation, around.peers, around.book, around.draw_edge, around.note
        )
        self.chosen: dict[str, Chosen] = {}
        self._log = logger("runs")
        self._library = Library(config.state_dir / "models")
        self._rows = RunRows(config.state_dir / "runs")
        self._rules = staging.Rules(
            stall_s=config.inference.stall_timeout_s,
            probe_s=3 * config.inference.step_deadline_s,
            teardown_s=config.inference.teardown_timeout_s,
            # The ends of a dead node's links are known within one heartbeat of each other.
            last_word_s=min(LONGEST_WORD_S, 1.0 + config.listen.heartbeat_s / 2),
        )
        self._nursery: trio.Nursery

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Take up what an earlier process left, then serve runs until cancelled."""
        self._peers.listen(self)
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            await self._take_up()
            task_status.started()
            await trio.sleep_forever()

    # ---- what sessions bring ----

    def node_said(self, node: NodeId, message: StageAnswer) -> None:
        """Every run looks for itself whether that is about one of its stages."""
        for run in self.runs.values():
            run.node_said(node, message)

    def link_said(self, node: NodeId, message: BurstAnswer) -> None:
        self._measuring.heard(node, message)

    def node_lost(self, node: NodeId, reason: str) -> None:
        self._measuring.lost(node)
        for run in self.runs.values():
            run.node_lost(node, reason)

    # ---- plans ----

    async def plan(self, wish: Wish) -> tuple[Model, placement.Plan]:
        """Read the model's header and place its layers on the nodes that are here.

        Raises:
            PlanInfeasible: it does not fit.
            ConfigError: the split by hand is wrong, or there is no such file.
            ModelFileError, UnsupportedModel, StorageError, WeightsError: it cannot be used.
        """
        library.check(wish.model, wish.fetch)
        model = await self._library.header(wish.model)
        return model, await self._places.find(wish, model)

    async def plan_measured(self, wish: Wish) -> tuple[Model, placement.Plan, tuple[str, ...]]:
        """As ``plan``, with the links of the plan measured; and which were not, and why not."""
        model, first = await self.plan(wish)
        again = partial(self._places.find, wish, model)
        plan, unmeasured = await self._measuring.refine(first, again)
        return model, plan, unmeasured

    # ---- runs ----

    async def provision(self, wish: Wish, *, measure: bool = False) -> ModelRun:
        """Plan and start a run; it goes on by itself.  With ``measure`` links are measured before.

        Raises:
            OperatorError: too many runs.
            PlanInfeasible and what else ``plan`` raises.
        """
        if measure:
            model, plan, _ = await self.plan_measured(wish)
        else:
            model, plan = await self.plan(wish)
        if len(self.runs) + len(self.reviving) >= self.config.max_runs:
            raise OperatorError(
                f"{len(self.runs) + len(self.reviving)} runs are provisioned (inference.max_runs)",
                "Tear one down: lensemblectl teardown RUN.",
            )
        chosen = Chosen(wish, model, await self._library.open(model, wish.fetch))
        ground = survival.Ground(survival.Rules(wish.replaces, wish.most))
        return self._start(secrets.token_hex(8), chosen, plan, ground)

    def _start(
        self,
        run: str,
        chosen: Chosen,
        plan: placement.Plan,
        ground: survival.Ground,
        before: tuple[Replacement, ...] = (),
    ) -> ModelRun:
        terms = Terms(
            run=run,
            model=chosen.material,
            plan=plan,
            ground=ground,
            rules=self._rules,
            replan=partial(self._places.again, chosen.wish, chosen.model),
            keep=partial(self._keep, chosen.wish),
            before=before,
        )
        made = self.runs[run] = ModelRun(terms, self.around)
        self.chosen[run] = chosen
        self._nursery.start_soon(self._serve, made, chosen.wish)
        self._announce()
        return made

    async def _serve(self, run: ModelRun, wish: Wish) -> None:
        try:
            await run.serve()
        finally:
            del self.runs[run.run], self.chosen[run.run]
            self._bury(run_status.run(run))
            self._announce()
        await self._write(self._row(wish, run))

    async def _keep(self, wish: Wish, name: str) -> None:
        run = self.runs[name]
        await trio.to_thread.run_sync(self._rows.write, self._row(wish, run))
        for node in run.wiring.nodes:
            # It was drained while this plan was made.
            if run.rules.replaces and (why := self.drains.why(node)):
                run.leave(node, why)

    async def end(self, run: ModelRun, request: StopRun | TeardownRun) -> None:
        """Stop or tear down ``run``; a restart meanwhile does not bring it back."""
        reason = request.reason or "ended by the operator"
        chosen = self.chosen.get(run.run)
        if chosen is not None:
            await self._write(self._row(chosen.wish, run, reason))
        if isinstance(request, StopRun):
            run.stop(reason)
        else:
            run.drain(reason)

    def _row(self, wish: Wish, run: ModelRun, ending: str = "") -> RunRow:
        ground = run.course.ground
        return RunRow(
            run=run.run,
            wish=wish,
            epoch=run.wiring.run_epoch,
            nodes=run.wiring.nodes,
            # What is known of links is of this moment, and another process will know other things.
            status=msgspec.structs.replace(run_status.run(run), hops=()),
            dropped=ground.dropped,
            replaced=ground.replaced,
            over=run.over,
            ending=ending or ground.draining,
        )

    async def _write(self, row: RunRow) -> None:
        """As well as the disk takes it: what is over will then be told of as restarted."""
        try:
            await trio.to_thread.run_sync(self._rows.write, row)
        except StorageError as error:
            self._log.warning("run.row_unwritten", run=row.run, reason=error.message)

    def _bury(self, status: ModelRunStatus) -> None:
        if len(self.over) == MAX_OVER:
            self._nursery.start_soon(trio.to_thread.run_sync, self._rows.forget, self.over[0].run)
        self.over.append(status)

    # ---- what an earlier process left ----

    async def _take_up(self) -> None:
        for row in await trio.to_thread.run_sync(self._rows.load):
            if row.over:
                self._bury(row.status)
            elif row.ending:
                await self._end_row(stopped(row, row.ending))
            elif row.wish.replaces:
                self.reviving[row.run] = Revival(row)
                self._nursery.start_soon(self._revive, self.reviving[row.run])
            else:
                await self._end_row(restarted(row))

    async def _end_row(self, row: RunRow) -> None:
        self._bury(row.status)
        if (revival := self.reviving.pop(row.run, None)) is not None:
            revival.over.set()
        self.around.note(
            "model.over", run=row.run, outcome=row.status.outcome, reason=row.status.reason
        )
        self._announce()
        await self._write(row)

    async def _revive(self, revival: Revival) -> None:
        """Carry a run on that an earlier process began, on its nodes if they come back in time."""
        row, wish = revival.row, revival.row.wish
        plan: placement.Plan | None = None
        try:
            with revival.scope:
                model = await self._library.header(wish.model)
                chosen = Chosen(wish, model, await self._library.open(model, wish.fetch))
                _check_same(row, chosen.material)
                again = partial(self._places.find, wish, model, row.dropped)
                plan = await revival.plan(self._peers, again, self.config.restart_wait_s)
        except LensembleError as error:
            reason = f"the coordinator restarted, and then: {error.message}"
            await self._end_row(restarted(row, reason, error.code, error.remediation))
            return
        if plan is None:
            await self._end_row(stopped(row, revival.stopped))
            return
        del self.reviving[row.run]
        revival.over.set()
        self._start(row.run, chosen, plan, revival.ground, revival.before)

    async def give_up(self, waiting: ModelRunStatus, reason: str) -> ModelRunStatus:
        """End a run that waits for its nodes; how it ended."""
        revival = self.reviving[waiting.run]
        revival.stop(reason)
        await revival.over.wait()
        found = [status for status in self.over if status.run == waiting.run]
        return found[-1] if found else waiting

    # ---- drained nodes ----

    def runs_on(self, node: NodeId) -> list[str]:
        """The runs that have a stage on ``node``, or wait for it."""
        live = [run.run for run in self.runs.values() if node in run.wiring.nodes]
        return [*live, *(each.run for each in self.reviving.values() if node in each.row.nodes)]

    async def move_off(self, node: NodeId, reason: str, *, force: bool) -> list[str]:
        """Let every run leave ``node``; what is in the way, for those that stay.

        A run that replaces moves if a plan without the node fits; others end by themselves, or at
        once with ``force``.
        """
        stay = []
        for run in [self.runs[each] for each in self.runs_on(node) if each in self.runs]:
            against = await self._against_moving(run)
            if not against:
                run.leave(node, reason)
            elif force:
                run.stop(reason)
            else:
                stay.append(f"run {run.run} stays: {against}")
        return stay

    async def _against_moving(self, run: ModelRun) -> str:
        chosen = self.chosen.get(run.run)
        if chosen is None or not run.rules.replaces:
            return "it ends by itself, or with --force (--on-fault fail)"
        ground = run.course.ground
        try:
            await self._places.find(chosen.wish, chosen.model, ground.dropped, run.taken_bytes)
        except LensembleError as error:
            return error.message
        return ""

    # ---- what is known of runs ----

    def look(self, beginning: str) -> ModelRun | ModelRunStatus:
        """The run whose id begins so, or how it ended; without a beginning the only one there is.

        One that waits for its nodes after a restart has a status only, without an outcome.

        Raises:
            OperatorError: there is none, or several.
        """
        found: list[ModelRun | Revival] = [
            *(run for name, run in self.runs.items() if name.startswith(beginning)),
            *(run for name, run in self.reviving.items() if name.startswith(beginning)),
        ]
        if len(found) > 1:
            ids = ", ".join(run.run for run in found)
            raise OperatorError(f"{len(found)} runs are meant: {ids}", "Name one by its id.")
        if found:
            (run,) = found
            return run.status(self._names()) if isinstance(run, Revival) else run
        over = [status for status in self.over if status.run.startswith(beginning)]
        if not over:
            raise OperatorError(
                f"no run {beginning!r}" if beginning else "no model is provisioned",
                "List runs with `lensemblectl runs`; start one with `lensemblectl provision`.",
            )
        return over[-1]

    def waiting(self) -> list[ModelRunStatus]:
        """The runs that wait for their nodes."""
        return [revival.status(self._names()) for revival in self.reviving.values()]

    def _names(self) -> frozenset[NodeId]:
        return frozenset(self._peers.here)

    def find(self, beginning: str) -> ModelRun:
        """As ``look``, of the runs that go on.

        Raises:
            OperatorError: there is none, or several, or it is over.
        """
        found = self.look(beginning)
        if not isinstance(found, ModelRunStatus):
            return found
        if not found.outcome:
            raise OperatorError(
                f"run {found.run} is not back yet: {found.reason}",
                "Start its nodes, wait, and ask again.",
            )
        raise OperatorError(
            f"run {found.run} is over: {found.outcome}, {found.reason}",
            "Provision the model again with `lensemblectl provision`.",
        )

    def _announce(self) -> None:
        self.changed.set()
        self.changed = trio.Event()


def _check_same(row: RunRow, material: Material) -> None:
    """Refuse to carry a run on with another model than it began with.

    Raises:
        WeightsChanged: that is so.
    """
    if material.digest != row.status.digest:
        raise WeightsChanged(
            f"{row.wish.model} is not the model that run {row.run} was begun with",
            "Restore the file, or provision the model again.",
        )
