"""Models and nodes for tests of the planner, without files."""

from lensemble.ids import Digest, NodeId
from lensemble.model_facts import EMBEDDING, HEAD, OUTPUT_NORM, ModelFacts
from lensemble.wire.stages import Inventory, TensorPart
from lensemble_coord.inference.chain import Offer

ENGINE = "tinygrad 0.14.0"


def model(
    layers: int = 4, hidden: int = 64, *, tied: bool = False, vocabulary: int = 300
) -> tuple[ModelFacts, tuple[TensorPart, ...]]:
    """One matrix of hidden x hidden and one norm per layer."""
    facts = ModelFacts(
        name="toy",
        architecture="llama",
        file_bytes=1 << 30,
        layers=layers,
        hidden=hidden,
        feed_forward=2 * hidden,
        heads=4,
        kv_heads=2,
        head_dim=hidden // 4,
        vocabulary=vocabulary,
        trained_ctx=1 << 17,
        rope_base=1e4,
        rope_dim=hidden // 4,
        norm_eps=1e-5,
        tied=tied,
        eos=(2,),
        tokenizer_digest=Digest("0" * 64),
    )
    shapes: list[tuple[str, tuple[int, ...]]] = [(EMBEDDING, (hidden, vocabulary))]
    for layer in range(layers):
        shapes.append((f"blk.{layer}.attn_q.weight", (hidden, hidden)))
        shapes.append((f"blk.{layer}.attn_norm.weight", (hidden,)))
    shapes.append((OUTPUT_NORM, (hidden,)))
    if not tied:
        shapes.append((HEAD, (hidden, vocabulary)))
    parts, offset = [], 4096
    for name, shape in shapes:
        nbytes = 4 * hidden * (shape[1] if len(shape) > 1 else 1)
        parts.append(TensorPart(name=name, ggml_type=0, shape=shape, offset=offset, nbytes=nbytes))
        offset += nbytes
    return facts, tuple(parts)


def offer(
    index: int, memory: int, *, taken: int = 0, weights: str = "float32", engine: str = ENGINE
) -> Offer:
    return Offer(
        NodeId(f"{index:064x}"),
        f"node{index}",
        Inventory(
            federation="f" * 32,
            epoch=1,
            memory_bytes=memory,
            taken_bytes=taken,
            device="CPU",
            engine=engine,
            weights="quantised" if weights == "quantised" else "float32",
            addresses=(),
        ),
    )
