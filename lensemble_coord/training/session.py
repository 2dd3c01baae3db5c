"""One node while its link lives: its two edges, what it says, what it is told.

The session checks what the node sends (fence, signatures, sizes) and passes what is left to the
round machine as events.  A pair of edges that breaks is replaced by a new pair with new ids, after
a pause that grows; the link and the rest of the daemon go on.
"""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Protocol

import msgspec
import trio

from lensemble import blob, identity
from lensemble.crash_points import reached
from lensemble.edge.arena import Region
from lensemble.edge.spec import EdgeSpec
from lensemble.errors import (
    CheckpointIntegrityError,
    ContractViolation,
    EdgeFault,
    FrameError,
    LinkLost,
    PeerError,
    Response,
    RoundError,
    SecureAggregationError,
    StorageError,
)
from lensemble.ids import Digest, EdgeId, FederationId, NodeId, SlotIndex
from lensemble.logs import logger
from lensemble.params import ParamLayout
from lensemble.secagg.plan import FieldPlan
from lensemble.transport.driver import Driver, Link
from lensemble.transport.ends import ArenaLeases, RxEnd, TxEnd
from lensemble.wire import codec, fence, messages
from lensemble.wire.circle import MemberNote
from lensemble.wire.fanout import Fanout
from lensemble.wire.stages import BurstAnswer, StageAnswer
from lensemble_coord.peers import Peers, Reach
from lensemble_coord.training import outer_round
from lensemble_coord.training.downlink import By, Downlink, Offer
from lensemble_coord.training.masking import public_keys
from lensemble_coord.training.spool import SpoolFile

OUTBOX_MESSAGES = 256
LEASE_WITHIN_S = 30.0
PROVISION_TIMEOUT_S = 120.0
ANNOUNCEMENT_TIMEOUT_S = 10.0
EDGE_PAUSE_S = 0.2
EDGE_PAUSE_MAX_S = 10.0
LAST_WORD_S = 0.2
PROGRESS_PAUSE_S = 0.5
"""Between two words on how much of an update is in."""

MAX_EDGE_FAULTS = 20
"""Broken pairs in a row, without an update or state between, before the link is closed."""


class Desk(Protocol):
    """What a session needs of the rounds it serves."""

    async def hear(self, event: outer_round.Event) -> None: ...

    @property
    def plan(self) -> FieldPlan: ...

    def elsewhere(self, round_index: int, attempt: int) -> str: ...

    def expects(self, node: NodeId, round_index: int, attempt: int) -> str: ...

    def keep(self, node: NodeId, spooled: SpoolFile) -> None: ...

    def announce_change(self) -> None: ...

    async def check_update(self, spooled: SpoolFile) -> None: ...

    async def take_masking(
        self, node: NodeId, message: messages.Shares | messages.UnmaskAnswer
    ) -> None: ...


class Ground(msgspec.Struct, frozen=True):
    """What all sessions of a coordinator share."""

    federation: FederationId
    layout: ParamLayout
    config_hash: Digest
    driver: Driver
    peers: Peers
    leases: ArenaLeases
    capacity_bytes: int
    slots: int
    masked: bool
    trains: bool = True
    """Nodes of a federation that trains nothing are given no edges for states and updates."""


class Spooler(Protocol):
    def open_update(self, node: NodeId) -> SpoolFile: ...


class EdgeNumbers:
    """Edge ids that are never used again: a random start in each process, then counting up."""

    def __init__(self, start: int) -> None:
        self._next = start

    def draw(self) -> EdgeId:
        self._next += 1
        return EdgeId(self._next)


class Activity(msgspec.Struct):
    """What a node is doing, for status; times on the daemon's monotonic clock."""

    phase: str = "joining"
    done: int = 0
    total: int = 0
    since: float = 0.0
    seen: float = 0.0
    last_reason: str = ""
    contributions: int = 0
    loss: float | None = None
    epsilon: float | None = None
    state_by: By = ""


class _Pair:
    """The edges of one provision: the state goes out, the update comes in."""

    def __init__(self, tx: TxEnd, rx: RxEnd) -> None:
        self.tx = tx
        self.rx = rx
        self.sending = False
        """Whether a state or a sum is on its way."""


