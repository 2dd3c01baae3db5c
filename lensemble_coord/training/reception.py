"""Where links come in: who knocks is heard, admitted or refused, and served until it goes."""

import itertools
from collections import Counter
from functools import partial

import msgspec
import trio

from lensemble.edge.arena import Arena
from lensemble.errors import ContractViolation, FrameError, LinkLost, StorageError
from lensemble.ids import NodeId
from lensemble.transport.driver import Driver, Link
from lensemble.transport.ends import ArenaLeases
from lensemble.version import BUILD
from lensemble.wire import codec, fence, messages
from lensemble_coord import roster
from lensemble_coord.config import CoordinatorConfig
from lensemble_coord.peers import Peer, Peers, Reach
from lensemble_coord.revocations import Revocations
from lensemble_coord.training import outer_round, session
from lensemble_coord.training.coordinator import Rounds
from lensemble_coord.training.journal import Journal
from lensemble_coord.training.session import Session
from lensemble_coord.training.store import Store, unix_now

JOIN_TIMEOUT_S = 10.0
MAX_KNOCKING = 64
"""Links that are connected and not admitted yet."""

MAX_DEPARTED = 4096


class Departure(msgspec.Struct, frozen=True):
    """Why a node is not here any more, since when on the daemon's clock, and what it had spent."""

    reason: str
    at: float
    epsilon: float | None = None


