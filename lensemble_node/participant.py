"""The rim of ``participation``: links, signatures, timers, the worker, the files of a membership.

``Member`` is one node from start to finish.  It holds no tensor: it passes digests, slots and
extents between the coordinator and the worker.
"""

import os
from collections import Counter
from functools import partial
from typing import Literal, TypeAlias

import trio

from lensemble.actor import Timers, run_machine
from lensemble.edge.arena import Arena
from lensemble.errors import (
    LensembleError,
    SecureAggregationError,
    StorageError,
    WorkerFault,
)
from lensemble.identity import Identity
from lensemble.ids import EdgeId, NodeId
from lensemble.logs import logger
from lensemble.machine import ArmTimer, CancelTimer
from lensemble.ticket import Membership
from lensemble.transport.driver import Driver, LinkFacts
from lensemble.transport.ends import ArenaLeases
from lensemble.version import BUILD
from lensemble.wire import circle, codec, messages, stages
from lensemble_node import (
    attempt,
    bursts,
    detector,
    egress,
    home,
    participation,
    provision,
    signals,
    stage_host,
    stage_process,
    supervisor,
)
from lensemble_node.bursts import Bursts
from lensemble_node.call import Call
from lensemble_node.config import NodeConfig
from lensemble_node.detector import NodeDetector
from lensemble_node.masking import Secrets
from lensemble_node.participation import Assigned, Quit
from lensemble_node.peer_links import PeerLinks, reachable
from lensemble_node.provisioner import Provisioner
from lensemble_node.quiet import Quiet
from lensemble_node.stage_host import StageHost
from lensemble_node.stage_process import Engine
from lensemble_node.supervisor import Supervisor
from lensemble_node.terms import Terms

INBOX_EVENTS = 1024
MAX_WAITING_FOR_EDGES = 256
THREAD_ABOVE = 16
"""Participants; keys and shares of more are checked and made outside of the event loop."""

JITTER = 0.5
"""The largest part of a redial delay that chance takes away."""


def chance() -> float:
    """Drawn from [0, 1)."""
    return int.from_bytes(os.urandom(4)) / (1 << 32)


