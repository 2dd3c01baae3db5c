"""What a stage takes of a node's memory, from the model's facts alone."""

from itertools import accumulate

import msgspec

from lensemble import stage_chunk
from lensemble.edge.spec import DEFAULT_SLOTS
from lensemble.model_facts import (
    EMBEDDING,
    HEAD,
    OUTPUT_NORM,
    ROPE_FACTORS,
    ModelFacts,
    elements,
    layer_of,
)
from lensemble.wire.stages import TensorPart

FLOAT_BYTES = 4
KEY_VALUE_BYTES = 4
"""Of one number in the caches of keys and values."""

RESERVE_BYTES = 128 << 20
"""Interpreter, engine, kernels and their captured graphs; measured, it hardly follows the model."""

HEADROOM = (11, 10)
"""A node must have so many times what is planned, as a fraction."""


class Need(msgspec.Struct, frozen=True):
    """Bytes of one stage."""

    weights: int
    """Its tensors as they lie in memory."""

    cache: int
    """Keys and values of all sessions, for the whole context and one chunk more."""

    slots: int
    """The rings of its two edges."""

    scratch: int
    """Activations of one chunk, and the largest tensor as stored, while it is unpacked."""

    reserve: int

    @property
    def planned(self) -> int:
        """What the worker is expected to take."""
        return self.weights + self.cache + self.slots + self.scratch + self.reserve

    @property
    def required(self) -> int:
        """What the node must have: planned with headroom, rounded up."""
        more, of = HEADROOM
        return -(-self.planned * more // of)


class Wanted(msgspec.Struct, frozen=True):
    """How the model is to be run: ``rows`` tokens of a prompt are computed at once."""

    ctx: int
    sessions: int = 1
    rows: int = 32


class Footprint:
    """Needs of every layer range of one model, for weights that lie as ``weights`` says."""

    def __init__(
        self, facts: ModelFacts, tensors: tuple[TensorPart, ...], wanted: Wanted, weights: str
    ) -> None:
        self._facts = facts
        self._wanted = wanted
        layers = [0] * facts.layers
        apart: dict[str, int] = {}
        largest = 0
        stored: dict[str, int] = {}
        for tensor in tensors:
            size = tensor.nbytes if weights == "quantised" else FLOAT_BYTES * elements(tensor)
            layer = layer_of(tensor.name)
            if layer is None:
                apart[tensor.name] = size
                stored[tensor.name] = tensor.nbytes
            elif layer < facts.layers:
                layers[layer] += size
                largest = max(largest, tensor.nbytes)
        self.layers = tuple(layers)
        """Bytes of the tensors of each layer."""
        self._sums = (0, *accumulate(layers))
        self._everywhere = apart.get(ROPE_FACTORS, 0)
        self._embedding = apart.get(EMBEDDING, 0)
        self._norm = apart.get(OUTPUT_NORM, 0)
        self._head = self._embedding if facts.tied else apart.get(HEAD, 0)
        self._largest = largest
        self._stored_embedding = stored.get(EMBEDDING, 0)
        self._stored_head = self._stored_embedding if facts.tied else stored.get(HEAD, 0)
        self._unpacked = weights != "quantised"

    @property
    def cache_per_layer(self) -> int:
        wanted, facts = self._wanted, self._facts
        positions = -(-wanted.ctx // wanted.rows) * wanted.rows + wanted.rows
        width = 2 * facts.kv_heads * facts.head_dim
        return wanted.sessions * positions * width * KEY_VALUE_BYTES

    def need(self, first: int, last: int) -> Need:
        """Of a stage that computes layers ``first`` to ``last`` (not included)."""
        ends = 0
        largest = self._largest
        tail = last == self._facts.layers
        if first == 0:
            ends += self._embedding
            largest = max(largest, self._stored_embedding)
        if tail:
            shared = first == 0 and self._facts.tied
            ends += self._norm + (0 if shared else self._head)
            largest = max(largest, self._stored_head)
        return Need(
            weights=self._sums[last] - self._sums[first] + ends + self._everywhere,
            cache=(last - first) * self.cache_per_layer,
            slots=2 * DEFAULT_SLOTS * self._slot_bytes(),
            scratch=self._activations(tail) + (largest if self._unpacked else 0),
            reserve=RESERVE_BYTES,
        )

    def _slot_bytes(self) -> int:
        return stage_chunk.capacity_bytes(self._wanted.rows, self._facts.hidden)

    def _activations(self, tail: bool) -> int:
        facts, wanted = self._facts, self._wanted
        heads = (facts.heads + 2 * facts.kv_heads) * facts.head_dim
        row = 4 * facts.hidden + 3 * facts.feed_forward + heads + facts.heads * wanted.ctx
        logits = facts.vocabulary if tail else 0
        return FLOAT_BYTES * (wanted.rows * row + logits)