class Session:
    """One admitted node on one link.

    Args:
        ground: what all sessions share.
        link: the live link.
        epoch: counts the sessions of this identity; older messages are refused.
        name: what people call the node.
    """

    def __init__(self, ground: Ground, link: Link, epoch: int, name: str) -> None:
        self.ground = ground
        self.link = link
        self.node = link.peer
        self.epoch = epoch
        self.name = name
        self.reach = Reach()
        self.activity = Activity()
        self.refused: Counter[str] = Counter()
        self.edges: dict[EdgeId, str] = {}
        self.moved: Counter[str] = Counter()
        self.edge_faults = 0
        self.log = logger("session").bind(peer=name)
        self._outbox, self._letters = trio.open_memory_channel[messages.FromCoordinator | Fanout](
            OUTBOX_MESSAGES
        )
        self._provisioned = trio.Event()
        self._broken = trio.Event()
        self._broken_reason = ""
        self._announced = trio.Event()
        self._announcement: messages.Update | None = None
        self.commitment: messages.Commitment | None = None
        self._receiving: trio.CancelScope | None = None
        self._receiving_for: tuple[int, int] = (-1, -1)
        self._pair: _Pair | None = None
        self._pair_nursery: trio.Nursery | None = None
        self._listening = trio.CancelScope()

    @property
    def ready(self) -> bool:
        """Whether a pair of edges is provisioned."""
        return self._pair is not None

    # ---- what the rounds tell it ----

    def tell(self, message: messages.FromCoordinator | Fanout) -> None:
        """Queue ``message``; a node that does not read is cut off rather than waited for."""
        try:
            self._outbox.send_nowait(message)
        except trio.WouldBlock:
            self._cut_off("outbox_full", f"{OUTBOX_MESSAGES} messages are waiting to be read")
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.log.debug("session.late_message", message=_kind(message))

    def refuse(self, code: str, reason: str, remediation: str = "") -> None:
        """Count a refusal and tell the node."""
        self.refused[code] += 1
        self.activity.last_reason = reason
        self.tell(
            messages.Refused(
                code=code,
                reason=fence.sentence(reason),
                remediation=fence.sentence(remediation),
            )
        )

    def did(self, phase: str, done: int = 0, total: int = 0) -> None:
        """Note what the node is doing now."""
        now = trio.current_time()
        if phase != self.activity.phase:
            self.activity.phase, self.activity.since = phase, now
        self.activity.done, self.activity.total, self.activity.seen = done, total, now

    def offer_state(self, offer: Offer, downlink: Downlink) -> None:
        """Send what is offered, if it is anything, beside everything else."""
        self.activity.state_by = offer.by
        if not offer.parts:
            self.did("waiting")
            return
        pair, nursery = self._pair, self._pair_nursery
        if pair is None or nursery is None:
            return
        if pair.sending:
            # A blob cannot be abandoned half-way on a live edge: the pair is replaced, and the
            # node asks again when it binds on the new one.
            self._break_edges("a state is still being sent on this edge")
            return
        pair.sending = True
        nursery.start_soon(self._send_state, pair, offer, downlink)

    def round_ended(self, round_index: int, attempt: int) -> None:
        """The attempt is over: nothing more of it is taken in."""
        self._announcement = None
        self._announced.set()
        self._announced = trio.Event()
        if self._receiving is not None and self._receiving_for == (round_index, attempt):
            self._receiving.cancel()
        if self._pair is not None:
            self.did("idle")

    # ---- life ----

    async def serve(self, desk: Desk, spooler: Spooler, numbers: EdgeNumbers) -> str:
        """Serve the node until its link ends; returns why it ended."""
        self.activity.since = self.activity.seen = trio.current_time()
        ended = "the node left"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._post)
            if self.ground.trains:
                nursery.start_soon(self._keep_edges, desk, spooler, numbers)
            else:
                self.did("idle")
            try:
                ended = await self._listen(desk)
            except (LinkLost, FrameError) as error:
                ended = error.message
            # At once, before edges are taken down: whoever placed work there waits for this word.
            self.ground.peers.leave(self.node, ended)
            nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            self._outbox.close()
            await self.link.close(ended)
        return ended

    async def _post(self) -> None:
        async for message in self._letters:
            kind = _kind(message)
            reached("message.made", kind)
            if isinstance(message, Fanout):
                payload = message.payload(self.epoch)
            else:
                payload = codec.encode(message)
            try:
                await self.link.send(payload)
            except LinkLost:
                return
            reached("message.sent", kind)

    def part(self, code: str, reason: str) -> None:
        """End the session because the coordinator's operator wants it."""
        self._cut_off(code, reason)

    def _cut_off(self, code: str, reason: str) -> None:
        """End the session, whatever it waits for."""
        self.refused[code] += 1
        self.activity.last_reason = reason
        self._listening.cancel()

    # ---- what the node says ----

    async def _listen(self, desk: Desk) -> str:
        with self._listening:
            while True:
                try:
                    message = codec.decode_from_node(await self.link.receive())
                except ContractViolation as error:
                    self.refuse(error.code, error.message, error.remediation)
                    continue
                self.activity.seen = trio.current_time()
                if isinstance(message, messages.Join):
                    self.refuse("misplaced", "this session has joined already")
                elif (message.federation, message.epoch) != (self.ground.federation, self.epoch):
                    self.refuse(
                        "stale_epoch",
                        f"a {type(message).__name__} of federation {message.federation[:8]} "
                        f"epoch {message.epoch}; this is {self.ground.federation[:8]} "
                        f"epoch {self.epoch}",
                    )
                elif isinstance(message, messages.Leave):
                    return f"left: {message.reason}"
                elif isinstance(message, fence.OfRound) and (
                    where := desk.elsewhere(message.round, message.attempt)
                ):
                    self._refuse_stale(message, where)
                elif isinstance(message, StageAnswer | BurstAnswer | MemberNote):
                    self.ground.peers.take(self.node, message)
                else:
                    await self._take(message, desk)
        return self.activity.last_reason or "cut off"

    def _refuse_stale(self, message: fence.OfRound, where: str) -> None:
        """Count it, and say so unless it is progress, of which there is much."""
        if isinstance(message, messages.Progress):
            self.refused["stale"] += 1
            return
        kind, at = type(message).__name__, f"round {message.round} attempt {message.attempt}"
        self.refuse("stale", f"a {kind} of {at}; {where}")

    async def _take(self, message: messages.FromNode, desk: Desk) -> None:
        match message:
            case messages.Commitment():
                await self._take_commitment(message, desk)
            case messages.Update():
                await self._take_update(message, desk)
            case messages.Shares() | messages.UnmaskAnswer():
                await desk.take_masking(self.node, message)
            case messages.Fault():
                await self._take_fault(message, desk)
            case messages.Progress():
                await self._take_progress(message, desk)
            case messages.Provisioned() if set(message.edges) == set(self.edges):
                self._provisioned.set()
            case messages.EdgeLost() if message.edge in self.edges:
                self._break_edges(message.reason)
            case _:
                pass

    async def _take_progress(self, message: messages.Progress, desk: Desk) -> None:
        self.did(message.phase, message.done, message.total)
        desk.announce_change()
        progressed = outer_round.Progressed(
            self.node,
            message.round,
            message.attempt,
            message.phase,
            message.done,
            message.total,
        )
        await desk.hear(progressed)

    async def _take_fault(self, message: messages.Fault, desk: Desk) -> None:
        self.activity.last_reason = message.reason
        self.did("declined")
        if message.code == CheckpointIntegrityError.code:
            # Of several nodes that say so, one may be right.
            self.log.warning("commit.disputed", round=message.round, attempt=message.attempt)
        at = (message.round, message.attempt)
        await desk.hear(outer_round.Declined(self.node, *at, message.code, message.reason))

    async def _take_commitment(self, message: messages.Commitment, desk: Desk) -> None:
        payload = messages.commitment_payload(
            message.federation,
            message.round,
            message.attempt,
            message.dataset_root,
            self.ground.config_hash,
            keys=message.keys,
        )
        if not identity.verify(self.node, message.signature, payload):
            self.refuse("signature", "the commitment is not signed by this node's key")
            return
        if self.ground.masked != (message.keys is not None):
            wants = "carries no masking keys" if self.ground.masked else "carries masking keys"
            self.refuse("contract_violation", f"the commitment {wants}")
            return
        if message.keys is not None:
            try:
                public_keys(message.keys).check(self.node)
            except SecureAggregationError as error:
                self.refuse(error.code, error.message)
                return
        self.commitment = message
        self.did("bound")
        await desk.hear(
            outer_round.Committed(
                self.node,
                message.round,
                message.attempt,
                message.dataset_root,
                message.signature,
                outer_round.Holding(message.holds_bytes, message.follows, message.holds_of_sum),
            )
        )

    async def _take_update(self, message: messages.Update, desk: Desk) -> None:
        if not identity.verify(self.node, message.signature, self._payload(message)):
            self.refuse("signature", "the update is not signed by this node's key")
            return
        if reason := desk.expects(self.node, message.round, message.attempt):
            self.refuse("misplaced", reason)
            return
        if message.nbytes != desk.plan.nbytes:
            self.refuse(
                "contract_violation",
                f"an update of {message.nbytes} bytes; those of this round have {desk.plan.nbytes}",
            )
            return
        known = self._announcement
        if known is not None and (known.round, known.attempt) == (message.round, message.attempt):
            self.refuse("duplicate", "a second update of one attempt")
            return
        # Known before the machine hears of it: the attempt may end while it is told.
        self._announcement = message
        await desk.hear(
            outer_round.UpdateAnnounced(
                self.node,
                message.round,
                message.attempt,
                message.digest,
                message.dataset_root,
                message.signature,
            )
        )
        self.activity.loss = message.loss
        if message.epsilon is not None:
            self.activity.epsilon = message.epsilon
            self.log.info(
                "privacy.reported",
                round=message.round,
                attempt=message.attempt,
                epsilon=message.epsilon,
            )
        self._announced.set()

    def _payload(self, message: messages.Update) -> bytes:
        return messages.update_payload(
            message.federation,
            message.round,
            message.attempt,
            message.dataset_root,
            message.digest,
        )

    # ---- edges ----

    def _break_edges(self, reason: str) -> None:
        self._broken_reason = reason
        self._broken.set()
        # Whoever waits for the pair to be provisioned waits in vain.
        self._provisioned.set()

    async def _keep_edges(self, desk: Desk, spooler: Spooler, numbers: EdgeNumbers) -> None:
        while self.edge_faults < MAX_EDGE_FAULTS:
            self._broken, self._provisioned = trio.Event(), trio.Event()
            try:
                reason = await self._use_one_pair(desk, spooler, numbers)
            except LinkLost:
                return
            except EdgeFault as full:
                reason = full.message
            self.edge_faults += 1
            self.log.warning("edges.broken", reason=reason, faults=self.edge_faults)
            if self.activity.phase != "declined":
                self.activity.last_reason = reason
                self.did("edges broken")
            # A node that knows why says so on its link meanwhile: its word is the better one.
            await trio.sleep(LAST_WORD_S)
            await desk.hear(outer_round.MemberLost(self.node, "edge_fault", reason))
            # Counted anew once a pair has carried a blob to its end.
            await trio.sleep(edge_pause_s(self.edge_faults))
        self._cut_off("edge_fault", f"{self.edge_faults} broken pairs of edges")

    async def _use_one_pair(self, desk: Desk, spooler: Spooler, numbers: EdgeNumbers) -> str:
        """Provision a pair, serve it until it breaks, and take it down; returns why."""
        ground, me = self.ground, self.ground.driver.node
        state = EdgeSpec(numbers.draw(), me, self.node, ground.capacity_bytes, ground.slots)
        update = EdgeSpec(numbers.draw(), self.node, me, ground.capacity_bytes, ground.slots)
        async with leased(ground.leases, state, update) as (out, into):
            rx, tx = RxEnd(update, into, ground.driver), TxEnd(state, out, ground.driver)
            self.edges = {state.edge: "state", update.edge: "update"}
            try:
                async with trio.open_nursery() as nursery:
                    await nursery.start(rx.serve)
                    await self._provision(state, update)
                    await nursery.start(tx.serve)
                    self._pair, self._pair_nursery = _Pair(tx, rx), nursery
                    self.did("idle")
                    nursery.start_soon(self._receive_updates, self._pair, desk, spooler)
                    await desk.hear(outer_round.MemberReady(self.node))
                    await self._broken.wait()
                    nursery.cancel_scope.cancel()
            except* EdgeFault as faults:
                self._broken_reason = str(faults.exceptions[0])
            finally:
                self._pair = self._pair_nursery = None
                self.edges = {}
        return self._broken_reason

    async def _provision(self, state: EdgeSpec, update: EdgeSpec) -> None:
        self.tell(
            messages.Provision(
                federation=self.ground.federation, epoch=self.epoch, state=state, update=update
            )
        )
        with trio.move_on_after(PROVISION_TIMEOUT_S):
            await self._provisioned.wait()
            if self._broken.is_set():
                raise EdgeFault(self._broken_reason)
            return
        raise EdgeFault(f"the node did not provision its edges within {PROVISION_TIMEOUT_S:g} s")

    # ---- state out ----

    async def _send_state(self, pair: _Pair, offer: Offer, downlink: Downlink) -> None:
        self.did("fetching", 0, offer.nbytes)
        try:
            await downlink.send(offer, pair.tx, self._count_state)
        except (EdgeFault, StorageError) as error:
            self._break_edges(error.message)
            return
        self.edge_faults = 0
        pair.sending = False

    def _count_state(self, extent: int) -> None:
        self.moved["state"] += extent

    # ---- updates in ----

    async def _receive_updates(self, pair: _Pair, desk: Desk, spooler: Spooler) -> None:
        while True:
            try:
                first = await pair.rx.receive()
                if first is None:
                    self._break_edges("the node ended its update stream")
                    return
                await self._receive_update(pair.rx, first, desk, spooler)
            except EdgeFault as error:
                self._break_edges(error.message)
                return
            except StorageError as error:
                failed = outer_round.StepFailed(
                    *self._receiving_for, error.code, error.message, Response.RETRY
                )
                await desk.hear(failed)
                self._break_edges(error.message)
                return
            except PeerError as error:
                self.refuse(error.code, error.message, error.remediation)
                self._break_edges(error.message)
                return

    async def _receive_update(
        self, rx: RxEnd, first: tuple[SlotIndex, int], desk: Desk, spooler: Spooler
    ) -> None:
        header = blob.read_header(rx.region.slot(first[0])[: first[1]])
        at = (header.round, header.attempt)
        announced = await self._announcement_due(at, desk)
        if announced is None:
            await self._pass_over(rx, first, header)
            return
        self._receiving_for = at
        with trio.CancelScope() as self._receiving:
            await self._spool(rx, first, announced, desk, spooler)
            self.edge_faults = 0
        if self._receiving.cancelled_caught:
            raise RoundError(f"round {at[0]} attempt {at[1]} ended before this update was in")
        self._receiving = None

    async def _announcement_due(self, at: tuple[int, int], desk: Desk) -> messages.Update | None:
        """The ``Update`` of the blob for ``at``; None once that attempt awaits none."""
        with trio.move_on_after(ANNOUNCEMENT_TIMEOUT_S):
            while True:
                now = self._announcement
                if now is not None and (now.round, now.attempt) == at:
                    return now
                if desk.expects(self.node, *at):
                    return None
                await self._announced.wait()
        raise RoundError(f"an update blob without an Update within {ANNOUNCEMENT_TIMEOUT_S:g} s")

    async def _pass_over(
        self, rx: RxEnd, first: tuple[SlotIndex, int], header: blob.BlobHeader
    ) -> None:
        """Read a blob that came too late to its end: the edge is sound, and the next is behind it.

        Raises:
            EdgeFault: its sender has given it up.
        """
        self.refused["late_update"] += 1
        self.log.info("update.late", round=header.round, attempt=header.attempt)
        rx.consumed(first[0])
        left = len(range(header.offset, header.total_bytes, header.chunk_bytes)) + 1
        for _ in range(left):
            slot, extent = _inside_blob(await rx.receive())
            rx.consumed(slot)
            self.moved["update"] += extent

    def _so_much_is_in(self, announced: messages.Update, done: int) -> outer_round.Progressed:
        at, total = (announced.round, announced.attempt), announced.nbytes
        return outer_round.Progressed(self.node, *at, "arriving", done, total)

    async def _spool(
        self,
        rx: RxEnd,
        first: tuple[SlotIndex, int],
        announced: messages.Update,
        desk: Desk,
        spooler: Spooler,
    ) -> None:
        expected = blob.Expected(
            kind="update",
            federation=self.ground.federation,
            round=announced.round,
            attempt=announced.attempt,
            layout=desk.plan,
            digest=announced.digest,
            max_chunk_bytes=self.ground.capacity_bytes,
        )
        payload = self._payload(announced)
        reader = blob.BlobReader(
            expected,
            verify=lambda _, signature: identity.verify(self.node, signature, payload),
        )
        spooled = await trio.to_thread.run_sync(spooler.open_update, self.node)
        try:
            slot, extent = first
            due = 0.0
            while True:
                take = partial(_take_chunk, reader, spooled, rx.region.slot(slot)[:extent])
                complete = await trio.to_thread.run_sync(take)
                rx.consumed(slot)
                self.moved["update"] += extent
                if complete is not None:
                    break
                if trio.current_time() >= due:
                    due = trio.current_time() + PROGRESS_PAUSE_S
                    await desk.hear(self._so_much_is_in(announced, reader.position))
                chunk = await rx.receive()
                slot, extent = _inside_blob(chunk)
            await desk.check_update(spooled)
        except BaseException:
            with trio.CancelScope(shield=True):
                # In a thread: to free a large file takes longer than the loop may stand.
                await trio.to_thread.run_sync(spooled.close)
            raise
        desk.keep(self.node, spooled)
        self.did("sent")
        await desk.hear(
            outer_round.BlobArrived(
                self.node,
                announced.round,
                announced.attempt,
                complete.digest,
                complete.signature,
            )
        )