class Member:
    """A node's membership, its worker and its edges.

    Args:
        config: the node's own terms.
        who: its identity.
        driver: a running driver for that identity.
        belongs: whom to join where neither configuration nor an earlier ticket says so.
        engine: what computes stages; by default what is installed.
    """

    def __init__(
        self,
        config: NodeConfig,
        who: Identity,
        driver: Driver,
        belongs: Membership | None = None,
        engine: Engine | None = None,
    ) -> None:
        self.config = config
        self.who = who
        self.driver = driver
        self.refused: Counter[str] = Counter()
        self.changed = trio.Event()
        self.finished = trio.Event()
        self.since: dict[str, float] = {}
        self.redial_at: float | None = None
        self.contributions = 0
        self.last_contribution: int | None = None
        self.progress: messages.Progress | None = None
        self.budget: signals.Budget | None = None
        self.clip_factor: float | None = None
        self.field_use: float | None = None
        self.drift: signals.Drift | None = None
        """Of the last release; never sent."""
        self.state_by: Literal["", "nothing", "sum", "state"] = ""
        self.releases = self.clipped = 0
        arena = Arena.create(config.edges.arena_bytes)
        worker = config.worker
        launch = supervisor.Launch(
            arena.fd,
            arena.nbytes,
            threads=worker.threads,
            memory_bytes=worker.memory_bytes,
            niceness=worker.niceness,
            backoff_s=worker.restart_backoff_s,
            backoff_max_s=worker.restart_backoff_max_s,
            processes=0 if worker.processes == "auto" else worker.processes,
            group_timeout_s=worker.group_timeout_s,
            prefix=worker.command_prefix,
        )
        self.supervisor = Supervisor(launch, self._hear_worker)
        leases = ArenaLeases(arena)
        self.provisioner = Provisioner(driver, leases, self.supervisor, self._hear)
        self.links = PeerLinks(driver, self.refused)
        engine = engine or stage_process.engine(config.inference, config.models_dir)
        ground = stage_host.Ground(
            config, driver, leases, self.links, engine, self.provisioner.edges
        )
        self.stages = StageHost(ground, self._say_of_stages)
        self.others = NodeDetector(
            detector.Ground(config.membership, driver, self.links, self._say_note), self.refused
        )
        self.bursts = Bursts(
            bursts.Ground(
                driver, self.links, self.others.belongs, self._busy, self._edges, self.refused
            ),
            self._say_of_stages,
        )
        self.state = participation.State(
            participation.Me(
                node=who.node,
                name=config.name,
                build=BUILD,
                boot=os.urandom(8).hex(),
                pinned=config.expected_config_hash,
                share_norms=config.share.norms,
                share_plain=config.share.plain,
                task_entry=config.task.entry,
                backoff_s=config.listen.reconnect_backoff_s,
                backoff_max_s=config.listen.reconnect_backoff_max_s,
                start_timeout_s=config.worker.start_timeout_s,
            )
        )
        self.membership = home.membership(config) or belongs
        self._arena = arena
        self._inbox, self._events = trio.open_memory_channel[participation.Event](INBOX_EVENTS)
        self._call: Call | None = None
        self._secrets: Secrets | None = None
        self._log = logger("participant")
        self._quiet = Quiet()
        self._nursery: trio.Nursery
        self._timers: Timers

    # ---- what others ask for ----

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Take part until cancelled; the worker is gone on the way out."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                self._timers = Timers(nursery, self._inbox.send)
                await nursery.start(self.supervisor.run)
                await nursery.start(self.provisioner.run)
                await nursery.start(self.stages.run)
                await nursery.start(self.links.run)
                await nursery.start(self.bursts.run)
                await nursery.start(self.others.run)
                if self.membership is None:
                    self._log.info("node.idle", reason="no coordinator: join with a ticket")
                else:
                    await self._inbox.send(Assigned(_target(self.membership)))
                task_status.started()
                await run_machine(
                    self.state,
                    participation.transition,
                    self._timers.sift(self._events),
                    self._perform,
                    self._moved,
                )
        finally:
            self._arena.close()

    async def assign(self, belongs: Membership) -> None:
        """Belong to another coordinator from now on, durably.

        Raises:
            StorageError: the state directory cannot be written.
        """
        await trio.to_thread.run_sync(home.save_membership, self.config.state_dir, belongs)
        self.membership = belongs
        await self._inbox.send(Assigned(_target(belongs)))

    async def resign(self, reason: str) -> None:
        """Leave the federation and belong to none."""
        await trio.to_thread.run_sync(home.forget_membership, self.config.state_dir)
        self.membership = None
        self.others.leave()
        await self._inbox.send(participation.Dismissed(reason))

    async def leave(self, reason: str) -> None:
        """Say farewell; returns when the link is closed.  Nothing can be asked afterwards."""
        self.others.leave()
        await self._inbox.send(Quit(reason))
        await self.finished.wait()
        if self._call is not None:
            await self._call.over.wait()

    def link_facts(self) -> LinkFacts | None:
        """What is known about the path to the coordinator, while there is a link."""
        link = None if self._call is None else self._call.link
        return None if link is None or link.lost.is_set() else link.facts()

    # ---- what comes in ----

    async def _hear(self, event: participation.Event) -> None:
        await self._inbox.send(event)

    async def _say_of_stages(self, message: stages.StageAnswer | stages.BurstAnswer) -> None:
        await self._hear(participation.StageSaid(message))

    def _busy(self) -> str:
        """Why no link is measured now, as a phrase; empty: nothing is in the way."""
        if self.stages.hosted:
            return "a stage is live on this node"
        now = _attempt(self.state)
        return "" if now is None or isinstance(now, attempt.Idle) else "it is in a round"

    def _edges(self) -> set[EdgeId]:
        return self.stages.edges() | set(self.provisioner.edges())

    def _say_note(self, note: bytes) -> None:
        """Send a note of this member to the coordinator on its control way."""
        joined = self.state.membership
        if isinstance(joined, participation.Joined):
            session = joined.session
            self._say(
                circle.MemberNote(federation=session.federation, epoch=session.epoch, note=note)
            )

    async def _hear_worker(self, report: supervisor.Report) -> None:
        match report:
            case supervisor.Started():
                self.provisioner.feed(provision.WorkerGone("a new worker has started"))
                await self._hear(participation.WorkerStarted())
            case supervisor.Died(fault=fault, restart_s=restart_s):
                self.provisioner.feed(provision.WorkerGone(fault))
                reason = f"{fault}; it starts again in {restart_s:g} s"
                await self._hear(participation.WorkerLost(WorkerFault.code, reason))
            case supervisor.Said(signal=signal):
                await self._route(signal)

    async def _route(self, signal: signals.Event) -> None:
        match signal:
            case signals.Filled() | signals.Consumed():
                self.provisioner.signal(signal)
            case signals.Attached(edge=edge):
                self.provisioner.feed(provision.Attached(EdgeId(edge)))
            case signals.Detached(edge=edge):
                self.provisioner.feed(provision.Detached(EdgeId(edge)))
            case signals.Spoiled(edge=edge, reason=reason):
                refused = f"the worker refused what came on it: {reason}"
                self.provisioner.feed(provision.EndFaulted(EdgeId(edge), refused))
            case _:
                self._account(signal)
                await self._hear(participation.WorkerSaid(signal))

    def _account(self, signal: signals.Event) -> None:
        """Keep what the worker says of the privacy budget, of updates and of what went wrong."""
        match signal:
            case signals.Configured(budget=budget):
                self.budget = budget
            case signals.Trained():
                self._account_release(signal)
            case signals.StateHeld(digest=digest, by=by):
                self.state_by = by
                self._log.info("state.held", by=by, digest=digest)
            case signals.Failed():
                self._account_failure(signal)
            case _:
                return

    def _account_failure(self, signal: signals.Failed) -> None:
        """Also where its attempt is over by then, which nobody withdraws from any more."""
        if self._quiet.may_say("worker", signal.message, trio.current_time()):
            self._log.warning(
                "worker.failed",
                round=signal.round,
                attempt=signal.attempt,
                code=signal.code,
                reason=signal.message,
            )

    def _account_release(self, signal: signals.Trained) -> None:
        self.clip_factor, self.field_use = signal.clip_factor, signal.field_use
        self.drift = signal.drift
        if signal.drift is not None and signal.drift.warning:
            self._log.warning("gauge.not_aligned", round=signal.round, reason=signal.drift.warning)
        if not signal.reused:
            self.releases += 1
            self.clipped += signal.clip_factor is not None and signal.clip_factor < 1.0
        self._log.info(
            "release.made",
            round=signal.round,
            attempt=signal.attempt,
            field_use=signal.field_use,
            reused=signal.reused,
        )
        if (budget := signal.budget) is not None:
            self.budget = budget
            self._log.info(
                "privacy.charged",
                round=signal.round,
                attempt=signal.attempt,
                epsilon=round(budget.spent, 4),
                budget=budget.epsilon,
                rounds_left=budget.rounds_left,
                clip_factor=signal.clip_factor,
                clip_fraction=round(self.clipped / max(1, self.releases), 4),
                reused=signal.reused,
            )

    def _moved(self, state: participation.State) -> None:
        before, self.state = self.state, state
        now = _attempt(state)
        if now is None or not attempt.holds_secrets(now):
            self._secrets = None
        for name, (old, new) in _parts(before, state).items():
            if type(old) is not type(new):
                self.since[name] = trio.current_time()
                if name == "attempt":
                    self.progress = None
                    self._say_where(now)
        self.changed.set()
        self.changed = trio.Event()

    def _say_where(self, now: attempt.State | None) -> None:
        """One line for each step of a round that an operator may want to see."""
        match now:
            case attempt.Training() | attempt.Sending() | attempt.Sent() | attempt.Answered():
                self._log.info(
                    f"round.{type(now).__name__.lower()}",
                    round=now.open.round,
                    attempt=now.open.attempt,
                )
            case attempt.Withdrawn(code=code, reason=reason, remediation=remediation):
                self._log.warning(
                    "round.withdrawn",
                    round=now.open.round,
                    attempt=now.open.attempt,
                    code=code,
                    reason=reason,
                    remediation=remediation,
                )
            case _:
                return

    # ---- from action to IO ----

    async def _perform(self, action: participation.Action) -> None:
        match action:
            case participation.Dial():
                self._dial(action)
            case participation.HangUp(call=call, reason=reason):
                self._hang_up(call, reason)
            case participation.SayJoin(target=target):
                self._say(self._join(target))
            case participation.Say(message=message):
                self._say(message)
            case participation.Commit() | participation.Announce() | participation.OnSecrets():
                self._promise(action)
            case participation.Redial():
                self._redial(action)
            case participation.Remember(target=target):
                await self._remember(target)
            case _:
                self._perform_here(action)

    def _perform_here(self, action: participation.Local) -> None:
        match action:
            case participation.RunWorker():
                self._run_worker(action)
            case participation.Order(command=command):
                self._order(command)
            case participation.EndWorker(reason=reason):
                self.supervisor.end(reason)
            case participation.Count(reason=reason, detail=detail):
                self._count(reason, detail)
            case ArmTimer():
                self._timers.arm(action)
            case CancelTimer():
                self._timers.cancel(action)
            case participation.Finish():
                self.finished.set()
            case _:
                self._on_edges(action)

    def _on_edges(
        self,
        action: participation.OnEdges
        | participation.OfferStages
        | participation.Stage
        | participation.Introduce,
    ) -> None:
        match action:
            case participation.Introduce(coordinator=coordinator, order=order):
                self.others.take(coordinator, order)
            case participation.OfferStages(session=session, coordinator=coordinator):
                facts = self.link_facts()
                path = "" if facts is None else facts.remote
                self.stages.begin(
                    stage_host.Session(session.federation, session.epoch, coordinator, path)
                )
            case participation.Stage(order=order):
                if isinstance(order, stages.BurstOrder):
                    self.bursts.take(order)
                else:
                    self.stages.carry_out(order)
            case _:
                self._provision(action)

    def _provision(self, action: participation.OnEdges) -> None:
        asked = isinstance(action, participation.Provide | participation.Withdraw)
        if asked and self.provisioner.backlog() > MAX_WAITING_FOR_EDGES:
            self._count("edges_too_fast", "")
            self._hang_up(self._call.number if self._call else 0, "edges are asked for too fast")
            return
        match action:
            case participation.Provide(pair=pair) if self.stages.edges() & set(pair.edges):
                # Two ends of one id could not be told apart; no honest coordinator asks for it.
                self._count("edge_in_use", f"{pair.edges} are edges of a stage too")
                self._hang_up(self._call.number if self._call else 0, "an edge is in use already")
            case participation.Provide(pair=pair):
                self.provisioner.feed(provision.Provide(pair))
            case participation.Withdraw(edges=edges):
                self.provisioner.feed(provision.Withdraw(tuple(EdgeId(edge) for edge in edges)))
            case participation.DropEdges(reason=reason):
                self.provisioner.feed(provision.Dropped(reason))
            case participation.ForgetEdges():
                self.provisioner.feed(provision.LinkGone())
                self.stages.end()
                self.bursts.end()

    # ---- the link ----

    def _dial(self, action: participation.Dial) -> None:
        self.redial_at = None
        self._call = Call(action.call, action.target, self.driver, self._hear)
        self._nursery.start_soon(self._call.attend)

    def _say(self, message: messages.FromNode) -> None:
        payload = egress.permit(message)
        if isinstance(message, messages.Progress):
            self.progress = message
        if self._call is not None:
            self._call.say(type(message).__name__, payload)

    def _hang_up(self, number: int, reason: str) -> None:
        if self._call is not None and self._call.number == number:
            self._call.hang_up(reason)

    def _redial(self, action: participation.Redial) -> None:
        delay = action.delay_s * (1 - JITTER * chance())
        self.redial_at = trio.current_time() + delay
        self._timers.arm(ArmTimer(participation.REDIAL, delay))
        where = ", ".join(action.target.addresses)
        if self._quiet.may_say("dial", f"{where}: {action.cause}", trio.current_time()):
            self._log.warning(
                "coordinator.retry",
                coordinator=action.target.node,
                address=where,
                reason=action.cause,
                next_s=round(delay, 2),
                refused=action.refused,
            )

    async def _remember(self, target: participation.Target) -> None:
        belongs = Membership(target.node, target.addresses, target.federation)
        if belongs != self.membership:
            save = partial(home.save_membership, self.config.state_dir, belongs)
            try:
                await trio.to_thread.run_sync(save)
                self.membership = belongs
            except StorageError as error:
                # The file holds the invite still, which is as good; the next welcome tries again.
                self._log.warning("membership.refused", reason=error.message)
        self._log.info("coordinator.joined", coordinator=target.node, federation=target.federation)

    # ---- messages ----

    def _join(self, target: participation.Target) -> messages.Join:
        me, belongs = self.state.me, self.membership
        invite = b"" if belongs is None or belongs.coordinator != target.node else belongs.invite
        return messages.Join(
            speaks=codec.SPEAKS,
            build=me.build,
            name=me.name,
            boot=me.boot,
            federation=target.federation,
            invite=invite,
            gossips=True,
            addresses=self._addresses() if self.others.callable else (),
        )

    def _addresses(self) -> tuple[str, ...]:
        """Where other nodes may call this one, as far as the way to the coordinator tells."""
        facts = self.link_facts()
        toward = "" if facts is None else facts.remote
        own = self.config.listen.advertise or reachable(self.driver.addresses(), toward)
        return own[: circle.MAX_ADDRESSES]

    def _promise(
        self, action: participation.Commit | participation.Announce | participation.OnSecrets
    ) -> None:
        match action:
            case participation.Commit():
                self._commit(action)
            case participation.Announce():
                self._announce(action)
            case participation.OnSecrets():
                self._use_secrets(action)

    def _commit(self, action: participation.Commit) -> None:
        session, commit = action.session, action.commit
        asked = commit.open
        least = session.terms.cohort
        self._secrets = Secrets(self.who.node, asked, least) if commit.masked else None
        keys = None if self._secrets is None else self._secrets.keys
        payload = messages.commitment_payload(
            session.federation,
            asked.round,
            asked.attempt,
            commit.root,
            asked.config_hash,
            keys=keys,
        )
        self._say(
            messages.Commitment(
                federation=session.federation,
                epoch=session.epoch,
                round=asked.round,
                attempt=asked.attempt,
                dataset_root=commit.root,
                episodes=commit.episodes,
                holds_bytes=commit.held.holds_bytes,
                follows=commit.held.follows,
                holds_of_sum=commit.held.holds_of_sum,
                keys=keys,
                signature=self.who.sign(payload),
            )
        )

    def _announce(self, action: participation.Announce) -> None:
        session, announce = action.session, action.announce
        asked, trained = announce.open, announce.trained
        payload = messages.update_payload(
            session.federation, asked.round, asked.attempt, announce.root, announce.digest
        )
        signature = self.who.sign(payload)
        budget = trained.budget
        # Nothing that was measured before the noise leaves where a budget is kept.
        shares = self.state.me.share_norms and budget is None
        self._say(
            messages.Update(
                federation=session.federation,
                epoch=session.epoch,
                round=asked.round,
                attempt=asked.attempt,
                digest=announce.digest,
                nbytes=trained.nbytes,
                dataset_root=announce.root,
                reused=trained.reused,
                l2_norm=trained.l2_norm if shares else None,
                loss=trained.loss_last if shares else None,
                epsilon=None if budget is None else budget.spent,
                signature=signature,
            )
        )
        self._order(
            signals.Send(
                edge=announce.edge,
                round=asked.round,
                attempt=asked.attempt,
                signature=signature.hex(),
            )
        )

    # ---- masks ----

    def _use_secrets(self, action: participation.OnSecrets) -> None:
        wanted, secrets = action.action, self._secrets
        if secrets is None:
            raise SecureAggregationError(f"no secrets are held for {type(wanted).__name__}")
        match wanted:
            case attempt.MaskUpdate(opened):
                mask = signals.Mask(
                    round=opened.round, attempt=opened.attempt, terms=secrets.terms()
                )
                self._order(mask)
            case attempt.Answer():
                self._answer(action.session, secrets)
            case attempt.Deal() | attempt.OpenShares() | attempt.Decide():
                self._nursery.start_soon(self._consider, secrets, wanted)

    async def _consider(self, secrets: Secrets, wanted: "Considered") -> None:
        """Do what takes a while, or may be refused, and report how it went."""
        work = partial(_outcome, secrets, wanted)
        large = _size(wanted) > THREAD_ABOVE
        signal = await trio.to_thread.run_sync(work) if large else work()
        # Else the attempt is over, and its secrets are forgotten.
        if secrets is self._secrets:
            await self._hear(participation.SecretsSaid(signal))

    def _answer(self, session: participation.Session, secrets: Secrets) -> None:
        shares, payload = secrets.answer()
        self._secrets = None
        self._say(
            messages.UnmaskAnswer(
                federation=session.federation,
                epoch=session.epoch,
                round=secrets.context.round,
                attempt=secrets.context.attempt,
                shares=shares,
                signature=self.who.sign(payload),
            )
        )

    # ---- the worker ----

    def _run_worker(self, action: participation.RunWorker) -> None:
        self.supervisor.configure(configuration(self.config, action.terms, self.who.node))

    def _order(self, command: signals.Command) -> None:
        if isinstance(command, signals.Close) and command.adopt:
            if command.round != self.last_contribution:
                self.contributions += 1
            self.last_contribution = command.round
        self.supervisor.command(command)

    def _count(self, reason: str, detail: str) -> None:
        self.refused[reason] += 1
        if self._quiet.may_say(f"refused: {reason}", reason, trio.current_time()):
            self._log.warning("message.refused", code=reason, reason=detail)


