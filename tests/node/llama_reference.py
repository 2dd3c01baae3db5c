"""A llama written down a second time, in torch, to compare with: one pass over all positions.

It shares nothing with the stage worker: weights are unpacked by the `gguf` package, rotary
embeddings turn neighbouring values as llama files store them, and there is no cache.
"""

from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from lensemble.model_facts import ModelFacts


class Reference:
    def __init__(self, path: Path, facts: ModelFacts) -> None:
        self.facts = facts
        self.weights = {
            tensor.name: torch.from_numpy(
                np.array(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32)
            )
            for tensor in gguf.GGUFReader(path).tensors
        }

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> Tensor:
        """(positions, vocabulary), float32."""
        x = self.weights["token_embd.weight"][tokens]
        for layer in range(self.facts.layers):
            x = x + self._attention(self._normed(x, layer, "attn_norm"), layer)
            h = self._normed(x, layer, "ffn_norm")
            gate = torch.nn.functional.silu(self._linear(h, layer, "ffn_gate"))
            x = x + self._linear(gate * self._linear(h, layer, "ffn_up"), layer, "ffn_down")
        x = self._norm(x, self.weights["output_norm.weight"])
        head = "token_embd.weight" if self.facts.tied else "output.weight"
        return x @ self.weights[head].T

    def generate(self, prompt: list[int], count: int) -> list[int]:
        """Greedy."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]

    def _attention(self, h: Tensor, layer: int) -> Tensor:
        facts, rows = self.facts, len(h)
        q = self._heads(h, layer, "attn_q", facts.heads)
        k = self._heads(h, layer, "attn_k", facts.kv_heads)
        v = self._heads(h, layer, "attn_v", facts.kv_heads)
        q, k = self._turned(q, layer, "attn_q_norm"), self._turned(k, layer, "attn_k_norm")
        k, v = (each.repeat_interleave(facts.heads // facts.kv_heads, 1) for each in (k, v))
        mixed = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=rows > 1
        )
        return self._linear(mixed.transpose(0, 1).reshape(rows, -1), layer, "attn_output")

    def _heads(self, h: Tensor, layer: int, name: str, heads: int) -> Tensor:
        return self._linear(h, layer, name).reshape(len(h), heads, self.facts.head_dim)

    def _turned(self, x: Tensor, layer: int, norm: str) -> Tensor:
        if f"blk.{layer}.{norm}.weight" in self.weights:
            x = self._normed(x, layer, norm)
        pairs = torch.arange(self.facts.head_dim // 2, dtype=torch.float64)
        turns = self.facts.rope_base ** (-2 * pairs / self.facts.head_dim)
        angles = torch.arange(len(x), dtype=torch.float64)[:, None, None] * turns
        cosine, sine = angles.cos().float(), angles.sin().float()
        if self.facts.architecture == "llama":
            left, right = x[..., 0::2], x[..., 1::2]
            turned = torch.stack([left * cosine - right * sine, right * cosine + left * sine], -1)
            return turned.flatten(-2)
        left, right = x.chunk(2, -1)
        return torch.cat([left * cosine - right * sine, right * cosine + left * sine], -1)

    def _linear(self, h: Tensor, layer: int, name: str) -> Tensor:
        bias = self.weights.get(f"blk.{layer}.{name}.bias")
        return torch.nn.functional.linear(h, self.weights[f"blk.{layer}.{name}.weight"], bias)

    def _normed(self, x: Tensor, layer: int, name: str) -> Tensor:
        return self._norm(x, self.weights[f"blk.{layer}.{name}.weight"])

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, weight.shape, weight, self.facts.norm_eps)
