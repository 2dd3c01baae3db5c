"""What a node daemon and the worker of one stage say to each other; lines as in ``signals``.

``Host`` comes first.  The worker fetches and verifies its weights, loads them and compiles, and
says ``Hosted``; from then on every ``Ready`` chunk of the inbound edge is one command, answered by
``Filled`` on the outbound edge or by nothing, then ``Consumed``.
"""

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from lensemble.wire.fence import Hash
from lensemble.wire.stages import MAX_RANGES, TensorPart
from lensemble_node.signals import (
    Attach,
    Attached,
    Consumed,
    Detach,
    Detached,
    Filled,
    Ready,
    Released,
    Stop,
    parse_line,
)
from lensemble_node.signals import SignalLine as Line

MAX_LINE_BYTES = 1 << 21
"""Longest line in either direction: ``Host`` of a model with ``MAX_TENSORS`` tensors."""

_Count = Annotated[int, Meta(ge=0, le=1 << 62)]


class Host(Line, frozen=True, kw_only=True, tag=True):
    """First command.  ``source`` is ``edge``, ``path`` or ``url``; ``place`` the last two's where.

    ``inbound`` and ``outbound`` are the edges of chunks, ``weights`` that of weights (0: none);
    each is attached by ``Attach``.
    """

    model: str
    """Canonical JSON of ``ModelFacts``."""

    manifest_digest: Hash
    tensors: tuple[TensorPart, ...]
    first: _Count
    last: _Count
    stage: _Count
    stages: _Count
    source: Literal["edge", "path", "url"]
    place: str
    cache_dir: str
    cache_bytes: _Count
    """Most that the cache may hold; 0: no limit."""

    inbound: _Count
    outbound: _Count
    weights: _Count
    ctx: _Count
    sessions: _Count
    rows: _Count
    device: str
    """One of ``engine_environment.DEVICES``; empty: the CPU."""


class Wants(Line, frozen=True, kw_only=True, tag=True):
    """Source ``edge``: send these (offset, length) of the file on the weights edge."""

    ranges: Annotated[tuple[tuple[_Count, _Count], ...], Meta(max_length=MAX_RANGES)]


Phase: TypeAlias = Literal["fetching", "verifying", "loading", "compiling"]


class Advanced(Line, frozen=True, kw_only=True, tag=True):
    """Bytes while fetching, verifying and loading; steps while compiling."""

    phase: Phase
    done: _Count
    total: _Count


class Hosted(Line, frozen=True, kw_only=True, tag=True):
    """Weights are bound and every kernel is compiled: the next chunk is computed."""

    weights_bytes: _Count
    resident_bytes: _Count
    fetched_bytes: _Count
    seconds: float


class Computed(Line, frozen=True, kw_only=True, tag=True):
    """One chunk, for the time line: when it was taken up and done, on CLOCK_MONOTONIC."""

    step: _Count
    rows: _Count
    began_ns: _Count
    ended_ns: _Count


class RefusedChunk(Line, frozen=True, kw_only=True, tag=True):
    """A chunk that cannot be computed; the stage goes on."""

    step: _Count
    code: str
    message: str


class StageFailed(Line, frozen=True, kw_only=True, tag=True):
    """The worker cannot go on and exits."""

    code: str
    message: str
    remediation: str = ""


Command: TypeAlias = Host | Attach | Detach | Ready | Released | Stop
Event: TypeAlias = (
    Wants
    | Advanced
    | Hosted
    | Computed
    | RefusedChunk
    | StageFailed
    | Attached
    | Detached
    | Consumed
    | Filled
)

_commands: "msgspec.json.Decoder[Command]" = msgspec.json.Decoder(Command)
_events: "msgspec.json.Decoder[Event]" = msgspec.json.Decoder(Event)


def parse_command(raw: bytes) -> Command:
    """Raises ``WorkerFault`` for a line that is no command to a stage's worker."""
    return parse_line(raw, _commands, MAX_LINE_BYTES)


def parse_event(raw: bytes) -> Event:
    """Raises ``WorkerFault`` for a line that is no event of a stage's worker."""
    return parse_line(raw, _events, MAX_LINE_BYTES)
