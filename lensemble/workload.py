"""A workload: what a federation trains, the terms every participant must share.

A workload file is TOML, validated here, and travels to the nodes as canonical JSON; its SHA-256 is
the ``config_hash`` of messages, checkpoints and ledger records.  What is a node's own affair (data,
threads, what it releases about itself) is not in it.
"""

import hashlib
import json
import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, Field, Strict, model_validator

from lensemble.ids import Digest
from lensemble.params import FlatParameters, ParamLayout, layout_of
from lensemble.seeds import derive
from lensemble.task import (
    CUSTOM_GROUP,
    CustomTask,
    NoopTask,
    Task,
    Terms,
    WorldModelTask,
    parameter_shapes,
)

__all__ = [
    "NOISE_TAIL",
    "UNSAID_AT_DEFAULT",
    "CustomTask",
    "FieldTerms",
    "Gauge",
    "Inner",
    "NoisyField",
    "NoopTask",
    "Normalize",
    "Objective",
    "Outer",
    "Privacy",
    "Release",
    "Task",
    "Workload",
    "WorldModelTask",
    "initial_parameters",
    "layout",
    "parameter_shapes",
]

NOISE_TAIL = 8.5
"""Standard deviations of noise that the field has room for: 25 million draws in each of a thousand
rounds all stay within with a probability of 1 - 5e-7."""


MAX_CANONICAL_BYTES = 1 << 16
"""Of the canonical JSON, which travels in one message to each node."""

UNSAID_AT_DEFAULT = (
    "field.bits",
    "gauge",
    "normalize",
    "objective.anchor",
    "task.encoder",
    "task.image_height",
    "task.image_width",
    "task.image_channels",
    "task.conv_width",
    "task.patch",
    "task.depth",
    "task.heads",
)
"""Keys that canonical JSON leaves out at their default, so that a workload that does without them
has the same hash in every build."""


class Inner(Terms):
    """The H local AdamW steps; cosine over the global step to ``final_lr_fraction``."""

    steps: int = Field(default=50, ge=1, le=100_000)
    batch: int = Field(default=64, ge=1, le=65_536)
    lr: float = Field(default=4e-3, gt=0, le=1)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.99, ge=0, lt=1)
    weight_decay: float = Field(default=1e-4, ge=0, le=1)
    schedule_steps: int = Field(default=400, ge=1, le=10_000_000)
    final_lr_fraction: float = Field(default=0.1, ge=0, le=1)


class Objective(Terms):
    """Weights of the loss; ``lambda_sig`` multiplies a statistic already scaled by sample count."""

    lambda_pred: float = Field(default=1.0, ge=0)
    lambda_sig: float = Field(default=5.12, ge=0)
    lambda_anc: float = Field(default=0.0, ge=0)
    anchor: Literal["landmark", "rotation"] = "landmark"
    """``landmark``: squared distance of the landmarks from their targets.  ``rotation``: squared
    distance from the identity of the rotation that fits them to their targets best."""
    sketch_dim: int = Field(default=128, ge=1, le=4096)
    knots: int = Field(default=17, ge=2, le=129)
    probe_hash: str = Field(default="", pattern=r"^([0-9a-f]{64})?$")
    """Of the public probe of anchor and gauge; each node holds the file itself."""

    @model_validator(mode="after")
    def _anchored_to_something(self) -> "Objective":
        if self.lambda_anc > 0 and not self.probe_hash:
            raise ValueError(
                "lambda_anc is above 0, so probe_hash must name the federation's probe"
            )
        return self


class Gauge(Terms):
    """Turning a node's latents back into the frame of the round's start, before it releases.

    The probe of ``objective.probe_hash`` says how they have turned; without ``align`` that is
    measured and nothing done about it.
    """

    align: bool = False
    rho: float = Field(default=0.3, ge=0, le=100)
    """Pull towards the least change of weights, in mean variances of a latent dimension."""
    threshold_degrees: float = Field(default=15.0, ge=0, le=180)
    """Turn only above this root mean square of the principal angles."""
    limit: float = Field(default=0.0, ge=0, le=1e6)
    """Release nothing further from the frame than this after turning, in latent variances of the
    round's start; 0: whatever the distance.  Unrelated latents are 2 apart."""


