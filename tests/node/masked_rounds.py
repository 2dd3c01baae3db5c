"""A coordinator's part in masked attempts, done with the library's primitives only."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lensemble import identity, seeds
from lensemble.ids import NodeId
from lensemble.secagg.keys import Context, PublicKeys
from lensemble.secagg.masks import MaskStream
from lensemble.secagg.participant import Answer, unmask_payload
from lensemble.secagg.roster import Roster
from lensemble.secagg.shares import Dealing, check_dealing, envelopes_for
from lensemble.secagg.unmask import Recovery, leftover
from lensemble.wire import messages
from tests.node.scripted import FEDERATION, WORKLOAD, Running, Session, Stage

Words = NDArray[np.uint32]


class Peer:
    """One node daemon and the newest session with it."""

    def __init__(self, running: Running, session: Session) -> None:
        self.running = running
        self.session = session

    @property
    def node(self) -> NodeId:
        return self.session.node

    @property
    def state_dir(self) -> Path:
        return self.running.serving.config.state_dir

    def bare(self, round_index: int = 0) -> Words:
        """What the node has on its own disk."""
        return np.fromfile(self.state_dir / "release" / f"round-{round_index}.u32", dtype="<u4")

    def revealed(self) -> list[messages.UnmaskAnswer]:
        return [m for m in self.session.heard if isinstance(m, messages.UnmaskAnswer)]


async def peers(s: Stage, count: int = 3) -> list[Peer]:
    """Daemons that send masked updates only, joined and with edges."""
    return [await peer(s, f"node{place}") for place in range(count)]


async def peer(s: Stage, name: str) -> Peer:
    folder = str(s.directory / name)
    running = await s.start_node(state_dir=folder, share={"plain": False})
    return Peer(running, await s.joined(aggregation="masked"))


class Attempt:
    """One attempt with ``everybody``; the steps are taken in order by a test."""

    def __init__(
        self, everybody: Iterable[Peer], round_index: int = 0, attempt: int = 0, threshold: int = 2
    ) -> None:
        self.everybody = {peer.node: peer for peer in everybody}
        self.at = (round_index, attempt)
        self.threshold = threshold
        self.members: tuple[messages.RosterEntry, ...] = ()
        self.dealings: dict[NodeId, Dealing] = {}
        self.blobs: dict[NodeId, Words] = {}
        self.roster: Roster

    async def bind(self) -> None:
        entries = []
        for node, peer in self.everybody.items():
            commitment = await peer.session.bind(*self.at)
            assert commitment.keys is not None
            if commitment.holds_bytes < peer.session.layout.nbytes:
                await peer.session.give_state(*self.at, commitment.holds_bytes)
            entries.append(
                messages.RosterEntry(
                    node=node,
                    dataset_root=commitment.dataset_root,
                    keys=commitment.keys,
                    signature=commitment.signature,
                )
            )
        self.members = tuple(sorted(entries, key=lambda entry: entry.node))
        keys = {
            each.node: PublicKeys(
                each.keys.mask_key, each.keys.share_key, each.keys.self_commitment
            )
            for each in self.members
        }
        seed = seeds.sketch(WORKLOAD.root_seed, self.at[0])
        self.roster = Roster(Context(FEDERATION, *self.at), keys, self.threshold, seed)

    def roster_for(
        self,
        peer: Peer,
        members: tuple[messages.RosterEntry, ...] | None = None,
        threshold: int | None = None,
    ) -> messages.Roster:
        return messages.Roster(
            federation=FEDERATION,
            epoch=peer.session.epoch,
            round=self.at[0],
            attempt=self.at[1],
            rows=messages.rows_of(self.members if members is None else members),
            threshold=self.threshold if threshold is None else threshold,
        )

    async def share(self, *, bound: bool = False) -> None:
        if not bound:
            await self.bind()
        for node, peer in self.everybody.items():
            await peer.session.say(self.roster_for(peer))
            shares = await peer.session.hear(messages.Shares)
            dealing = Dealing(shares.commitments, shares.sealed)
            check_dealing(self.roster, node, dealing)
            self.dealings[node] = dealing

    def envelopes_for(self, node: NodeId) -> tuple[messages.Envelope, ...]:
        found = envelopes_for(self.roster, self.dealings, node)
        return tuple(
            messages.Envelope(dealer=dealer, sealed=each.sealed, commitments=each.commitments)
            for dealer, each in found.items()
        )

    async def collect(self) -> None:
        await self.share()
        await self.begin()

    async def begin(self) -> None:
        for node, peer in self.everybody.items():
            roster = tuple(sorted(self.dealings))
            await peer.session.collect(*self.at, roster, self.envelopes_for(node))

    async def updates(self, among: Iterable[Peer]) -> None:
        for peer in among:
            update = await peer.session.hear(messages.Update)
            assert (update.l2_norm, update.loss) == (None, None)
            self.blobs[peer.node] = await peer.session.take_update(update)

    async def ask(self, peer: Peer, survivors: Iterable[NodeId]) -> None:
        await peer.session.say(
            messages.UnmaskRequest(
                federation=FEDERATION,
                epoch=peer.session.epoch,
                round=self.at[0],
                attempt=self.at[1],
                survivors=tuple(survivors),
            )
        )

    async def unmask(self, among: Iterable[Peer]) -> Words:
        """The sum of the updates that arrived, after ``among`` have answered for it."""
        survivors = tuple(sorted(self.blobs))
        recovery = Recovery(self.roster, self.dealings, survivors)
        for peer in among:
            await self.ask(peer, survivors)
            answer = await peer.session.hear(messages.UnmaskAnswer)
            payload = unmask_payload(self.roster, survivors, answer.shares)
            assert identity.verify(peer.node, answer.signature, payload)
            recovery.accept(peer.node, Answer(answer.shares))
        total = plain_sum(self.blobs.values())
        MaskStream(leftover(self.roster, recovery.reveal())).subtract(0, total)
        return total


def plain_sum(updates: Iterable[Words]) -> Words:
    total: Words | None = None
    for words in updates:
        total = words.copy() if total is None else np.add(total, words)
    assert total is not None
    return total
