"""Runs that outlive their plans, in a bad world: the real ``survival`` and ``sequence`` machines.

It follows ``model_run``: each plan is a ``Run`` with a ``staging`` machine of its own, requests
wait for the next one with the tokens that they were given, and a row is kept of what an earlier
process of the coordinator began.
"""

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from lensemble.ids import NodeId
from lensemble.machine import ArmTimer, CancelTimer, TimerExpired
from lensemble.stage_chunk import MAX_RECENT, Sampling
from lensemble_coord.inference import sequence, staging, survival
from tests.sim.world import Actor, Timers

if TYPE_CHECKING:
    from tests.sim.model_life import ModelCoordinator
    from tests.sim.model_plan import Run

VOCABULARY = 97
CTX = 64
SESSIONS = 2
MOST_REPLACED = 3
WAIT_S = 20.0
"""How long a run waits for its nodes after a restart."""

LOOK_S = 1.0


def model(tokens: tuple[int, ...], sampling: Sampling) -> int:
    """The next token: all tokens, their order, the index and what the penalty sees count."""
    state = sampling.seed + 17 * sampling.index
    for token in (*tokens, -1, *sampling.recent):
        state = (state * 31 + token + 2) % 999_983
    return state % VOCABULARY


def undisturbed(ask: sequence.Ask) -> list[int]:
    """What an unsplit model answers."""
    tokens = ask.prompt
    for index in range(ask.max_tokens):
        recent = tokens[-MAX_RECENT:]
        sampling = msgspec.structs.replace(ask.sampling, index=index, recent=recent)
        tokens = (*tokens, model(tokens, sampling))
    return list(tokens[len(ask.prompt) :])


class Row(msgspec.Struct):
    """What is on disk of a run."""

    rules: survival.Rules
    epoch: int
    nodes: tuple[NodeId, ...] = ()
    dropped: frozenset[NodeId] = frozenset()
    over: bool = False


class Asked:
    """One request, as ``request``."""

    def __init__(self, course: "Course", number: int) -> None:
        chance = course.coord.world.random
        prompt = tuple(chance.randrange(VOCABULARY) for _ in range(chance.randint(1, 40)))
        sampling = Sampling(temperature=1.0, repeat_penalty=1.3, seed=chance.randrange(1000))
        ask = sequence.Ask(
            prompt, sampling, CTX, 2, frozenset(), chance.randint(1, 12), course.step_s / 2
        )
        self.course, self.number = course, number
        self.whole = undisturbed(ask)
        self.given: list[int] = []
        self.plan: Run | None = None
        self.slot = -1
        self.waits = True
        machine = course.coord.life.parts.sequence
        state = sequence.Queued(ask)
        self.machine = Actor(course.coord, machine, state, self.perform, lambda *_: None)
        self.timers = Timers(self.machine, TimerExpired)

    @property
    def ended(self) -> sequence.Ended | None:
        state = self.machine.state
        return state if isinstance(state, sequence.Ended) else None

    def sit(self, plan: "Run", slot: int) -> None:
        self.plan, self.slot, self.waits = plan, slot, False
        self.machine.feed(sequence.Granted(slot))

    def interrupt(self) -> None:
        if self.ended is None:
            self.plan, self.waits = None, True
            where = type(self.machine.state).__name__
            self.course.coord.world.note(self.course.coord, f"interrupted {where}", str(self.given))
            self.machine.feed(sequence.Interrupted(tuple(self.given)))

    def perform(self, action: Any) -> None:
        match action:
            case ArmTimer(timer=timer, seconds=seconds):
                self.timers.arm(timer, seconds)
            case CancelTimer(timer=timer):
                self.timers.cancel(timer)
            case sequence.SendChunk() if self.plan is not None:
                of = self.plan
                of.send_chunk(action, partial(self._accepted, of), partial(self._came, of))
            case sequence.LookAround() if self.plan is not None:
                look = partial(self._look, self.plan, len(self.given))
                self.course.coord.world.after(self.course.coord, LOOK_S, look)
            case sequence.ReleaseSlot():
                self.course.free(self)
            case sequence.Finished(finish, usage):
                assert usage.completion_tokens == len(self.given)
                self.course.finished(self, finish)
            case _:
                pass

    def _accepted(self, plan: "Run", step: int) -> None:
        if plan is self.plan and self.ended is None:
            self.machine.feed(sequence.Accepted(step))

    def _came(self, plan: "Run", step: int, token: int) -> None:
        state = self.machine.state
        if plan is not self.plan or not isinstance(state, sequence.Decoding):
            return
        if state.step == step:
            self.given.append(token)
            assert self.given == self.whole[: len(self.given)], "not what an undisturbed run gives"
            self.machine.feed(sequence.Drawn(step, token))

    def _look(self, plan: "Run", given: int) -> None:
        if plan is not self.plan or self.ended is not None:
            return
        stuck = plan.stuck()
        if stuck is None and len(self.given) > given:
            self.machine.feed(sequence.StillMoving())
        else:
            plan.hear(staging.Failed(staging.Fault("stage_stalled", "stands still", stuck)))


