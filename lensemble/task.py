"""What a workload trains: kinds of model, and names and shapes of their federated tensors."""

import json
import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, Strict, model_validator

MAX_TOKENS = 4096
MAX_OPTION_BYTES = 1 << 14
"""Of the canonical JSON of a custom task's options."""
MAX_OPTION_DEPTH = 8
MAX_CUSTOM_TENSORS = 1024
MAX_CUSTOM_PARAMETERS = 1 << 31
MAX_RANK = 8
ENTRY_PATTERN = r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*"
"""``package.module:Class``."""
TENSOR_PATTERN = r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*"
CUSTOM_GROUP = "shared"
"""Under which the tensors of a custom task lie in the layout."""
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


_Tensor: TypeAlias = Annotated[str, Field(pattern=rf"^{TENSOR_PATTERN}$", max_length=200)]
_Shape: TypeAlias = Annotated[
    tuple[Annotated[int, Field(ge=1, le=MAX_CUSTOM_PARAMETERS)], ...],
    Strict(False),
    Field(min_length=1, max_length=MAX_RANK),
]


class CustomTask(Terms):
    """A task whose model, data and loss are Python code on the nodes, see ``lensemble_node.tasks``.

    The coordinator never sees that code, so the federated tensors are stated here.  Tensors of two
    or more dimensions start uniform in +-1/sqrt(fan_in), the others at nought; ``start`` gives
    single ones a number instead.
    """

    kind: Literal["custom"] = "custom"
    entry: str = Field(pattern=rf"^{ENTRY_PATTERN}$", max_length=256)
    """``package.module:Class``; runs only on nodes whose own configuration names the same."""
    options: dict[str, Any] = Field(default_factory=dict, max_length=256)
    """For that code; any JSON, ``MAX_OPTION_BYTES`` of it at most."""
    parameters: dict[_Tensor, _Shape] = Field(min_length=1, max_length=MAX_CUSTOM_TENSORS)
    start: dict[_Tensor, float] = Field(default_factory=dict, max_length=MAX_CUSTOM_TENSORS)

    @model_validator(mode="after")
    def _is_bounded(self) -> "CustomTask":
        _require_json(self.options)
        total = sum(math.prod(shape) for shape in self.parameters.values())
        if total > MAX_CUSTOM_PARAMETERS:
            raise ValueError(
                f"task.parameters are {total} numbers; {MAX_CUSTOM_PARAMETERS} are the most"
            )
        for name in self.start:
            if name not in self.parameters:
                raise ValueError(f"task.start names {name!r}, which is not in task.parameters")
        return self


def _require_json(options: dict[str, Any], room: int = MAX_OPTION_DEPTH) -> None:
    _require_depth(options, room)
    try:
        nbytes = len(json.dumps(options, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"task.options is not JSON: {error}") from error
    if nbytes > MAX_OPTION_BYTES:
        raise ValueError(f"task.options is {nbytes} bytes of JSON; {MAX_OPTION_BYTES} are the most")


def _require_depth(value: object, room: int) -> None:
    match value:
        case dict():
            inner = list(value.values())
        case list() | tuple():
            inner = list(value)
        case _:
            return
    if not room:
        raise ValueError(f"task.options nests deeper than {MAX_OPTION_DEPTH} levels")
    for each in inner:
        _require_depth(each, room - 1)


Task = Annotated[WorldModelTask | NoopTask | CustomTask, Field(discriminator="kind")]


def parameter_shapes(task: WorldModelTask | NoopTask | CustomTask) -> Shapes:
    """Name to shape of every federated tensor of ``task``, weights as (out, in, ...)."""
    if isinstance(task, NoopTask):
        return {"encoder.weight": (task.parameters,)}
    if isinstance(task, CustomTask):
        return {f"{CUSTOM_GROUP}.{name}": shape for name, shape in task.parameters.items()}
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
