"""What a workload trains: kinds of model, and names and shapes of their federated tensors."""

import math
from collections.abc import Iterator
from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_TOKENS = 4096
Shapes: TypeAlias = dict[str, tuple[int, ...]]
_Named: TypeAlias = Iterator[tuple[str, tuple[int, ...]]]


class Terms(BaseModel):
    """A table of a workload file: unknown keys refused, no silent conversions, frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class WorldModelTask(Terms):
    """Action-conditioned latent world model.

    Encoder: ``observation_dim -> hidden -> hidden -> latent_dim`` (``state``); of pictures, three
    convolutions of stride 2 (``conv``) or a transformer over patches (``vit``), then a plain linear
    layer to ``latent_dim``.  Predictor: ``history`` latents and ``history`` action embeddings
    ``-> hidden -> hidden -> latent_dim``, residual.  The action head (``action_dim -> head_hidden
    -> action_embedding``) is local and in no layout.
    """

    kind: Literal["world_model"] = "world_model"
    encoder: Literal["state", "conv", "vit"] = "state"
    observation_dim: int = Field(default=6, ge=1, le=4096)
    image_height: int = Field(default=64, ge=8, le=1024)
    image_width: int = Field(default=64, ge=8, le=1024)
    image_channels: int = Field(default=3, ge=1, le=64)
    conv_width: int = Field(default=16, ge=1, le=4096)
    """Channels of the first convolution; the others have twice as many."""
    patch: int = Field(default=8, ge=1, le=256)
    """Side of a patch of ``vit``; it divides height and width."""
    depth: int = Field(default=2, ge=1, le=64)
    heads: int = Field(default=4, ge=1, le=64)
    latent_dim: int = Field(default=12, ge=1, le=4096)
    hidden: int = Field(default=96, ge=1, le=16384)
    history: int = Field(default=3, ge=1, le=64)
    action_embedding: int = Field(default=8, ge=1, le=4096)
    head_hidden: int = Field(default=32, ge=1, le=4096)

    @model_validator(mode="after")
    def _patches_fit(self) -> "WorldModelTask":
        if self.encoder != "vit":
            return self
        if self.image_height % self.patch or self.image_width % self.patch:
            raise ValueError(
                f"patch is {self.patch}; it must divide image_height {self.image_height} and "
                f"image_width {self.image_width}"
            )
        if self.hidden % self.heads:
            raise ValueError(f"heads is {self.heads}; it must divide hidden {self.hidden}")
        if self.tokens > MAX_TOKENS:
            raise ValueError(
                f"patch is {self.patch}, which makes {self.tokens} patches of a picture; "
                f"{MAX_TOKENS} is the most"
            )
        return self

    @property
    def pictures(self) -> bool:
        """Whether the encoder takes pictures, of ``image_shape``, and not state vectors."""
        return self.encoder != "state"

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return self.image_height, self.image_width, self.image_channels

    @property
    def tokens(self) -> int:
        """Patches of a picture."""
        return (self.image_height // self.patch) * (self.image_width // self.patch)


class NoopTask(Terms):
    """No model at all: a flat vector and a seeded update, to measure and test rounds."""

    kind: Literal["noop"] = "noop"
    parameters: int = Field(default=250_000, ge=1, le=1 << 31)
    step_seconds: float = Field(default=0.0, ge=0, le=60)
    """How long one inner step pretends to take."""


Task = Annotated[WorldModelTask | NoopTask, Field(discriminator="kind")]


def parameter_shapes(task: WorldModelTask | NoopTask) -> Shapes:
    """Name to shape of every federated tensor of ``task``, weights as (out, in, ...)."""
    if isinstance(task, NoopTask):
        return {"encoder.weight": (task.parameters,)}
    joint = task.history * (task.latent_dim + task.action_embedding)
    encoder = {"state": _perceptron, "conv": _convolutions, "vit": _transformer}[task.encoder]
    shapes = {f"encoder.{name}": shape for name, shape in encoder(task, task.observation_dim)}
    return shapes | {f"predictor.{name}": shape for name, shape in _perceptron(task, joint)}


def _linear(name: str, fan_in: int, fan_out: int) -> _Named:
    yield f"{name}.weight", (fan_out, fan_in)
    yield f"{name}.bias", (fan_out,)


def _perceptron(task: WorldModelTask, fan_in: int) -> _Named:
    yield from _linear("input", fan_in, task.hidden)
    yield from _linear("middle", task.hidden, task.hidden)
    yield from _linear("output", task.hidden, task.latent_dim)


def _convolutions(task: WorldModelTask, _: int) -> _Named:
    height, width, channels = task.image_shape
    for index in range(3):
        wide = task.conv_width * min(index + 1, 2)
        yield f"conv{index}.weight", (wide, channels, 3, 3)
        yield f"conv{index}.bias", (wide,)
        height, width, channels = math.ceil(height / 2), math.ceil(width / 2), wide
    yield from _linear("middle", height * width * channels, task.hidden)
    yield from _linear("output", task.hidden, task.latent_dim)


def _transformer(task: WorldModelTask, _: int) -> _Named:
    hidden = task.hidden
    yield from _linear("patches", task.patch * task.patch * task.image_channels, hidden)
    yield "position.weight", (task.tokens, hidden)
    for index in range(task.depth):
        block = f"blocks.{index}"
        for norm in ("norm1", "norm2"):
            yield from _norm(f"{block}.{norm}", hidden)
        yield from _linear(f"{block}.attend", hidden, 3 * hidden)
        yield from _linear(f"{block}.join", hidden, hidden)
        yield from _linear(f"{block}.up", hidden, 2 * hidden)
        yield from _linear(f"{block}.down", 2 * hidden, hidden)
    yield from _norm("norm", hidden)
    yield from _linear("output", hidden, task.latent_dim)


def _norm(name: str, width: int) -> _Named:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)
