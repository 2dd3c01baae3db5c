"""The hosts of a federation in a ``World``: the real round machine, and nodes that follow a script.

What they say to each other goes through the real codec.  Blobs are told, not sent.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from lensemble.errors import Response
from lensemble.ids import Digest, FederationId, NodeId
from lensemble.machine import ArmTimer, CancelTimer, TimerExpired
from lensemble.wire import codec, messages
from lensemble_coord.training import outer_round as r
from tests.coord.round_play import PRIOR, RoundAudit, at_rest
from tests.sim.mask_side import MaskSide, Request, digest_of
from tests.sim.world import Link, World

FEDERATION = FederationId("fe" * 16)
HASH = Digest("c" * 64)
REJOIN_S = 1.5


class Blob(msgspec.Struct, frozen=True):
    """A whole update, as the spool has it once it is checked."""

    node: NodeId
    round: int
    attempt: int
    digest: Digest
    signature: bytes


class StateBlob(msgspec.Struct, frozen=True):
    digest: Digest


class Record(msgspec.Struct, frozen=True):
    round: int
    attempt: int
    prior: Digest
    digest: Digest
    contributors: tuple[r.Contribution, ...]


class Disk:
    """What the coordinator has after any crash."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.begun: list[tuple[int, int]] = []
        self.requested = 0
        self.outcomes: list[r.FinishRun] = []

    @property
    def round(self) -> int:
        return len(self.records)

    @property
    def digest(self) -> Digest:
        return self.records[-1].digest if self.records else PRIOR

    @property
    def next_attempt(self) -> int:
        return max((a + 1 for t, a in self.begun if t == self.round), default=0)


class Trouble:
    """Probabilities of what goes wrong, each where it says."""

    def __init__(self) -> None:
        self.step_fails = 0.0
        self.declines = 0.0
        self.torn_update = 0.0
        self.other_dataset = 0.0
        self.repeats_itself = 0.0
        self.slow = 0.0
        self.shares_late = 0.0
        self.answers_late = 0.0
        self.dies_masking = 0.0


class Session(msgspec.Struct):
    node: NodeId
    epoch: int
    link: Link


