"""From the header of a GGUF file to what a plan and a stage must know of the model.

An engine computes exactly what is named here: an architecture of ``ARCHITECTURES``, tensors of
types in ``COMPUTED_TYPES``, and no key or tensor that would change the arithmetic.  Anything else
is refused by name before a byte of weights is fetched, because a model that is computed slightly
wrong answers fluently.
"""

from lensemble.errors import ModelFileError, UnsupportedModel
from lensemble.gguf import TYPES, Header, StoredTensor
from lensemble.model_facts import (
    EMBEDDING,
    HEAD,
    OUTPUT_NORM,
    ROPE_FACTORS,
    ModelFacts,
)
from lensemble.wire.stages import TensorPart

ARCHITECTURES: dict[str, frozenset[str]] = {
    # Each has a test that its split answers as the whole does, and as another implementation.
    "llama": frozenset(),
    "qwen2": frozenset({"attn_q.bias", "attn_k.bias", "attn_v.bias"}),
    "qwen3": frozenset({"attn_q_norm.weight", "attn_k_norm.weight"}),
}
"""Architectures that are computed, with what each of their layers has beyond one of llama."""

COMPUTED_TYPES = frozenset({0, 1, 2, 3, 6, 7, 8, 12, 13, 14, 18, 21, 22, 23, 28, 30, 39, 41})
"""ggml types that tinygrad 0.14.0 unpacks; integers are left out, they hold no weights."""

MAX_LAYERS = 1 << 10
MAX_WIDTH = 1 << 20
MAX_NAME_CHARS = 64
_ENDINGS = frozenset({
    "<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|endoftext|>", "<|end|>", "<|eom_id|>",
})  # fmt: skip
"""Control tokens that end an answer whatever the end-of-sequence key says."""

