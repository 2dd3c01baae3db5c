"""Messages about stages: contiguous layer ranges of one model, each on another node, in a chain.

The coordinator says ``StageProvision`` to every stage, ``StageOpen`` when all are ready to receive,
and ``StageTeardown`` in the end.  What travels between the stages goes over edges; see
``lensemble.stage_chunk`` for tokens and activations, ``StageWants`` for weights.
"""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from lensemble.edge.spec import EdgeSpec
from lensemble.wire.fence import (
    MAX_STAGES,
    Count,
    Fenced,
    Hash,
    Label,
    Message,
    NodeKey,
    OfRun,
    Sentence,
)

STAGE_PROTOCOL = 1
"""Of the chunks between stages; a stage of another build that speaks another is refused."""

MAX_CTX = 1 << 20
MAX_SESSIONS = 256
MAX_ROWS = 1024
MAX_TENSORS = 4096
MAX_RANGES = 4096
MAX_MODEL_BYTES = 1 << 17
MAX_ADDRESSES = 8
STDERR_LINES = 200
MAX_LINKED = 64
MAX_TIMES = 64
MAX_TIMELINE = 128

LINKS_LOOK_S = 10.0
"""How often a node looks whether what it says of its links in ``Inventory`` still holds."""

MAX_BURST_BYTES = 1 << 20
BURST_FRAME_BYTES = 1 << 14
"""Each chunk of a burst; so much may be missing where its time ran out in the middle of one."""

BURST_S = 2.0
"""A burst that takes longer is broken off on both sides."""

BURST_REST_S = 600.0
"""Between two bursts over one pair of nodes, in whichever direction."""

Times: TypeAlias = tuple[Count, Count, Count, Count, Count, Count]
"""One chunk of a stage: its step and rows, then four times in microseconds.

How long before this was said it had landed; from there on until it was taken up; from there on
until it was computed; from there on until what became of it was with the outbound edge, 0 where
nothing did.  No clock is told, so that none has to agree with another.
"""

# ---- what a node offers ----


class Inventory(Fenced, frozen=True, kw_only=True, tag=True):
    """What a node can hold of a model; said after ``Welcome`` and whenever it changes."""

    memory_bytes: Count
    """What all stages on this node may take together; 0: it hosts none."""

    taken_bytes: Count
    """What its stages take now."""

    device: Label
    engine: Label
    """Which code computes, with its version; all stages of a run have the same."""

    weights: Literal["float32", "quantised"]
    """How weights lie in memory."""

    addresses: Annotated[
        tuple[Annotated[str, Meta(max_length=64)], ...], Meta(max_length=MAX_ADDRESSES)
    ]
    """Where other nodes reach this one."""

    reason: Sentence = ""
    """Why it hosts nothing."""

    linked: Annotated[tuple[NodeKey, ...], Meta(max_length=MAX_LINKED)] = ()
    """Nodes that it has links of its own to, where those are measured."""

    rtts_us: Annotated[tuple[Count, ...], Meta(max_length=MAX_LINKED)] = ()
    """Microseconds there and back to each of ``linked``."""


# ---- where weights come from ----


class FromPath(Message, frozen=True, kw_only=True, tag=True):
    """A file of the node's own."""

    path: Annotated[str, Meta(max_length=4096)]


class FromUrl(Message, frozen=True, kw_only=True, tag=True):
    """HTTP or HTTPS, by byte ranges."""

    url: Annotated[str, Meta(max_length=4096)]


class FromEdge(Message, frozen=True, kw_only=True, tag=True):
    """The producer of the edge sends what ``StageWants`` asks for."""

    edge: EdgeSpec


Source: TypeAlias = FromPath | FromUrl | FromEdge


class TensorPart(Message, frozen=True, kw_only=True):
    """One tensor of a GGUF file: ``nbytes`` stored bytes from ``offset`` of the file on."""

    name: Label
    ggml_type: Annotated[int, Meta(ge=0, le=1 << 16)]
    shape: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=4)]
    """As stored: innermost dimension first."""

    offset: Count
    nbytes: Count
    digest: Hash | None = None
    """BLAKE3 of the stored bytes, where the coordinator holds the file."""


class Address(Message, frozen=True, kw_only=True):
    node: NodeKey
    addresses: Annotated[
        tuple[Annotated[str, Meta(max_length=64)], ...], Meta(max_length=MAX_ADDRESSES)
    ] = ()


# ---- coordinator to node ----


class StageProvision(OfRun, frozen=True, kw_only=True, tag=True):
    """Get ready to compute layers ``first`` to ``last`` (not included) of a model.

    The first stage embeds tokens, the last one has the head, samples and answers with tokens.
    Answered by ``StageWants`` (where weights come over an edge), ``StageProgress`` along the way,
    then ``StageReady``, ``StageRefused`` or ``StageFault``.
    """

    stages: Annotated[int, Meta(ge=1, le=MAX_STAGES)]
    build: Label
    protocol: Annotated[int, Meta(ge=1)]
    engine: Label
    model: Annotated[bytes, Meta(max_length=MAX_MODEL_BYTES)]
    """Canonical JSON of ``model_facts.ModelFacts``."""

    manifest_digest: Hash
    """Of model and all its tensors: ``model_facts.manifest_digest``."""

    tokenizer_digest: Hash
    first: Count
    last: Count
    tensors: Annotated[tuple[TensorPart, ...], Meta(max_length=MAX_TENSORS)]
    """What this stage needs, by offset."""

    source: Source
    inbound: EdgeSpec
    outbound: EdgeSpec
    upstream: Address
    downstream: Address
    ctx: Annotated[int, Meta(ge=1, le=MAX_CTX)]
    sessions: Annotated[int, Meta(ge=1, le=MAX_SESSIONS)]
    rows: Annotated[int, Meta(ge=1, le=MAX_ROWS)]
    """Most rows of a chunk: of a prompt, so many tokens are computed at once."""


