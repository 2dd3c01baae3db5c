"""One node at the coordinator while its link lives, as ``lensemble_coord.training.session``."""

from collections import deque
from typing import TYPE_CHECKING, Any

from lensemble.edge.spec import EdgeSpec
from lensemble.errors import Response
from lensemble.ids import Digest, EdgeId, NodeId, SlotIndex
from lensemble.wire import codec, fence, messages
from lensemble_coord.training import outer_round as r
from lensemble_coord.training.downlink import Origin
from lensemble_coord.training.session import (
    ANNOUNCEMENT_TIMEOUT_S,
    LAST_WORD_S,
    MAX_EDGE_FAULTS,
    PROVISION_TIMEOUT_S,
    edge_pause_s,
)
from tests.sim.edges import Region, RxEnd, TxEnd
from tests.sim.mask_side import At, sign
from tests.sim.states import CHUNK
from tests.sim.terms import CAPACITY_BYTES, CONFIG_HASH, COORDINATOR, FEDERATION, LAYOUT, SLOTS
from tests.sim.world import Link, brief

if TYPE_CHECKING:
    from tests.sim.coord_host import CoordinatorHost


ECHOES = 40
"""How many words back an echo goes."""

Told = tuple[fence.Fenced, bytes]


class _Pair:
    """The edges of one provision."""

    def __init__(self, state: EdgeSpec, update: EdgeSpec) -> None:
        self.state, self.update = state, update
        self.tx: TxEnd | None = None
        self.rx: RxEnd | None = None
        self.outgoing: deque[Any] = deque()
        self.sending = False
        self.free: deque[SlotIndex] = deque()
        self.came: deque[tuple[SlotIndex, Any]] = deque()
        self.broken = False


