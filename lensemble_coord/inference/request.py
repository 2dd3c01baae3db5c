"""The rim of one request: runs its machine on a ring and turns what comes back into text.

It may outlive the plan that computes it: then it waits for a seat of the next one.  What the ring
and the timers of its seat still have to say is not heard any more.
"""

from typing import TypeAlias

import msgspec
import trio

from lensemble.actor import Timers
from lensemble.errors import EdgeFault
from lensemble.machine import ArmTimer, CancelTimer, TimerExpired
from lensemble_coord.inference import sequence
from lensemble_coord.inference.ring import Heard
from lensemble_coord.inference.seats import Seat, Seats
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


class Pause(msgspec.Struct, frozen=True):
    """The plan that computes it is gone, and the answer goes on under the next one.

    ``fault`` is why, with its stage on ``name``; none where its nodes are to be left.
    """

    reason: str
    name: str = ""
    fault: Fault | None = None


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


Piece: TypeAlias = Token | Pause | Answer


class _Back(msgspec.Struct, frozen=True):
    """A result as the ring brings it."""

    step: int
    token: int
    log_probability: float


class _OfSeat(msgspec.Struct, frozen=True):
    """Something that goes on in ``seat``; of interest as long as the request sits there."""

    seat: Seat
    event: sequence.Granted | sequence.Accepted | sequence.StillMoving | _Back


_Event: TypeAlias = _OfSeat | Pause | sequence.Failed | sequence.CancelAsked | TimerExpired