def configuration(config: NodeConfig, terms: Terms, node: NodeId) -> signals.Configure:
    """What a worker of ``node`` needs to know to work for ``terms``."""
    data = config.data
    return signals.Configure(
        workload=terms.workload,
        federation=terms.federation,
        node=node,
        state_dir=str(config.state_dir),
        path=str(data.path),
        format=data.format,
        observation_keys=data.observation_keys,
        image_keys=data.image_keys,
        action_keys=data.action_keys,
        embodiment=data.embodiment,
        probe="" if data.probe is None else str(data.probe),
        threads=config.worker.threads,
        device=config.worker.device,
        task_entry=config.task.entry,
        task_folder="" if config.task.folder is None else str(config.task.folder),
        masked=terms.masked,
    )


Considered: TypeAlias = attempt.Deal | attempt.OpenShares | attempt.Decide


def _size(wanted: Considered) -> int:
    match wanted:
        case attempt.Deal(roster=roster):
            return roster.count
        case attempt.OpenShares(envelopes=envelopes):
            return len(envelopes)
        case attempt.Decide():
            return 0


def _outcome(secrets: Secrets, wanted: Considered) -> attempt.FromSecrets:
    at = wanted.open.round, wanted.open.attempt
    try:
        match wanted:
            case attempt.Deal(roster=roster):
                dealing = secrets.deal(roster)
                return attempt.SharesDealt(*at, dealing.commitments, dealing.sealed)
            case attempt.OpenShares(envelopes=envelopes):
                secrets.open(envelopes)
                return attempt.SharesOpened(*at)
            case attempt.Decide(survivors=survivors):
                secrets.decide(survivors)
                return attempt.Consented(*at)
    except LensembleError as error:
        return attempt.MasksRefused(*at, error.message, error.remediation)


def _target(belongs: Membership) -> participation.Target:
    return participation.Target(belongs.coordinator, belongs.addresses, belongs.federation)


def _parts(
    before: participation.State, after: participation.State
) -> dict[str, tuple[object, object]]:
    """What status says "since" of, before and after."""
    return {
        "membership": (before.membership, after.membership),
        "worker": (before.worker, after.worker),
        "attempt": (_attempt(before), _attempt(after)),
    }


def _attempt(state: participation.State) -> attempt.State | None:
    joined = state.membership
    return joined.attempt if isinstance(joined, participation.Joined) else None