class SimSession:
    def __init__(self, coord: "CoordinatorHost", link: Link, node: NodeId, epoch: int) -> None:
        self.coord, self.link, self.node, self.epoch = coord, link, node, epoch
        self.world = coord.world
        self.ended = False
        self.commitment: messages.Commitment | None = None
        self._announcement: messages.Update | None = None
        self._pair: _Pair | None = None
        self._provisioned = False
        self._faults = 0
        self._reading: tuple[str, At, Digest, int] | None = None
        """How the blob coming in is read (spool or pass), for what, and how far it is."""
        self._waits_since: float | None = None

    # ---- words ----

    def tell(self, message: messages.FromCoordinator) -> None:
        if not self.ended:
            payload = codec.encode(message)
            self.coord.federation.checks.told(self.coord, message)
            self.world.send(self.link, self.coord, "ctl", payload, about=message)
            self._echo(message, payload)

    def _echo(self, message: messages.FromCoordinator, payload: bytes) -> None:
        """Something from long ago comes once more: of an older attempt, session or process.

        Of one session a link repeats nothing; a coordinator that does may do so with rounds.
        """
        if not isinstance(message, fence.Fenced) or isinstance(message, messages.Welcome):
            return
        heard = self.coord.told[self.node]
        if self.coord.federation.happens("echoes"):
            again = [
                (old, sent)
                for old, sent in heard
                if old.epoch != self.epoch or isinstance(old, fence.OfRound)
            ]
            if again:
                old, sent = self.world.random.choice(again)
                self.world.send(self.link, self.coord, "ctl", sent, about=f"echo of {brief(old)}")
        heard.append((message, payload))

    def refuse(self, code: str, reason: str) -> None:
        self.tell(messages.Refused(code=code, reason=reason[:500]))

    def end(self, reason: str) -> None:
        if not self.ended:
            self.ended = True
            self._take_down()
            self.coord.session_ended(self, reason)

    def heard(self, message: messages.FromNode) -> None:
        if self.ended:
            return
        if isinstance(message, messages.Join):
            self.refuse("misplaced", "this session has joined already")
        elif (message.federation, message.epoch) != (FEDERATION, self.epoch):
            self.refuse("stale_epoch", "of another session")
        elif isinstance(message, messages.Leave):
            self.end(f"left: {message.reason}")
        elif isinstance(message, fence.OfRound) and not self.is_now(message):
            self.refuse("stale", f"a {type(message).__name__} of another attempt")
        else:
            self._take(message)

    def is_now(self, message: fence.OfRound) -> bool:
        """Whether it is of the attempt that the rounds are at."""
        ground = self.coord.state.ground
        return (message.round, message.attempt) == (ground.round, ground.attempt)

    def _take(self, message: messages.FromNode) -> None:  # noqa: C901 - one arm a message
        rounds, node = self.coord.rounds, self.node
        match message:
            case messages.Commitment():
                self._take_commitment(message)
            case messages.Update():
                self._take_update(message)
            case messages.Shares():
                rounds.post(r.SharesSent(node, message.round, message.attempt))
            case messages.UnmaskAnswer():
                rounds.post(r.UnmaskAnswered(node, message.round, message.attempt))
            case messages.Fault():
                at = (message.round, message.attempt)
                rounds.post(r.Declined(node, *at, message.code, message.reason))
            case messages.Progress():
                at = (message.round, message.attempt)
                how_far = (message.phase, message.done, message.total)
                rounds.post(r.Progressed(node, *at, *how_far))
            case messages.Provisioned(edges=edges):
                if self._pair is not None and set(edges) == self._edges():
                    self._use()
            case messages.EdgeLost(edge=edge, reason=reason):
                if edge in self._edges():
                    self._break(reason)
            case _:
                pass

    def _edges(self) -> set[int]:
        pair = self._pair
        return set() if pair is None else {pair.state.edge, pair.update.edge}

    def _take_commitment(self, message: messages.Commitment) -> None:
        payload = messages.commitment_payload(
            message.federation,
            message.round,
            message.attempt,
            message.dataset_root,
            CONFIG_HASH,
            keys=message.keys,
        )
        assert message.signature == sign(self.node, payload)
        assert (message.keys is not None) == self.coord.rules.masked
        self.commitment = message
        self.coord.rounds.post(
            r.Committed(
                self.node,
                message.round,
                message.attempt,
                message.dataset_root,
                message.signature,
                r.Holding(message.holds_bytes, message.follows, message.holds_of_sum),
            )
        )

    def _take_update(self, message: messages.Update) -> None:
        at = (message.round, message.attempt)
        if message.signature != sign(self.node, self._payload(message)):
            self.refuse("signature", "the update is not signed by this node's key")
            return
        if not self.coord.expects(self.node, at):
            self.refuse("misplaced", "no update is expected")
            return
        if self._announcement is not None:
            self.refuse("duplicate", "a second update of one attempt")
            return
        self.coord.rounds.post(
            r.UpdateAnnounced(
                self.node, *at, message.digest, message.dataset_root, message.signature
            )
        )
        self._announcement = message
        self._read()

    def _payload(self, message: messages.Update) -> bytes:
        return messages.update_payload(
            message.federation,
            message.round,
            message.attempt,
            message.dataset_root,
            message.digest,
        )

    # ---- edges ----

    def keep_edges(self) -> None:
        """Provision a pair; once it breaks another, after a pause that grows."""
        if self.ended:
            return
        coord = self.coord
        coord.edge_numbers += 2
        first, me = coord.edge_numbers, COORDINATOR
        pair = self._pair = _Pair(
            EdgeSpec(EdgeId(first), me, self.node, CAPACITY_BYTES, SLOTS),
            EdgeSpec(EdgeId(first + 1), self.node, me, CAPACITY_BYTES, SLOTS),
        )
        self._provisioned, self._reading, self._waits_since = False, None, None

        def ready(slot: SlotIndex, _: int) -> None:
            assert pair.rx is not None
            pair.came.append((slot, pair.rx.region.slots[slot]))
            self._read()

        region, faulted = Region(0, SLOTS), self._faulted(pair)
        pair.rx = RxEnd(coord, self.link, pair.update, region, ready=ready, faulted=faulted)
        pair.rx.register()
        coord.provisioned[first] = coord.provisioned[first + 1] = self.epoch
        provision = messages.Provision(
            federation=FEDERATION, epoch=self.epoch, state=pair.state, update=pair.update
        )
        self.tell(provision)

        def too_slow() -> None:
            if self._pair is pair and not self._provisioned:
                self._break("the node did not provision its edges in time")

        self.world.after(coord, PROVISION_TIMEOUT_S, too_slow)

    def _faulted(self, pair: _Pair) -> Any:
        def report(reason: str) -> None:
            if self._pair is pair:
                self._break(reason)

        return report

    def _use(self) -> None:
        pair = self._pair
        if pair is None or self._provisioned or pair.broken:
            return
        self._provisioned = True
        pair.tx = TxEnd(
            self.coord,
            self.link,
            pair.state,
            Region(0, SLOTS),
            released=lambda slot: self._fill(pair, slot),
            faulted=self._faulted(pair),
        )
        pair.tx.chunk_s = self.coord.federation.chunk_s(self.coord)
        pair.tx.open()
        self.coord.rounds.post(r.MemberReady(self.node))

    def _take_down(self) -> None:
        pair, self._pair = self._pair, None
        if pair is not None:
            pair.broken = True
            for end in (pair.tx, pair.rx):
                if end is not None:
                    end.cancel()

    def _break(self, reason: str) -> None:
        pair = self._pair
        if pair is None or pair.broken:
            return
        self.world.note(self.coord, "edges broken", f"{self.node[:6]}: {reason}")
        pair.broken = True
        self._faults += 1
        self._take_down()

        def lost() -> None:
            if not self.ended:
                self.coord.rounds.post(r.MemberLost(self.node, "edge_fault", reason))
                self.world.after(self.coord, edge_pause_s(self._faults), again)

        def again() -> None:
            if self._faults >= MAX_EDGE_FAULTS:
                self.end(f"{self._faults} broken pairs of edges")
            else:
                self.keep_edges()

        self.world.after(self.coord, LAST_WORD_S, lost)

    # ---- state out ----

    def offer_state(self, held: r.Holding) -> None:
        origin = self.coord.origin
        if held.nbytes >= origin.nbytes:
            return
        pair = self._pair
        if pair is None or pair.tx is None:
            return
        if pair.sending:
            self._break("a state is still being sent on this edge")
            return
        ground = self.coord.state.ground
        at = (ground.round, ground.attempt)
        for kind, digest, offset in self._parts(origin, held):
            starts = range(offset, LAYOUT.nbytes, CHUNK)
            data = [("data", start, min(CHUNK, LAYOUT.nbytes - start)) for start in starts]
            pair.outgoing.extend([("head", kind, at, digest, offset), *data, ("tail", digest)])
        pair.sending = True
        self._pump(pair)

    def _parts(self, origin: Origin, held: r.Holding) -> list[tuple[str, Digest, int]]:
        """Kind, digest and first byte of every blob."""
        steps = origin.steps[-held.follows :] if held.follows else ()
        if steps and all(self.coord.books.has_sum(step.total) for step in steps):
            self.world.note(self.coord, "sends", f"{len(steps)} sums to {self.node[:6]}")
            first = held.of_sum - held.of_sum % CHUNK
            return [("sum", step.total, first if step is steps[0] else 0) for step in steps]
        self.world.note(self.coord, "sends", f"the state from {held.nbytes} to {self.node[:6]}")
        self.coord.books.require_weights(origin.state)
        parts = [("state", origin.state, held.nbytes)] if held.nbytes < LAYOUT.nbytes else []
        if origin.momentum is not None:
            parts.append(("momentum", origin.momentum, max(0, held.nbytes - LAYOUT.nbytes)))
        return parts

    def _fill(self, pair: _Pair, slot: SlotIndex) -> None:
        pair.free.append(slot)
        self._pump(pair)

    def _pump(self, pair: _Pair) -> None:
        while pair.outgoing and pair.free and pair.tx is not None and not pair.tx.over:
            slot = pair.free.popleft()
            pair.tx.region.slots[slot] = pair.outgoing.popleft()
            if not pair.outgoing:
                pair.sending = False
                self._faults = 0
            pair.tx.filled(slot, 1)

    # ---- updates in ----

    def heard_stream(self, lane: tuple[Any, ...], payload: Any) -> None:
        way, edge = lane
        what, chunk = payload
        pair = self._pair
        if pair is None or edge not in self._edges():
            if way == "to_rx" and what == "chunk":
                self.world.send(self.link, self.coord, ("to_tx", edge), ("stop", None))
            return
        if way == "to_rx" and pair.rx is not None:
            pair.rx.hear(what, chunk)
        elif way == "to_tx" and pair.tx is not None:
            pair.tx.lose("refused by the peer")

    def is_announced(self, found: Digest, signature: bytes, said: messages.Update) -> bool:
        """Whether a blob is what its node has signed."""
        return found == said.digest and signature == said.signature

    def round_ended(self, at: At) -> None:
        self._announcement = None
        if self._reading is not None and self._reading[:2] == ("spool", at):
            self.refuse("round", "the attempt ended before this update was in")
            self._break("the attempt ended before this update was in")
        self._read()

    def _read(self) -> None:
        """Take what has come as far as it can be taken now."""
        pair = self._pair
        while pair is not None and pair.came and self._pair is pair:
            slot, chunk = pair.came[0]
            if self._reading is None:
                how = self._how_to_read(chunk)
                if how is None:
                    return
                self._reading = (how, chunk[2], chunk[3], 0)
            elif not self._next(chunk):
                return
            pair.came.popleft()
            if pair.rx is not None:
                pair.rx.consumed(slot)

    def _how_to_read(self, chunk: Any) -> str | None:
        assert chunk[:2] == ("head", "update"), chunk
        at, now = chunk[2], self._announcement
        if now is not None and (now.round, now.attempt) == at:
            self._waits_since = None
            return "spool"
        if not self.coord.expects(self.node, at):
            self._waits_since = None
            return "pass"
        if self._waits_since is None:
            since = self._waits_since = self.world.now

            def too_late() -> None:
                if self._waits_since == since and not self.ended:
                    self.refuse("round", "an update blob without an Update")
                    self._break("an update blob without an Update")

            self.world.after(self.coord, ANNOUNCEMENT_TIMEOUT_S, too_late)
        return None

    def _next(self, chunk: Any) -> bool:
        """Take one more chunk of the blob; False if it ended the edge."""
        assert self._reading is not None
        how, at, digest, position = self._reading
        if chunk[0] == "data":
            assert chunk[1] == position
            position += chunk[2]
            self._reading = (how, at, digest, position)
            if how == "spool" and self.coord.books.disk.full:
                retry = r.StepFailed(*at, "storage", "no room for an update", Response.RETRY)
                self.coord.rounds.post(retry)
                self._break("no room for an update")
                return False
            if how == "spool":
                progress = r.Progressed(self.node, *at, "arriving", position, LAYOUT.nbytes)
                self.coord.rounds.post(progress)
            return True
        assert chunk[0] == "tail", chunk
        assert position == LAYOUT.nbytes, chunk
        self._reading = None
        announced = self._announcement
        if how == "pass" or announced is None:
            return True
        _, found, signature = chunk
        if not self.is_announced(found, signature, announced):
            self.refuse("contract_violation", "the blob is not what was announced")
            self._break("the blob is not what was announced")
            return False
        self._faults = 0
        self.coord.books.spool[self.node] = (at, found)
        self.coord.rounds.post(r.BlobArrived(self.node, *at, found, signature))
        return True
