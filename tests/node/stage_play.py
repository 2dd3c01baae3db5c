"""Orders of a small made-up run, for tests of stages."""

from typing import Any

from lensemble.edge.spec import EdgeSpec
from lensemble.ids import Digest, EdgeId, FederationId, NodeId
from lensemble.model_facts import ModelFacts
from lensemble.version import BUILD
from lensemble.wire import stages
from lensemble.wire.fence import MAX_STAGES
from lensemble_node.stage_terms import Offer

FEDERATION = FederationId("f" * 32)
COORDINATOR = NodeId("c" * 64)
NODE = NodeId("a" * 64)
RUN = "0123456789abcdef"
ENGINE = "scripted"
FACTS = ModelFacts(
    name="toy",
    architecture="llama",
    file_bytes=1 << 16,
    layers=2,
    hidden=16,
    feed_forward=32,
    heads=2,
    kv_heads=1,
    head_dim=8,
    vocabulary=32,
    trained_ctx=64,
    rope_base=10000.0,
    rope_dim=8,
    norm_eps=1e-5,
    tied=True,
    eos=(2,),
    tokenizer_digest=Digest("d" * 64),
)
OFFER = Offer(
    NODE, COORDINATOR, BUILD, ENGINE, memory_bytes=1 << 30, taken_bytes=0, sources=("/nowhere/",)
)


def tensors(first: int, last: int) -> tuple[stages.TensorPart, ...]:
    ends = [("token_embd.weight", 0)] if first == 0 or last == FACTS.layers else []
    names = [*ends, *((f"blk.{n}.attn_q.weight", 1 + n) for n in range(first, last))]
    names += [("output_norm.weight", 8)] if last == FACTS.layers else []
    return tuple(
        stages.TensorPart(name=name, ggml_type=0, shape=(16, 2), offset=4096 * at, nbytes=128)
        for name, at in names
    )


def provision(run_epoch: int = 1, **changes: Any) -> stages.StageProvision:
    """The only stage of ``RUN`` on ``NODE``, its edges those of ``run_epoch``."""
    stage, count = changes.get("stage", 0), changes.get("stages", 1)
    node = changes.pop("node", NODE)
    first, last = stage * FACTS.layers // count, (stage + 1) * FACTS.layers // count
    upstream = changes.get("upstream", stages.Address(node=COORDINATOR))
    downstream = changes.get("downstream", stages.Address(node=COORDINATOR))
    base = (run_epoch * MAX_STAGES + stage) * 8
    fields: dict[str, Any] = {
        "federation": FEDERATION,
        "epoch": 1,
        "run": RUN,
        "run_epoch": run_epoch,
        "stage": stage,
        "stages": count,
        "build": BUILD,
        "protocol": stages.STAGE_PROTOCOL,
        "engine": ENGINE,
        "model": FACTS.canonical(),
        "manifest_digest": Digest("e" * 64),
        "tokenizer_digest": FACTS.tokenizer_digest,
        "first": first,
        "last": last,
        "tensors": tensors(first, last),
        "source": stages.FromPath(path="/nowhere/toy.gguf"),
        "inbound": EdgeSpec(EdgeId(base), upstream.node, node, 4096),
        "outbound": EdgeSpec(EdgeId(base + 8), node, downstream.node, 4096),
        "upstream": upstream,
        "downstream": downstream,
        "ctx": 32,
        "sessions": 2,
        "rows": 8,
    }
    return stages.StageProvision(**{**fields, **changes})


def weights(run_epoch: int = 1, node: NodeId = NODE) -> stages.FromEdge:
    edge = EdgeId(run_epoch * MAX_STAGES * 8 + 3)
    return stages.FromEdge(edge=EdgeSpec(edge, COORDINATOR, node, 4096))


def opening(order: stages.StageProvision) -> stages.StageOpen:
    return stages.StageOpen(**fence(order))


def teardown(order: stages.StageProvision, reason: str = "done") -> stages.StageTeardown:
    return stages.StageTeardown(**fence(order), reason=reason)


def fence(order: stages.StageProvision) -> dict[str, Any]:
    return {
        "federation": order.federation,
        "epoch": order.epoch,
        "run": order.run,
        "run_epoch": order.run_epoch,
        "stage": order.stage,
    }
