"""Encoders: of state vectors, and of pictures by convolution or by attention over patches.

No dropout and no batch normalisation: their noise and running statistics do not average.  Every one
ends in a plain linear layer, ``output``, which is what alignment turns.
"""

import torch
from torch import nn
from torch.nn import functional

from lensemble.task import WorldModelTask


class Perceptron(nn.Module):
    """``sizes[0] -> sizes[1] -> sizes[2] -> sizes[3]``, linear at the end."""

    def __init__(self, sizes: tuple[int, int, int, int]) -> None:
        super().__init__()
        self.input = nn.Linear(sizes[0], sizes[1])
        self.middle = nn.Linear(sizes[1], sizes[2])
        self.output = nn.Linear(sizes[2], sizes[3])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = functional.silu(self.middle(functional.silu(self.input(x))))
        result: torch.Tensor = self.output(hidden)
        return result


class Pictures(nn.Module):
    """An encoder of uint8 pictures (..., height, width, channels) to latents (..., latent_dim)."""

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        flat = pictures.flatten(0, -4)
        scaled = flat.to(torch.float32) / 255.0 - 0.5
        latents = self.encoded(scaled.permute(0, 3, 1, 2))
        return latents.reshape(*pictures.shape[:-3], -1)

    def encoded(self, pictures: torch.Tensor) -> torch.Tensor:
        """Latents (n, latent_dim) of pictures (n, channels, height, width) within +-0.5."""
        raise NotImplementedError


class Convolutions(Pictures):
    """Three convolutions of stride 2, a hidden layer, linear at the end."""

    def __init__(self, task: WorldModelTask) -> None:
        super().__init__()
        height, width, channels = task.image_shape
        wide = (task.conv_width, 2 * task.conv_width, 2 * task.conv_width)
        self.conv0 = nn.Conv2d(channels, wide[0], 3, stride=2, padding=1)
        self.conv1 = nn.Conv2d(wide[0], wide[1], 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(wide[1], wide[2], 3, stride=2, padding=1)
        cells = -(-height // 8) * -(-width // 8)
        self.middle = nn.Linear(cells * wide[2], task.hidden)
        self.output = nn.Linear(task.hidden, task.latent_dim)

    def encoded(self, pictures: torch.Tensor) -> torch.Tensor:
        seen = pictures
        for convolution in (self.conv0, self.conv1, self.conv2):
            seen = functional.silu(convolution(seen))
        result: torch.Tensor = self.output(functional.silu(self.middle(seen.flatten(1))))
        return result


class Block(nn.Module):
    """Attention, then two layers, each on its normed input and added to it."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.norm1 = nn.LayerNorm(hidden)
        self.attend = nn.Linear(hidden, 3 * hidden)
        self.join = nn.Linear(hidden, hidden)
        self.norm2 = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 2 * hidden)
        self.down = nn.Linear(2 * hidden, hidden)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens (n, count, hidden) to the same."""
        count, length, _ = tokens.shape
        parts = self.attend(self.norm1(tokens)).reshape(count, length, 3, self._heads, -1)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(queries, keys, values)
        tokens = tokens + self.join(seen.transpose(1, 2).flatten(2))
        after: torch.Tensor = tokens + self.down(functional.gelu(self.up(self.norm2(tokens))))
        return after


class Transformer(Pictures):
    """A small vision transformer: patches, blocks, their mean, linear at the end."""

    def __init__(self, task: WorldModelTask) -> None:
        super().__init__()
        self._patch = task.patch
        self.patches = nn.Linear(task.patch * task.patch * task.image_channels, task.hidden)
        self.position = nn.Embedding(task.tokens, task.hidden)
        self.blocks = nn.ModuleList(Block(task.hidden, task.heads) for _ in range(task.depth))
        self.norm = nn.LayerNorm(task.hidden)
        self.output = nn.Linear(task.hidden, task.latent_dim)

    def encoded(self, pictures: torch.Tensor) -> torch.Tensor:
        cut = functional.unfold(pictures, self._patch, stride=self._patch).transpose(1, 2)
        tokens = self.patches(cut) + self.position.weight
        for block in self.blocks:
            tokens = block(tokens)
        result: torch.Tensor = self.output(self.norm(tokens).mean(dim=1))
        return result


def encoder_of(task: WorldModelTask) -> nn.Module:
    """The encoder that ``task`` names."""
    match task.encoder:
        case "state":
            sizes = (task.observation_dim, task.hidden, task.hidden, task.latent_dim)
            return Perceptron(sizes)
        case "conv":
            return Convolutions(task)
        case "vit":
            return Transformer(task)