class Reception:
    """Accepts links for ``rounds``."""

    def __init__(
        self,
        config: CoordinatorConfig,
        store: Store,
        driver: Driver,
        rounds: Rounds,
        journal: Journal,
    ) -> None:
        self.refused: Counter[str] = Counter()
        self.departed: dict[NodeId, Departure] = {}
        self.revocations = Revocations(config.state_dir)
        self.admission = config.admission
        self._config = config
        self._store = store
        self._driver = driver
        self._rounds = rounds
        self._journal = journal
        self._knocking = 0
        now_us = int(unix_now() * 1e6)
        # Neither an epoch nor an edge id may come twice, also not after a restart.
        self._epochs = itertools.count(now_us)
        self.numbers = session.EdgeNumbers(now_us << 8)
        self.peers = Peers()
        self._ended: dict[NodeId, trio.Event] = {}
        self._ground = session.Ground(
            federation=store.federation,
            layout=store.layout,
            config_hash=store.workload.digest,
            driver=driver,
            peers=self.peers,
            leases=ArenaLeases(Arena.create(config.edges.arena_bytes)),
            capacity_bytes=config.chunk_bytes,
            slots=config.edges.slots,
            masked=config.rounds.masked,
            trains=config.trains,
        )

    @property
    def leased_bytes(self) -> int:
        """Address space of the arena that edges hold now."""
        return self._ground.leases.arena.leased_bytes()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Accept until cancelled."""
        async with trio.open_nursery() as nursery:
            task_status.started()
            while True:
                link = await self._driver.accept()
                if self._knocking >= MAX_KNOCKING:
                    self.refused["busy"] += 1
                    await link.close(f"{MAX_KNOCKING} nodes are knocking already")
                else:
                    nursery.start_soon(self._attend, link)

    async def revoke(self, node: NodeId, reason: str) -> None:
        """Admit ``node`` no more, and end its session if it is here.

        Raises:
            OperatorError, StorageError: see ``NodeList.add``; then nothing has changed.
        """
        await self.revocations.add(node, reason)
        self._journal.note("peer.revoked", warn=True, node=node, reason=reason)
        if (here := self._rounds.sessions.get(node)) is not None:
            here.part("revoked", f"revoked: {reason}")

    async def _attend(self, link: Link) -> None:
        self._knocking += 1
        try:
            admitted = await self._greet(link)
        finally:
            self._knocking -= 1
        if admitted is not None:
            await self._serve(admitted)

    async def _greet(self, link: Link) -> Session | None:
        try:
            with trio.fail_after(JOIN_TIMEOUT_S):
                join = _join(await link.receive())
        except trio.TooSlowError:
            await self._turn_away(link, "no_join", f"no Join within {JOIN_TIMEOUT_S:g} s")
            return None
        except (FrameError, ContractViolation) as error:
            await self._turn_away(link, error.code, error.message, error.remediation, final=True)
            return None
        except LinkLost:
            self.refused["vanished"] += 1
            return None
        try:
            return await self._decide(link, join)
        except StorageError as error:
            # Without its name on the roster it cannot be let in; it comes again by itself.
            await self._turn_away(link, error.code, error.message, error.remediation)
            return None

    async def _decide(self, link: Link, join: messages.Join) -> Session | None:
        secret_hash = roster.invite_hash(join.invite) if join.invite else ""
        invitation = None
        if secret_hash:
            find = partial(self._store.invitation, secret_hash)
            invitation = await trio.to_thread.run_sync(find)
        decision = roster.decide(
            link.peer,
            join,
            roster.Known(
                federation=self._store.federation,
                allowed=frozenset(map(NodeId, self.admission.allow)),
                admitted_before=self._store.admitted_before(link.peer),
                invites=self.admission.invites,
                invitation=invitation,
                here=frozenset(self._rounds.sessions),
                max_participants=self._config.rounds.max_participants,
                now=unix_now(),
                revoked=self.revocations.nodes.get(link.peer),
            ),
        )
        if isinstance(decision, roster.Denied):
            await self._turn_away(
                link, decision.code, decision.reason, decision.remediation, final=decision.final
            )
            return None
        used = secret_hash if decision.by == "invite" else ""
        admit = partial(self._store.admit, link.peer, join.name, decision.by, used)
        if not await trio.to_thread.run_sync(admit):
            await self._turn_away(link, "used_invite", "this invite has been used up", final=True)
            return None
        session = Session(self._ground, link, next(self._epochs), join.name)
        session.reach = Reach(join.gossips, join.addresses)
        return session

    async def _turn_away(
        self, link: Link, code: str, reason: str, remediation: str = "", *, final: bool = False
    ) -> None:
        self.refused[code] += 1
        self._journal.note("peer.refused", warn=True, peer=link.peer, code=code, reason=reason)
        refused = messages.Refused(
            code=code,
            reason=fence.sentence(reason),
            remediation=fence.sentence(remediation),
            final=final,
        )
        try:
            await link.send(codec.encode(refused))
        except LinkLost:
            return
        await link.close(reason)

    async def _serve(self, admitted: Session) -> None:
        node = admitted.node
        welcome = await self._welcome_to(admitted)
        ended = self._ended[node] = trio.Event()
        self._rounds.sessions[node] = admitted
        if (before := self.departed.pop(node, None)) is not None:
            admitted.activity.epsilon = before.epsilon
        self._journal.note("peer.joined", peer=admitted.name, node=node, epoch=admitted.epoch)
        admitted.tell(welcome)
        peer = Peer(node, admitted.name, admitted.epoch, admitted.tell, admitted.link.facts)
        peer.reach = admitted.reach
        self.peers.arrive(peer)
        try:
            reason = await admitted.serve(self._rounds, self._store, self.numbers)
            del self._rounds.sessions[node]
            self._journal.note("peer.left", peer=admitted.name, node=node, reason=reason)
            if len(self.departed) < MAX_DEPARTED:
                spent = admitted.activity.epsilon
                self.departed[node] = Departure(reason, trio.current_time(), spent)
            await self._rounds.hear(outer_round.MemberLost(node, "link_lost", reason))
            self._rounds.announce_change()
        finally:
            # Only now may a newer session of this identity begin: the machine knows that the
            # older one is gone.
            ended.set()

    async def _welcome_to(self, admitted: Session) -> messages.Welcome:
        """What to say first.  It names the newest record of which nobody was told without it.

        Whoever is told of the end of a round must have been welcomed before, so nothing may come
        between the last look at it and the session being there.
        """
        await self._replace(admitted)
        welcome = await trio.to_thread.run_sync(self._welcome, admitted)
        while (
            admitted.node in self._rounds.sessions
            or welcome.last.round + 1 < self._rounds.state.ground.round
        ):
            await self._replace(admitted)
            welcome = await trio.to_thread.run_sync(self._welcome, admitted)
        return welcome

    async def _replace(self, admitted: Session) -> None:
        """Wait until an earlier session of the same identity, whose link is lost, has gone."""
        while admitted.node in self._rounds.sessions:
            await self._ended[admitted.node].wait()

    def _welcome(self, admitted: Session) -> messages.Welcome:
        tail = self._store.tail()
        return messages.Welcome(
            federation=self._store.federation,
            epoch=admitted.epoch,
            build=BUILD,
            coordinator=self._config.name,
            workload=self._store.workload.canonical(),
            config_hash=self._store.workload.digest,
            layout_digest=self._store.layout.digest,
            aggregation=self._config.rounds.aggregation,
            trains=self._config.trains,
            last=messages.LastRecord(
                round=tail.round,
                digest=tail.next_digest,
                contributors=tuple(each.node for each in tail.contributors),
            ),
        )


def _join(payload: bytes) -> messages.Join:
    join = codec.decode_from_node(payload)
    if not isinstance(join, messages.Join):
        raise FrameError(f"the first message is {type(join).__name__}, not Join")
    codec.common_version(join.speaks)
    return join