class Normalize(Terms):
    """What is done to state vectors before the encoder, the same on every node.

    ``stats``: ``(x - offset) / scale`` in each dimension.  The numbers are part of the workload
    because an encoder that is shared must see the same units everywhere; a node's own statistics
    would bend its latents and are never used.
    """

    kind: Literal["none", "stats"] = "none"
    offset: Annotated[tuple[float, ...], Strict(False)] = Field(default=(), max_length=4096)
    scale: Annotated[tuple[Annotated[float, Field(gt=0)], ...], Strict(False)] = Field(
        default=(), max_length=4096
    )

    @model_validator(mode="after")
    def _numbers_of_every_dimension(self) -> "Normalize":
        if len(self.offset) != len(self.scale):
            raise ValueError(
                f"normalize.offset has {len(self.offset)} numbers, normalize.scale "
                f"{len(self.scale)}; give one of each for every observation dimension"
            )
        if (self.kind == "stats") != bool(self.offset):
            raise ValueError('normalize.kind is "stats" if and only if offset and scale are given')
        return self


class Outer(Terms):
    """Nesterov step on the mean update; DiLoCo's values are the defaults."""

    lr: float = Field(default=0.7, gt=0, le=10)
    momentum: float = Field(default=0.9, ge=0, lt=1)
    dtype: Literal["fp32", "fp64"] = "fp32"


