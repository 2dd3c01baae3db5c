"""The rim of one request: runs its machine on a ring and turns what comes back into text."""

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeAlias

import msgspec
import trio

from lensemble.actor import Timers
from lensemble.errors import EdgeFault
from lensemble.machine import ArmTimer, CancelTimer, TimerExpired
from lensemble_coord.inference import sequence
from lensemble_coord.inference.ring import Ring
from lensemble_coord.inference.staging import Fault
from lensemble_coord.inference.standstill import Counts
from lensemble_coord.inference.tokens import TextStream

INBOX_EVENTS = 64
PIECES = 256
"""Of text that the one who asked has not taken yet; then its request waits for it."""


class Token(msgspec.Struct, frozen=True):
    """One more token; ``text`` is what may be shown after it, perhaps nothing yet."""

    token: int
    log_probability: float
    text: str


class Answer(msgspec.Struct, frozen=True):
    """The end: the text that was still held back, what it took, and why it ended."""

    text: str
    finish: sequence.Finish
    usage: sequence.Usage
    queued_s: float
    first_token_s: float | None
    """From the grant of a slot on."""

    seconds: float
    fault: Fault | None = None


Piece: TypeAlias = Token | Answer


class _Back(msgspec.Struct, frozen=True):
    """A result as the ring brings it."""

    step: int
    token: int
    log_probability: float


class Slots(Protocol):
    """The KV slots of a run."""

    async def take(self) -> int: ...

    def give(self, slot: int) -> None: ...


Look: TypeAlias = Callable[[str, Counts | None], Awaitable[Counts | None]]
"""How far the stages are, for a request in that phase that has seen them at so many chunks before.

None where they have not moved: then the run ends.
"""


class Request:
    """One request of a run.

    Args:
        ring: of the run, open.
        slots: where its KV slot comes from.
        ask: what to compute.
        text: what turns its tokens into text.
        look: what to do when a result is overdue.
    """

    def __init__(
        self, ring: Ring, slots: Slots, ask: sequence.Ask, text: TextStream, look: Look
    ) -> None:
        self.ask = ask
        self.state: sequence.State = sequence.Queued(ask)
        self.since = trio.current_time()
        self.drawn = 0
        self._ring = ring
        self._slots = slots
        self._text = text
        self._look = look
        self._slot: int | None = None
        self._granted_at: float | None = None
        self._first_at: float | None = None
        self._fault: Fault | None = None
        self._counts: Counts | None = None
        self._scope = trio.CancelScope()
        self._inbox, self._events = trio.open_memory_channel[sequence.Event | _Back](INBOX_EVENTS)
        self._out, self.pieces = trio.open_memory_channel[Piece](PIECES)
        self._nursery: trio.Nursery
        self._timers: Timers

    @property
    def slot(self) -> int | None:
        """Its KV slot, while it has one."""
        return self._slot

    def cancel(self) -> None:
        """End it at once; nobody takes pieces any more."""
        self._scope.cancel()

    def fail(self, fault: Fault | None) -> None:
        """Its run is over, by ``fault`` or because it was stopped."""
        self._fault = fault
        self._give_event(sequence.Failed() if fault is not None else sequence.CancelAsked())

    async def serve(self) -> None:
        """Go on until it ends, whichever way; the slot is free afterwards."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    self._nursery = nursery
                    self._timers = Timers(nursery, self._inbox.send)
                    nursery.start_soon(self._be_granted)
                    await self._work()
                    nursery.cancel_scope.cancel()
        finally:
            if not isinstance(self.state, sequence.Ended):
                self.state, _ = sequence.transition(self.state, sequence.CancelAsked())
            self._release()
            self._out.close()

    async def _be_granted(self) -> None:
        slot = await self._slots.take()
        self._slot = slot
        self._granted_at = trio.current_time()
        self._give_event(sequence.Granted(slot))

    async def _work(self) -> None:
        async for event in self._timers.sift(self._events):
            if isinstance(event, _Back):
                await self._take_back(event)
            else:
                await self._feed(event)
            if isinstance(self.state, sequence.Ended):
                return

    async def _take_back(self, back: _Back) -> None:
        state = self.state
        if not isinstance(state, sequence.Decoding) or state.step != back.step:
            return
        if self._first_at is None:
            self._first_at = trio.current_time()
        self.drawn += 1
        ends = back.token in self.ask.eos
        text = "" if ends else self._text.push(back.token)
        token = Token(back.token, back.log_probability, text)
        # On its way round again before anybody reads it.
        await self._feed(sequence.Drawn(back.step, back.token, self._text.stopped), token)

    async def _feed(self, event: sequence.Event, token: Token | None = None) -> None:
        self.state, actions = sequence.transition(self.state, event)
        for action in actions:
            if isinstance(action, sequence.Finished):
                break
            self._perform(action)
        if token is not None:
            await self._out.send(token)
        if isinstance(self.state, sequence.Ended):
            await self._out.send(self._answer(self.state))

    def _perform(self, action: sequence.Action) -> None:
        match action:
            case ArmTimer():
                self._timers.arm(action)
            case CancelTimer():
                self._timers.cancel(action)
            case sequence.SendChunk():
                self._counts = None
                self._nursery.start_soon(self._send, action)
            case sequence.LookAround(phase):
                self._nursery.start_soon(self._look_around, phase)
            case sequence.ReleaseSlot():
                self._release()
            case sequence.Finished():
                pass

    async def _send(self, chunk: sequence.SendChunk) -> None:
        try:
            step = await self._ring.send(
                chunk.slot, chunk.start, chunk.tokens, chunk.sampling, self._hear
            )
        except EdgeFault:
            # The run hears of it too, waits for the cause, and fails this request with it.
            return
        self._give_event(sequence.Accepted(step))

    async def _look_around(self, phase: str) -> None:
        self._counts = await self._look(phase, self._counts)
        if self._counts is not None:
            self._give_event(sequence.StillMoving())

    def _hear(self, step: int, token: int, log_probability: float) -> None:
        self._give_event(_Back(step, token, log_probability))

    def _give_event(self, event: sequence.Event | _Back | TimerExpired) -> None:
        """Few events can be under way for one request: the inbox has room for all of them."""
        try:
            self._inbox.send_nowait(event)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return

    def _release(self) -> None:
        slot, self._slot = self._slot, None
        if slot is not None:
            self._slots.give(slot)

    def _answer(self, ended: sequence.Ended) -> Answer:
        now = trio.current_time()
        granted = now if self._granted_at is None else self._granted_at
        return Answer(
            text=self._text.flush(),
            finish=ended.finish,
            usage=ended.usage,
            queued_s=granted - self.since,
            first_token_s=None if self._first_at is None else self._first_at - granted,
            seconds=now - granted,
            fault=self._fault,
        )
