"""A node in the world: its real machines, and a rim that performs their actions on simulated parts.

``participation`` with ``attempt``, and ``provision``, run as they do in the daemon; worker, disk,
arena, edges and links are the world's.  What a node promises is checked here as it is done.
"""

from collections import deque
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

from lensemble.errors import SecureAggregationError, StorageError, WorkerFault
from lensemble.ids import Digest, EdgeId, NodeId, SlotIndex
from lensemble.machine import ArmTimer, CancelTimer, TimerExpired
from lensemble.wire import codec, messages
from lensemble_node import attempt, egress, participation, provision, signals
from lensemble_node.participant import JITTER
from lensemble_node.participation import Joined, Target
from lensemble_node.provision import Pair
from lensemble_node.provisioner import DRAIN_TIMEOUT_S
from tests.sim.disk import Disk
from tests.sim.edges import Arena, Region, RxEnd, TxEnd
from tests.sim.mask_side import Answer, At, SimSecrets, digest_of, sign
from tests.sim.terms import COORDINATOR, LAYOUT
from tests.sim.worker import SimWorker
from tests.sim.world import Actor, Host, Link, Pause, Timers, brief

if TYPE_CHECKING:
    from tests.sim.federation import Federation

LATE = {
    messages.Commitment: ("commitments_late", 23.0),
    messages.Shares: ("shares_late", 60.0),
    messages.UnmaskAnswer: ("answers_late", 60.0),
}
"""What may hang on its way, how probably, and for how many seconds."""

ECHOES = 40
"""How many words back an echo goes."""

REPEATABLE = (messages.Commitment, messages.Shares, messages.Update, messages.UnmaskAnswer)
"""What a broken node says twice."""

START_TIMEOUT_S = 60.0
RESTART_S = 1.0
RESTART_MAX_S = 8.0
SETTLED_S = 60.0


