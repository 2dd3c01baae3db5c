"""The rim of one run: its plans, one after the other, and the requests that outlive them."""

from collections import Counter

import trio

from lensemble.actor import run_machine
from lensemble.errors import LensembleError, OperatorError, QueueFull
from lensemble.ids import NodeId
from lensemble.logs import logger
from lensemble.stage_chunk import Sampling
from lensemble.wire.stages import StageAnswer
from lensemble_coord.inference import deployment, sequence, staging, survival
from lensemble_coord.inference.deployment import Deployment, Surroundings
from lensemble_coord.inference.paths import Paths
from lensemble_coord.inference.placement import Plan
from lensemble_coord.inference.request import Pause, Request
from lensemble_coord.inference.ring import Ring
from lensemble_coord.inference.run_terms import MAX_REPLACED, Left, Terms
from lensemble_coord.inference.seats import Seats
from lensemble_coord.inference.staging import Fault
from lensemble_coord.inference.standstill import Watch
from lensemble_coord.inference.tokens import TextStream
from lensemble_coord.inference.wiring import Wiring

INBOX_EVENTS = 4096
LAST_WORDS_S = 5.0
"""How long requests of a run that is over may take to say so to those who asked."""


class ModelRun:
    """One model over several nodes, from its first plan to the teardown of its last one.

    ``changed`` is set, and replaced, whenever something moves.
    """

    def __init__(self, terms: Terms, around: Surroundings) -> None:
        self.run = terms.run
        self.model = terms.model
        self.rules = terms.ground.rules
        self.before = terms.before
        self.since = trio.current_time()
        self.ended_at: float | None = None
        self.changed = trio.Event()
        self.course: survival.State = survival.Planning(terms.ground)
        self.left: list[Left] = []
        self.requests: dict[int, Request] = {}
        self.finished: Counter[str] = Counter()
        self.tokens = 0
        self._terms = terms
        self._around = around
        self._log = logger("run").bind(run=terms.run)
        self._seats = Seats()
        self._taken_on = 0
        self._over = False
        self._next = terms.plan
        self._counted: set[int] = set()
        """Requests of which the machine of the plan knows."""

        self._ready = False
        """Whether that machine takes requests."""

        self._inbox, self._events = trio.open_memory_channel[survival.Event](INBOX_EVENTS)
        self._nursery: trio.Nursery
        self.deployment = self._deploy(terms.ground.epoch + 1)

    # ---- what others see ----

    @property
    def state(self) -> staging.State:
        """Of the plan that is, or was last, carried out."""
        return self.deployment.state

    @property
    def plan(self) -> Plan:
        return self.deployment.plan

    @property
    def wiring(self) -> Wiring:
        return self.deployment.wiring

    @property
    def ring(self) -> Ring:
        return self.deployment.ring

    @property
    def watch(self) -> Watch:
        return self.deployment.watch

    @property
    def paths(self) -> Paths:
        """What is known of links at the moment."""
        return self._around.paths

    @property
    def over(self) -> bool:
        """Whether everything is torn down."""
        return isinstance(self.course, survival.Over)

    @property
    def takes_requests(self) -> bool:
        """Whether a request may be begun; while a stage is replaced it waits for the next plan."""
        answers = self._ready or self.replacing or self.rules.replaces
        return answers and survival.takes_requests(self.course)

    @property
    def replacing(self) -> bool:
        """Whether a plan was left and the next one is not ready yet."""
        waits = bool(self.left) and self.left[-1].ready_s is None
        return waits and survival.ending(self.course) is None

    @property
    def taken_bytes(self) -> dict[NodeId, int]:
        """What its stages take, by node: as planned, or as measured where that is more."""
        places = zip(self.plan.stages, self.state.places, strict=True)
        return {
            stage.node: max(
                stage.need.planned, 0 if at.loaded is None else at.loaded.resident_bytes
            )
            for stage, at in places
        }

    @property
    def waiting(self) -> int:
        """Requests that wait for a KV slot."""
        return sum(isinstance(each.state, sequence.Queued) for each in self.requests.values())

    # ---- what others ask ----

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Carry plans out and serve requests, until everything is torn down."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            self._hear(survival.Planned(_nodes(self._next)))
            await run_machine(
                self.course, survival.transition, self._events, self._perform, self._moved
            )
            with trio.move_on_after(LAST_WORDS_S):
                while self.requests:
                    await self.changed.wait()
            nursery.cancel_scope.cancel()

    def stop(self, reason: str) -> None:
        """End requests and the run."""
        self._hear(survival.StopAsked(reason))

    def drain(self, reason: str) -> None:
        """End the run once its requests have ended."""
        self._hear(survival.DrainAsked(reason, len(self.requests)))

    def leave(self, node: NodeId, reason: str) -> None:
        """Plan again without ``node``, with which nothing is wrong."""
        self._hear(survival.MoveAsked(node, reason))

    def begin(
        self, prompt: tuple[int, ...], sampling: Sampling, most: int, stops: tuple[str, ...] = ()
    ) -> Request:
        """Take a request on; it waits for a KV slot and runs by itself.

        Raises:
            OperatorError: the run is not ready.
            QueueFull: too many requests wait.
            ContextLengthExceeded: the prompt does not fit.
        """
        if not self.takes_requests:
            raise OperatorError(
                f"run {self.run} is {staging.public_state(self.state)}",
                "Wait until it is provisioned, or provision the model again.",
            )
        sequence.check(len(prompt), self.plan.ctx)
        if self.waiting >= max(1, self._around.max_waiting):
            raise QueueFull(
                f"{self.waiting} requests wait for one of {self.plan.sessions} sessions"
            )
        ask = sequence.Ask(
            prompt=prompt,
            sampling=sampling,
            ctx=self.plan.ctx,
            rows=self.plan.rows,
            eos=frozenset(self.model.facts.eos),
            max_tokens=most,
            # Two looks with nothing moved between them make one deadline.
            step_s=self._around.step_deadline_s / 2,
        )
        text = TextStream(self.model.tokenizer, stops)
        self._taken_on += 1
        request = Request(self._taken_on, self._seats, ask, text)
        self.requests[self._taken_on] = request
        if self._ready:
            self._count(self._taken_on)
        self._nursery.start_soon(self._attend, self._taken_on, request)
        return request

    def _count(self, number: int) -> None:
        self._counted.add(number)
        self.deployment.hear(staging.SequenceBegan())

    async def _attend(self, number: int, request: Request) -> None:
        try:
            await request.serve()
        finally:
            del self.requests[number]
            self.tokens += request.drawn
            if isinstance(request.state, sequence.Ended):
                finish = request.state.finish
                self.finished[finish] += 1
                self._around.tally.ended(request, len(request.ask.prompt), finish)
            if number in self._counted:
                self._counted.remove(number)
                self.deployment.hear(staging.SequenceEnded())
            self._announce()

    def node_said(self, node: NodeId, message: StageAnswer) -> None:
        """Something about a stage of this run; what its fence says is of another is passed by."""
        self.deployment.node_said(node, message)

    def node_lost(self, node: NodeId, reason: str) -> None:
        self.deployment.node_lost(node, reason)

    # ---- what becomes of a plan ----

    def _deploy(self, epoch: int) -> Deployment:
        terms = self._terms
        task = deployment.Task(self.run, epoch, self.model, self._next, terms.rules)
        return Deployment(task, self._around, self._plan_moved)

    def _plan_moved(self, plan: Deployment, before: staging.State) -> None:
        state = plan.state
        if type(before) is not type(state):
            self._note(plan, before)
            match state:
                case staging.Provisioned() if isinstance(before, staging.Probing):
                    self._begin_work(plan)
                case staging.Leaving(ending=ending):
                    self._ready = False
                    self._counted.clear()
                    self._hear(survival.Left(ending))
                case staging.TornDown(teardown=teardown, complaints=complaints):
                    if isinstance(before, staging.Planned):
                        self._hear(survival.Left(state.ending))
                    self._hear(survival.Cleared(teardown, complaints))
                case _:
                    pass
        self._announce()

    def _begin_work(self, plan: Deployment) -> None:
        """The plan is proven: requests that wait for it are its own."""
        self._ready = True
        for number in self.requests:
            self._count(number)
        for left in self.left:
            if left.ready_s is None:
                left.ready_s = trio.current_time() - left.at
        self._hear(survival.Ready())
        self._seats.open(plan.plan.sessions, plan.ring, plan.look)

    def _note(self, plan: Deployment, before: staging.State) -> None:
        """Record what an operator will look for later."""
        note, run, model = self._around.note, self.run, self.model.facts.name
        match plan.state:
            case staging.Provisioning():
                note("model.provisioning", run=run, model=model, **_epoch_of(plan))
            case staging.Provisioned() if isinstance(before, staging.Probing):
                took = round(trio.current_time() - plan.since, 3)
                note("model.provisioned", run=run, model=model, seconds=took, **_epoch_of(plan))
            case staging.Leaving(ending=staging.Ending(fault=Fault() as fault)):
                node = "" if fault.stage is None else plan.plan.stages[fault.stage].name
                note(
                    "model.faulted",
                    warn=True,
                    run=run,
                    code=fault.code,
                    stage=fault.stage,
                    peer=node,
                    reason=fault.reason,
                )
            case _:
                pass

    # ---- the machine of the run ----

    def _hear(self, event: survival.Event) -> None:
        if self._over:
            return
        try:
            self._inbox.send_nowait(event)
        except trio.WouldBlock:
            self._log.warning("run.inbox_full", dropped=type(event).__name__)

    def _moved(self, course: survival.State) -> None:
        before, self.course = self.course, course
        if type(before) is not type(course):
            self._log.info("run.course", state=type(course).__name__.lower())
        if isinstance(course, survival.Over):
            self.ended_at = trio.current_time()
            ending = course.ending
            self._around.note(
                "model.over", run=self.run, outcome=ending.outcome, teardown=course.teardown
            )
        elif isinstance(course, survival.Clearing) and isinstance(before, survival.Carrying):
            self._remember(before, course)
        self._announce()

    def _remember(self, before: survival.Carrying, after: survival.Clearing) -> None:
        ending, plan = self.state, self.plan
        reason = (
            ending.ending.reason if isinstance(ending, staging.Leaving | staging.TornDown) else ""
        )
        dropped = next(iter(after.ground.dropped - before.ground.dropped), None)
        now = trio.current_time()
        left = Left(before.ground.epoch, plan, after.lost, reason, now, dropped)
        self.left = [*self.left[-MAX_REPLACED + 1 :], left]
        self._around.note(
            "model.replacing", warn=after.lost is not None, run=self.run,
            plan=before.ground.epoch, reason=reason,
        )  # fmt: skip

    def _cleared(self, left: Left) -> None:
        left.cleared_s = trio.current_time() - left.at
        if isinstance(self.state, staging.TornDown):
            left.teardown, left.complaints = self.state.teardown, self.state.complaints

    def _announce(self) -> None:
        self.changed.set()
        self.changed = trio.Event()

    async def _perform(self, action: survival.Action) -> None:
        match action:
            case survival.Plan(without):
                self._cleared(self.left[-1])
                self._nursery.start_soon(self._plan_again, without)
            case survival.Carry(epoch):
                await self._carry(epoch)
            case survival.Tell(event):
                self.deployment.hear(event)
            case survival.Interrupt() | survival.EndRequests():
                self._end_requests(action)
            case survival.Close():
                self._over = True
                self._inbox.close()

    def _end_requests(self, action: survival.Interrupt | survival.EndRequests) -> None:
        self._seats.close()
        for request in self.requests.values():
            match action:
                case survival.Interrupt(reason, fault):
                    request.interrupt(Pause(reason, self._name_of(fault), fault))
                case survival.EndRequests(fault):
                    request.fail(fault)

    def _name_of(self, fault: Fault | None) -> str:
        stage = None if fault is None else fault.stage
        return "" if stage is None else self.plan.stages[stage].name

    async def _plan_again(self, without: frozenset[NodeId]) -> None:
        try:
            self._next = await self._terms.replan(without)
        except LensembleError as error:
            self._hear(survival.Unplanned(_fault_of(error)))
            return
        self.left[-1].planned_s = trio.current_time() - self.left[-1].at
        self._hear(survival.Planned(_nodes(self._next)))

    async def _carry(self, epoch: int) -> None:
        """Make ``epoch`` durable, then let nodes hear of it: it may never come twice."""
        if epoch != self.deployment.wiring.run_epoch:
            self.deployment = self._deploy(epoch)
        try:
            await self._terms.keep(self.run)
        except LensembleError as error:
            self._hear(survival.Unplanned(_fault_of(error)))
            return
        await self._nursery.start(self.deployment.serve)


def _epoch_of(plan: Deployment) -> dict[str, int]:
    return {"plan": plan.wiring.run_epoch}


def _nodes(plan: Plan) -> tuple[NodeId, ...]:
    return tuple(stage.node for stage in plan.stages)


def _fault_of(error: LensembleError) -> Fault:
    return Fault(error.code, error.message, None, error.remediation)
