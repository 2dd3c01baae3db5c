"""What a coordinator asks of a stage, checked against what this node is and has."""

import msgspec

from lensemble import stage_chunk
from lensemble.ids import NodeId
from lensemble.model_facts import ModelFacts, elements, tensors_for
from lensemble.wire.fence import Sentence, sentence
from lensemble.wire.stages import (
    STAGE_PROTOCOL,
    FromEdge,
    FromPath,
    FromUrl,
    StageProvision,
    StageRefused,
)

FLOAT_BYTES = 4


class Offer(msgspec.Struct, frozen=True):
    """What this node is; ``memory_bytes`` are for all its stages together, 0 hosts none."""

    node: NodeId
    coordinator: NodeId
    build: str
    engine: str
    memory_bytes: int
    taken_bytes: int
    weights: str = "float32"
    reason: str = ""
    """Why it hosts nothing."""

    sources: tuple[str, ...] = ()
    """Directories and URL prefixes, each ending in a slash, that weights may be read from."""


class Difference(msgspec.Struct, frozen=True):
    """What ``field`` is here and what was asked for."""

    field: str
    have: Sentence
    want: Sentence
    remediation: Sentence = ""


def refusal(order: StageProvision, against: Difference) -> StageRefused:
    """The answer that says why ``order`` is not carried out."""
    return StageRefused(
        federation=order.federation,
        epoch=order.epoch,
        run=order.run,
        run_epoch=order.run_epoch,
        stage=order.stage,
        field=against.field,
        have=sentence(against.have),
        want=sentence(against.want),
        remediation=sentence(against.remediation),
    )


def objection(order: StageProvision, offer: Offer) -> Difference | None:
    """Why this node does not host ``order``, or None when it can."""
    if offer.memory_bytes == 0:
        reason = offer.reason or "this node hosts no stages"
        return Difference("inference", reason, "a node that hosts stages")
    for name, have, want, way_out in (
        ("build", offer.build, order.build, "Run the same release on coordinator and nodes."),
        ("protocol", STAGE_PROTOCOL, order.protocol, "Upgrade the older side."),
        ("engine", offer.engine, order.engine, "Give all nodes of a run the same engine."),
    ):
        if have != want:
            return Difference(name, str(have), str(want), way_out)
    try:
        facts = msgspec.json.decode(order.model, type=ModelFacts)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return Difference("model", f"not model facts: {error}", "facts of this build")
    return (
        _source_differs(order, offer)
        or _layers_differ(order, facts)
        or _model_differs(order, facts)
        or _edges_differ(order, facts, offer)
        or _memory_differs(order, facts, offer)
    )


def needed_bytes(order: StageProvision, facts: ModelFacts, weights: str = "float32") -> int:
    """The least that the stage takes: its tensors as they lie in memory, caches, and rings."""
    sizes = (
        each.nbytes if weights == "quantised" else elements(each) * FLOAT_BYTES
        for each in order.tensors
    )
    width = 2 * facts.kv_heads * facts.head_dim * FLOAT_BYTES
    caches = (order.last - order.first) * order.sessions * order.ctx * width
    return sum(sizes) + caches + order.inbound.ring_bytes + order.outbound.ring_bytes


def facts_of(order: StageProvision) -> ModelFacts:
    """The model of an order that nothing was objected to."""
    return msgspec.json.decode(order.model, type=ModelFacts)


def _model_differs(order: StageProvision, facts: ModelFacts) -> Difference | None:
    if facts.tokenizer_digest != order.tokenizer_digest:
        return Difference("tokenizer_digest", facts.tokenizer_digest, order.tokenizer_digest)
    if tensors_for(facts, order.tensors, order.first, order.last) != order.tensors:
        return Difference(
            "tensors",
            f"those of layers {order.first}:{order.last}, by offset",
            "others, or in another order",
        )
    end = 0
    for tensor in order.tensors:
        if tensor.offset < end or tensor.offset + tensor.nbytes > facts.file_bytes:
            return Difference(
                "tensors",
                f"{tensor.name} at {tensor.offset} overlaps another or leaves the file",
                f"tensors by offset within {facts.file_bytes} bytes",
            )
        end = tensor.offset + tensor.nbytes
    return None


def _source_differs(order: StageProvision, offer: Offer) -> Difference | None:
    match order.source:
        case FromEdge():
            return None
        case FromPath(path=place) | FromUrl(url=place):
            pass
    # A path that climbs would leave the directory that it begins with.
    if ".." not in place.split("/") and place.startswith(offer.sources):
        return None
    return Difference(
        "source",
        "weights come from the coordinator"
        + (", or from where inference.sources allows" if offer.sources else " only"),
        place,
        "Add its directory or URL to `inference.sources` of the node, or have the coordinator send "
        "the weights.",
    )


def _layers_differ(order: StageProvision, facts: ModelFacts) -> Difference | None:
    first, last = order.first, order.last
    at_ends = (order.stage == 0, order.stage == order.stages - 1)
    if not 0 <= first < last <= facts.layers or at_ends != (first == 0, last == facts.layers):
        return Difference(
            "layers",
            f"{first}:{last} as stage {order.stage} of {order.stages}",
            f"a range of 0:{facts.layers} that starts with the first stage and ends with the last",
        )
    if order.ctx > facts.trained_ctx:
        return Difference("ctx", f"trained for {facts.trained_ctx}", str(order.ctx))
    return None


def _edges_differ(order: StageProvision, facts: ModelFacts, offer: Offer) -> Difference | None:
    upstream = offer.coordinator if order.stage == 0 else order.upstream.node
    downstream = offer.coordinator if order.stage == order.stages - 1 else order.downstream.node
    edges = [
        ("inbound", order.inbound, upstream, offer.node),
        ("outbound", order.outbound, offer.node, downstream),
    ]
    if isinstance(order.source, FromEdge):
        edges.append(("source", order.source.edge, offer.coordinator, offer.node))
    for name, spec, producer, consumer in edges:
        if (spec.producer, spec.consumer) != (producer, consumer):
            return Difference(
                name,
                f"{producer[:16]} to {consumer[:16]}",
                f"{spec.producer[:16]} to {spec.consumer[:16]}",
            )
    if len({spec.edge for _, spec, _, _ in edges}) < len(edges):
        return Difference("edges", "one id for each edge", "one id for several edges")
    return _chunk_does_not_fit(order, facts)


def _chunk_does_not_fit(order: StageProvision, facts: ModelFacts) -> Difference | None:
    row = facts.hidden * FLOAT_BYTES
    into = order.rows * (FLOAT_BYTES if order.stage == 0 else row)
    out = stage_chunk.RESULT.size if order.stage == order.stages - 1 else order.rows * row
    for name, spec, payload in (
        ("inbound", order.inbound, into), ("outbound", order.outbound, out),
    ):  # fmt: skip
        least = stage_chunk.MAX_HEADER_BYTES + payload
        if spec.capacity_bytes < least:
            return Difference(
                f"{name}.capacity_bytes",
                f"a chunk of {order.rows} rows takes up to {least}",
                str(spec.capacity_bytes),
            )
    return None


def _memory_differs(order: StageProvision, facts: ModelFacts, offer: Offer) -> Difference | None:
    free = offer.memory_bytes - offer.taken_bytes
    needed = needed_bytes(order, facts, offer.weights)
    if needed <= free:
        return None
    return Difference(
        "memory_bytes",
        f"{free} bytes free of {offer.memory_bytes}",
        f"{needed} bytes for layers {order.first}:{order.last}",
        "End another run on this node, raise `inference.memory_bytes` there, or plan again.",
    )
