"""What a plan and a stage must know of a model: shapes and sizes, never weights."""

import msgspec
from blake3 import blake3

from lensemble.ids import Digest
from lensemble.wire.stages import TensorPart


class ModelFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Of one GGUF file, from its header alone.

    ``hidden`` is the width of activations; attention has ``heads`` query and ``kv_heads`` key
    heads of ``head_dim`` each.  A ``tied`` head is the embedding again: first and last stage both
    hold it.
    """

    name: str
    architecture: str
    file_bytes: int
    layers: int
    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    trained_ctx: int
    rope_base: float
    rope_dim: int
    norm_eps: float
    tied: bool
    eos: tuple[int, ...]
    """Tokens that end an answer."""

    tokenizer_digest: Digest
    """BLAKE3 of the canonical form of every ``tokenizer.*`` key."""

    def canonical(self) -> bytes:
        """Sorted compact JSON."""
        return msgspec.json.encode(self, order="sorted")


def manifest_digest(facts: ModelFacts, tensors: tuple[TensorPart, ...]) -> Digest:
    """BLAKE3 over ``facts`` and every tensor of the file by offset: the identity of a model."""
    running = blake3(b"lensemble/model/v1\x00")
    running.update(facts.canonical())
    for tensor in sorted(tensors, key=lambda each: (each.offset, each.name)):
        running.update(b"\x00")
        running.update(msgspec.json.encode(tensor, order="sorted"))
    return Digest(running.hexdigest())
