"""A llama-like transformer, a contiguous range of its layers at a time.

Architectures: ``llama``, and ``qwen2`` and ``qwen3``, which add biases and norms of queries and
keys to it.  Rotary embeddings turn the two halves of a head; llama files interleave these, which is
undone when they are loaded.  Everything is float32.

A layer is cut into the same kernels wherever the model is split: each ends where ``contiguous``
says so, and the layer where its outcome is realised.  That is why a split changes no token.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from lensemble.errors import UnsupportedModel
from lensemble.model_facts import ModelFacts
from lensemble.model_header import ARCHITECTURES, COMPUTED_TYPES
from lensemble_node.worker.inference import engine
from lensemble_node.worker.inference.engine import Tensor, UOp

Progress: TypeAlias = Callable[[int, int], None]
"""Bytes done, and of how many."""


@dataclass(frozen=True)
class Stored:
    """A tensor as its file has it; ``shape`` is innermost first."""

    raw: memoryview
    ggml_type: int
    shape: tuple[int, ...]


Weights: TypeAlias = Mapping[str, Stored]


@dataclass(frozen=True)
class _Linear:
    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        y = x @ self.weight.transpose(0, 1)
        return y if self.bias is None else y + self.bias


@dataclass(frozen=True)
class _Projection:
    """Onto ``heads`` of ``width`` values; ``interleaved`` as the file has it."""

    heads: int
    width: int
    biased: bool
    interleaved: bool


@dataclass(frozen=True)
class _Norm:
    weight: Tensor
    epsilon: float

    def __call__(self, x: Tensor) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.epsilon).rsqrt()
        return x * scale * self.weight


@dataclass(frozen=True)
class _Layer:
    attention_norm: _Norm
    query: _Linear
    key: _Linear
    value: _Linear
    query_norm: _Norm | None
    key_norm: _Norm | None
    output: _Linear
    forward_norm: _Norm
    gate: _Linear
    up: _Linear
    down: _Linear
    cache: Tensor
    """Keys and values of every session: (sessions, 2, kv_heads, cache rows, head_dim)."""


def cache_rows(ctx: int, rows: int) -> int:
    """Positions a session has room for: the last chunk may be padded beyond ``ctx``."""
    return -(-ctx // rows) * rows + rows


def cache_bytes(facts: ModelFacts, layers: int, cache: tuple[int, int, int]) -> int:
    """Of keys and values of ``layers`` layers, for ``cache``: ctx, rows, sessions."""
    ctx, rows, sessions = cache
    return 8 * sessions * layers * facts.kv_heads * facts.head_dim * cache_rows(ctx, rows)


def check(facts: ModelFacts, weights: Weights) -> None:
    """Whether this module computes such a model.

    Raises:
        UnsupportedModel: another architecture, a partial rotation, or an unknown tensor type.
    """
    if facts.architecture not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{facts.name} is a {facts.architecture} model; {', '.join(ARCHITECTURES)} are computed"
        )
    if facts.rope_dim != facts.head_dim or facts.head_dim % 2:
        raise UnsupportedModel(
            f"{facts.name} turns {facts.rope_dim} of {facts.head_dim} values of a head; all of an "
            "even number are turned here"
        )
    for name, stored in weights.items():
        if stored.ggml_type not in COMPUTED_TYPES:
            raise UnsupportedModel(f"{name} of {facts.name} is of ggml type {stored.ggml_type}")


class Layers:
    """Layers ``first`` to ``last`` (not included) in memory, with their caches.

    Args:
        facts: the model.
        span: first and last.
        cache: ctx, rows and sessions.
        weights: every tensor this range needs.
        progress: told after each tensor.

    Raises:
        UnsupportedModel: see ``check``, or a tensor is missing or has another shape.
        MemoryError: there is not enough.
    """

    def __init__(
        self,
        facts: ModelFacts,
        span: tuple[int, int],
        cache: tuple[int, int, int],
        weights: Weights,
        progress: Progress,
    ) -> None:
        check(facts, weights)
        self.facts = facts
        self.first, self.last = span
        self.ctx, self.rows, self.sessions = cache
        self.embeds, self.heads = self.first == 0, self.last == facts.layers
        self.traced: Callable[[], None] = lambda: None
        """Called before each layer whenever the graph is made, which is while it is captured."""

        loading = _Loading(facts, weights, progress)
        self._cosine, self._sine = self._rotation(weights.get("rope_freqs.weight"))
        width = facts.hidden
        self._embedding: Tensor | None = None
        if self.embeds or (self.heads and facts.tied):
            self._embedding = loading.tensor("token_embd.weight", facts.vocabulary, width)
        self._layers = [self._layer(loading, index) for index in range(*span)]
        self._norm: _Norm | None = None
        self._head: _Linear | None = None
        if self.heads:
            self._norm = loading.norm("output_norm", width)
            self._head = (
                _Linear(self._embedding, None)
                if facts.tied and self._embedding is not None
                else loading.linear("output", facts.vocabulary, width)
            )
        self.weights_bytes = loading.nbytes
        self.start = engine.position("start", self.ctx - 1)
        self.session = engine.position("session", max(self.sessions - 1, 1))

    # ---- the graph ----

    def forward(self, x: Tensor, into: Tensor, start: UOp, session: UOp) -> Tensor:
        """Token ids (rows,) or activations (rows, hidden) through all layers, into ``into``."""
        x = x.to(engine.DEVICE)
        if self._embedding is not None and self.embeds:
            x = self._embedding[x]
        x = x.contiguous()
        for layer in self._layers[:-1]:
            self.traced()
            x = self._through(layer, x, start, session).contiguous().realize()
        self.traced()
        x = self._through(self._layers[-1], x, start, session)
        return into.assign(x.to(engine.HOST)).realize()

    def logits(self, x: Tensor, into: Tensor) -> Tensor:
        """Activations (1, hidden) to logits (1, vocabulary), into ``into``; the last range only."""
        if self._norm is None or self._head is None:
            raise AssertionError("a range of layers without the last has no head")
        x = self._head(self._norm(x.to(engine.DEVICE)).contiguous())
        return into.assign(x.to(engine.HOST)).realize()

    def _through(self, layer: _Layer, x: Tensor, start: UOp, session: UOp) -> Tensor:
        facts = self.facts
        rows, kv_heads, width = int(x.shape[0]), facts.kv_heads, facts.head_dim
        group = facts.heads // kv_heads
        h = layer.attention_norm(x).contiguous()
        q = layer.query(h).reshape(rows, facts.heads, width)
        k = layer.key(h).reshape(rows, kv_heads, width)
        v = layer.value(h).reshape(rows, kv_heads, width).transpose(0, 1)
        if layer.query_norm is not None and layer.key_norm is not None:
            q, k = layer.query_norm(q), layer.key_norm(k)
        q = self._turn(q, start) * width**-0.5
        # Left to be fused with the attention below, this would be one huge kernel.
        q = q.reshape(rows, kv_heads, group, width).permute(1, 2, 0, 3).contiguous()
        k = self._turn(k, start).transpose(0, 1)
        here = layer.cache[session : session + 1]
        here[:, :, :, start : start + rows].assign(k.stack(v).unsqueeze(0)).realize()
        seen = layer.cache[session : session + 1, :, :, : start + rows]
        seen = seen.reshape(2, kv_heads, 1, start + rows, width)
        scores = q @ seen[0].transpose(-1, -2)
        if rows > 1:
            scores = scores + engine.causal_mask(rows, start)
        mixed = (scores.softmax(-1) @ seen[1]).permute(2, 0, 1, 3)
        mixed = mixed.reshape(rows, facts.heads * width).contiguous()
        x = (x + layer.output(mixed)).contiguous()
        h = layer.forward_norm(x).contiguous()
        inner = (layer.gate(h).silu() * layer.up(h)).contiguous()
        return x + layer.down(inner)

    def _turn(self, x: Tensor, start: UOp) -> Tensor:
        """Rotary embedding of (rows, heads, head_dim) from position ``start`` on."""
        rows, half = x.shape[0], self.facts.head_dim // 2
        cosine = self._cosine[start : start + rows].reshape(rows, 1, half)
        sine = self._sine[start : start + rows].reshape(rows, 1, half)
        left, right = x.chunk(2, dim=-1)
        return (left * cosine - right * sine).cat(right * cosine + left * sine, dim=-1)

    # ---- loading ----

    def _rotation(self, factors: Stored | None) -> tuple[Tensor, Tensor]:
        """Cosine and sine of every position: (cache rows, head_dim / 2)."""
        facts = self.facts
        turns = facts.rope_base ** -(np.arange(0, facts.head_dim, 2) / facts.head_dim)
        if factors is not None:
            turns = turns / np.frombuffer(factors.raw, "<f4").astype(np.float64)
        angles = np.outer(np.arange(cache_rows(self.ctx, self.rows)), turns)
        return (
            engine.constant(np.cos(angles).astype(np.float32)),
            engine.constant(np.sin(angles).astype(np.float32)),
        )

    def _layer(self, loading: "_Loading", index: int) -> _Layer:
        facts, at = self.facts, f"blk.{index}"
        width = facts.hidden
        beyond = ARCHITECTURES[facts.architecture]
        biased, normed = "attn_q.bias" in beyond, "attn_q_norm.weight" in beyond
        query, key = (
            _Projection(heads, facts.head_dim, biased, facts.architecture == "llama")
            for heads in (facts.heads, facts.kv_heads)
        )
        return _Layer(
            attention_norm=loading.norm(f"{at}.attn_norm", width),
            query=loading.projection(f"{at}.attn_q", query),
            key=loading.projection(f"{at}.attn_k", key),
            value=loading.projection(f"{at}.attn_v", replace(key, interleaved=False)),
            query_norm=loading.norm(f"{at}.attn_q_norm", facts.head_dim) if normed else None,
            key_norm=loading.norm(f"{at}.attn_k_norm", facts.head_dim) if normed else None,
            output=loading.linear(f"{at}.attn_output", width, facts.heads * facts.head_dim),
            forward_norm=loading.norm(f"{at}.ffn_norm", width),
            gate=loading.linear(f"{at}.ffn_gate", facts.feed_forward, width),
            up=loading.linear(f"{at}.ffn_up", facts.feed_forward, width),
            down=loading.linear(f"{at}.ffn_down", width, facts.feed_forward),
            cache=engine.zeros(
                self.sessions,
                2,
                facts.kv_heads,
                cache_rows(self.ctx, self.rows),
                facts.head_dim,
            ),
        )


class _Loading:
    """Unpacks tensors by name and keeps count."""

    def __init__(self, facts: ModelFacts, weights: Weights, progress: Progress) -> None:
        self._facts = facts
        self._weights = weights
        self._progress = progress
        self._total = sum(len(stored.raw) for stored in weights.values())
        self._done = 0
        self.nbytes = 0
        """Of the tensors in memory."""

    def tensor(self, name: str, *shape: int, halves_of: int = 0) -> Tensor:
        stored = self._weights.get(name)
        if stored is None:
            raise UnsupportedModel(f"{self._facts.name} has no tensor {name}")
        if stored.shape[::-1] != shape:
            raise UnsupportedModel(
                f"{name} of {self._facts.name} has the shape {stored.shape[::-1]}, not {shape}"
            )
        tensor = engine.unpack(stored.raw, stored.ggml_type, shape, halves_of)
        self.nbytes += 4 * int(np.prod(shape))
        self._done += len(stored.raw)
        self._progress(self._done, self._total)
        return tensor

    def norm(self, name: str, width: int) -> _Norm:
        return _Norm(self.tensor(f"{name}.weight", width), self._facts.norm_eps)

    def linear(self, name: str, outputs: int, inputs: int) -> _Linear:
        return _Linear(self.tensor(f"{name}.weight", outputs, inputs), None)

    def projection(self, name: str, how: _Projection) -> _Linear:
        """From activations to heads."""
        halves_of = how.heads if how.interleaved else 0
        outputs = how.heads * how.width
        weight = self.tensor(f"{name}.weight", outputs, self._facts.hidden, halves_of=halves_of)
        bias = self.tensor(f"{name}.bias", outputs, halves_of=halves_of) if how.biased else None
        return _Linear(weight, bias)