class Request:
    """One request of a run.

    Args:
        number: of the run's requests, from 1; lower ones are served first.
        seats: where its KV slot comes from.
        ask: what to compute.
        text: what turns its tokens into text.
    """

    def __init__(self, number: int, seats: Seats, ask: sequence.Ask, text: TextStream) -> None:
        self.ask = ask
        self.state: sequence.State = sequence.Queued(ask)
        self.since = trio.current_time()
        self.given: list[int] = []
        """Every token that was drawn."""

        self.pauses = 0
        self._number = number
        self._seats = seats
        self._text = text
        self._seat: Seat | None = None
        self._granted_at: float | None = None
        self._first_at: float | None = None
        self._fault: Fault | None = None
        self._counts: Counts | None = None
        self._scope = trio.CancelScope()
        self._inbox, self._events = trio.open_memory_channel[_Event](INBOX_EVENTS)
        self._out, self.pieces = trio.open_memory_channel[Piece](PIECES)
        self._nursery: trio.Nursery
        self._sitting: trio.Nursery
        """For what goes on in its seat, and for its wait for one."""

        self._timers: Timers

    @property
    def drawn(self) -> int:
        """How many tokens were drawn."""
        return len(self.given)

    @property
    def first_token_s(self) -> float | None:
        """Seconds from its beginning to its first token; None before."""
        return None if self._first_at is None else self._first_at - self.since

    @property
    def slot(self) -> int | None:
        """Its KV slot, while it has one."""
        return None if self._seat is None else self._seat.slot

    def cancel(self) -> None:
        """End it at once; nobody takes pieces any more."""
        self._scope.cancel()

    def fail(self, fault: Fault | None) -> None:
        """Its run is over, by ``fault`` or because it was stopped."""
        self._fault = fault
        self._give_event(sequence.Failed() if fault is not None else sequence.CancelAsked())

    def interrupt(self, pause: Pause) -> None:
        """The plan that computes it is gone, and another one will come.

        Whoever takes nothing while many plans come and go is not waited for.
        """
        try:
            self._give_event(pause)
        except trio.WouldBlock:
            self.cancel()

    async def serve(self) -> None:
        """Go on until it ends, whichever way; the slot is free afterwards."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    self._nursery = nursery
                    self._timers = Timers(nursery, self._inbox.send)
                    await nursery.start(self._sit)
                    await self._work()
                    nursery.cancel_scope.cancel()
        finally:
            if not isinstance(self.state, sequence.Ended):
                self.state, _ = sequence.transition(self.state, sequence.CancelAsked())
            self._release()
            self._out.close()

    async def _sit(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Wait for a seat, and keep it until the plan that it is of is gone."""
        async with trio.open_nursery() as sitting:
            self._sitting = sitting
            task_status.started()
            seat = await self._seats.take(self._number)
            if sitting.cancel_scope.cancel_called:
                self._seats.give(seat)
                return
            self._seat = seat
            if self._granted_at is None:
                self._granted_at = trio.current_time()
            self._give_event(_OfSeat(seat, sequence.Granted(seat.slot)))
            await trio.sleep_forever()

    async def _work(self) -> None:
        async for event in self._timers.sift(self._events):
            match event:
                case Pause():
                    await self._pause(event)
                case _OfSeat():
                    await self._heed(event)
                case _:
                    await self._feed(event)
            if isinstance(self.state, sequence.Ended):
                return

    async def _heed(self, said: _OfSeat) -> None:
        if said.seat is not self._seat:
            return
        if isinstance(said.event, _Back):
            await self._take_back(said.event)
        else:
            await self._feed(said.event)

    async def _pause(self, pause: Pause) -> None:
        """Leave the seat, and wait for one of the next plan."""
        self.pauses += 1
        self._sitting.cancel_scope.cancel()
        await self._feed(sequence.Interrupted(tuple(self.given)))
        self._release()
        await self._nursery.start(self._sit)
        await self._out.send(pause)

    async def _take_back(self, back: _Back) -> None:
        state = self.state
        if not isinstance(state, sequence.Decoding) or state.step != back.step:
            return
        if self._first_at is None:
            self._first_at = trio.current_time()
        self.given.append(back.token)
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
            case sequence.ReleaseSlot():
                self._release()
            case sequence.SendChunk() | sequence.LookAround() if self._seat is not None:
                self._act(self._seat, action)
            case _:
                pass

    def _act(self, seat: Seat, action: sequence.SendChunk | sequence.LookAround) -> None:
        match action:
            case sequence.SendChunk():
                self._counts = None
                self._send_now(seat, action)
            case sequence.LookAround(phase):
                self._sitting.start_soon(self._look_around, seat, phase)

    def _send_now(self, seat: Seat, chunk: sequence.SendChunk) -> None:
        """On its way before this returns, unless there is no room: a token waits for each turn."""
        step = seat.ring.send_now(
            chunk.slot, chunk.start, chunk.tokens, chunk.sampling, self._ear(seat)
        )
        if step is None:
            self._sitting.start_soon(self._send, seat, chunk)
        else:
            self._give_event(_OfSeat(seat, sequence.Accepted(step)))

    def _ear(self, seat: Seat) -> Heard:
        def hear(step: int, token: int, log_probability: float) -> None:
            self._give_event(_OfSeat(seat, _Back(step, token, log_probability)))

        return hear

    async def _send(self, seat: Seat, chunk: sequence.SendChunk) -> None:
        try:
            step = await seat.ring.send(
                chunk.slot, chunk.start, chunk.tokens, chunk.sampling, self._ear(seat)
            )
        except EdgeFault:
            # The run hears of it too, waits for the cause, and then goes on or fails this request.
            return
        self._give_event(_OfSeat(seat, sequence.Accepted(step)))

    async def _look_around(self, seat: Seat, phase: str) -> None:
        self._counts = await seat.look(phase, self._counts)
        if self._counts is not None:
            self._give_event(_OfSeat(seat, sequence.StillMoving()))

    def _give_event(self, event: _Event) -> None:
        """Few events can be under way for one request: the inbox has room for all of them."""
        try:
            self._inbox.send_nowait(event)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return

    def _release(self) -> None:
        seat, self._seat = self._seat, None
        if seat is not None:
            self._seats.give(seat)

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