def _kind(message: messages.FromCoordinator | Fanout) -> str:
    return message.kind if isinstance(message, Fanout) else type(message).__name__


def edge_pause_s(faults: int) -> float:
    """Seconds to wait before the next pair, once so many in a row have broken."""
    doublings = min(max(faults - 1, 0), MAX_EDGE_FAULTS)
    return float(min(EDGE_PAUSE_S * 2**doublings, EDGE_PAUSE_MAX_S))


@asynccontextmanager
async def leased(leases: ArenaLeases, *specs: EdgeSpec) -> AsyncIterator[list[Region]]:
    """The rings of ``specs``, given back on the way out.

    Raises:
        EdgeFault: there was no room for all of them in ``LEASE_WITHIN_S``.
    """
    try:
        with trio.fail_after(LEASE_WITHIN_S):
            regions = await leases.lease_all(specs)
    except trio.TooSlowError:
        raise EdgeFault(
            f"no room for its rings in the coordinator's arena within {LEASE_WITHIN_S:g} s: raise "
            "`edges.arena_bytes` there, or let fewer nodes in"
        ) from None
    try:
        yield regions
    finally:
        for region in regions:
            leases.give_back(region)


def _inside_blob(chunk: tuple[SlotIndex, int] | None) -> tuple[SlotIndex, int]:
    if chunk is None:
        raise EdgeFault("the stream ended inside a blob")
    return chunk


def _take_chunk(
    reader: blob.BlobReader, spooled: SpoolFile, chunk: memoryview
) -> blob.Complete | None:
    """Hash and spool one chunk; the end of the blob once it is whole.  Runs in a thread."""
    event = reader.feed(chunk)
    match event:
        case blob.Data(offset=offset, view=view):
            spooled.pwrite(offset, view)
        case blob.Complete():
            return event
        case blob.Header():
            pass
    return None
