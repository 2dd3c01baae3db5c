"""The coordinator in the world: the real round machine, and a rim that performs its actions.

What a session checks, when edges are made and broken, what is durable before what is said: all of
that follows ``session``, ``reception``, ``coordinator`` and ``store`` of the daemon.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from lensemble import seeds
from lensemble.errors import LensembleError, Response, StorageError
from lensemble.ids import NodeId
from lensemble.machine import ArmTimer, CancelTimer, TimerExpired
from lensemble.wire import codec, messages
from lensemble_coord import roster
from lensemble_coord.training import outer_round as r
from lensemble_coord.training import record as records
from lensemble_node.worker.state_store import Goal
from tests.coord.round_play import RoundAudit, at_rest
from tests.sim.mask_side import At, digest_of
from tests.sim.session import ECHOES, SimSession, Told
from tests.sim.states import stepped
from tests.sim.terms import CANONICAL, CONFIG_HASH, FEDERATION, LAYOUT, WORKLOAD
from tests.sim.world import Actor, Host, Link, Pause, Timers

if TYPE_CHECKING:
    from tests.sim.federation import Federation

MAX_PARTICIPANTS = 64
RECORD_AGAIN_S = 5.0


class CoordinatorHost(Host):
    def __init__(self, federation: "Federation", rules: r.Rules) -> None:
        super().__init__(federation.world, "coord")
        self.federation = federation
        self.trouble = federation.trouble
        self.rules = rules
        self.books = federation.parts.books(self.world.random)
        self.wall_offset_s = 0.0
        self.told: defaultdict[NodeId, deque[Told]] = defaultdict(lambda: deque(maxlen=ECHOES))
        """What each node was told last, in whatever life and session."""
        self.provisioned: dict[int, int] = {}
        """The epoch of the session that each edge was provisioned in."""
        self.requests: dict[At, tuple[NodeId, ...]] = {}
        """Survivors of each attempt whose unmasking was asked for, in whatever life."""

    # ---- life ----

    def start(self) -> None:
        self.books.open()
        self.federation.checks.coordinator_starts(self.books)
        position = self.books.position
        ground = r.Ground(self.rules, position.round, position.attempt, position.digest)
        self.audit = RoundAudit(r.Closed(ground), self.federation.parts.round)
        self.audit.last_opened = max(self.books.begun, default=(-1, -1))
        self.rounds = Actor(self, self._step, self.audit.state, self.perform, self.moved)
        self.timers = Timers(self.rounds, TimerExpired)
        self.sessions: dict[NodeId, SimSession] = {}
        self.ending: set[NodeId] = set()
        self.waiting: dict[NodeId, list[tuple[Link, messages.Join]]] = {}
        self.by_link: dict[Link, SimSession] = {}
        self.epochs = self.edge_numbers = 0
        started = int((1.8e9 + self.world.now + self.wall_offset_s) * 1e6)
        self.epochs, self.edge_numbers = started, started << 8
        self.spent_before = (position.round, position.attempt)
        self.opening: messages.RoundOpen | None = None
        self.origin = self.books.origin()
        self.keys: dict[NodeId, messages.RosterEntry] = {}
        self.roster: tuple[NodeId, ...] = ()
        left = self.books.unfinished_rounds
        if left:
            self.rounds.post(r.RoundsAsked(left))

    def stopped(self, *, power: bool) -> None:
        if power:
            self.books.disk.lose_power()

    def ask(self, rounds: int) -> None:
        """As an operator does; refused while a run goes on."""
        if not self.up or self.books.run is not None:
            return

        def write() -> None:
            if self.books.run is not None:
                return
            try:
                self.books.begin_run(rounds)
            except StorageError:
                self.world.note(self, "cannot write", "a run")
            else:
                self.rounds.post(r.RoundsAsked(rounds))

        self.world.after(self, 0.02 * self.books.disk.slow, write)

    def abort(self) -> None:
        if self.up:
            self.rounds.post(r.AbortAsked("an operator said so"))

    @property
    def state(self) -> r.State:
        return self.audit.state

    @property
    def resting(self) -> bool:
        if not self.up or self.books.run is not None or not at_rest(self.state):
            return False
        return all(run.outcome for run in self.books.ledger.runs)

    def wall_s(self) -> float:
        return 1.8e9 + self.world.now + self.wall_offset_s

    # ---- links ----

    def heard(self, link: Link, lane: Hashable, payload: Any) -> None:
        session = self.by_link.get(link)
        if isinstance(lane, tuple):
            if session is not None:
                session.heard_stream(lane, payload)
            return
        message = codec.decode_from_node(payload)
        if session is not None:
            session.heard(message)
        elif isinstance(message, messages.Join):
            self._greet(link, message)

    def lost(self, link: Link) -> None:
        session = self.by_link.get(link)
        if session is not None:
            session.end("its link is gone")

    def _greet(self, link: Link, join: messages.Join) -> None:
        node = self.federation.node_at(link.other(self)).node
        known = roster.Known(
            federation=FEDERATION,
            allowed=frozenset(self.federation.allowed),
            admitted_before=node in self.books.roster,
            invites=True,
            invitation=self.books.invitation(join.invite),
            here=frozenset(self.sessions),
            max_participants=MAX_PARTICIPANTS,
            now=self.wall_s(),
        )
        decision = roster.decide(node, join, known)
        if isinstance(decision, roster.Denied):
            self._turn_away(link, decision.code, decision.reason, final=decision.final)
            return

        def write() -> None:
            try:
                self.books.admit(node, join.invite if decision.by == "invite" else b"")
            except StorageError as error:
                self._turn_away(link, error.code, error.message, final=False)
                return
            if link.alive:
                self._admit(link, node, join)

        self.world.after(self, 0.01 * self.books.disk.slow, write)

    def _turn_away(self, link: Link, code: str, reason: str, *, final: bool) -> None:
        refused = messages.Refused(code=code, reason=reason[:500], final=final)
        self.world.send(link, self, "ctl", codec.encode(refused), about=refused)
        self.world.hang_up(link, self)

    def _admit(self, link: Link, node: NodeId, join: messages.Join) -> None:
        if node in self.sessions or node in self.ending:
            # Only once the older session of this identity has gone.
            self.waiting.setdefault(node, []).append((link, join))
            return
        tail = self.books.tail()

        def read() -> None:
            """What was read may be old by now: whoever is told of an end was welcomed before."""
            if not link.alive:
                return
            if node in self.sessions or tail.round + 1 < self.state.ground.round:
                self._admit(link, node, join)
            else:
                self._welcome(link, node, tail)

        self.world.after(self, 0.1 * self.world.random.random() * self.books.disk.slow, read)

    def _welcome(self, link: Link, node: NodeId, tail: records.ContributionRecord) -> None:
        self.epochs += 1
        session = self.federation.parts.session(self, link, node, self.epochs)
        self.sessions[node] = self.by_link[link] = session
        session.tell(
            messages.Welcome(
                federation=FEDERATION,
                epoch=session.epoch,
                build="sim",
                coordinator="coord",
                workload=CANONICAL,
                config_hash=CONFIG_HASH,
                layout_digest=LAYOUT.digest,
                aggregation="masked" if self.rules.masked else "plain",
                last=messages.LastRecord(
                    round=tail.round,
                    digest=tail.next_digest,
                    contributors=tuple(each.node for each in tail.contributors),
                ),
            )
        )
        session.keep_edges()

    def session_ended(self, session: SimSession, reason: str) -> None:
        node = session.node
        del self.by_link[session.link]
        del self.sessions[node]
        self.ending.add(node)
        self.world.hang_up(session.link, self)
        self.rounds.post(r.MemberLost(node, "link_lost", reason))
        self.ending.discard(node)
        for link, join in self.waiting.pop(node, []):
            if link.alive:
                self._admit(link, node, join)

    def present(self, nodes: tuple[NodeId, ...]) -> list[SimSession]:
        return [self.sessions[node] for node in nodes if node in self.sessions]

    # ---- the machine ----

    def _step(self, _: r.State, event: r.Event) -> tuple[r.State, tuple[r.Action, ...]]:
        actions = self.audit.step(event)
        return self.audit.state, actions

    def moved(self, before: r.State, event: r.Event, actions: tuple[r.Action, ...]) -> None:
        """The machine has taken ``event``."""
        self.world.note(self, "hears", event)
        if type(before) is not type(self.state):
            self.world.note(self, f"is {r.public_state(self.state)}:", r.waiting(self.state).reason)
        for action in actions:
            self.world.note(self, "does", action)
        self.federation.checks.round_moved(self, before, event, actions)

    @property
    def fence(self) -> dict[str, Any]:
        ground = self.state.ground
        return {
            "federation": FEDERATION,
            "epoch": 0,
            "round": ground.round,
            "attempt": ground.attempt,
        }

    def perform(self, action: r.Action) -> Pause | None:
        match action:
            case ArmTimer(timer=timer, seconds=seconds):
                self.timers.arm(timer, seconds)
            case CancelTimer(timer=timer):
                self.timers.cancel(timer)
            case r.OpenRound():
                return self._open(action)
            case r.AnnounceClose():
                self._announce_close(action)
            case r.AnnounceAbort():
                return self._announce_abort(action)
            case r.FinishRun():
                return self._finish(action)
            case r.DeriveSum() | r.Diagnose() | r.Commit():
                self._work(action)
            case _:
                self._address(action)
        return None

    def _address(self, action: r.Action) -> None:  # noqa: C901 - one arm an action
        match action:
            case r.AskAlso(node=node):
                self._tell_opening((node,))
            case r.OfferState(node=node, held=held):
                for session in self.present((node,)):
                    self._remember_keys(session)
                    session.offer_state(held)
            case r.SendRoster():
                self._send_roster(action)
            case r.BeginCollect(nodes=nodes):
                self._begin_collect(nodes)
            case r.RequestUnmask(survivors=survivors):
                ground = self.state.ground
                self.spent_before = (ground.round, ground.attempt + 1)
                self.requests[ground.round, ground.attempt] = survivors
                self.tell_all(survivors, messages.UnmaskRequest(**self.fence, survivors=survivors))
                if self.federation.happens("asks_twice"):
                    # A coordinator that is after one update asks for a sum without it as well.
                    fewer = self.world.random.sample(survivors, len(survivors) - 1)
                    other = tuple(sorted(fewer))
                    self.tell_all(other, messages.UnmaskRequest(**self.fence, survivors=other))
                self._may_die("dies_masking", 0.1, 0.5, 2.0)
            case r.Refuse(node=node, code=code, reason=reason):
                for session in self.present((node,)):
                    session.refuse(code, reason)
            case r.DropUpdate(node=node):
                self.books.spool.pop(node, None)
            case _:
                pass

    def tell_all(self, nodes: tuple[NodeId, ...], message: messages.FromCoordinator) -> None:
        for session in self.present(nodes):
            session.tell(msgspec.structs.replace(message, epoch=session.epoch))

    # ---- rounds ----

    def _open(self, action: r.OpenRound) -> Pause:
        def write() -> None:
            try:
                self.books.begin_attempt(action.round, action.attempt)
            except LensembleError as error:
                self._failed((action.round, action.attempt), error)
                return
            spent = self.spent_before
            self.origin = self.books.origin()
            self.opening = messages.RoundOpen(
                **self.fence,
                prior_digest=action.digest,
                prior_momentum=self.origin.momentum,
                steps=self.origin.steps,
                layout_digest=LAYOUT.digest,
                config_hash=CONFIG_HASH,
                roster_digest=CONFIG_HASH,
                sketch_seed=self.federation.sketch(action.round),
                inner_steps=WORKLOAD.inner.steps,
                global_step=action.round * WORKLOAD.inner.steps,
                state_bytes=self.origin.nbytes,
                field=messages.FieldParams(k=WORKLOAD.field.k, n_max=WORKLOAD.field.n_max),
                spent_before=spent[1] if spent[0] == action.round else 0,
                answer_within_s=self.rules.open_timeout_s,
            )
            self._tell_opening(action.nodes)

        return self._disk_time(), write

    def _disk_time(self) -> float:
        return self.world.random.random() * 0.02 * self.books.disk.slow

    def _tell_opening(self, nodes: tuple[NodeId, ...]) -> None:
        if self.opening is not None:
            self.tell_all(nodes, self.opening)

    def _remember_keys(self, session: SimSession) -> None:
        said = session.commitment
        if said is not None and said.keys is not None:
            self.keys[session.node] = messages.RosterEntry(
                node=session.node,
                dataset_root=said.dataset_root,
                keys=said.keys,
                signature=said.signature,
            )

    def _send_roster(self, action: r.SendRoster) -> None:
        at = (self.state.ground.round, self.state.ground.attempt)
        members = tuple(self.keys[each.node] for each in action.bound)

        def built() -> None:
            ground = self.state.ground
            if at != (ground.round, ground.attempt) or not isinstance(self.state, r.Sharing):
                return
            self.roster = tuple(each.node for each in members)
            rows = messages.rows_of(members)
            told = messages.Roster(**self.fence, rows=rows, threshold=action.threshold)
            self.tell_all(self.roster, told)
            self._may_die("dies_masking", 0.1, 0.5, 2.0)

        self.world.after(self, self.world.random.random() * 0.05, built)

    def _begin_collect(self, nodes: tuple[NodeId, ...]) -> None:
        for session in self.present(nodes):
            envelopes = tuple(
                messages.Envelope(dealer=node, sealed=b"x" * 92, commitments=b"c" * 64)
                for node in nodes
                if node != session.node and self.rules.masked
            )
            session.tell(
                messages.Collect(
                    **{**self.fence, "epoch": session.epoch},
                    roster=nodes,
                    send_within_s=self.rules.collect_timeout_s,
                    envelopes=envelopes,
                )
            )

    def _may_die(self, trouble: str, *within_s: float) -> None:
        """Not at once: some of what it has just said may still get through."""
        if self.federation.happens(trouble):
            when = self.world.random.uniform(0.0, self.world.random.choice(within_s))
            self.world.after(self, when, lambda: self.federation.restart(self, 5.0))

    def expects(self, node: NodeId, at: At) -> bool:
        state, ground = self.state, self.state.ground
        if at != (ground.round, ground.attempt) or not isinstance(state, r.Collecting):
            return False
        return node in r.outstanding(state)

    # ---- our own work ----

    def _work(self, action: r.DeriveSum | r.Diagnose | r.Commit) -> None:
        """It takes a moment, and may fail or be cut short by a crash at any point."""
        at = (self.state.ground.round, self.state.ground.attempt)
        if isinstance(action, r.DeriveSum):
            for each in action.contributors:
                verified = (at, each.digest)
                assert self.books.spool[each.node] == verified, "a summand is not the verified one"
        pause = self.world.random.uniform(0.01, 0.5) * self.books.disk.slow
        steps: dict[type, Callable[..., r.Event]] = {
            r.DeriveSum: self._derive,
            r.Diagnose: lambda _, at: r.Diagnosed(*at),
            r.Commit: self._commit,
        }

        def done() -> None:
            try:
                if self.federation.happens("step_fails"):
                    raise StorageError("the disk is full")
                event = steps[type(action)](action, at)
            except LensembleError as error:
                self._failed(at, error)
                return
            # Done and durable; a crash may come before the machine hears of it.
            self.world.after(self, 0.02, partial(self.rounds.feed, event))

        self.world.after(self, pause, done)

    def _failed(self, at: At, error: LensembleError) -> None:
        response = Response.STOP if error.response is Response.REFUSE else error.response
        self.rounds.post(r.StepFailed(*at, error.code, error.message, response))

    def _derive(self, action: r.DeriveSum, at: At) -> r.Event:
        field_sum = digest_of(sorted(c.digest for c in action.contributors))
        self.books.disk.put(("sum", field_sum), True)
        return r.SumDerived(*at, field_sum)

    def _commit(self, action: r.Commit, at: At) -> r.Event:
        tail = self.books.tail()
        count = len(action.contributors)
        before = Goal(tail.next_digest, tail.momentum_digest)
        digest, momentum = stepped(before, action.field_sum, count)
        self.books.disk.put(("weights", digest), True)
        record = records.ContributionRecord(
            federation=FEDERATION,
            round=at[0],
            attempt=at[1],
            contributors=tuple(
                records.Contributor(
                    node=each.node,
                    dataset_root=each.dataset_root,
                    update_digest=each.digest,
                    commitment_signature=each.commitment_signature.hex(),
                    update_signature=each.update_signature.hex(),
                )
                for each in action.contributors
            ),
            c_t=count,
            prior_digest=tail.next_digest,
            next_digest=digest,
            prior_momentum_digest=tail.momentum_digest,
            momentum_digest=momentum,
            field_sum_digest=action.field_sum,
            config_hash=CONFIG_HASH,
            layout_digest=LAYOUT.digest,
            sketch_seed=seeds.sketch(WORKLOAD.root_seed, at[0]),
            prev_record_hash=records.record_hash(tail),
        )
        self.world.note(self, "appends", f"record of round {at[0]} attempt {at[1]}")
        self.books.append(record)
        self.federation.checks.appended(self, record)
        self._may_die("dies_committing", 0.04)
        return r.Advanced(*at, digest)

    # ---- ends ----

    def _forget_attempt(self, at: At) -> None:
        self.books.spool.clear()
        self.opening = None
        self.keys, self.roster = {}, ()
        for session in tuple(self.sessions.values()):
            session.round_ended(at)

    def _announce_close(self, action: r.AnnounceClose) -> None:
        at = (action.round, action.attempt)
        self._forget_attempt(at)
        close = messages.RoundClose(
            **{**self.fence, "round": at[0], "attempt": at[1]},
            outcome="closed",
            digest=action.digest,
            contributors=action.contributors,
        )
        self.tell_all(tuple(self.sessions), close)

    def _announce_abort(self, action: r.AnnounceAbort) -> Pause:
        at = (action.round, action.attempt)

        def write() -> None:
            try:
                self.books.abort_attempt(at)
            except StorageError:
                self.world.note(self, "cannot write", "the end of an attempt")
            self._forget_attempt(at)
            close = messages.RoundClose(
                **{**self.fence, "round": at[0], "attempt": at[1]},
                outcome="aborted",
                digest=action.digest,
                code=action.code,
                reason=action.reason[:500],
                retries=action.retries,
            )
            self.tell_all(tuple(self.sessions), close)

        return self._disk_time(), write

    def _finish(self, action: r.FinishRun) -> Pause:
        run, self.books.run = self.books.run, None

        def write() -> None:
            if run is None:
                return
            try:
                self.books.finish_run(run, action)
            except StorageError:
                # It is tried until it is written, or another run has begun.
                self.world.note(self, "cannot write", "the end of a run")
                self.world.after(self, RECORD_AGAIN_S, write)

        return self._disk_time(), write
