"""The rim of the round machine: performs its actions on links, spool, threads and ledger.

Everything that takes long runs beside the machine and comes back to it as an event.  What must be
durable before it is visible is awaited before the next action is performed: the attempt before it
is broadcast, the record before the close is.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import TypeAlias

import msgspec
import trio

from lensemble import files, seeds
from lensemble.actor import Timers, run_machine
from lensemble.crash_points import reached
from lensemble.errors import (
    LensembleError,
    OperatorError,
    Response,
    RoundError,
    StorageError,
)
from lensemble.ids import Digest, NodeId
from lensemble.logs import logger
from lensemble.machine import ArmTimer, CancelTimer
from lensemble.secagg.plan import FieldPlan
from lensemble.wire import fence, messages
from lensemble.wire.fanout import Fanout
from lensemble_coord.config import CoordinatorConfig
from lensemble_coord.training import budget, outer_round, record
from lensemble_coord.training.aggregate import Addend
from lensemble_coord.training.downlink import Downlink, Origin
from lensemble_coord.training.gatekeeper import Gatekeeper
from lensemble_coord.training.journal import Journal
from lensemble_coord.training.mask_rim import MaskMessage, MaskRim
from lensemble_coord.training.rows import Run
from lensemble_coord.training.session import Session
from lensemble_coord.training.spool import SpoolFile
from lensemble_coord.training.store import Store

INBOX_EVENTS = 1024
RECORD_AGAIN_S = 5.0
MAX_UNRECORDED = 256
"""Ends of attempts and runs that wait for a disk that refuses; older ones are let go."""

MAX_NODES_NOTED = 32
"""Contributors of a round that have an event of their own; only so many events are kept."""

MAX_NAMED = 16
"""Nodes that the log names of those that a round waits for; with more sessions than these it says
why at each step of the round, and else once in so many seconds."""
SAY_PAUSE_S = 1.0

MAX_NEWS = 256
"""Finished attempts and runs that are remembered for those who watch."""


class RoundEnded(msgspec.Struct, frozen=True):
    """One attempt that closed or aborted; ``seconds`` in each state, in order of first entry."""

    round: int
    attempt: int
    closed: bool
    digest: Digest
    contributors: tuple[NodeId, ...]
    dropped: tuple[outer_round.Dropped, ...]
    seconds: dict[str, float]
    code: str = ""
    reason: str = ""
    retries: bool = False
    refusal: str = ""
    """Why the state that the round came to was not adopted."""
    by_sum: int = 0
    bytes_saved: int = 0
    """By sums, which so many contributors followed, against sending them the parameters."""


class RunEnded(msgspec.Struct, frozen=True):
    """How a run of rounds ended."""

    run: str
    rounds: int
    closed: int
    completed: bool
    digest: Digest
    seconds: float
    code: str
    reason: str


News: TypeAlias = RoundEnded | RunEnded
Turn: TypeAlias = (
    outer_round.OpenRound
    | outer_round.AnnounceClose
    | outer_round.AnnounceAbort
    | outer_round.FinishRun
)
ToNode: TypeAlias = (
    outer_round.AskAlso
    | outer_round.OfferState
    | outer_round.SendRoster
    | outer_round.BeginCollect
    | outer_round.RequestUnmask
    | outer_round.Refuse
    | outer_round.DropUpdate
)
At: TypeAlias = tuple[int, int]
Outcome: TypeAlias = outer_round.SumDerived | outer_round.Diagnosed | outer_round.Advanced
Work: TypeAlias = outer_round.DeriveSum | outer_round.Diagnose | outer_round.Commit


class Rounds:
    """Drives rounds for the sessions that are here.

    ``changed`` is set, and replaced, whenever the state of the round or of a node changes.
    """

    def __init__(
        self, config: CoordinatorConfig, store: Store, journal: Journal, gate: Gatekeeper
    ) -> None:
        self.config = config
        self.store = store
        self.journal = journal
        self.gate = gate
        self.workload = store.workload
        self.layout = store.layout
        self.sessions: dict[NodeId, Session] = {}
        self.state: outer_round.State = outer_round.Closed(self._ground())
        self.since = 0.0
        self.deadlines: dict[str, float] = {}
        self.changed = trio.Event()
        self.news: deque[tuple[int, News]] = deque(maxlen=MAX_NEWS)
        self.published = 0
        self.run_since = 0.0
        self.aborted_in_run = 0
        self.log = logger("rounds")
        self._inbox, self._events = trio.open_memory_channel[outer_round.Event](INBOX_EVENTS)
        self._opening: messages.RoundOpen | None = None
        self._masks = MaskRim(self, store.federation)
        self._origin = Origin(store.position.digest, None, (), store.layout.nbytes)
        self.downlink = Downlink(
            store.federation,
            store.layout,
            store.workload.room,
            store.directory,
            config.chunk_bytes,
        )
        # What an earlier process asked to be unmasked is not known here; take it that it did.
        self._spent_before = (store.position.round, store.position.attempt)
        self._seconds: dict[str, float] = {}
        self._left_out: tuple[outer_round.Dropped, ...] = ()
        self._refusal = ""
        self._prior = self.state.ground.digest
        self._moved_before: dict[NodeId, tuple[int, int]] = {}
        self._spooled: dict[NodeId, SpoolFile] = {}
        self._spool_in_use = trio.Lock()
        self._unrecorded: deque[Callable[[], None]] = deque(maxlen=MAX_UNRECORDED)
        self._nursery: trio.Nursery
        self._timers: Timers
        self._asking = trio.Lock()
        self._said, self._said_at = "", 0.0

    def _ground(self) -> outer_round.Ground:
        rules = self.config.rounds
        position = self.store.position
        return outer_round.Ground(
            outer_round.Rules(
                quorum=rules.quorum,
                max_attempts=rules.max_attempts,
                open_timeout_s=rules.open_timeout_s,
                open_grace_s=rules.open_grace_s,
                collect_timeout_s=rules.collect_timeout_s,
                retry_backoff_s=rules.retry_backoff_s,
                retry_backoff_max_s=rules.retry_backoff_max_s,
                on_commitment_mismatch=rules.on_commitment_mismatch,
                masked=rules.masked,
                threshold=rules.secure_agg_threshold,
                share_timeout_s=rules.share_timeout_s,
                unmask_timeout_s=rules.unmask_timeout_s,
                collect_max_s=rules.collect_max_s,
            ),
            round=position.round,
            attempt=position.attempt,
            digest=position.digest,
        )

    # ---- running ----

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the machine until cancelled; goes on with a run that an earlier process left."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                self._timers = Timers(nursery, self._inbox.send)
                self.since = self.run_since = trio.current_time()
                left = self.store.unfinished_rounds
                if left:
                    self.log.info("run.resumed", rounds=left, round=self.state.ground.round)
                    await self._inbox.send(outer_round.RoundsAsked(left))
                task_status.started()
                await run_machine(
                    self.state,
                    outer_round.transition,
                    self._timers.sift(self._events),
                    self._perform,
                    self._moved,
                )
        finally:
            await self.downlink.close()

    async def hear(self, event: outer_round.Event) -> None:
        """Give the machine an event; waits while its inbox is full."""
        await self._inbox.send(event)

    async def ask(self, rounds: int, patience_s: float | None = None) -> Run:
        """Start a run of ``rounds`` rounds; it is durable before the first one opens.

        Raises:
            OperatorError: a run goes on already, too many rounds, or nothing is trained here.
            PrivacyBudgetExceeded: for more than the privacy budget of the workload covers.
            ConfigError: the privacy that the workload asks for cannot be kept by these rounds.
        """
        if not self.config.trains:
            raise OperatorError(
                "this federation trains nothing: its configuration names no workload",
                "Name one (`workload`) in a configuration with another state_dir.",
            )
        async with self._asking:
            if self.store.run is not None:
                raise OperatorError(
                    f"run {self.store.run.run} goes on with {self.store.unfinished_rounds} rounds",
                    "Watch it with `lensemblectl run --attach`; end it with `lensemblectl abort`.",
                )
            committed = self.state.ground.round
            covered = partial(budget.require_covered, self.workload, self.config.rounds)
            await trio.to_thread.run_sync(covered, committed, rounds)
            run = await trio.to_thread.run_sync(self.store.begin_run, rounds)
            self.run_since, self.aborted_in_run = trio.current_time(), 0
            await self.hear(outer_round.RoundsAsked(rounds, patience_s))
            return run

    def _moved(self, state: outer_round.State) -> None:
        before, self.state = self.state, state
        if type(before) is not type(state):
            now = trio.current_time()
            name = str(outer_round.public_state(before))
            self._seconds[name] = self._seconds.get(name, 0.0) + now - self.since
            reached("round.entered", type(state).__name__)
            self.since = now
        if isinstance(state, outer_round.Collecting | outer_round.Committing):
            self._left_out = state.dropped
        self._say_why(entered=type(before) is not type(state))
        self.announce_change()

    def announce_change(self) -> None:
        """Wake everyone who watches."""
        self.changed.set()
        self.changed = trio.Event()

    def _say_why(self, *, entered: bool) -> None:
        """Log why the round is where it is; of a large one, not at every word of every node."""
        now, many = trio.current_time(), len(self.sessions) > MAX_NAMED
        if many and not entered and now < self._said_at + SAY_PAUSE_S:
            return
        waiting = outer_round.waiting(self.state)
        ground = self.state.ground
        where = f"{outer_round.public_state(self.state)}:{ground.round}:{ground.attempt}"
        said = f"{where}: {waiting.reason}"
        if said != self._said:
            self._said, self._said_at = said, now
            more = len(waiting.on) - MAX_NAMED
            named = [self.name(node) for node in waiting.on[:MAX_NAMED]]
            self.log.info(
                "round.state",
                state=str(outer_round.public_state(self.state)),
                round=ground.round,
                attempt=ground.attempt,
                reason=waiting.reason,
                on=", ".join([*named, *([f"and {more} more"] if more > 0 else [])]),
            )

    def name(self, node: NodeId) -> str:
        """What people call ``node``."""
        return self.store.name(node)

    # ---- from action to IO ----

    async def _perform(self, action: outer_round.Action) -> None:
        match action:
            case ArmTimer():
                self.deadlines[action.timer] = trio.current_time() + action.seconds
                self._timers.arm(action)
            case CancelTimer():
                self.deadlines.pop(action.timer, None)
                self._timers.cancel(action)
            case outer_round.DeriveSum() | outer_round.Diagnose() | outer_round.Commit():
                self._nursery.start_soon(self._work, *self._begin_work(action))
            case (
                outer_round.OpenRound()
                | outer_round.AnnounceClose()
                | outer_round.AnnounceAbort()
                | outer_round.FinishRun()
            ):
                await self._turn(action)
            case _:
                self._address(action)

    async def _turn(self, action: Turn) -> None:
        """A round or a run begins or ends."""
        match action:
            case outer_round.OpenRound():
                await self._open(action)
            case outer_round.AnnounceClose():
                await self._announce_close(action)
            case outer_round.AnnounceAbort():
                await self._announce_abort(action)
            case outer_round.FinishRun():
                await self._finish_run(action)

    def _address(self, action: ToNode) -> None:
        """Something concerns one node, or is told to some."""
        match action:
            case outer_round.AskAlso(node=node):
                self._tell_opening((node,))
            case outer_round.OfferState(node=node, held=held):
                self._offer_state(node, held)
            case outer_round.SendRoster():
                members = self._masks.members(action.bound)
                seed = seeds.sketch(self.workload.root_seed, self.state.ground.round)
                self._nursery.start_soon(self._masks.send_roster, members, action.threshold, seed)
            case outer_round.BeginCollect(nodes=nodes):
                self._begin_collect(nodes)
            case outer_round.RequestUnmask(survivors=survivors):
                ground = self.state.ground
                self._spent_before = (ground.round, ground.attempt + 1)
                self._masks.request_unmask(survivors)
            case outer_round.Refuse(node=node, code=code, reason=reason):
                self.refuse(node, code, reason)
            case outer_round.DropUpdate(node=node):
                self._drop_update(node)

    async def _open(self, action: outer_round.OpenRound) -> None:
        self._seconds, self._left_out, self._refusal = {}, (), ""
        self._prior = action.digest
        self._moved_before = {
            node: (each.moved["state"], each.moved["update"])
            for node, each in self.sessions.items()
        }
        self.gate.warm()
        try:
            await trio.to_thread.run_sync(self.store.begin_attempt, action.round, action.attempt)
            self._origin = await trio.to_thread.run_sync(self.store.origin)
        except LensembleError as error:
            self._nursery.start_soon(self.failed, (action.round, action.attempt), error)
            return
        ground = self.state.ground
        patience = ground.patience_s
        self._opening = messages.RoundOpen(
            federation=self.store.federation,
            epoch=0,
            round=action.round,
            attempt=action.attempt,
            prior_digest=action.digest,
            prior_momentum=self._origin.momentum,
            steps=self._origin.steps,
            layout_digest=self.layout.digest,
            config_hash=self.workload.digest,
            roster_digest=messages.roster_digest(action.nodes),
            sketch_seed=seeds.sketch(self.workload.root_seed, action.round),
            probe_hash=Digest(self.workload.objective.probe_hash) or None,
            inner_steps=self.workload.inner.steps,
            global_step=action.round * self.workload.inner.steps,
            state_bytes=self._origin.nbytes,
            field=messages.FieldParams(
                k=self.workload.field.k,
                n_max=self.workload.field.n_max,
                plan=self.store.plan.code,
            ),
            spent_before=self._spent_before[1] if self._spent_before[0] == action.round else 0,
            answer_within_s=ground.rules.open_timeout_s if patience is None else patience,
        )
        self._tell_opening(action.nodes)

    def _tell_opening(self, nodes: Iterable[NodeId]) -> None:
        if self._opening is None:
            return
        opening = Fanout(self._opening)
        for session in self.present(nodes):
            session.tell(opening)

    def present(self, nodes: Iterable[NodeId]) -> list[Session]:
        """The sessions of those of ``nodes`` that are here."""
        return [self.sessions[node] for node in nodes if node in self.sessions]

    def _offer_state(self, node: NodeId, held: outer_round.Holding) -> None:
        at = (self.state.ground.round, self.state.ground.attempt)
        for session in self.present((node,)):
            self._masks.remember_keys(session)
            try:
                offer = self.downlink.offer(self._origin, held, at)
            except LensembleError as error:
                self._nursery.start_soon(self.failed, at, error)
            else:
                session.offer_state(offer, self.downlink)

    def _begin_collect(self, nodes: tuple[NodeId, ...]) -> None:
        ground = self.state.ground
        self._masks.start(nodes)
        for session in self.present(nodes):
            session.tell(
                messages.Collect(
                    federation=self.store.federation,
                    epoch=session.epoch,
                    round=ground.round,
                    attempt=ground.attempt,
                    roster=(session.node,),
                    send_within_s=ground.rules.collect_timeout_s,
                    envelopes=self._masks.envelopes(session.node),
                )
            )

    # ---- what sessions bring ----

    async def take_masking(self, node: NodeId, message: MaskMessage) -> None:
        """Shares or an unmasking answer of ``node``."""
        await self._masks.take(node, message)

    async def check_update(self, spooled: SpoolFile) -> None:
        """Refuse a plain update that could make the sum wrap; a masked one is uniform by design.

        Raises:
            ContractViolation: names the coordinate.
        """
        if not self.config.rounds.masked:
            await trio.to_thread.run_sync(self.store.check_update, spooled)

    # ---- refusals ----

    def refuse(self, node: NodeId, code: str, reason: str) -> None:
        """Count and log that something of ``node`` was refused, and tell it."""
        self.log.warning("peer.refused", peer=self.name(node), code=code, reason=reason)
        for session in self.present((node,)):
            session.refuse(code, reason)

    def _drop_update(self, node: NodeId) -> None:
        spooled = self._spooled.pop(node, None)
        if spooled is not None:
            self._nursery.start_soon(self._close_spooled, [spooled])

    # ---- updates ----

    def elsewhere(self, round_index: int, attempt: int) -> str:
        """Where the rounds are, if not at this attempt; empty if they are."""
        ground = self.state.ground
        if (round_index, attempt) == (ground.round, ground.attempt):
            return ""
        return f"the coordinator is at round {ground.round} attempt {ground.attempt}"

    @property
    def plan(self) -> FieldPlan:
        """Of the words of the updates of this round."""
        return self.store.plan

    def expects(self, node: NodeId, round_index: int, attempt: int) -> str:
        """Why an update of ``node`` for this attempt is not wanted; empty if it is."""
        state = self.state
        if where := self.elsewhere(round_index, attempt):
            return f"the update is of round {round_index} attempt {attempt}, {where}"
        if not isinstance(state, outer_round.Collecting):
            return f"the round is {outer_round.public_state(state)}"
        if not outer_round.may_send(state, node):
            return "this node is not expected to send in this attempt"
        return ""

    def keep(self, node: NodeId, spooled: SpoolFile) -> None:
        """Take over a whole, checked update of the attempt in flight."""
        self._drop_update(node)
        self._spooled[node] = spooled

    def spooled_updates(self) -> tuple[SpoolFile, ...]:
        """The updates that are in, as they came."""
        return tuple(self._spooled.values())

    def _begin_work(self, action: Work) -> tuple[At, Callable[[], Awaitable[Outcome]]]:
        """What is to be done, with all that it needs: the attempt may end before it has begun."""
        at = (self.state.ground.round, self.state.ground.attempt)
        match action:
            case outer_round.DeriveSum(contributors=contributors):
                addends = [self._spooled[each.node] for each in contributors]
                return at, partial(self._derive_sum, at, addends)
            case outer_round.Diagnose():
                return at, partial(self._diagnose, at, action)
            case outer_round.Commit():
                return at, partial(self._commit, at, action, self._masks.transcript())

    async def _work(self, at: At, work: Callable[[], Awaitable[Outcome]]) -> None:
        """Do what takes long, in a thread, and tell the machine how it ended."""
        try:
            with files.storage(self.store.directory.root):
                outcome = await work()
            await self.hear(outcome)
        except LensembleError as error:
            await self.failed(at, error)

    async def failed(self, at: tuple[int, int], error: LensembleError) -> None:
        """Our own work for the attempt ``at`` failed; the machine decides what follows."""
        self.log.warning(
            "round.step_failed", round=at[0], attempt=at[1], code=error.code, reason=error.message
        )
        response = Response.STOP if error.response is Response.REFUSE else error.response
        await self.hear(outer_round.StepFailed(*at, error.code, error.message, response))

    async def _derive_sum(self, at: At, spooled: list[SpoolFile]) -> outer_round.SumDerived:
        async with self._spool_in_use:
            now = (self.state.ground.round, self.state.ground.attempt)
            if at != now or not isinstance(self.state, outer_round.Aggregating):
                # It was aborted while the sum of an earlier attempt was waited for.
                raise RoundError(f"round {at[0]} attempt {at[1]} ended before it was summed")
            addends: list[Addend] = [*spooled, *await self._masks.leftover(self.store.plan)]
            field_sum = await trio.to_thread.run_sync(self.store.derive_sum, addends)
        return outer_round.SumDerived(*at, field_sum)

    async def _diagnose(self, at: At, action: outer_round.Diagnose) -> outer_round.Diagnosed:
        count = len(action.contributors)
        # Beside the diagnosis, which leaves a core free; what is packed is needed after the commit.
        self._nursery.start_soon(self.downlink.prepare, action.field_sum, self.store.plan)
        try:
            found = await trio.to_thread.run_sync(self.store.diagnose, action.field_sum, count)
        except LensembleError as error:
            # Diagnostics are for people; they never end a round.
            self.journal.note("round.undiagnosed", warn=True, round=at[0], reason=error.message)
        else:
            self.journal.note(
                "round.diagnosed",
                round=at[0],
                attempt=at[1],
                mean_update_l2=found.mean_update_l2,
                field_use=found.field_use,
            )
        return outer_round.Diagnosed(*at)

    async def _commit(
        self, at: At, action: outer_round.Commit, transcript: record.Masking | None
    ) -> outer_round.Advanced:
        step = partial(self.store.prepare, at[0], action.field_sum, len(action.contributors))
        candidate = await trio.to_thread.run_sync(step)
        self._refusal = await self.gate.weigh(at[0], candidate.digest, candidate.prior)
        commit = partial(
            self.store.commit, at[1], candidate, action.contributors, transcript, self._refusal
        )
        return outer_round.Advanced(*at, await trio.to_thread.run_sync(commit))

    # ---- ends ----

    def _note_spent(self, round_index: int, reported: list[float | None]) -> None:
        """Record the largest epsilon that a contributor reports, and how many report one."""
        spent = [epsilon for epsilon in reported if epsilon is not None]
        if spent:
            self.journal.note(
                "privacy.spent", round=round_index, nodes=len(spent), epsilon=max(spent)
            )

    def _note_nodes(self, round_index: int, contributors: list[Session]) -> None:
        """Record what went to and came from each of the first contributors, and what they tell."""
        for session in contributors[:MAX_NODES_NOTED]:
            down, up = self._moved_before.get(session.node, (0, 0))
            self.journal.note(
                "round.node",
                round=round_index,
                node=session.node,
                bytes_down=session.moved["state"] - down,
                bytes_up=session.moved["update"] - up,
                state_by=session.activity.state_by,
                loss=session.activity.loss,
                epsilon=session.activity.epsilon,
            )

    def _saved(self, session: Session) -> int:
        """By how much the sums sent for this attempt are less than the parameters."""
        before, _ = self._moved_before.get(session.node, (0, 0))
        return self.layout.nbytes - (session.moved["state"] - before)

    async def _announce_close(self, action: outer_round.AnnounceClose) -> None:
        self._clear_spool()
        self._tell_close(
            action.round,
            action.attempt,
            messages.RoundClose(
                federation=self.store.federation,
                epoch=0,
                round=action.round,
                attempt=action.attempt,
                outcome="closed",
                digest=action.digest,
                contributors=action.contributors,
            ),
        )
        here = self.present(action.contributors)
        for session in here:
            session.activity.contributions += 1
        self._note_spent(action.round, [session.activity.epsilon for session in here])
        followed = [session for session in here if session.activity.state_by == "sum"]
        saved = sum(self._saved(session) for session in followed)
        self._publish(
            RoundEnded(
                action.round,
                action.attempt,
                closed=True,
                digest=action.digest,
                contributors=action.contributors,
                dropped=self._left_out,
                seconds=self._seconds,
                refusal=self._refusal,
                by_sum=len(followed),
                bytes_saved=saved,
            )
        )
        self.gate.committed(action.round, action.digest, self._prior)
        self._note_nodes(action.round, here)
        self.journal.note(
            "round.closed",
            warn=bool(self._refusal),
            round=action.round,
            attempt=action.attempt,
            contributors=len(action.contributors),
            digest=action.digest,
            refusal=self._refusal,
            by_sum=len(followed),
            bytes_saved=saved,
            seconds=round(sum(self._seconds.values()), 3),
            **{f"{state}_s": round(spent, 3) for state, spent in self._seconds.items()},
            left_out=", ".join(f"{self.name(d.node)} ({d.code})" for d in self._left_out),
        )

    async def _announce_abort(self, action: outer_round.AnnounceAbort) -> None:
        abort = partial(
            self.store.abort_attempt, action.round, action.attempt, action.code, action.reason
        )
        await self._record(abort)
        self._clear_spool()
        self._tell_close(
            action.round,
            action.attempt,
            messages.RoundClose(
                federation=self.store.federation,
                epoch=0,
                round=action.round,
                attempt=action.attempt,
                outcome="aborted",
                digest=action.digest,
                code=action.code,
                reason=fence.sentence(action.reason),
                retries=action.retries,
            ),
        )
        self.aborted_in_run += 1
        self._publish(
            RoundEnded(
                action.round,
                action.attempt,
                closed=False,
                digest=action.digest,
                contributors=(),
                dropped=self._left_out,
                seconds=self._seconds,
                code=action.code,
                reason=action.reason,
                retries=action.retries,
            )
        )
        self.journal.note(
            "round.aborted",
            warn=True,
            round=action.round,
            attempt=action.attempt,
            code=action.code,
            reason=action.reason,
            retries=action.retries,
        )

    def _tell_close(self, round_index: int, attempt: int, close: messages.RoundClose) -> None:
        self._opening = None
        self._masks.forget()
        told = Fanout(close)
        for session in self.sessions.values():
            session.round_ended(round_index, attempt)
            session.tell(told)

    def _clear_spool(self) -> None:
        spooled, self._spooled = list(self._spooled.values()), {}
        self._nursery.start_soon(self._close_spooled, spooled)

    async def _close_spooled(self, spooled: list[SpoolFile]) -> None:
        """Close the updates of a finished attempt once no thread reads them."""
        async with self._spool_in_use:
            # In a thread: to free a memory file of a model takes longer than the loop may stand.
            await trio.to_thread.run_sync(_close_all, spooled)

    async def _finish_run(self, action: outer_round.FinishRun) -> None:
        run = self.store.run
        if run is None:
            return
        end = (action.completed, action.code, action.reason)
        await self._record(partial(self.store.finish_run, run, *end))
        self._publish(
            RunEnded(
                run.run,
                run.requested,
                run.done,
                action.completed,
                self.state.ground.digest,
                trio.current_time() - self.run_since,
                action.code,
                action.reason,
            )
        )
        self.journal.note(
            "run.ended", run=run.run, completed=action.completed, reason=action.reason
        )

    async def _record(self, write: Callable[[], None]) -> None:
        """Write down how something ended; a disk that refuses is asked again until it does not.

        Nothing waits for that.  What this process cannot write down in its life is found again at
        the next start: an attempt that is open then is aborted, and a run that is not ended goes
        on.
        """
        try:
            await trio.to_thread.run_sync(write)
        except StorageError as error:
            self.log.warning("ledger.refused", reason=error.message)
            self._unrecorded.append(write)
            if len(self._unrecorded) == 1:
                self._nursery.start_soon(self._record_later)

    async def _record_later(self) -> None:
        while self._unrecorded:
            await trio.sleep(RECORD_AGAIN_S)
            try:
                await trio.to_thread.run_sync(self._unrecorded[0])
            except StorageError:
                continue
            self._unrecorded.popleft()

    def _publish(self, news: News) -> None:
        self.news.append((self.published, news))
        self.published += 1
        self.announce_change()

    def news_since(self, number: int) -> list[News]:
        """What was published from ``number`` on, as far as it is remembered; see ``published``."""
        return [news for at, news in self.news if at >= number]


def _close_all(spooled: list[SpoolFile]) -> None:
    for update in spooled:
        update.close()
