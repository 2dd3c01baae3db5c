"""One request: prefill, then a token per trip round the ring.

The prompt is sent in chunks as fast as the first stage takes them; only the last one asks for a
token.  Each token that comes back is sent round again, until something ends the request.  A result
of a step that is not awaited, such as one of a cancelled request, is passed over; the slot of the
KV cache is free at once, for whoever has it next writes it from position 0.

When the plan that computes it is lost, a request goes back into the queue with the tokens that it
has drawn.  Whatever plan grants it a slot next gets prompt and tokens as one prompt, and the next
token is drawn as if nothing had happened: with the index it would have had, from the same tokens.
"""

from typing import Literal, TypeAlias

import msgspec
from msgspec.structs import replace

from lensemble.errors import ContextLengthExceeded, InvalidTransition, OperatorError
from lensemble.machine import ArmTimer, CancelTimer, Step, TimerExpired
from lensemble.stage_chunk import MAX_RECENT, Sampling

STEP = "step"
"""The timer that runs while something of this request is on its way."""

Finish: TypeAlias = Literal["stop", "length", "cancelled", "faulted"]


class Ask(msgspec.Struct, frozen=True):
    """A request; ``sampling`` as of its first token."""

    prompt: tuple[int, ...]
    sampling: Sampling
    ctx: int
    rows: int
    eos: frozenset[int]
    max_tokens: int
    step_s: float = 30.0


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    """Tokens that were drawn, the one that ended the answer with them."""


# ---- states ----


class Queued(msgspec.Struct, frozen=True, tag=True):
    """Every slot is taken; ``given`` were drawn under plans that are gone."""

    ask: Ask
    given: tuple[int, ...] = ()


class Prefilling(msgspec.Struct, frozen=True, tag=True):
    """``sent`` tokens of prompt and ``given`` are on their way, ``sending`` wait for a place."""

    ask: Ask
    slot: int
    sent: int
    sending: int
    given: tuple[int, ...] = ()

    @property
    def tokens(self) -> tuple[int, ...]:
        """All that the caches have to hold before the next token."""
        return self.ask.prompt + self.given


class Decoding(msgspec.Struct, frozen=True, tag=True):
    """``step`` is on its way round, or its chunk waits for a place (None).

    ``position`` is where the next token goes, ``recent`` the tokens before it.
    """

    ask: Ask
    slot: int
    position: int
    drawn: int
    recent: tuple[int, ...]
    step: int | None


class Ended(msgspec.Struct, frozen=True, tag=True):
    finish: Finish
    usage: Usage


State: TypeAlias = Queued | Prefilling | Decoding | Ended
Held: TypeAlias = Prefilling | Decoding

# ---- events ----


class Granted(msgspec.Struct, frozen=True, tag=True):
    """A slot of the KV cache."""

    slot: int


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """The chunk that was to be sent is with the edge, as ``step``."""

    step: int


class Drawn(msgspec.Struct, frozen=True, tag=True):
    """``token`` is the result of ``step``; ``stops`` where its text completes a stop string."""

    step: int
    token: int
    stops: bool = False


class StillMoving(msgspec.Struct, frozen=True, tag=True):
    """The ring was looked at and is only slow."""


class Interrupted(msgspec.Struct, frozen=True, tag=True):
    """Its plan is gone and another one comes; ``given`` are all tokens that it has drawn."""

    given: tuple[int, ...]


