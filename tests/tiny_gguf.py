"""Small random models, llama-like, as GGUF files, with a tokenizer and a chat template.

Seeded: the same arguments write the same bytes.  Weights are scaled so that logits have clear
winners, or rounding would decide which token comes next.
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

HIDDEN, HEADS, KV_HEADS, FEED_FORWARD = 64, 4, 2, 128
WORDS = (
    "th", "he", "Ġt", "Ġa", "in", "er", "Ġthe", "on", "re", "Ġs", "at", "Ġo", "en", "Ġw", "it",
    "ou", "is", "an", "or", "es", "Ġc", "ing", "Ġf", "Ġp", "ed", "Ġin", "al", "Ġm", "Ġof",
)  # fmt: skip
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
EOS = 2


def write_tiny(
    path: Path,
    *,
    layers: int = 4,
    seed: int = 0,
    tied: bool = True,
    quant: str = "Q8_0",
    ctx: int = 256,
    name: str = "tiny",
    keys: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray[Any, Any]] | None = None,
    alignment: int = 32,
    architecture: str = "llama",
) -> Path:
    """Write a model to ``path``: ``quant`` is F32, F16, Q8_0, Q4_0, ... of its matrices.

    ``keys`` are further unsigned metadata of the architecture (or replace its), ``extra`` further
    F32 tensors.
    """
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_custom_alignment(alignment)
    writer.add_name(name)
    writer.add_context_length(ctx)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in (keys or {}).items():
        writer.add_uint32(f"{architecture}.{key}", value)
    vocabulary = _add_tokenizer(writer)
    random = np.random.default_rng(seed)
    _add(writer, "token_embd.weight", _matrix(random, HIDDEN, vocabulary, 1.0), quant)
    for layer in range(layers):
        _add_layer(writer, random, layer, quant)
        _add_beyond(writer, random, layer, architecture)
    _add(writer, "output_norm.weight", _norm(random), "F32")
    if not tied:
        _add(writer, "output.weight", _matrix(random, HIDDEN, vocabulary, 1.0), quant)
    for named, values in (extra or {}).items():
        _add(writer, named, values.astype(np.float32), "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tokens() -> list[str]:
    """Special tokens, the 256 bytes as GPT-2 writes them, then merged words."""
    return [*SPECIAL, *_bytes_as_text(), *(word for word, _ in _merges())]


def _add_tokenizer(writer: gguf.GGUFWriter) -> int:
    vocabulary = tokens()
    kinds = [gguf.TokenType.CONTROL] * len(SPECIAL)
    kinds += [gguf.TokenType.NORMAL] * (len(vocabulary) - len(SPECIAL))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary)
    writer.add_token_types(kinds)
    writer.add_token_merges([pair for _, pair in _merges()])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(EOS)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    return len(vocabulary)


def _bytes_as_text() -> list[str]:
    """One printable character per byte, in the order of GPT-2's table."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) for byte in plain] + [chr(256 + index) for index in range(len(rest))]


def _merges() -> list[tuple[str, str]]:
    """Each word of ``WORDS`` with the two known tokens that it is made of."""
    known = set(_bytes_as_text())
    found = []
    for word in WORDS:
        cut = next(
            at for at in range(len(word) - 1, 0, -1) if word[:at] in known and word[at:] in known
        )
        known.add(word)
        found.append((word, f"{word[:cut]} {word[cut:]}"))
    return found


def _add_layer(
    writer: gguf.GGUFWriter, random: np.random.Generator, layer: int, quant: str
) -> None:
    key = HIDDEN // HEADS * KV_HEADS
    for named, inner, outer in (
        ("attn_q", HIDDEN, HIDDEN),
        ("attn_k", HIDDEN, key),
        ("attn_v", HIDDEN, key),
        ("attn_output", HIDDEN, HIDDEN),
        ("ffn_gate", HIDDEN, FEED_FORWARD),
        ("ffn_up", HIDDEN, FEED_FORWARD),
        ("ffn_down", FEED_FORWARD, HIDDEN),
    ):
        matrix = _matrix(random, inner, outer, 1.5 / np.sqrt(inner))
        _add(writer, f"blk.{layer}.{named}.weight", matrix, quant)
    for named in ("attn_norm", "ffn_norm"):
        _add(writer, f"blk.{layer}.{named}.weight", _norm(random), "F32")


def _add_beyond(
    writer: gguf.GGUFWriter, random: np.random.Generator, layer: int, architecture: str
) -> None:
    """What a layer of ``architecture`` has beyond one of llama."""
    width, key = HIDDEN // HEADS, HIDDEN // HEADS * KV_HEADS
    if architecture == "qwen2":
        for named, size in (("attn_q", HIDDEN), ("attn_k", key), ("attn_v", key)):
            values = (0.5 * random.standard_normal(size)).astype(np.float32)
            _add(writer, f"blk.{layer}.{named}.bias", values, "F32")
    if architecture == "qwen3":
        for named in ("attn_q_norm", "attn_k_norm"):
            values = (1 + 0.3 * random.standard_normal(width)).astype(np.float32)
            _add(writer, f"blk.{layer}.{named}.weight", values, "F32")


def _matrix(
    random: np.random.Generator, inner: int, outer: int, scale: float
) -> np.ndarray[Any, Any]:
    return (random.standard_normal((outer, inner)) * scale).astype(np.float32)


def _norm(random: np.random.Generator) -> np.ndarray[Any, Any]:
    return (1 + 0.1 * random.standard_normal(HIDDEN)).astype(np.float32)


def _add(writer: gguf.GGUFWriter, name: str, values: np.ndarray[Any, Any], quant: str) -> None:
    if values.ndim == 1 or quant == "F32":
        writer.add_tensor(name, values)
        return
    kind = gguf.GGMLQuantizationType[quant]
    writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
