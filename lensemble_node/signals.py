"""What a node daemon and its worker process say to each other: JSON lines, payload never in them.

Commands go to the worker's stdin, events come from its stdout.  The four slot signals are the hot
path: ``Ready``/``Consumed`` for a slot that came in, ``Filled``/``Released`` for one that goes out.
At ``Attach`` every slot of a tx edge belongs to the worker, every slot of an rx edge to the stream.
"""

from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from lensemble.errors import WorkerFault
from lensemble.params import MAX_TENSORS
from lensemble.secagg.graph import MAX_HOLDERS
from lensemble.wire.steps import MAX_STEPS, Steps

EXIT_NO_MEMORY = 71
"""Exit status of a worker that was refused memory."""

EXIT_GROUP_LOST = 72
"""Exit status of a worker of several processes that lost one of them."""

MAX_LINE_BYTES = 1 << 18
"""Longest line in either direction."""

_Hash = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
_Count = Annotated[int, Meta(ge=0, le=1 << 62)]
_Seed = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class SignalLine(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """One line, by its tag."""


# ---- commands ----


class Configure(SignalLine, frozen=True, kw_only=True, tag=True):
    """First command.  ``workload`` is canonical JSON; ``path`` empty means no dataset (noop)."""

    workload: str
    federation: str
    node: str
    state_dir: str
    path: str
    format: str = "auto"
    observation_keys: tuple[str, ...] = ()
    image_keys: tuple[str, ...] = ()
    action_keys: tuple[str, ...] = ()
    embodiment: str = ""
    probe: str = ""
    """Path of the public probe; empty if this node has none."""
    threads: Annotated[int, Meta(ge=1, le=1024)] = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"
    task_entry: str = ""
    """``module:Class`` of the only task whose code may run here; empty: none."""
    task_folder: str = ""
    """Where its module is, if it is not installed."""
    masked: bool = False
    """Nothing leaves but under the masks of ``Mask``."""


class Attach(SignalLine, frozen=True, kw_only=True, tag=True):
    """The ring of ``edge`` is ``slots`` of ``capacity_bytes`` from ``offset`` in the arena."""

    edge: _Count
    direction: Literal["rx", "tx"]
    offset: _Count
    capacity_bytes: _Count
    slots: Annotated[int, Meta(ge=1, le=64)]


class Detach(SignalLine, frozen=True, kw_only=True, tag=True):
    """Touch no slot of ``edge`` again; answered by ``Detached``."""

    edge: _Count


class Ready(SignalLine, frozen=True, kw_only=True, tag=True):
    edge: _Count
    slot: _Count
    extent: _Count


class Released(SignalLine, frozen=True, kw_only=True, tag=True):
    edge: _Count
    slot: _Count


class Bind(SignalLine, frozen=True, kw_only=True, tag=True):
    """How much of the state ``prior_digest`` and its momentum is held?  Answered by ``Bound``.

    ``steps`` lead there, for those who hold what one of them starts from.
    """

    round: _Count
    attempt: _Count
    prior_digest: _Hash
    prior_momentum: _Hash | None = None
    steps: Steps = ()


class Train(SignalLine, frozen=True, kw_only=True, tag=True):
    """Run the inner steps from ``prior_digest``; answered by ``Trained`` or ``Failed``.

    A release of this round from an attempt below ``spent_before`` is not sent again.  ``plan`` is
    that of the field, see ``RoundOpen``.
    """

    round: _Count
    attempt: _Count
    prior_digest: _Hash
    sketch_seed: _Seed
    global_step: _Count
    spent_before: _Count = 0
    plan: Annotated[bytes, Meta(max_length=MAX_TENSORS)] = b""


class MaskTerm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One mask to add, or to take away: see ``secagg.masks.Term``.  ``key`` is secret."""

    key: _Hash
    negative: bool = False

    def __repr__(self) -> str:
        return "MaskTerm(...)"


class Mask(SignalLine, frozen=True, kw_only=True, tag=True):
    """Send the release of ``round`` under these masks only; answered by ``Masked``.

    They are forgotten when it is sent, or given up.
    """

    round: _Count
    attempt: _Count
    terms: Annotated[tuple[MaskTerm, ...], Meta(min_length=1, max_length=MAX_HOLDERS)]


class Send(SignalLine, frozen=True, kw_only=True, tag=True):
    """Put the release of ``round`` on ``edge`` as a blob; answered by ``Sent``."""

    edge: _Count
    round: _Count
    attempt: _Count
    signature: Annotated[str, Meta(pattern=r"\A[0-9a-f]{128}\Z")]


class Abandon(SignalLine, frozen=True, kw_only=True, tag=True):
    """Stop working on the attempt; its release is kept for a later attempt of the round."""

    round: _Count
    attempt: _Count


class Spend(SignalLine, frozen=True, kw_only=True, tag=True):
    """The release of ``round`` may not be sent again, a restart included; answered by ``Spent``."""

    round: _Count
    attempt: _Count


class Close(SignalLine, frozen=True, kw_only=True, tag=True):
    """The round has ended.  ``adopt``: this node contributed, so its local state advances."""

    round: _Count
    digest: _Hash
    adopt: bool


class Stop(SignalLine, frozen=True, kw_only=True, tag=True):
    """Finish and exit with status 0."""


Command: TypeAlias = (
    Configure
    | Attach
    | Detach
    | Ready
    | Released
    | Bind
    | Train
    | Mask
    | Send
    | Spend
    | Abandon
    | Close
    | Stop
)

# ---- events ----


class Budget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is spent of the privacy budget ``epsilon`` at ``delta``, and what is left of it."""

    spent: float
    epsilon: float
    delta: float
    releases: _Count
    rounds_left: _Count
    unit: Literal["participant", "episode"]


class Configured(SignalLine, frozen=True, kw_only=True, tag=True):
    """The dataset is open and committed; the root of no dataset is that of the empty set."""

    build: str
    dataset_root: _Hash
    episodes: _Count
    steps: _Count
    layout_digest: _Hash
    budget: Budget | None = None
    """Where the workload asks for privacy."""


class Attached(SignalLine, frozen=True, kw_only=True, tag=True):
    edge: _Count


class Detached(SignalLine, frozen=True, kw_only=True, tag=True):
    edge: _Count


class Spoiled(SignalLine, frozen=True, kw_only=True, tag=True):
    """What came on ``edge`` was refused; nothing more of it is taken until it is replaced."""

    edge: _Count
    reason: str


class Consumed(SignalLine, frozen=True, kw_only=True, tag=True):
    edge: _Count
    slot: _Count


class Filled(SignalLine, frozen=True, kw_only=True, tag=True):
    edge: _Count
    slot: _Count
    extent: _Count


class Bound(SignalLine, frozen=True, kw_only=True, tag=True):
    """What is held, as ``Commitment`` says it."""

    round: _Count
    attempt: _Count
    holds_bytes: _Count
    follows: Annotated[int, Meta(ge=0, le=MAX_STEPS)] = 0
    holds_of_sum: _Count = 0


class StateHeld(SignalLine, frozen=True, kw_only=True, tag=True):
    """The state ``digest`` is complete, verified and on disk, and so is its momentum.

    ``by``: it was held before, outer steps led to it, or it came as it is.
    """

    digest: _Hash
    by: Literal["nothing", "sum", "state"] = "state"


class Worked(SignalLine, frozen=True, kw_only=True, tag=True):
    """Progress inside a phase: bytes while fetching or sending, steps while training."""

    round: _Count
    attempt: _Count
    phase: Literal["fetching", "training", "releasing", "sending"]
    done: _Count
    total: _Count


class Drift(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How training has turned the latents of the public probe; see ``worker.training.gauge``."""

    before: float
    after: float
    mean_degrees: float
    rms_degrees: float
    max_degrees: float
    dimension: float
    std: float
    aligned: bool
    warning: str


class Trained(SignalLine, frozen=True, kw_only=True, tag=True):
    round: _Count
    attempt: _Count
    digest: _Hash | None
    """Of the blob; None where it will be sent masked."""
    nbytes: _Count
    reused: bool
    l2_norm: float
    loss_first: float | None
    loss_last: float | None
    budget: Budget | None = None
    """With this release charged, durably, where the workload asks for privacy."""
    clip_factor: float | None = None
    """By which the update was scaled down to the norm that the workload allows."""
    field_use: float | None = None
    """The largest coordinate over the most that the field has room for; 1 would be refused."""
    drift: Drift | None = None
    """Where the worker holds a probe."""


class Masked(SignalLine, frozen=True, kw_only=True, tag=True):
    """``digest`` is that of the blob under its masks."""

    round: _Count
    attempt: _Count
    digest: _Hash


class Spent(SignalLine, frozen=True, kw_only=True, tag=True):
    """It is on disk that the release of ``round`` is spent."""

    round: _Count
    attempt: _Count


class Sent(SignalLine, frozen=True, kw_only=True, tag=True):
    """The last chunk of the update blob was filled."""

    round: _Count
    attempt: _Count


class Closed(SignalLine, frozen=True, kw_only=True, tag=True):
    round: _Count
    adopted: bool


class Failed(SignalLine, frozen=True, kw_only=True, tag=True):
    """A command could not be carried out; the worker goes on unless ``fatal``."""

    code: str
    message: str
    remediation: str = ""
    round: _Count | None = None
    attempt: _Count | None = None
    fatal: bool = False


Event: TypeAlias = (
    Configured
    | Attached
    | Detached
    | Spoiled
    | Consumed
    | Filled
    | Bound
    | StateHeld
    | Worked
    | Trained
    | Masked
    | Sent
    | Spent
    | Closed
    | Failed
)

Parsed = TypeVar("Parsed")
_encoder = msgspec.json.Encoder()
_commands: "msgspec.json.Decoder[Command]" = msgspec.json.Decoder(Command)
_events: "msgspec.json.Decoder[Event]" = msgspec.json.Decoder(Event)


def line(message: SignalLine) -> bytes:
    """One JSON line, newline included."""
    return _encoder.encode(message) + b"\n"


def parse_command(raw: bytes) -> Command:
    """Raises ``WorkerFault`` for a line that is no command."""
    return parse_line(raw, _commands)


def parse_event(raw: bytes) -> Event:
    """Raises ``WorkerFault`` for a line that is no event."""
    return parse_line(raw, _events)


def parse_line(
    raw: bytes, decoder: "msgspec.json.Decoder[Parsed]", limit: int = MAX_LINE_BYTES
) -> Parsed:
    """Raises ``WorkerFault`` for a line of over ``limit`` bytes, or that is none of ``decoder``."""
    if len(raw) > limit:
        raise WorkerFault(f"a line of {len(raw)} bytes is over {limit}")
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # Nothing of the line itself: it may hold the keys of masks.
        raise WorkerFault(
            f"a line of {len(raw)} bytes is none of the worker protocol: {error}"
        ) from error