class CancelAsked(msgspec.Struct, frozen=True, tag=True):
    pass


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The run is over."""


Event: TypeAlias = (
    Granted | Accepted | Drawn | StillMoving | Interrupted | CancelAsked | Failed | TimerExpired
)

# ---- actions ----


class SendChunk(msgspec.Struct, frozen=True, tag=True):
    """Put these tokens on the edge to the first stage: ``Accepted``."""

    slot: int
    start: int
    tokens: tuple[int, ...]
    sampling: Sampling | None


class LookAround(msgspec.Struct, frozen=True, tag=True):
    """A result is overdue; answered by ``StillMoving`` or ``Failed``."""

    phase: str


class ReleaseSlot(msgspec.Struct, frozen=True, tag=True):
    slot: int


class Finished(msgspec.Struct, frozen=True, tag=True):
    finish: Finish
    usage: Usage


Action: TypeAlias = SendChunk | LookAround | ReleaseSlot | Finished | ArmTimer | CancelTimer

# ---- transition ----


def check(prompt_tokens: int, ctx: int) -> None:
    """Refuse a prompt that has no room, or nothing in it.

    Raises:
        ContextLengthExceeded: over ``ctx`` tokens.
        OperatorError: no token at all.
    """
    if prompt_tokens > ctx:
        raise ContextLengthExceeded(prompt_tokens, ctx)
    if prompt_tokens == 0:
        raise OperatorError("the prompt is empty", "Say something.")


def phase(state: State) -> str:
    """In a word, for people and for who looks around."""
    return type(state).__name__.lower()


def transition(state: State, event: Event) -> Step[State, Action]:
    match state, event:
        case Ended(), _:
            return state, ()
        case _, (CancelAsked() | Failed() | Interrupted()):
            return _break_off(state, event)
        case Queued(ask, given), Granted(slot):
            return _next_chunk(Prefilling(ask, slot, 0, 0, given))
        case Prefilling(), Accepted(step):
            return _accepted(state, step)
        case Decoding(step=None), Accepted(step):
            # Its timer has run since the token before came back.
            return replace(state, step=step), ()
        case ((Prefilling() | Decoding()), (Drawn() | TimerExpired() | StillMoving())):
            return _go_on(state, event)
        case _:
            raise InvalidTransition(state, event)


def _go_on(state: Held, event: Drawn | TimerExpired | StillMoving) -> Step[State, Action]:
    match state, event:
        case Decoding(), Drawn() if event.step == state.step:
            return _drawn(state, event)
        case _, Drawn():
            return state, ()
        case _, TimerExpired():
            return state, (LookAround(phase(state)),)
        case _, _:
            return state, (_watch(state),)


def _watch(state: Held) -> ArmTimer:
    return ArmTimer(STEP, state.ask.step_s)


def _break_off(
    state: Queued | Held, event: CancelAsked | Failed | Interrupted
) -> Step[State, Action]:
    match state, event:
        case _, CancelAsked():
            return _finish(state, "cancelled")
        case _, Failed():
            return _finish(state, "faulted")
        case Queued(), Interrupted():
            return state, ()
        case ((Prefilling() | Decoding()), Interrupted(given)):
            return Queued(state.ask, given), (CancelTimer(STEP), ReleaseSlot(state.slot))


def _next_chunk(state: Prefilling) -> Step[State, Action]:
    ask, everything = state.ask, state.tokens
    tokens = everything[state.sent : state.sent + ask.rows]
    last = state.sent + len(tokens) == len(everything)
    sampling = _sampling(ask, len(state.given), everything[-MAX_RECENT:]) if last else None
    send = SendChunk(state.slot, state.sent, tokens, sampling)
    return replace(state, sending=len(tokens)), (_watch(state), send)


def _sampling(ask: Ask, index: int, recent: tuple[int, ...]) -> Sampling:
    seen = recent if ask.sampling.repeat_penalty != 1.0 else ()
    return replace(ask.sampling, index=index, recent=seen)


def _accepted(state: Prefilling, step: int) -> Step[State, Action]:
    sent, everything = state.sent + state.sending, state.tokens
    if sent < len(everything):
        return _next_chunk(replace(state, sent=sent))
    recent, drawn = everything[-MAX_RECENT:], len(state.given)
    return Decoding(state.ask, state.slot, sent, drawn, recent, step), (_watch(state),)


def _drawn(state: Decoding, event: Drawn) -> Step[State, Action]:
    ask = state.ask
    recent = (*state.recent, event.token)[-MAX_RECENT:]
    state = replace(state, drawn=state.drawn + 1, recent=recent, step=None)
    if event.token in ask.eos or event.stops:
        return _finish(state, "stop")
    if state.drawn >= ask.max_tokens or state.position >= ask.ctx:
        return _finish(state, "length")
    sampling = _sampling(ask, state.drawn, recent)
    send = SendChunk(state.slot, state.position, (event.token,), sampling)
    return replace(state, position=state.position + 1), (_watch(state), send)


def _finish(state: Queued | Held, finish: Finish) -> Step[State, Action]:
    drawn = state.drawn if isinstance(state, Decoding) else len(state.given)
    usage = Usage(len(state.ask.prompt), drawn)
    actions: tuple[Action, ...] = (CancelTimer(STEP),)
    if not isinstance(state, Queued):
        actions += (ReleaseSlot(state.slot),)
    return Ended(finish, usage), (*actions, Finished(finish, usage))