class Holding:
    """What one pair has of this process."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.regions: list[Region] = []
        self.rx: RxEnd | None = None
        self.tx: TxEnd | None = None
        self.stopped = False
        self.lease: Callable[[Region], None] | None = None


class NodeHost(Host):
    def __init__(self, federation: "Federation", node: NodeId, invite: bytes) -> None:
        super().__init__(federation.world, f"node-{node[0]}")
        self.federation = federation
        self.trouble = federation.trouble
        self.revealed = federation.revealed
        self.node = node
        self.disk = Disk(self.world.random)
        self.disk.put("membership", Target(COORDINATOR, ("192.0.2.1:7707",)))
        self.invite = invite
        self.budget = 1 << 30
        self.layout_digest = LAYOUT.digest
        self.state_bytes = LAYOUT.nbytes
        self.vectors = 0
        self.secrets_drawn = 0
        self.sent: dict[At, set[Digest]] = {}
        """Digests of the updates that left whole or in part, by attempt."""
        self.made_vectors: set[Digest] = set()
        self.adopted: list[int] = []
        self.committed: dict[At, set[bytes]] = {}
        """Signatures of the commitments that were said, by attempt."""
        self.said: deque[tuple[messages.FromNode, bytes]] = deque(maxlen=ECHOES)
        """What was said last, in whatever life and session."""
        self.reaches_coordinator = True
        self.gone = False

    @property
    def dataset_root(self) -> Digest:
        return digest_of("dataset", self.node)

    def happens(self, trouble: str) -> bool:
        probability: float = getattr(self.trouble, trouble)
        return probability > 0 and self.world.random.random() < probability

    # ---- life ----

    def start(self) -> None:
        me = participation.Me(
            node=self.node,
            name=self.name,
            build="sim",
            boot=f"{self.lives:016x}",
            share_plain=True,
            start_timeout_s=START_TIMEOUT_S,
        )
        self.arena = Arena(self.federation.arena_rings)
        self.worker: SimWorker | None = None
        self.configure: signals.Configure | None = None
        self.failures = 0
        self.worker_since = 0.0
        self.spawning = 0
        self.secrets: SimSecrets | None = None
        self.link: Link | None = None
        self.call = 0
        self.calls: dict[Link, int] = {}
        self.holdings: dict[tuple[EdgeId, EdgeId], Holding] = {}
        self.member = Actor(
            self,
            self.federation.parts.participation,
            participation.State(me),
            self.perform,
            self.moved,
        )
        self.timers = Timers(self.member, TimerExpired)
        self.provisioner = Actor(
            self,
            self.federation.parts.provision,
            provision.Bare(),
            self.provide,
            self.provided,
        )
        self.member.post(participation.Assigned(self.disk.read("membership")))

    def stopped(self, *, power: bool) -> None:
        if self.worker is not None:
            self.worker.die()
        if power:
            self.disk.lose_power()

    def leave(self) -> None:
        """Shut down in order."""
        self.gone = True
        if self.up:
            self.member.post(participation.Quit("the end"))

    # ---- the link ----

    def _dial(self, call: int) -> None:
        self.call, self.link = call, None

        def answered(link: Link | None) -> None:
            if self.call != call:
                if link is not None:
                    self.world.hang_up(link, self)
                return
            self.link = link
            if link is not None:
                self.calls[link] = call
            if link is None:
                self.member.post(participation.LinkDown(call, "nobody answers"))
            else:
                self.member.post(participation.LinkUp(call))

        self.world.dial(self, self.federation.coord, answered)

    def heard(self, link: Link, lane: Hashable, payload: Any) -> None:
        if isinstance(lane, tuple):
            self._heard_stream(link, lane, payload)
        elif link in self.calls:
            # The machine tells the words of an older link from those of this one.
            message = codec.decode_from_coordinator(payload)
            self.member.post(participation.Heard(self.calls[link], message))

    def lost(self, link: Link) -> None:
        self.end_edges(link)
        call = self.calls.pop(link, None)
        if call is not None:
            self.member.post(participation.LinkDown(call, "the link is gone"))
        if link is self.link:
            self.link = None

    def end_edges(self, link: Link) -> None:
        """What was on ``link`` can neither send nor receive."""
        for held in self.holdings.values():
            for end in (held.rx, held.tx):
                if end is not None and end.link is link:
                    end.lose("the link is gone")

    def say(self, message: messages.FromNode) -> None:
        message = self.federation.tampered(self, message)
        payload = egress.permit(message)
        if self.link is not None:
            late, seconds = LATE.get(type(message), ("", 0.0))
            delay = seconds if late and self.happens(late) else 0.0
            again = isinstance(message, REPEATABLE) and self.happens("repeats_itself")
            for _ in range(1 + again):
                self.world.send(self.link, self, "ctl", payload, about=message, delay_s=delay)
            self._echo(message, payload)

    def _echo(self, message: messages.FromNode, payload: bytes) -> None:
        """Something from long ago comes once more: of an older attempt, session or process."""
        if isinstance(message, messages.Join | messages.Leave):
            return
        self.said.append((message, payload))
        if self.link is not None and self.happens("echoes"):
            old, again = self.world.random.choice(self.said)
            self.world.send(self.link, self, "ctl", again, about=f"echo of {brief(old)}")

    # ---- participation ----

    def moved(self, before: Any, event: Any, actions: Any) -> None:
        state = self.member.state
        self.world.note(self, "hears", event)
        joined = state.membership
        now = joined.attempt if isinstance(joined, Joined) else None
        if now is None or not attempt.holds_secrets(now):
            self.secrets = None
        old = getattr(before.membership, "attempt", None)
        if type(before.membership) is not type(joined) or type(old) is not type(now):
            what = type(joined).__name__ if now is None else type(now).__name__
            reason = getattr(joined, "cause", "") or getattr(now, "reason", "")
            self.world.note(self, "is", f"{what} {reason}")
        self.federation.checks.node_moved(self, before, event)
        del actions

    def perform(self, action: Any) -> Pause | None:
        match action:
            case participation.Say(message=message):
                self.say(message)
            case participation.Commit():
                self._commit(action)
            case participation.Announce():
                self._announce(action)
            case participation.OnSecrets():
                self._use_secrets(action)
            case participation.Remember(target=target):
                return self._remember(target)
            case _:
                self._perform_here(action)
        return None

    def _perform_here(self, action: Any) -> None:  # noqa: C901 - one arm an action
        match action:
            case participation.Dial(call=call):
                self._dial(call)
            case participation.HangUp(call=call):
                self._hang_up(call)
            case participation.SayJoin(target=target):
                self._join(target)
            case participation.Redial(delay_s=delay_s):
                wait = delay_s * (1 - JITTER * self.world.random.random())
                self.timers.arm(participation.REDIAL, wait)
            case participation.RunWorker(terms=terms):
                self._run_worker(terms)
            case participation.Order(command=command):
                self.order(command)
            case participation.EndWorker(reason=reason):
                self.kill_worker(f"was ended: {reason}")
            case ArmTimer(timer=timer, seconds=seconds):
                self.timers.arm(timer, seconds)
            case CancelTimer(timer=timer):
                self.timers.cancel(timer)
            case participation.Count():
                self.world.note(self, "counts", action)
            case _:
                self._on_edges(action)

    def _on_edges(self, action: Any) -> None:
        match action:
            case participation.Provide(pair=pair):
                self.federation.checks.provides(self, pair)
                self.provisioner.post(provision.Provide(pair))
            case participation.Withdraw(edges=edges):
                self.provisioner.post(provision.Withdraw(tuple(map(EdgeId, edges))))
            case participation.DropEdges(reason=reason):
                self.provisioner.post(provision.Dropped(reason))
            case participation.ForgetEdges():
                self.provisioner.post(provision.LinkGone())
            case _:
                pass

    def _hang_up(self, call: int) -> None:
        if call == self.call:
            if self.link is not None:
                # Its last words may still come in, and then that it is down.
                self.world.hang_up(self.link, self)
                self.link = None
            else:
                self.call = -1
                self.member.post(participation.LinkDown(call, "hung up"))

    def _join(self, target: Target) -> None:
        invite = b"" if target.federation is not None else self.invite
        self.say(
            messages.Join(
                speaks=codec.SPEAKS,
                build="sim",
                name=self.name,
                boot=f"{self.lives:016x}",
                federation=target.federation,
                invite=invite,
            )
        )

    def _remember(self, target: Target) -> Pause | None:
        if target == self.disk.read("membership"):
            return None

        def write() -> None:
            try:
                self.disk.put("membership", target)
            except StorageError:
                # The next welcome tries again.
                self.world.note(self, "cannot write", "membership")

        return self.world.random.random() * 0.02 * self.disk.slow, write

    def _commit(self, action: participation.Commit) -> None:
        session, commit = action.session, action.commit
        asked = commit.open
        self.secrets_drawn += 1
        draw = self.federation.parts.secrets
        self.secrets = draw(self.node, asked, self.secrets_drawn) if commit.masked else None
        keys = None if self.secrets is None else self.secrets.keys
        payload = messages.commitment_payload(
            session.federation,
            asked.round,
            asked.attempt,
            commit.root,
            asked.config_hash,
            keys=keys,
        )
        at = (asked.round, asked.attempt)
        self.committed.setdefault(at, set()).add(sign(self.node, payload))
        self.say(
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
                signature=sign(self.node, payload),
            )
        )

    def _announce(self, action: participation.Announce) -> None:
        session, announce = action.session, action.announce
        asked, trained = announce.open, announce.trained
        payload = messages.update_payload(
            session.federation, asked.round, asked.attempt, announce.root, announce.digest
        )
        signature = sign(self.node, payload)
        self.say(
            messages.Update(
                federation=session.federation,
                epoch=session.epoch,
                round=asked.round,
                attempt=asked.attempt,
                digest=announce.digest,
                nbytes=trained.nbytes,
                dataset_root=announce.root,
                reused=trained.reused,
                signature=signature,
            )
        )
        self.order(
            signals.Send(
                edge=announce.edge,
                round=asked.round,
                attempt=asked.attempt,
                signature=signature.hex(),
            )
        )

    # ---- masks ----

    def _use_secrets(self, action: participation.OnSecrets) -> None:
        wanted, secrets = action.action, self.secrets
        assert secrets is not None, f"no secrets are held for {type(wanted).__name__}"
        match wanted:
            case attempt.MaskUpdate(opened):
                self.order(
                    signals.Mask(round=opened.round, attempt=opened.attempt, terms=secrets.terms())
                )
            case attempt.Answer():
                self._answer(action.session, secrets)
            case _:
                self._consider(secrets, wanted)

    def _consider(self, secrets: SimSecrets, wanted: Any) -> None:
        at = secrets.at
        signal: attempt.FromSecrets
        try:
            match wanted:
                case attempt.Deal(roster=roster):
                    secrets.deal(roster)
                    sealed = (b"x" * 92,) * (len(secrets.roster) - 1)
                    signal = attempt.SharesDealt(*at, b"c" * 64, sealed)
                case attempt.OpenShares(envelopes=envelopes):
                    secrets.open(tuple(each.dealer for each in envelopes))
                    signal = attempt.SharesOpened(*at)
                case attempt.Decide(survivors=survivors):
                    secrets.decide(survivors)
                    signal = attempt.Consented(*at)
        except SecureAggregationError as error:
            signal = attempt.MasksRefused(*at, error.message, error.remediation)

        def done() -> None:
            if secrets is self.secrets:
                self.member.post(participation.SecretsSaid(signal))

        self.world.after(self, self.world.random.random() * 0.1, done)

    def _answer(self, session: participation.Session, secrets: SimSecrets) -> None:
        self.secrets = None
        vector = self.revealed.sent.get((secrets.at, self.node))
        spent = self.disk.read(("spent", secrets.at[0]), "nothing")
        assert spent == vector, f"{self.name} answers and its vector is not marked as spent"
        answer = Answer(
            self.node, secrets.at, secrets.survivors, secrets.dealers, secrets.threshold
        )
        self.revealed.answered(answer)
        self.say(
            messages.UnmaskAnswer(
                federation=session.federation,
                epoch=session.epoch,
                round=secrets.at[0],
                attempt=secrets.at[1],
                shares=b"s",
                signature=sign(self.node, repr(secrets.survivors).encode()),
            )
        )

    # ---- what the worker does that others rely on ----

    def made(self, vector: Digest) -> None:
        self.made_vectors.add(vector)

    def has_trained(self, vector: Digest) -> None:
        """The worker says that a release is ready to be announced."""
        for place in ("charges a", "charges b"):
            assert vector in self.disk.read(place, ()), f"{vector[:6]} is told of and not charged"

    def leaves(self, at: At, vector: Digest, digest: Digest) -> None:
        """The first byte of an update is about to go."""
        for place in ("charges a", "charges b"):
            charged = self.disk.read(place, ())
            assert charged.count(vector) == 1, f"{self.name} sends what is not charged in {place}"
        spent = self.disk.read(("spent", at[0]))
        assert spent != vector, f"{self.name} sends a vector that is spent"
        self.sent.setdefault(at, set()).add(digest)
        if self.federation.rules.masked:
            self.revealed.sends(self.node, at, vector)

    def spends(self, round_index: int, attempt_index: int) -> None:
        self.world.note(self, "spends", f"round {round_index} attempt {attempt_index}")

    def closes(self, round_index: int, *, adopt: bool, adopted: bool) -> None:
        self.world.note(self, "closes", f"round {round_index} adopt={adopt} adopted={adopted}")
        self.federation.checks.node_closed(self, round_index, adopt=adopt)
        if adopt and adopted and round_index not in self.adopted:
            self.adopted.append(round_index)

    def recover_local(self) -> None:
        """What a new worker does with what an older one left half done."""
        for key in self.disk.keys("adopting"):
            self.disk.put("adopted", (key[1], self.disk.read(key)))
            self.disk.remove(key)
        both = [self.disk.read(place, ()) for place in ("charges a", "charges b")]
        longest = max(both, key=len)
        for place in ("charges a", "charges b"):
            if self.disk.read(place, ()) != longest:
                self.disk.put(place, longest)

    # ---- the worker's process ----

    def order(self, command: signals.Command) -> None:
        worker = self.worker
        if worker is not None:
            self.world.note(self, "orders", command)
            worker.take(command)

    def _run_worker(self, terms: Any) -> None:
        configure = signals.Configure(
            workload=terms.workload,
            federation=terms.federation,
            node=self.node,
            state_dir="",
            path="",
            masked=terms.masked,
        )
        if configure == self.configure:
            return
        self.configure = configure
        if self.worker is not None:
            self.worker.die()
            self.worker = None
        self._spawn(0.0)

    def _spawn(self, delay_s: float) -> None:
        self.spawning += 1
        number, configure = self.spawning, self.configure
        assert configure is not None

        def starts() -> None:
            if number != self.spawning:
                return
            pipe = [0.0]

            def say(signal: signals.Event) -> None:
                world = self.world
                when = max(world.now + world.random.random() * 0.01, pipe[0])
                pipe[0] = when
                # Also the last words of a dead process are heard.
                world.after(self, when - world.now, lambda: self._route(signal))

            self.worker, self.worker_since = self.federation.parts.worker(self, say), self.world.now
            self.provisioner.post(provision.WorkerGone("a new worker has started"))
            self.member.post(participation.WorkerStarted())
            worker = self.worker
            self.world.after(
                self,
                self.world.random.uniform(0.05, 1.0),
                lambda: worker.alive and worker.take(configure),
            )

        self.world.after(self, delay_s + 0.05, starts)

    def kill_worker(self, fault: str) -> None:
        """It dies, its last words are heard, and another one follows."""
        worker = self.worker
        if worker is None:
            return
        self.world.note(self, "worker", fault)
        worker.die()
        self.worker = None
        settled = self.world.now - self.worker_since > SETTLED_S
        self.failures = 1 if settled else self.failures + 1
        delay = min(RESTART_S * float(1 << min(self.failures - 1, 10)), RESTART_MAX_S)

        def told() -> None:
            self.provisioner.post(provision.WorkerGone(fault))
            self.member.post(participation.WorkerLost(WorkerFault.code, fault))

        self.world.after(self, 0.02, told)
        self._spawn(delay)

    def _route(self, signal: signals.Event) -> None:
        match signal:
            case signals.Filled() | signals.Consumed():
                self._signal(signal)
            case signals.Attached(edge=edge):
                self.provisioner.post(provision.Attached(EdgeId(edge)))
            case signals.Detached(edge=edge):
                self.provisioner.post(provision.Detached(EdgeId(edge)))
            case signals.Spoiled(edge=edge, reason=reason):
                self.provisioner.post(provision.EndFaulted(EdgeId(edge), reason))
            case _:
                self.member.post(participation.WorkerSaid(signal))

    def _signal(self, signal: signals.Filled | signals.Consumed) -> None:
        slot = SlotIndex(signal.slot)
        for held in self.holdings.values():
            for end in (held.rx, held.tx):
                if end is None or end.spec.edge != signal.edge or end.over:
                    continue
                lent = getattr(end.state, "lent", ())
                assert slot in lent, f"slot {slot} of edge {signal.edge} is not the worker's"
                if isinstance(end, RxEnd):
                    end.consumed(slot)
                else:
                    assert isinstance(signal, signals.Filled)
                    end.filled(slot, signal.extent)

    # ---- provision ----

    def provided(self, before: Any, event: Any, actions: Any) -> None:
        del actions
        if type(before) is not type(self.provisioner.state):
            name = type(self.provisioner.state).__name__
            self.world.note(self, "edges", f"{name} after {type(event).__name__}")

    def provide(self, action: Any) -> None:  # noqa: C901 - one arm an action
        match action:
            case provision.Lease(pair):
                self._lease(pair)
            case provision.Open(pair):
                self._open(pair)
            case provision.Attach(pair):
                self._attach(pair)
            case provision.Detach(edge):
                self.order(signals.Detach(edge=edge))
            case provision.Stop(pair):
                self._stop(pair)
            case provision.GiveBack(pair):
                held = self.holdings.pop(pair.edges)
                for region in held.regions:
                    self.arena.give_back(region)
            case provision.Acknowledge(pair):
                self.member.post(participation.EdgesLive(pair))
            case provision.AcknowledgeTeardown(edges=edges):
                self.member.post(participation.EdgesTornDown(edges))
            case provision.ReportLost(pair=pair, edge=edge, reason=reason):
                self.member.post(participation.EdgesGone(pair, reason, edge))
            case provision.Unusable(pair=pair, reason=reason):
                self.member.post(participation.EdgesGone(pair, reason))

    def _lease(self, pair: Pair) -> None:
        assert pair.edges not in self.holdings
        held = self.holdings[pair.edges] = Holding(pair)

        def leased(region: Region) -> None:
            held.regions.append(region)
            if len(held.regions) < 2:
                self.arena.lease(pair.update.slots, leased)
            else:
                held.lease = None
                self.provisioner.post(provision.Leased(pair))

        held.lease = leased
        self.arena.lease(pair.state.slots, leased)

    def _open(self, pair: Pair) -> None:
        held = self.holdings[pair.edges]
        state, update = held.regions
        link = self.link

        if link is None or not link.alive:
            self.provisioner.post(provision.EndFaulted(pair.update.edge, "there is no link"))
            return

        def ready(slot: SlotIndex, extent: int) -> None:
            self.order(signals.Ready(edge=pair.state.edge, slot=slot, extent=extent))

        def released(slot: SlotIndex) -> None:
            # At Attach the worker owns every slot already: only later ones are told.
            if held.tx is not None:
                self.order(signals.Released(edge=pair.update.edge, slot=slot))

        def faulted(edge: EdgeId) -> Callable[[str], None]:
            return lambda reason: self.provisioner.post(provision.EndFaulted(edge, reason))

        ends = faulted(pair.state.edge), faulted(pair.update.edge)
        held.rx = RxEnd(self, link, pair.state, state, ready=ready, faulted=ends[0])
        held.rx.register()
        tx = TxEnd(self, link, pair.update, update, released=released, faulted=ends[1])
        tx.chunk_s = self.federation.chunk_s(self)
        tx.open()
        held.tx = tx

        def opened() -> None:
            if not held.stopped and not tx.over:
                self.provisioner.post(provision.Opened(pair))

        self.world.after(self, self.world.random.random() * 0.1, opened)

    def _attach(self, pair: Pair) -> None:
        regions = self.holdings[pair.edges].regions
        for spec, region, rx in zip((pair.state, pair.update), regions, (True, False), strict=True):
            self.order(
                signals.Attach(
                    edge=spec.edge,
                    direction="rx" if rx else "tx",
                    offset=region.number,
                    capacity_bytes=spec.capacity_bytes,
                    slots=spec.slots,
                )
            )

    def _stop(self, pair: Pair) -> None:
        held = self.holdings[pair.edges]
        held.stopped = True
        if held.lease is not None:
            self.arena.forget(held.lease)

        def stopped() -> None:
            for end in (held.rx, held.tx):
                if end is not None:
                    end.cancel()
            self.provisioner.post(provision.Stopped(pair))

        def insist() -> None:
            if self.holdings.get(pair.edges) is held:
                self.kill_worker("was ended: it did not let go of its edges")

        self.world.after(self, self.world.random.random() * 0.05, stopped)
        self.world.after(self, DRAIN_TIMEOUT_S, insist)

    def _heard_stream(self, link: Link, lane: tuple[Any, ...], payload: Any) -> None:
        way, edge = lane
        what, chunk = payload
        for held in self.holdings.values():
            if way == "to_rx" and held.rx is not None and held.rx.spec.edge == edge:
                held.rx.hear(what, chunk)
                return
            if way == "to_tx" and held.tx is not None and held.tx.spec.edge == edge:
                held.tx.lose("refused by the peer")
                return
        if way == "to_rx" and what == "chunk":
            self.world.send(link, self, ("to_tx", edge), ("stop", None))