class CoordinatorHost:
    def __init__(self, world: World, rules: r.Rules, trouble: Trouble) -> None:
        self.name = "coord"
        self.world = world
        self.rules = rules
        self.trouble = trouble
        self.disk = Disk()
        self.epochs: dict[NodeId, int] = {}
        self.refused: list[r.Refuse] = []
        self.keys: dict[NodeId, messages.MaskKeys] = {}
        self.requests: list[Request] = []
        """Whatever was asked to be unmasked in any life."""
        self.commits: list[tuple[int, int]] = []

    # ---- life ----

    def start(self) -> None:
        ground = r.Ground(self.rules, self.disk.round, self.disk.next_attempt, self.disk.digest)
        self.audit = RoundAudit(r.Closed(ground))
        self.audit.last_opened = max(self.disk.begun, default=(-1, -1))
        self.sessions: dict[NodeId, Session] = {}
        self.armed: dict[str, object] = {}
        if self.disk.requested:
            self.feed(r.RoundsAsked(self.disk.requested))

    def ask(self, rounds: int) -> None:
        self.disk.requested += rounds
        if self.name in self.world.up:
            self.feed(r.RoundsAsked(rounds))

    @property
    def state(self) -> r.State:
        return self.audit.state

    @property
    def resting(self) -> bool:
        return self.name in self.world.up and at_rest(self.state)

    # ---- links ----

    def connected(self, link: Link) -> None:
        """A node speaks first."""

    def heard(self, link: Link, payload: object) -> None:
        if isinstance(payload, Blob):
            if any(s.link is link for s in self.sessions.values()):
                self.feed(r.BlobArrived(*msgspec.structs.astuple(payload)))
            return
        assert isinstance(payload, bytes)
        message = codec.decode_from_node(payload)
        if isinstance(message, messages.Join):
            self._admit(link, NodeId(message.name))
            return
        session = next((s for s in self.sessions.values() if s.link is link), None)
        if session is not None and message.epoch == session.epoch:
            self._take(session, message)

    def _admit(self, link: Link, node: NodeId) -> None:
        older = self.sessions.get(node)
        if older is not None:
            self._forget(older, "replaced")
        epoch = self.epochs[node] = self.epochs.get(node, 0) + 1
        self.sessions[node] = session = Session(node, epoch, link)
        last = messages.LastRecord(
            round=self.disk.round - 1, digest=self.disk.digest, contributors=()
        )
        self.tell(
            session,
            messages.Welcome(
                federation=FEDERATION,
                epoch=epoch,
                build="sim",
                coordinator="coord",
                workload=b"{}",
                config_hash=HASH,
                layout_digest=HASH,
                aggregation="masked" if self.rules.masked else "plain",
                last=last,
            ),
        )
        self.feed(r.MemberReady(node))

    def _take(self, session: Session, message: messages.FromNode) -> None:
        node = session.node
        match message:
            case messages.Shares():
                self.feed(r.SharesSent(node, message.round, message.attempt))
            case messages.UnmaskAnswer():
                self.feed(r.UnmaskAnswered(node, message.round, message.attempt))
            case messages.Commitment():
                if message.keys is not None:
                    self.keys[node] = message.keys
                self.feed(
                    r.Committed(
                        node,
                        message.round,
                        message.attempt,
                        message.dataset_root,
                        message.signature,
                        message.holds_bytes,
                    )
                )
            case messages.Update():
                self.feed(
                    r.UpdateAnnounced(
                        node,
                        message.round,
                        message.attempt,
                        message.digest,
                        message.dataset_root,
                        message.signature,
                    )
                )
            case messages.Fault():
                at = (message.round, message.attempt)
                self.feed(r.Declined(node, *at, message.code, message.reason))
            case messages.Leave():
                self._forget(session, message.reason)
            case _:
                pass

    def lost(self, link: Link) -> None:
        for session in list(self.sessions.values()):
            if session.link is link:
                self._forget(session, "its link is gone")

    def _forget(self, session: Session, reason: str) -> None:
        del self.sessions[session.node]
        self.feed(r.MemberLost(session.node, "link_lost", reason))

    def tell(self, session: Session, message: messages.FromCoordinator) -> None:
        self.world.send(session.link, self, codec.encode(message), about=message)

    def tell_all(self, nodes: tuple[NodeId, ...], message: messages.FromCoordinator) -> None:
        for node in nodes:
            session = self.sessions.get(node)
            if session is not None:
                self.tell(session, msgspec.structs.replace(message, epoch=session.epoch))

    # ---- the machine ----

    def feed(self, event: r.Event) -> None:
        before = self.audit.state
        self.world.note(self, "hears", event)
        actions = self.audit.step(event)
        if type(before) is not type(self.state):
            self.world.note(self, f"is {r.public_state(self.state)}:", r.waiting(self.state).reason)
        for action in actions:
            self.world.note(self, "does", action)
            self.perform(action)

    @property
    def fence(self) -> dict[str, Any]:
        ground = self.state.ground
        return {
            "federation": FEDERATION,
            "epoch": 0,
            "round": ground.round,
            "attempt": ground.attempt,
        }

    def perform(self, action: r.Action) -> None:  # noqa: C901 - one arm an action
        match action:
            case r.OpenRound():
                self.disk.begun.append((action.round, action.attempt))
                self.tell_all(action.nodes, self._opening())
            case r.AskAlso(node=node):
                self.tell_all((node,), self._opening())
            case r.OfferState(node=node):
                session = self.sessions[node]
                self.world.send(session.link, self, StateBlob(self.state.ground.digest))
            case r.BeginCollect(nodes=nodes):
                collect = messages.Collect(**self.fence, roster=nodes, send_within_s=1.0)
                self.tell_all(nodes, collect)
            case r.SendRoster():
                self._send_roster(action)
            case r.RequestUnmask(survivors=survivors, dropouts=dropouts):
                at = (self.state.ground.round, self.state.ground.attempt)
                self.requests.append(Request(*at, survivors, dropouts))
                self.tell_all(survivors, messages.UnmaskRequest(**self.fence, survivors=survivors))
                self._may_die()
            case r.Refuse():
                self.refused.append(action)
            case r.DeriveSum() | r.Diagnose() | r.Commit():
                self._work(action)
            case r.AnnounceClose() | r.AnnounceAbort():
                self._announce(action)
            case r.FinishRun():
                self.disk.outcomes.append(action)
                self.disk.requested = self.state.ground.remaining
            case ArmTimer() | CancelTimer():
                self._time(action)
            case _:
                pass

    def _send_roster(self, action: r.SendRoster) -> None:
        members = tuple(
            messages.RosterEntry(
                node=each.node,
                dataset_root=each.dataset_root,
                keys=self.keys[each.node],
                signature=each.signature,
            )
            for each in action.bound
        )
        roster = messages.Roster(**self.fence, members=members, threshold=action.threshold)
        self.tell_all(tuple(each.node for each in action.bound), roster)
        self._may_die()

    def _may_die(self) -> None:
        """Not at once: some of what it has just said may still get through."""
        chance = self.world.random
        if chance.random() < self.trouble.dies_masking / 3:
            self.world.after(self, chance.uniform(0.0, 2.0), lambda: self.world.restart(self, 5.0))

    def _opening(self) -> messages.RoundOpen:
        return messages.RoundOpen(
            **self.fence,
            prior_digest=self.state.ground.digest,
            layout_digest=HASH,
            config_hash=HASH,
            roster_digest=HASH,
            sketch_seed=1,
            inner_steps=1,
            global_step=0,
            state_bytes=4,
            field=messages.FieldParams(k=24, n_max=64),
            answer_within_s=1.0,
        )

    def _announce(self, action: r.AnnounceClose | r.AnnounceAbort) -> None:
        closed = isinstance(action, r.AnnounceClose)
        close = messages.RoundClose(
            **{**self.fence, "round": action.round, "attempt": action.attempt},
            outcome="closed" if closed else "aborted",
            digest=action.digest,
            contributors=action.contributors if isinstance(action, r.AnnounceClose) else (),
        )
        self.tell_all(tuple(self.sessions), close)

    def _time(self, action: ArmTimer | CancelTimer) -> None:
        self.armed[action.timer] = token = object()
        if isinstance(action, ArmTimer):

            def expire() -> None:
                if self.armed.get(action.timer) is token:
                    self.feed(TimerExpired(action.timer))

            self.world.after(self, action.seconds, expire)

    def _work(self, action: r.DeriveSum | r.Diagnose | r.Commit) -> None:
        """Our own work takes a moment, and may fail or be cut short by a crash at any point."""
        at = (self.state.ground.round, self.state.ground.attempt)
        if isinstance(action, r.Commit):
            self.commits.append(at)
        chance, pause = self.world.random, self.world.random.uniform(0.01, 0.5)
        if chance.random() < self.trouble.step_fails:
            response = chance.choice([Response.RETRY, Response.RETRY, Response.STOP])
            failure = r.StepFailed(*at, "storage", "the disk is full", response)
            self.world.after(self, pause, partial(self.feed, failure))
            return
        match action:
            case r.DeriveSum(contributors=contributors):
                field_sum = digest_of(sorted(c.digest for c in contributors))
                self.world.after(self, pause, partial(self.feed, r.SumDerived(*at, field_sum)))
            case r.Diagnose():
                self.world.after(self, pause, partial(self.feed, r.Diagnosed(*at)))
            case r.Commit():
                self.world.after(self, pause, partial(self._append, action, at))

    def _append(self, action: r.Commit, at: tuple[int, int]) -> None:
        """Durable first; a crash may come before the machine hears of it."""
        prior = self.disk.digest
        digest = digest_of(prior, action.field_sum)
        self.disk.records.append(Record(*at, prior, digest, action.contributors))
        self.disk.requested -= 1
        self.world.note(self, "appends", f"record of round {at[0]} attempt {at[1]}")
        self.world.after(self, 0.05, partial(self.feed, r.Advanced(*at, digest)))