class FieldTerms(Terms):
    """The integer field of updates: ``rint(x * 2**k) mod 2**32``, at most ``n_max`` summands.

    With ``bits = "auto"`` tensors whose last sum says how large their updates are have words of 16
    bits, see ``secagg.plan``.
    """

    bits: Literal["auto", 32] = "auto"
    k: int = Field(default=24, ge=8, le=30)
    n_max: int = Field(default=64, ge=1, le=4096)

    @property
    def bound(self) -> float:
        """Largest absolute value of one coordinate for which ``n_max`` summands cannot wrap."""
        return float(((1 << 31) - 1) // self.n_max) / float(1 << self.k)


@dataclass(frozen=True)
class NoisyField:
    """The field of updates with a norm of at most ``clip_norm`` and noise up to ``tail``."""

    k: int
    n_max: int
    clip_norm: float
    tail: float

    @property
    def coordinate_bound(self) -> float:
        """Largest absolute value of one coordinate that a node may encode."""
        return self.clip_norm + self.tail

    def sum_bound(self, contributors: int) -> float:
        """What a coordinate of the sum of so many stays within: noise adds up by its variance."""
        return contributors * self.clip_norm + self.tail * math.sqrt(contributors)


class Privacy(Terms):
    """Clipping, noise and the budget that pays for them; off unless asked for.

    ``unit = "participant"``: what a node releases in a round is clipped to ``clip_norm`` and noised
    with ``noise_multiplier * clip_norm`` per coordinate (``"local"``), or with that over
    ``sqrt(cohort)`` (``"distributed"``), so that the sum of ``cohort`` or more carries it.  With
    ``sample_rate`` below 1 a node enters its update into a round with that probability, by a coin
    that nobody else sees, and noise alone otherwise.

    ``unit = "episode"``: the same of every gradient inside the node, where each episode enters a
    step with probability ``sample_rate``.
    """

    enabled: bool = False
    unit: Literal["participant", "episode"] = "participant"
    clip_norm: float = Field(default=1.0, gt=0, le=1e4)
    noise_multiplier: float = Field(default=1.0, gt=0, le=1e4)
    placement: Literal["local", "distributed"] = "local"
    cohort: int = Field(default=3, ge=2, le=4096)
    """Contributors of the smallest sum that is ever revealed; what ``distributed`` counts on."""
    sample_rate: float = Field(default=1.0, gt=0, le=1)
    epsilon: float = Field(default=8.0, gt=0, le=1e4)
    delta: float = Field(default=1e-5, gt=0, lt=0.1)

    @model_validator(mode="after")
    def _steps_are_noised_where_they_are_taken(self) -> "Privacy":
        if self.unit == "episode" and self.placement == "distributed":
            raise ValueError(
                'unit "episode" adds its noise inside each node; placement must be "local"'
            )
        return self

    @property
    def of_participants(self) -> bool:
        """Whether what is released is clipped and noised as a whole."""
        return self.enabled and self.unit == "participant"

    @property
    def noise_sd(self) -> float:
        """Standard deviation of the noise that one node adds to a coordinate."""
        spread = math.sqrt(self.cohort) if self.placement == "distributed" else 1.0
        return self.noise_multiplier * self.clip_norm / spread


class Release(Terms):
    """What happens to an update, last of all, before it is encoded.

    ``int8``: each block of 256 coordinates is rounded to 255 steps of its largest.
    """

    quantize: Literal["none", "int8"] = "none"


class Workload(Terms):
    """Everything that participants must agree on to train one model."""

    name: str = Field(default="arm", pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")
    root_seed: int = Field(default=0, ge=0, lt=1 << 63)
    task: Task = WorldModelTask()
    inner: Inner = Inner()
    objective: Objective = Objective()
    outer: Outer = Outer()
    field: FieldTerms = FieldTerms()
    privacy: Privacy = Privacy()
    release: Release = Release()
    gauge: Gauge = Gauge()
    normalize: Normalize = Normalize()

    @model_validator(mode="after")
    def _every_dimension_normalised(self) -> "Workload":
        terms, task = self.normalize, self.task
        if terms.kind == "none":
            return self
        wanted = task.observation_dim if isinstance(task, WorldModelTask) else 0
        if len(terms.offset) != wanted:
            raise ValueError(
                f"normalize.offset has {len(terms.offset)} numbers; the model takes {wanted} "
                "observation dimensions"
            )
        return self

    @model_validator(mode="after")
    def _aligned_on_something(self) -> "Workload":
        if self.gauge.align and not self.objective.probe_hash:
            raise ValueError(
                "gauge.align is true, so objective.probe_hash must name the federation's probe"
            )
        return self

    @model_validator(mode="after")
    def _field_leaves_room(self) -> "Workload":
        if self.field.bound < 2 ** (1 - self.field.k):
            raise ValueError("field.k and field.n_max leave no room for a single step of the field")
        self._leave_room_for_noise()
        return self

    @model_validator(mode="after")
    def _episodes_are_there(self) -> "Workload":
        of_episodes = self.privacy.enabled and self.privacy.unit == "episode"
        if of_episodes and not isinstance(self.task, WorldModelTask):
            raise ValueError(
                f'a task of kind "{self.task.kind}" has no episodes; privacy.unit must be '
                '"participant"'
            )
        return self

    @model_validator(mode="after")
    def _probe_is_of_a_world_model(self) -> "Workload":
        if isinstance(self.task, CustomTask) and self.objective.probe_hash:
            raise ValueError(
                "objective.probe_hash names a probe, and a custom task has no latents to anchor "
                "or align with it; leave it empty"
            )
        return self

    @model_validator(mode="after")
    def _travels_in_a_message(self) -> "Workload":
        nbytes = len(self.canonical())
        if nbytes > MAX_CANONICAL_BYTES:
            raise ValueError(
                f"the workload is {nbytes} bytes of JSON; {MAX_CANONICAL_BYTES} are the most"
            )
        return self

    def _leave_room_for_noise(self) -> None:
        terms, private, room = self.field, self.privacy, self.room
        if not isinstance(room, NoisyField):
            return
        sum_reach = room.sum_bound(terms.n_max)
        most = math.floor(31 - math.log2(sum_reach))
        if terms.k > most:
            spread = private.noise_sd * math.sqrt(terms.n_max)
            raise ValueError(
                f"field.k is {terms.k}; {terms.n_max} updates (field.n_max) of norm "
                f"{private.clip_norm:g} (privacy.clip_norm) and {NOISE_TAIL:g} standard deviations "
                f"of their noise ({spread:.4g}) reach {sum_reach:.4g}, for which field.k may be at "
                f"most {most}"
            )

    @property
    def room(self) -> "FieldTerms | NoisyField":
        """The field as updates use it: with noise on them, a coordinate may be larger."""
        terms, private = self.field, self.privacy
        if not private.of_participants:
            return terms
        return NoisyField(terms.k, terms.n_max, private.clip_norm, NOISE_TAIL * private.noise_sd)

    def canonical(self) -> bytes:
        """Sorted compact ASCII JSON of every key but ``UNSAID_AT_DEFAULT``."""
        tree = self.model_dump(mode="json")
        for path in UNSAID_AT_DEFAULT:
            _leave_out_default(tree, self, path.split("."))
        return json.dumps(tree, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()

    @property
    def digest(self) -> Digest:
        """``config_hash``: SHA-256 of the canonical JSON."""
        return Digest(hashlib.sha256(self.canonical()).hexdigest())


def _leave_out_default(tree: dict[str, Any], terms: BaseModel, path: list[str]) -> None:
    key, *rest = path
    if key not in tree:
        return
    value = getattr(terms, key)
    if rest:
        _leave_out_default(tree[key], value, rest)
    elif value == type(terms).model_fields[key].default:
        del tree[key]


def layout(workload: Workload) -> ParamLayout:
    return layout_of(parameter_shapes(workload.task))


def initial_parameters(workload: Workload) -> FlatParameters:
    """The warm start from the seed alone: float32, shape ``(layout.size,)``.

    Uniform in +-1/sqrt(fan_in), biases included, sqrt(6) times that for convolutions, norms at one
    and nought.  From a counter-based generator, so that every machine draws the same bits (torch's
    generators differ between processors).  Tensors of a custom task as ``CustomTask`` says.
    """
    where = layout(workload)
    flat = np.zeros(where.size, dtype=np.float32)
    if isinstance(workload.task, NoopTask):
        return flat
    if isinstance(workload.task, CustomTask):
        _start_custom(workload.task, workload.root_seed, where.views(flat))
        return flat
    shapes = {t.name: t.shape for t in where.tensors}
    for name, view in where.views(flat).items():
        seed = derive(workload.root_seed, f"init:{name}")
        generator = np.random.Generator(np.random.Philox(seed))
        weight = shapes[name.rsplit(".", 1)[0] + ".weight"]
        if len(weight) == 1:
            # A layer norm begins as nothing but that.
            view[...] = name.endswith(".weight")
            continue
        # Convolutions keep the spread of what they see: most of a picture is even background.
        gain = 6.0 if len(view.shape) > 2 else 1.0
        reach = math.sqrt(gain) / math.sqrt(math.prod(weight[1:]))
        view[...] = generator.uniform(-reach, reach, size=view.shape).astype(np.float32)
    return flat


def _start_custom(task: CustomTask, root_seed: int, views: dict[str, FlatParameters]) -> None:
    for name, shape in task.parameters.items():
        full = f"{CUSTOM_GROUP}.{name}"
        if name in task.start:
            views[full][...] = task.start[name]
        elif len(shape) > 1:
            generator = np.random.Generator(np.random.Philox(derive(root_seed, f"init:{full}")))
            reach = 1.0 / math.sqrt(math.prod(shape[1:]))
            views[full][...] = generator.uniform(-reach, reach, size=shape)
