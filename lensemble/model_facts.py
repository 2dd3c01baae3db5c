"""What a plan and a stage must know of a model: shapes and sizes, never weights."""

import math
import re

import msgspec
from blake3 import blake3

from lensemble.ids import Digest
from lensemble.wire.stages import TensorPart

EMBEDDING, OUTPUT_NORM, HEAD = "token_embd.weight", "output_norm.weight", "output.weight"
ROPE_FACTORS = "rope_freqs.weight"
_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,3})\..+")


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


def tensors_for(
    facts: ModelFacts, tensors: tuple[TensorPart, ...], first: int, last: int
) -> tuple[TensorPart, ...]:
    """What layers ``first`` to ``last`` (not included) need, by offset.

    The first layers need the embedding, the last ones output norm and head; the head of a tied
    model is the embedding.  Factors of the rotary embedding are everybody's.
    """
    apart = {ROPE_FACTORS}
    if first == 0:
        apart.add(EMBEDDING)
    if last == facts.layers:
        apart |= {OUTPUT_NORM, EMBEDDING if facts.tied else HEAD}
    chosen = [
        tensor
        for tensor in tensors
        if tensor.name in apart
        or ((layer := layer_of(tensor.name)) is not None and first <= layer < last)
    ]
    return tuple(sorted(chosen, key=lambda tensor: tensor.offset))


def layer_of(name: str) -> int | None:
    """The layer that the tensor ``name`` is of."""
    found = _LAYER.fullmatch(name)
    return int(found[1]) if found else None


def elements(tensor: TensorPart) -> int:
    """How many numbers ``tensor`` holds."""
    return math.prod(tensor.shape)