class NodeHost:
    """A node by the book, but for the troubles it is given."""

    def __init__(
        self, world: World, node: NodeId, coord: CoordinatorHost, trouble: Trouble
    ) -> None:
        self.name = f"node-{node[0]}"
        self.node = node
        self.world = world
        self.coord = coord
        self.trouble = trouble
        self.sent: set[tuple[int, int, Digest]] = set()
        self.closed: dict[int, Digest] = {}
        self.masks = MaskSide(node)

    @property
    def dataset_root(self) -> Digest:
        return digest_of("dataset", self.node)

    def start(self) -> None:
        self.link: Link | None = None
        self.epoch = 0
        self.attempt: tuple[int, int] | None = None
        self.holds: Digest | None = None
        self.collecting = False
        self.masked = False
        self.masks.die()
        self.dial()

    def dial(self) -> None:
        self.link = self.world.connect(self, self.coord)
        if self.link is None:
            self.world.after(self, REJOIN_S, self.dial)
            return
        self.say(messages.Join(speaks=codec.SPEAKS, build="sim", name=self.node, boot="0" * 16))

    def connected(self, link: Link) -> None:
        """Nobody dials a node."""

    def lost(self, link: Link) -> None:
        if link is self.link:
            self.link, self.attempt, self.collecting = None, None, False
            self.world.after(self, REJOIN_S, self.dial)

    def say(self, message: messages.FromNode) -> None:
        if self.link is not None:
            payload = codec.encode(message)
            for _ in range(1 + self.happens("repeats_itself")):
                self.world.send(self.link, self, payload, about=message)

    def happens(self, trouble: str) -> bool:
        probability: float = getattr(self.trouble, trouble)
        return self.world.random.random() < probability

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        """Go on with this attempt later, if it is still the one."""
        link, attempt = self.link, self.attempt

        def go_on() -> None:
            if (self.link, self.attempt) == (link, attempt):
                call()

        self.world.after(self, seconds, go_on)

    def heard(self, link: Link, payload: object) -> None:
        if link is not self.link:
            return
        if isinstance(payload, StateBlob):
            self.holds = payload.digest
            self.train()
            return
        assert isinstance(payload, bytes)
        self.told(codec.decode_from_coordinator(payload))

    def told(self, message: messages.FromCoordinator) -> None:
        match message:
            case messages.Welcome():
                self.epoch = message.epoch
                self.masked = message.aggregation == "masked"
            case messages.RoundOpen():
                self.attempt = (message.round, message.attempt)
                self.opening, self.collecting = message, False
                self.later(self.world.random.uniform(0.0, 1.0), self.answer)
            case messages.Collect():
                if self.attempt == (message.round, message.attempt):
                    self.collecting = True
                    self.train()
            case messages.Roster() | messages.UnmaskRequest():
                self.told_about_masks(message)
            case messages.RoundClose():
                self.close(message)
            case _:
                pass

    def told_about_masks(self, message: messages.Roster | messages.UnmaskRequest) -> None:
        pause = self.world.random.uniform(0.0, 0.5)
        if self.happens("dies_masking"):
            self.world.after(self, pause, lambda: self.world.restart(self, 5.0))
            return
        if isinstance(message, messages.Roster):
            late = 60.0 if self.happens("shares_late") else 0.0
            self.later(pause + late, self.share)
        else:
            late = 60.0 if self.happens("answers_late") else 0.0
            self.world.after(self, pause + late, lambda: self.unmask(message))

    def share(self) -> None:
        self.say(messages.Shares(**self.fence, commitments=b"", sealed=()))

    def unmask(self, request: messages.UnmaskRequest) -> None:
        """Answer on whatever link there is by now; without the secrets, say so."""
        at = (request.round, request.attempt)
        fence = {"federation": FEDERATION, "epoch": self.epoch, "round": at[0], "attempt": at[1]}
        if self.masks.may_answer(at, request.survivors):
            signature = self.node.encode()
            self.say(messages.UnmaskAnswer(**fence, shares=b"", signature=signature))
        else:
            self.say(messages.Fault(**fence, code="secure_aggregation", reason="no secrets left"))

    def close(self, message: messages.RoundClose) -> None:
        if message.outcome == "closed":
            assert self.closed.setdefault(message.round, message.digest) == message.digest
        self.attempt, self.collecting = None, False

    @property
    def fence(self) -> dict[str, Any]:
        assert self.attempt is not None
        round_index, attempt = self.attempt
        return {
            "federation": FEDERATION,
            "epoch": self.epoch,
            "round": round_index,
            "attempt": attempt,
        }

    def answer(self) -> None:
        if self.happens("declines"):
            self.say(messages.Fault(**self.fence, code="dataset", reason="no data today"))
            return
        self.say(
            messages.Commitment(
                **self.fence,
                dataset_root=self.dataset_root,
                episodes=1,
                holds_bytes=0,
                keys=self.masks.keys(self.attempt) if self.masked and self.attempt else None,
                signature=self.node.encode(),
            )
        )

    def train(self) -> None:
        if self.collecting and self.holds == self.opening.prior_digest:
            self.collecting = False
            slow = 60.0 if self.happens("slow") else 0.0
            self.later(slow + self.world.random.uniform(0.5, 5.0), self.send)

    def send(self) -> None:
        assert self.attempt is not None
        release = self.masks.release(self.attempt) if self.masked else None
        digest = digest_of(self.node, self.holds, self.attempt, release)
        root = HASH if self.happens("other_dataset") else self.dataset_root
        arriving = HASH if self.happens("torn_update") else digest
        if root == self.dataset_root and arriving == digest:
            self.sent.add((*self.attempt, digest))
        blob = Blob(self.node, *self.attempt, arriving, self.node.encode())
        update = messages.Update(
            **self.fence,
            digest=digest,
            nbytes=4,
            dataset_root=root,
            reused=False,
            signature=self.node.encode(),
        )
        if self.link is not None and self.world.random.random() < 0.5:
            self.world.send(self.link, self, blob)
            self.say(update)
        elif self.link is not None:
            self.say(update)
            late = self.world.random.uniform(0.0, 2.0)
            self.world.send(self.link, self, blob, delay_s=late)