class StageOpen(OfRun, frozen=True, kw_only=True, tag=True):
    """Every stage is registered to receive: open the outbound edge.  Answered: ``StageOpened``."""


class StageLook(OfRun, frozen=True, kw_only=True, tag=True):
    """A result is overdue: how far is this stage?  Answered at once: ``StageSeen``.

    With ``timeline`` it also tells when its latest chunks came and went.
    """

    timeline: bool = False


class StageTeardown(OfRun, frozen=True, kw_only=True, tag=True):
    """End the stage and free everything it holds.  Answered: ``StageTornDown``, always."""

    reason: Sentence


class BurstExpect(Fenced, frozen=True, kw_only=True, tag=True):
    """Time what comes on ``edge`` from ``far``.  Answered: ``BurstReady``, then ``BurstTaken``.

    Any answer may be ``BurstRefused`` instead.
    """

    burst: Count
    """Tells measurements apart."""

    edge: EdgeSpec
    far: Address


class BurstSend(Fenced, frozen=True, kw_only=True, tag=True):
    """Send bytes that mean nothing on ``edge`` to ``far``, which expects them.

    ``MAX_BURST_BYTES``, or what goes within ``BURST_S``.  Answered only if refused.
    """

    burst: Count
    edge: EdgeSpec
    far: Address


# ---- node to coordinator ----


class StageWants(OfRun, frozen=True, kw_only=True, tag=True):
    """The weights edge is registered: send these (offset, length) of the file, then end it.

    Each chunk is the offset as u64 little-endian, then bytes.
    """

    ranges: Annotated[tuple[tuple[Count, Count], ...], Meta(max_length=MAX_RANGES)]


class StageProgress(OfRun, frozen=True, kw_only=True, tag=True):
    phase: Literal["fetching", "verifying", "loading", "compiling", "opening"]
    done: Count
    total: Count
    """Bytes while fetching, verifying and loading; steps while compiling."""


class StageReady(OfRun, frozen=True, kw_only=True, tag=True):
    """Weights bound, kernels compiled, inbound edge registered, both rings attached."""

    weights_bytes: Count
    """Of its tensors in memory."""

    resident_bytes: Count
    """Of the worker process."""

    fetched_bytes: Count
    seconds: Annotated[float, Meta(ge=0)]


class StageOpened(OfRun, frozen=True, kw_only=True, tag=True):
    """The outbound stream is open."""


class StageSeen(OfRun, frozen=True, kw_only=True, tag=True):
    computed: Count
    """Chunks that the worker has consumed since it was attached."""

    held: Count
    """Chunks that are landed here and not consumed yet; the worker is at the oldest of them."""

    recent: Annotated[tuple[tuple[Count, Count], ...], Meta(max_length=MAX_TIMES)] = ()
    """Step and microseconds of computing of the latest chunks, oldest first."""

    timeline: Annotated[tuple[Times, ...], Meta(max_length=MAX_TIMELINE)] = ()
    """Of the latest chunks, oldest first, where it was asked for."""


class StageRefused(OfRun, frozen=True, kw_only=True, tag=True):
    """This node does not host that: what ``field`` is here and what was asked for."""

    field: Label
    have: Sentence
    want: Sentence
    remediation: Sentence = ""


class StageFault(OfRun, frozen=True, kw_only=True, tag=True):
    """The stage is gone; what it held on the node is freed."""

    code: Label
    reason: Sentence
    remediation: Sentence = ""
    stderr: Annotated[tuple[Sentence, ...], Meta(max_length=STDERR_LINES)] = ()
    """Last lines of the worker that computed it."""


class StageTornDown(OfRun, frozen=True, kw_only=True, tag=True):
    outcome: Literal["clean", "faulted"]
    reason: Sentence = ""


class BurstReady(Fenced, frozen=True, kw_only=True, tag=True):
    """The edge of the burst is registered."""

    burst: Count


class BurstTaken(Fenced, frozen=True, kw_only=True, tag=True):
    """What came of a burst until it ended or its time ran out."""

    burst: Count
    landed_bytes: Annotated[int, Meta(ge=0, le=MAX_BURST_BYTES)]
    microseconds: Count
    """Since its stream was here; 0 counts as 1."""

    rtt_us: Count | None = None
    """There and back on that link, if it is measured."""


class BurstRefused(Fenced, frozen=True, kw_only=True, tag=True):
    """This node does not measure that, or could not."""

    burst: Count
    reason: Sentence


BurstOrder: TypeAlias = BurstExpect | BurstSend
BurstAnswer: TypeAlias = BurstReady | BurstTaken | BurstRefused
StageOrder: TypeAlias = StageProvision | StageOpen | StageLook | StageTeardown
StageAnswer: TypeAlias = (
    Inventory
    | StageWants
    | StageProgress
    | StageReady
    | StageOpened
    | StageSeen
    | StageRefused
    | StageFault
    | StageTornDown
)