_CONTROL = 3
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "expert_count": (0,),
    "attention.sliding_window": (0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.scale": (0.0,),
    "attention.causal": (True,),
    "use_parallel_residual": (False,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "rope.scaling.type": ("none",),
    "rope.scaling.factor": (0.0, 1.0),
    "rope.scaling.attn_factor": (0.0, 1.0),
    "rope.scale_linear": (0.0, 1.0),
}
"""Keys of an architecture that change the arithmetic, with the values at which they do not."""


def facts_of(header: Header) -> ModelFacts:
    """What is known of the model.

    Raises:
        UnsupportedModel: an architecture, tensor type, key or tensor that is not computed.
        ModelFileError: a key or tensor is missing, or does not fit the others.
    """
    architecture = _architecture(header)
    keys = _Keys(header, architecture)
    keys.refuse_unknown_arithmetic()
    hidden, heads = keys.count("embedding_length"), keys.count("attention.head_count")
    head_dim = keys.count("attention.key_length", hidden // heads)
    tensors = {tensor.name: tensor for tensor in header.tensors}
    if EMBEDDING not in tensors:
        raise ModelFileError(f"the tensor {EMBEDDING} is missing")
    facts = ModelFacts(
        name=_name(header),
        architecture=architecture,
        file_bytes=header.file_bytes,
        layers=keys.count("block_count", most=MAX_LAYERS),
        hidden=hidden,
        feed_forward=keys.count("feed_forward_length"),
        heads=heads,
        kv_heads=keys.count("attention.head_count_kv", heads),
        head_dim=head_dim,
        vocabulary=tensors[EMBEDDING].shape[-1],
        trained_ctx=keys.count("context_length"),
        rope_base=keys.real("rope.freq_base", 10_000.0),
        rope_dim=keys.count("rope.dimension_count", head_dim),
        norm_eps=keys.real("attention.layer_norm_rms_epsilon"),
        tied=HEAD not in tensors,
        eos=_endings(header),
        tokenizer_digest=header.tokenizer_digest,
    )
    _check_heads(facts, keys)
    _check_tensors(facts, tensors)
    return facts


def parts_of(header: Header) -> tuple[TensorPart, ...]:
    """Every tensor of the file by offset, without digests."""
    return tuple(
        TensorPart(
            name=tensor.name,
            ggml_type=tensor.ggml_type,
            shape=tensor.shape,
            offset=tensor.offset,
            nbytes=tensor.nbytes,
        )
        for tensor in header.tensors
    )


class _Keys:
    """The metadata of one architecture, checked as it is asked for."""

    def __init__(self, header: Header, architecture: str) -> None:
        self._metadata = header.metadata
        self._architecture = architecture

    def count(self, key: str, default: int | None = None, most: int = MAX_WIDTH) -> int:
        """A whole number from 1 to ``most``; per layer only if all layers have the same."""
        full, value = self._get(key, default)
        if isinstance(value, tuple):
            if len(set(value)) != 1:
                raise UnsupportedModel(f"{full} differs between layers, which is not computed")
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise ModelFileError(f"{full} is {value!r}, not a whole number from 1 to {most}")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A finite number over 0."""
        full, value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelFileError(f"{full} is {value!r}, not a number")
        if not 0 < value < 1e30:
            raise ModelFileError(f"{full} is {value}, not a number over 0")
        return float(value)

    def refuse_unknown_arithmetic(self) -> None:
        """Raises ``UnsupportedModel`` for a key at a value that would change the outcome."""
        for key, harmless in _NEUTRAL.items():
            full = f"{self._architecture}.{key}"
            if full in self._metadata and self._metadata[full] not in harmless:
                raise UnsupportedModel(
                    f"{full} is {str(self._metadata[full])[:80]}, which is not computed"
                )

    def _get(self, key: str, default: object) -> tuple[str, object]:
        full = f"{self._architecture}.{key}"
        value = self._metadata.get(full, default)
        if value is None:
            raise ModelFileError(f"the key {full} is missing")
        return full, value


def _architecture(header: Header) -> str:
    parts = header.metadata.get("split.count", 1)
    if parts not in {0, 1}:
        raise UnsupportedModel(
            f"this is one of {parts} parts of a model",
            "Join the parts into one file: `llama-gguf-split --merge FIRST-PART WHOLE.gguf`.",
        )
    found = header.metadata.get("general.architecture")
    if not isinstance(found, str):
        raise ModelFileError("the key general.architecture is missing or no text")
    if found not in ARCHITECTURES:
        raise UnsupportedModel(
            f"the architecture is {found[:80]}; computed are {', '.join(sorted(ARCHITECTURES))}"
        )
    return found


def _name(header: Header) -> str:
    for key in ("general.name", "general.basename"):
        found = header.metadata.get(key)
        if isinstance(found, str) and found.strip():
            return "".join(each for each in found if each.isprintable())[:MAX_NAME_CHARS]
    return "unnamed"


def _endings(header: Header) -> tuple[int, ...]:
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, tuple) or not tokens:
        raise ModelFileError("the key tokenizer.ggml.tokens is missing or no list")
    found = set()
    for key in ("eos_token_id", "eot_token_id", "eom_token_id"):
        token = header.metadata.get(f"tokenizer.ggml.{key}")
        if token is None:
            continue
        if not isinstance(token, int) or not 0 <= token < len(tokens):
            raise ModelFileError(f"tokenizer.ggml.{key} is {token!r} of {len(tokens)} tokens")
        found.add(int(token))
    kinds = header.metadata.get("tokenizer.ggml.token_type", ())
    if isinstance(kinds, tuple) and len(kinds) == len(tokens):
        for index, token in enumerate(tokens):
            if kinds[index] == _CONTROL and token in _ENDINGS:
                found.add(index)
    return tuple(sorted(found))


def _check_heads(facts: ModelFacts, keys: _Keys) -> None:
    if facts.heads % facts.kv_heads:
        raise ModelFileError(f"{facts.heads} heads are no multiple of {facts.kv_heads} key heads")
    if keys.count("attention.value_length", facts.head_dim) != facts.head_dim:
        raise UnsupportedModel("values are of another width than keys, which is not computed")
    if facts.rope_dim > facts.head_dim or facts.rope_dim % 2:
        raise ModelFileError(f"rope turns {facts.rope_dim} of {facts.head_dim} head dimensions")


def shapes(facts: ModelFacts) -> dict[str, tuple[int, ...]]:
    """Name and shape, innermost first, of every tensor that the model must have."""
    query, key = facts.heads * facts.head_dim, facts.kv_heads * facts.head_dim
    layer = {
        "attn_norm.weight": (facts.hidden,),
        "attn_q.weight": (facts.hidden, query),
        "attn_k.weight": (facts.hidden, key),
        "attn_v.weight": (facts.hidden, key),
        "attn_output.weight": (query, facts.hidden),
        "ffn_norm.weight": (facts.hidden,),
        "ffn_gate.weight": (facts.hidden, facts.feed_forward),
        "ffn_up.weight": (facts.hidden, facts.feed_forward),
        "ffn_down.weight": (facts.feed_forward, facts.hidden),
    }
    beyond = {
        "attn_q.bias": (query,),
        "attn_k.bias": (key,),
        "attn_v.bias": (key,),
        "attn_q_norm.weight": (facts.head_dim,),
        "attn_k_norm.weight": (facts.head_dim,),
    }
    layer |= {name: beyond[name] for name in ARCHITECTURES[facts.architecture]}
    whole = {
        f"blk.{index}.{name}": shape
        for index in range(facts.layers)
        for name, shape in layer.items()
    }
    ends = {EMBEDDING: (facts.hidden, facts.vocabulary), OUTPUT_NORM: (facts.hidden,)}
    if not facts.tied:
        ends[HEAD] = (facts.hidden, facts.vocabulary)
    return ends | whole


def _check_tensors(facts: ModelFacts, tensors: dict[str, StoredTensor]) -> None:
    wanted = shapes(facts)
    for name, shape in wanted.items():
        if name not in tensors:
            raise ModelFileError(f"the tensor {name} is missing")
        if tensors[name].shape != shape:
            raise ModelFileError(f"{name} has the shape {tensors[name].shape}, not {shape}")
    optional = {ROPE_FACTORS: (facts.rope_dim // 2,)}
    for name, tensor in tensors.items():
        if name not in wanted and optional.get(name) != tensor.shape:
            raise UnsupportedModel(f"the tensor {name} {tensor.shape} is not computed")
        if tensor.ggml_type not in COMPUTED_TYPES:
            raise UnsupportedModel(
                f"{name} is {TYPES[tensor.ggml_type].name}, which is not computed"
            )
