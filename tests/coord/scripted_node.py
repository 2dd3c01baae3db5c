"""A node that speaks the protocol from a script: no worker, no daemon, one link."""

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import numpy as np
import trio

from lensemble import blob, identity, workload
from lensemble.edge.arena import Arena, Region
from lensemble.edge.spec import EdgeSpec
from lensemble.errors import EdgeFault, LinkLost
from lensemble.ids import Digest
from lensemble.secagg.keys import Context
from lensemble.secagg.participant import Drawn, unmask_payload
from lensemble.secagg.roster import Roster
from lensemble.secagg.shares import Envelope
from lensemble.transport.driver import Driver, PeerAddress
from lensemble.transport.ends import RxEnd, TxEnd
from lensemble.wire import codec, messages
from lensemble.workload import Workload
from lensemble_coord.training.masking import public_keys

ROOT = Digest("5" * 64)


class ScriptedNode:
    """Joins, binds, receives states and sends updates when it is told to."""

    def __init__(self, driver: Driver, me: identity.Identity, terms: Workload, name: str) -> None:
        self.driver, self.me, self.name = driver, me, name
        self.layout = workload.layout(terms)
        self.terms = terms
        self.arena = Arena.create(1 << 24)
        self.welcome: messages.Welcome
        self.heard: list[messages.FromCoordinator] = []
        self.news = trio.Event()
        self.states: list[Digest] = []
        self.loses_pairs = 0
        """So many pairs of edges are lost before they are provisioned."""

        self.tx: TxEnd
        self.nursery: trio.Nursery

    @asynccontextmanager
    async def joined(
        self, address: PeerAddress, *, invite: bytes = b""
    ) -> AsyncIterator["ScriptedNode"]:
        self.link = await self.driver.dial(address)
        await self.say(
            messages.Join(
                speaks=codec.SPEAKS,
                build="test",
                name=self.name,
                boot=secrets.token_hex(8),
                invite=invite,
            )
        )
        async with trio.open_nursery() as nursery:
            self.nursery = nursery
            nursery.start_soon(self._listen)
            yield self
            nursery.cancel_scope.cancel()
        await self.link.close("left")

    async def say(self, message: messages.FromNode) -> None:
        await self.link.send(codec.encode(message))

    async def _listen(self) -> None:
        while True:
            try:
                message = self.read(await self.link.receive())
            except LinkLost:
                return
            if isinstance(message, messages.Welcome):
                self.welcome = message
            if isinstance(message, messages.Provision):
                self.nursery.start_soon(self._provision, message)
            self.heard.append(message)
            self.news.set()
            self.news = trio.Event()

    def read(self, payload: bytes) -> messages.FromCoordinator:
        return codec.decode_from_coordinator(payload)

    async def wait_for(self, kind: type[msgspec.Struct], **fields: object) -> msgspec.Struct:
        """The first message of ``kind`` heard, now or later, with these fields; it is taken out."""
        while True:
            news = self.news
            for message in self.heard:
                if isinstance(message, kind) and all(
                    getattr(message, key) == value for key, value in fields.items()
                ):
                    self.heard.remove(message)
                    return message
            await news.wait()

    async def wait_for_one(self, *kinds: type[msgspec.Struct]) -> msgspec.Struct:
        """The first message of any of ``kinds``."""
        while True:
            news = self.news
            for message in self.heard:
                if isinstance(message, kinds):
                    return message
            await news.wait()

    async def _provision(self, message: messages.Provision) -> None:
        if self.loses_pairs:
            self.loses_pairs -= 1
            await self.say(
                messages.EdgeLost(
                    federation=message.federation,
                    epoch=message.epoch,
                    edge=message.update.edge,
                    reason="the worker was killed",
                )
            )
            return
        async with trio.open_nursery() as nursery:
            rx = RxEnd(message.state, self._region(message.state), self.driver)
            self.tx = TxEnd(message.update, self._region(message.update), self.driver)
            await nursery.start(rx.serve)
            await nursery.start(self.tx.serve)
            await self.say(
                messages.Provisioned(
                    federation=message.federation,
                    epoch=message.epoch,
                    edges=(message.state.edge, message.update.edge),
                )
            )
            await self._take_states(rx)

    def _region(self, spec: EdgeSpec) -> Region:
        region = self.arena.lease(spec)
        assert region is not None
        return region

    async def _take_states(self, rx: RxEnd) -> None:
        while True:
            try:
                chunk = await rx.receive()
            except EdgeFault:
                return
            if chunk is None:
                return
            slot, extent = chunk
            raw = bytes(rx.region.slot(slot)[:extent])
            rx.consumed(slot)
            if raw.startswith(b"LNSBLOBT"):
                self.states.append(msgspec.msgpack.decode(raw[8:])[0])
                self.news.set()
                self.news = trio.Event()

    def fields(self, opening: messages.RoundOpen) -> dict[str, object]:
        return {
            "federation": opening.federation,
            "epoch": opening.epoch,
            "round": opening.round,
            "attempt": opening.attempt,
        }

    async def bind(
        self, opening: messages.RoundOpen, *, holds: int = 0, root: Digest = ROOT
    ) -> None:
        keys = None
        if self.welcome.aggregation == "masked":
            context = Context(opening.federation, opening.round, opening.attempt)
            self.drawn = Drawn(context, self.me.node)
            public = self.drawn.public
            keys = messages.MaskKeys(
                mask_key=public.mask_key,
                share_key=public.share_key,
                self_commitment=public.self_commitment,
            )
        payload = messages.commitment_payload(
            opening.federation, opening.round, opening.attempt, root, opening.config_hash, keys=keys
        )
        await self.say(
            messages.Commitment(
                **self.fields(opening),
                dataset_root=root,
                episodes=1,
                holds_bytes=holds,
                keys=keys,
                signature=self.me.sign(payload),
            )
        )

    async def deal(self, opening: messages.RoundOpen) -> None:
        """Answer the roster with shares."""
        told = await self.wait_for(messages.Roster, round=opening.round, attempt=opening.attempt)
        self.roster = self.roster_of(told, opening)
        self.dealt = self.drawn.deal(self.roster)
        dealing = self.dealt.dealing
        await self.say(
            messages.Shares(
                **self.fields(opening), commitments=dealing.commitments, sealed=dealing.sealed
            )
        )

    def roster_of(self, told: messages.Roster, opening: messages.RoundOpen) -> Roster:
        keys = {each.node: public_keys(each.keys) for each in told.members}
        context = Context(opening.federation, opening.round, opening.attempt)
        return Roster(context, keys, told.threshold, opening.sketch_seed)

    async def collect(self, opening: messages.RoundOpen) -> None:
        """Open the shares that come with the go-ahead."""
        told = await self.wait_for(messages.Collect, round=opening.round, attempt=opening.attempt)
        envelopes = {e.dealer: Envelope(e.sealed, e.commitments) for e in told.envelopes}
        self.bound = self.dealt.receive(envelopes)

    def masked(self, words: np.ndarray) -> np.ndarray:
        hidden = words.copy()
        self.bound.mask().add(0, hidden)
        return hidden

    async def unmask(self, opening: messages.RoundOpen, *, lie: bool = False) -> None:
        """Answer for the survivors."""
        asked = await self.wait_for(
            messages.UnmaskRequest, round=opening.round, attempt=opening.attempt
        )
        answer = self.bound.answer(self.roster.context, asked.survivors)
        shares = bytes(len(answer.shares)) if lie else answer.shares
        payload = unmask_payload(self.roster, asked.survivors, shares)
        await self.say(
            messages.UnmaskAnswer(
                **self.fields(opening), shares=shares, signature=self.me.sign(payload)
            )
        )

    async def take_masked_part(self, value: int = 1, *, lie: bool = False) -> messages.RoundClose:
        """One whole masked round; ``lie`` reveals other shares than were dealt."""
        opening = await self.wait_for(messages.RoundOpen)
        await self.bind(opening)
        await self.deal(opening)
        await self.collect(opening)
        words = self.masked(self.words(value))
        signature = await self.announce(opening, words)
        await self.send(opening, words, signature)
        await self.unmask(opening, lie=lie)
        return await self.wait_for(messages.RoundClose, round=opening.round)

    def words(self, value: int) -> np.ndarray:
        return np.full(self.layout.size, value, dtype=np.uint32)

    def digest(self, words: np.ndarray) -> Digest:
        return blob.update_digest(self.layout, [words.data.cast("B")])

    async def announce(
        self, opening: messages.RoundOpen, words: np.ndarray, *, root: Digest = ROOT
    ) -> bytes:
        digest = self.digest(words)
        signature = self.me.sign(
            messages.update_payload(
                opening.federation, opening.round, opening.attempt, root, digest
            )
        )
        await self.say(
            messages.Update(
                **self.fields(opening),
                digest=digest,
                nbytes=self.layout.nbytes,
                dataset_root=root,
                reused=False,
                signature=signature,
            )
        )
        return signature

    async def send(
        self,
        opening: messages.RoundOpen,
        words: np.ndarray,
        signature: bytes,
        *,
        pause_s: float = 0.0,
    ) -> None:
        """Put the blob on the edge, with ``pause_s`` before each chunk of it."""
        raw = words.data.cast("B")
        header = blob.BlobHeader(
            kind="update",
            federation=opening.federation,
            round=opening.round,
            attempt=opening.attempt,
            total_bytes=self.layout.nbytes,
            chunk_bytes=self.tx.spec.capacity_bytes,
            layout_digest=self.layout.digest,
            digest_hint=self.digest(words),
        )
        slot = await self.tx.acquire()
        self.tx.filled(slot, blob.header_chunk(header, self.tx.region.slot(slot)))
        for start, length in blob.data_ranges(header):
            await trio.sleep(pause_s)
            slot = await self.tx.acquire()
            self.tx.region.slot(slot)[:length] = raw[start : start + length]
            self.tx.filled(slot, length)
        slot = await self.tx.acquire()
        self.tx.filled(
            slot, blob.trailer_chunk(self.digest(words), signature, self.tx.region.slot(slot))
        )

    async def take_part(self, value: int = 1) -> messages.RoundClose:
        """One whole round, as a node that behaves does it."""
        opening = await self.wait_for(messages.RoundOpen)
        await self.bind(opening)
        await self.wait_for(messages.Collect, round=opening.round, attempt=opening.attempt)
        words = self.words(value)
        signature = await self.announce(opening, words)
        await self.send(opening, words, signature)
        return await self.wait_for(messages.RoundClose, round=opening.round)