class Course:
    """A run over all its plans, as ``model_run``."""

    def __init__(self, coord: "ModelCoordinator", name: str, row: Row, step_s: float) -> None:
        self.coord, self.name, self.row, self.step_s = coord, name, row, step_s
        ground = survival.Ground(row.rules, row.epoch, dropped=row.dropped)
        self.machine = Actor(
            coord, coord.life.parts.survival, survival.Planning(ground), self.perform, self.moved
        )
        self.plan: Run | None = None
        self.asked: list[Asked] = []
        self.counted: set[Asked] = set()
        self.seats: dict[int, Asked | None] = {}
        self.ready = self.stopped = False
        self.left: set[Asked] = set()
        self.blamed: set[NodeId] = set()

    @property
    def over(self) -> bool:
        return isinstance(self.machine.state, survival.Over)

    @property
    def settled(self) -> bool:
        """Whether it has ended, or is ready with nothing left to answer."""
        ready = self.plan is not None and isinstance(self.plan.machine.state, staging.Provisioned)
        return self.over or (ready and all(each.ended for each in self.asked))

    def hear(self, event: survival.Event) -> None:
        self.stopped = self.stopped or isinstance(event, survival.StopAsked)
        self.machine.feed(event)

    def moved(self, before: Any, event: Any, actions: Any) -> None:
        del actions
        after = self.machine.state
        name = f"{self.name} {type(event).__name__} {type(before).__name__}"
        self.coord.world.note(self.coord, name, type(after).__name__)
        self.coord.life.checks.went(self, before)
        self.row.over = self.over

    def perform(self, action: Any) -> None:
        match action:
            case survival.Plan(without):
                self.coord.world.after(self.coord, 0.05, partial(self._plan_again, without))
            case survival.Carry(epoch):
                self._carry(epoch)
            case survival.Tell(event):
                if self.plan is not None:
                    self.plan.hear(event)
            case survival.Interrupt() | survival.EndRequests():
                self._end_requests(action)
            case _:
                pass

    def _end_requests(self, action: survival.Interrupt | survival.EndRequests) -> None:
        self.seats = {}
        for each in self.asked:
            match action:
                case survival.Interrupt():
                    each.interrupt()
                case survival.EndRequests(fault):
                    each.machine.feed(sequence.CancelAsked() if not fault else sequence.Failed())

    def _plan_again(self, without: frozenset[NodeId]) -> None:
        if not self.over:
            nodes = self.coord.choose(without)
            none = survival.Unplanned(staging.Fault("plan_infeasible", "no node is left"))
            self.hear(survival.Planned(nodes) if nodes else none)

    def _carry(self, epoch: int) -> None:
        ground = self.machine.state.ground
        assert not self.blamed & set(ground.nodes), "a node to blame is planned with again"
        self.coord.life.checks.carried(self.name, epoch)
        self.row.epoch, self.row.nodes = epoch, ground.nodes
        self.row.dropped = ground.dropped
        self.plan = self.coord.carry(self, epoch, ground.nodes)

    # ---- what becomes of a plan ----

    def plan_moved(self, run: "Run", before: Any) -> None:
        after = run.machine.state
        if type(before) is type(after):
            return
        match after:
            case staging.Provisioned() if isinstance(before, staging.Probing):
                for each in self.asked:
                    if each.ended is None:
                        self._count(each)
                self.ready, self.seats = True, dict.fromkeys(range(SESSIONS))
                self.hear(survival.Ready())
                self._grant()
            case staging.Leaving(ending=ending):
                self.ready = False
                self.counted.clear()
                fault = ending.fault
                if fault is not None and fault.code == "worker_fault" and fault.stage is not None:
                    self.blamed.add(run.nodes[fault.stage])
                self.hear(survival.Left(ending))
            case staging.TornDown(teardown=teardown, complaints=complaints):
                self.hear(survival.Cleared(teardown, complaints))
            case _:
                pass

    # ---- requests ----

    def ask(self) -> None:
        if survival.takes_requests(self.machine.state):
            self.asked.append(Asked(self, len(self.asked)))
            if self.ready:
                self._count(self.asked[-1])
            self._grant()

    def cancel(self) -> None:
        live = [each for each in self.asked if each.ended is None]
        if live:
            leaves = self.coord.world.random.choice(live)
            self.left.add(leaves)
            leaves.machine.feed(sequence.CancelAsked())

    def _count(self, each: Asked) -> None:
        if self.plan is not None:
            self.counted.add(each)
            self.plan.hear(staging.SequenceBegan())

    def _grant(self) -> None:
        waiting = deque(each for each in self.asked if each.waits and each.ended is None)
        for slot, owner in self.seats.items():
            if owner is None and waiting and self.plan is not None:
                self.seats[slot] = waiting.popleft()
                self.seats[slot].sit(self.plan, slot)

    def free(self, each: Asked) -> None:
        if self.seats.get(each.slot) is each:
            self.seats[each.slot] = None
            self.coord.world.after(self.coord, 0.0, self._grant)

    def finished(self, each: Asked, finish: str) -> None:
        assert finish != "length" or each.given == each.whole, "an answer ends too soon"
        told = self.stopped or each in self.left
        assert finish != "cancelled" or told, "a request is cut short that nobody ended"
        ended = survival.ending(self.machine.state)
        assert finish != "faulted" or (ended is not None and ended.fault is not None)
        if each in self.counted and self.plan is not None:
            self.counted.discard(each)
            self.plan.hear(staging.SequenceEnded())

    def check_seats(self) -> None:
        """A slot has one owner, and whoever computes has a slot of this plan."""
        held = [each for each in self.asked if isinstance(each.machine.state, sequence.Held)]
        if not self.machine.busy and self.seats:
            slots = [each.slot for each in held if each.plan is self.plan]
            assert len(slots) == len(set(slots)), f"slots with two owners: {slots}"
