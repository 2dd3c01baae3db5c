"""The rim of a masked attempt: what the round machine asks about masks, on sessions and threads."""

from collections.abc import Iterable
from functools import partial
from typing import Protocol

import trio

from lensemble.errors import InvariantError, LensembleError, SecureAggregationError
from lensemble.ids import FederationId, NodeId
from lensemble.secagg.plan import FieldPlan
from lensemble.wire import messages
from lensemble.wire.fanout import Fanout
from lensemble_coord.training import outer_round, record
from lensemble_coord.training.aggregate import Addend
from lensemble_coord.training.masking import Leftover, Masking
from lensemble_coord.training.session import Session
from lensemble_coord.training.turns import Turns

MaskMessage = messages.Shares | messages.UnmaskAnswer


class Rim(Protocol):
    """What it needs of the rounds."""

    state: outer_round.State

    def present(self, nodes: Iterable[NodeId]) -> list[Session]: ...

    def refuse(self, node: NodeId, code: str, reason: str) -> None: ...

    async def hear(self, event: outer_round.Event) -> None: ...

    async def failed(self, at: tuple[int, int], error: LensembleError) -> None: ...


class MaskRim:
    """Keys, shares and answers of the attempt in flight, if it is masked."""

    def __init__(self, rim: Rim, federation: FederationId) -> None:
        self._rim = rim
        self._federation = federation
        self._members: dict[NodeId, messages.RosterEntry] = {}
        self._masking: Masking | None = None
        self._turns: Turns | None = None

    def forget(self) -> None:
        """The attempt is over."""
        self._members, self._masking, self._turns = {}, None, None

    def remember_keys(self, session: Session) -> None:
        """Keep the keys of a commitment that the machine has just accepted."""
        commitment = session.commitment
        if commitment is not None and commitment.keys is not None:
            self._members[session.node] = messages.RosterEntry(
                node=session.node,
                dataset_root=commitment.dataset_root,
                keys=commitment.keys,
                signature=commitment.signature,
            )

    def members(self, bound: Iterable[outer_round.Binding]) -> list[messages.RosterEntry]:
        """The roster entries of ``bound``."""
        return [self._members[each.node] for each in bound]

    async def send_roster(
        self, members: list[messages.RosterEntry], threshold: int, round_seed: int
    ) -> None:
        """Build the roster in a thread, since every key is checked, and tell it to its members."""
        at = self._at()
        build = partial(Masking, (self._federation, *at), members, threshold, round_seed)
        try:
            masking = await trio.to_thread.run_sync(build)
        except LensembleError as error:
            await self._rim.failed(at, error)
            return
        if at != self._at() or not isinstance(self._rim.state, outer_round.Sharing):
            return
        self._masking = masking
        told = Fanout(
            messages.Roster(
                federation=self._federation,
                epoch=0,
                round=at[0],
                attempt=at[1],
                rows=messages.rows_of(masking.members),
                threshold=threshold,
            )
        )
        self._turns = turns = Turns(len(told.payload(0)))
        for member in masking.members:
            await turns.take(member.node)
            if at != self._at() or not isinstance(self._rim.state, outer_round.Sharing):
                return
            for session in self._rim.present((member.node,)):
                session.tell(told)

    def start(self, nodes: Iterable[NodeId]) -> None:
        """Fix who takes part."""
        if self._masking is not None:
            self._masking.start(nodes)

    def envelopes(self, node: NodeId) -> tuple[messages.Envelope, ...]:
        """The shares that were dealt to ``node``; none in a plain attempt."""
        return () if self._masking is None else self._masking.envelopes(node)

    def request_unmask(self, survivors: tuple[NodeId, ...]) -> None:
        """Ask the survivors, whom the machine has fixed."""
        if self._masking is None:
            raise InvariantError("a sum is to be unmasked in an attempt that was not masked")
        self._masking.freeze(survivors)
        at = self._at()
        told = Fanout(
            messages.UnmaskRequest(
                federation=self._federation,
                epoch=0,
                round=at[0],
                attempt=at[1],
                survivors=survivors,
            )
        )
        for session in self._rim.present(survivors):
            session.tell(told)

    async def take(self, node: NodeId, message: MaskMessage) -> None:
        """Keep what ``node`` shares or reveals, if it is awaited; a wrong one is none."""
        at = (message.round, message.attempt)
        if self._masking is not None and self._awaits(node, message):
            try:
                self._masking.take(node, message)
            except SecureAggregationError as error:
                self._rim.refuse(node, error.code, error.message)
                declined = outer_round.Declined(node, *at, error.code, error.message)
                await self._rim.hear(declined)
                return
        shares = isinstance(message, messages.Shares)
        if shares and self._turns is not None:
            self._turns.end(node)
        heard = outer_round.SharesSent if shares else outer_round.UnmaskAnswered
        await self._rim.hear(heard(node, *at))

    def _awaits(self, node: NodeId, message: MaskMessage) -> bool:
        state = self._rim.state
        if (message.round, message.attempt) != self._at():
            return False
        match state, message:
            case outer_round.Sharing(), messages.Shares():
                return node not in state.shared and any(b.node == node for b in state.bound)
            case outer_round.Unmasking(), messages.UnmaskAnswer():
                return node not in state.answered
            case _:
                return False

    async def leftover(self, plan: FieldPlan) -> list[Addend]:
        """What takes the masks off the sum, as an addend; nothing in a plain attempt.

        Raises:
            MaskingFault: too few answers, or shares of something else than was committed to.
        """
        if self._masking is None:
            return []
        return [Leftover(await trio.to_thread.run_sync(self._masking.reveal), plan)]

    def transcript(self) -> record.Masking | None:
        """For the record of the round; None in a plain attempt."""
        return None if self._masking is None else self._masking.transcript()

    def _at(self) -> tuple[int, int]:
        return self._rim.state.ground.round, self._rim.state.ground.attempt
